"""`torch.compile(model, fullgraph=True)`: one graph, with the collectives in it, gives what eager replicas give."""

from __future__ import annotations

import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch._dynamo.utils
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.fx import GraphModule

import zero_fn as zf
from tests.ranks import Ranks, axis
from tests.wholes import fulls
from tests.worlds import ALL, WIDTH, World, differences, noise
from zero_fn.resting import local_of
from zero_fn.runtime.whole_graph import begin_region, end_region


class Awkward(nn.Module):
    """A tie, a parameter that nobody uses, a scalar, a frozen one, one that lies transposed; rows that do not divide.

    The weight of one unit is computed by a hook before its forward.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.unused = nn.Parameter(torch.ones(3, 2))
        self.transposed = nn.Parameter(torch.randn(6, 5).t())
        self.head = nn.Linear(6, 5)
        self.head.weight = self.embedding.weight
        self.blocks[0][2].weight.requires_grad_(False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            nn.utils.weight_norm(self.blocks[1][0])

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :5] @ self.embedding.weight
        for block in self.blocks:
            x = x + self.scale * block(x)
        output: Tensor = self.head(x) + x @ self.transposed.t()
        return output


def _steps(run: nn.Module, model: nn.Module, world: World, *, seeds: range, clip: float | None = None) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for seed in seeds:
        run(noise(4, WIDTH, seed=seed)).square().mean().backward()
        world.reduce(model)
        if clip is not None:  # to the largest element: the one norm that does not depend on where sums are cut
            world.note("norm", nn.utils.clip_grad_norm_(model.parameters(), clip, norm_type=torch.inf))
        world.note_model(model)
        optimizer.step()
        optimizer.zero_grad()


def _compiled(model: nn.Module, world: World, backend: Any = "aot_eager") -> nn.Module:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return model if world.is_replica else torch.compile(model, backend=backend, fullgraph=True)  # type: ignore[return-value]


def _graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _trains(world: World) -> None:
    torch.manual_seed(0)
    model = world.place(Awkward())
    run = _compiled(model, world, "aot_eager" if world.stage == "zero3" else "eager")
    _steps(run, model, world, seeds=range(3))
    graphs = _graphs()
    _steps(run, model, world, seeds=range(3, 5))
    assert world.is_replica or (graphs == 1 and _graphs() == 1), "compiled again"
    with torch.no_grad():
        world.note("output", run(noise(4, WIDTH, seed=9)))
    _steps(model, model, world, seeds=range(5, 6))  # not compiled, from where the compiled steps ended


@pytest.mark.parametrize("stage", ALL)
def test_one_graph_trains_as_replicas(ranks: Ranks, stage: str) -> None:
    for found in ranks(2, deadline_s=200).run(differences, _trains, stages=[stage]):
        assert found == []


def test_one_graph_sums_in_the_order_of_ranks(ranks: Ranks) -> None:
    """Bitwise on three ranks, where the order matters: as the module that is not compiled."""
    for compiled, eager in ranks(3, deadline_s=200).run(_twice):
        assert all(map(torch.equal, compiled, eager))


def _twice() -> tuple[list[Tensor], list[Tensor]]:
    found = []
    for compiles in (True, False):
        torch.manual_seed(0)
        model = zf.zero3(Awkward(), axis())
        run = torch.compile(model, backend="eager", fullgraph=True) if compiles else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for seed in range(2):
            run(noise(4, WIDTH, seed=seed)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(fulls(model.parameters()))
    return found[0], found[1]


@contextmanager
def _counting() -> Iterator[tuple[Any, list[Counter[str]]]]:
    """A backend that counts the collectives of the graphs it is given: forward, then backward."""
    torch._dynamo.reset()
    counted: list[Counter[str]] = []

    def note(graph: GraphModule, _inputs: object) -> Callable[..., Any]:
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        counted.append(Counter(name.split(".")[1] for name in names if name.startswith("_c10d_functional")))
        return graph.forward

    backend = aot_autograd(fw_compiler=note, bw_compiler=note, partition_fn=min_cut_rematerialization_partition)
    yield backend, counted


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class _Chain(nn.Module):
    """Each block is a unit; the root has no parameter."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _collectives(stage: str) -> list[Counter[str]]:
    torch.manual_seed(0)
    model = getattr(zf, stage)(_Chain(3), axis())
    with _counting() as (backend, counted):
        run = torch.compile(model, backend=backend, fullgraph=True)
        for _ in range(2):
            run(noise(4, 8, seed=0)).square().mean().backward()
    return counted


@pytest.mark.parametrize(("stage", "again"), [("zero1", 0), ("zero2", 0), ("zero3", 2)])
def test_a_graph_gathers_and_reduces_each_unit_once_and_zero3_gathers_again(
    ranks: Ranks, stage: str, again: int
) -> None:
    """But for the weight of the first block, which no gradient needs."""
    for forward, backward in ranks(2, deadline_s=200).run(_collectives, stage):
        assert forward == {"all_gather_into_tensor": 3, "wait_tensor": 3}
        expected = Counter(all_to_all_single=3, wait_tensor=3 + again, all_gather_into_tensor=again)
        assert backward == +expected


def _deep(compiles: bool) -> tuple[int, list[Tensor]]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = zf.zero3(_Chain(10), axis())
    if compiles:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = torch.compile(block, backend="eager", fullgraph=True)  # type: ignore[call-overload]
    for _ in range(2):
        model(noise(4, 8, seed=0)).sum().backward()
    return _graphs(), fulls([p.grad for p in model.parameters()])


def test_each_of_many_blocks_may_be_a_graph_of_its_own(ranks: Ranks) -> None:
    """More than the compiler compiles one function for (8)."""
    case = ranks(2, deadline_s=200)
    for (graphs, gradients), (_, expected) in zip(case.run(_deep, True), case.run(_deep, False), strict=True):
        assert graphs == 10
        assert all(map(torch.equal, gradients, expected))


def _mixed(stage: str) -> list[Tensor]:
    found = []
    for compiles in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = zf.precision(getattr(zf, stage)(Awkward(), axis()), output=torch.float32)
        run = torch.compile(model, backend="eager", fullgraph=True) if compiles else model
        run(noise(4, WIDTH, seed=0)).square().mean().backward()
        found += fulls([p.grad for p in model.parameters() if p.grad is not None])
    return found


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_gradients_in_bfloat16_are_summed_in_float32(ranks: Ranks, stage: str) -> None:
    for found in ranks(3, deadline_s=200).run(_mixed, stage):
        half = len(found) // 2
        assert half and all(map(torch.equal, found[:half], found[half:]))


# -- what else users do with it -----------------------------------------------------------------------------------------


def _clips_and_accumulates(world: World) -> None:
    torch.manual_seed(0)
    model = world.place(Awkward())
    run = _compiled(model, world, "eager")
    _steps(run, model, world, seeds=range(2), clip=0.01)
    run(noise(4, WIDTH, seed=5)).square().mean().backward()  # two backwards, two reductions, one `.grad`
    first = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = None
    run(noise(4, WIDTH, seed=6)).square().mean().backward()
    world.reduce(model)
    world.note_model(model)
    assert sum(grad is None for grad in first) == 2


def test_clipping_after_one_graph_is_that_of_replicas(ranks: Ranks) -> None:
    for found in ranks(2, deadline_s=200).run(differences, _clips_and_accumulates, stages=["zero3"]):
        assert found == []


def _accumulates_whole(world: World) -> None:
    torch.manual_seed(0)
    model = world.place(Awkward())
    run = _compiled(model, world, "eager")
    for step in range(2):
        with nullcontext() if world.is_replica else zf.accumulate(model, unshard=True):
            for micro in range(2):
                run(noise(4, WIDTH, seed=2 * step + micro)).square().mean().backward()
        world.reduce(model)
        world.note_model(model)
        model.zero_grad()


def test_one_graph_accumulates_where_parameters_are_whole(ranks: Ranks) -> None:
    for found in ranks(2, deadline_s=200).run(differences, _accumulates_whole, stages=["zero2", "zero3"]):
        assert found == []


def _loads_and_evaluates() -> list[tuple[Tensor, Tensor]]:
    """Loaded values reach the graph, and whole parameters of `unsharded` do; both against the module not compiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = zf.zero3(Awkward(), axis())
    run = torch.compile(model, backend="eager", fullgraph=True)
    x = noise(4, WIDTH, seed=0)
    run(x).sum().backward()
    torch.manual_seed(1)
    model.load_state_dict(zf.zero3(Awkward(), axis()).state_dict())
    pairs = [(run(x), model(x))]
    with torch.no_grad(), zf.unsharded(model):
        pairs.append((run(x), model(x)))
    values = {name: p.full_tensor().detach() * 2 for name, p in model.named_parameters()}

    def call(values: dict[str, Tensor], x: Tensor) -> Tensor:
        output: Tensor = torch.func.functional_call(model, values, (x,))
        return output

    pairs.append((torch.compile(call, backend="eager", fullgraph=True)(values, x), call(values, x)))
    return [(one.detach(), other.detach()) for one, other in pairs]


def test_values_that_change_outside_reach_the_graph(ranks: Ranks) -> None:
    for pairs in ranks(2, deadline_s=200).run(_loads_and_evaluates):
        assert [torch.equal(one, other) for one, other in pairs] == [True, True, True]


def _refusals() -> list[str]:
    torch.manual_seed(0)
    model = zf.zero3(Awkward(), axis())
    found = []
    with zf.accumulate(model):
        found.append(_error_of(model))
    with zf.unsharded(model):
        found.append(_error_of(model))
    found.append(_error_of(zf.zero3(nn.Sequential(nn.BatchNorm1d(WIDTH)), axis())))
    return found


def _error_of(model: nn.Module) -> str:
    torch._dynamo.reset()
    with pytest.raises(zf.StateError) as raised:
        torch.compile(model, backend="eager", fullgraph=True)(noise(4, WIDTH, seed=0))
    return str(pickle.loads(pickle.dumps(raised.value)))


def test_what_a_graph_cannot_hold_is_refused(ranks: Ranks) -> None:
    for accumulating, unsharded, buffers in ranks(2, deadline_s=200).run(_refusals):
        assert "accumulate() cannot hold its gradients back" in accumulating
        assert "would lose the gradients" in unsharded
        assert "Statistics of rank 0" in buffers


class _Counting(nn.Module):
    """A buffer that stays, one that a forward may change, and statistics that it uses."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.linear, self.norm, self.counts = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH).eval(), counts
        self.register_buffer("mask", torch.eye(WIDTH))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.calls += 1
        output: Tensor = self.norm(self.linear(x @ self.mask))
        return output


def _with_buffers(counts: bool) -> str:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = zf.zero3(_Counting(counts), axis())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = fulls(model.parameters())
    torch.compile(model, backend="eager", fullgraph=True)(noise(4, WIDTH, seed=0)).sum().backward()
    try:
        optimizer.step()
    except zf.StateError as error:
        assert all(map(torch.equal, fulls(model.parameters()), before))
        return error.summary
    return "stepped"


def test_buffers_may_be_read_in_one_graph_and_not_changed(ranks: Ranks) -> None:
    assert ranks(2).run(_with_buffers, False) == ["stepped"] * 2
    for said in ranks(2).run(_with_buffers, True):
        assert said.startswith("A buffer changed in a forward that is one graph")


def _recomputed(order: str) -> list[Tensor]:
    found = []
    for compiles in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model: nn.Module = _Chain(3)
        if order == "inside":
            model = zf.zero3(zf.checkpoint_activations(model, units=_Block), axis())
        else:
            model = zf.checkpoint_activations(zf.zero3(model, axis()), units=_Block)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiles else model
        run(noise(4, 8, seed=0)).square().mean().backward()
        found += fulls([p.grad for p in model.parameters()])
    return found


def test_the_compiler_is_left_as_it_was() -> None:
    from torch._dynamo import config

    before = config.skip_fwd_side_effects_in_bwd_under_checkpoint
    begin_region("block", is_moved=False)
    assert config.skip_fwd_side_effects_in_bwd_under_checkpoint
    end_region()
    assert config.skip_fwd_side_effects_in_bwd_under_checkpoint == before


@pytest.mark.parametrize("order", ["inside", "around"])
def test_one_graph_recomputes_activations(ranks: Ranks, order: str) -> None:
    for found in ranks(2, deadline_s=200).run(_recomputed, order):
        half = len(found) // 2
        assert half
        assert all(map(torch.equal, found[:half], found[half:]))


# -- more axes ----------------------------------------------------------------------------------------------------------


class _Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.norm(self.down(F.relu(self.up(x))))
        return output


def _on_axes(chain: str) -> list[list[Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for compiles in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(_Wide(), _Wide())
        if chain == "tp":
            for block in model:
                parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            model = zf.zero3(model, mesh["dp"])
            seed = mesh["dp"].get_local_rank()
        else:
            inner, outer = {
                "hsdp": ("zero3", "replicate"),
                "zero3 twice": ("zero3", "zero3"),
                "hpz": ("zero3", "zero1"),
            }[chain]
            model = getattr(zf, outer)(getattr(zf, inner)(model, mesh["tp"]), mesh["dp"])
            seed = torch.distributed.get_rank()
        backend = "aot_eager" if chain in ("tp", "hpz") else "eager"
        run = torch.compile(model, backend=backend, fullgraph=True) if compiles else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            torch.manual_seed(100 * step + seed)
            run(torch.randn(4, WIDTH)).square().mean().backward()
            optimizer.step()
            grads = [p.grad for p in model.parameters()]
            optimizer.zero_grad()
        found.append([local_of(tensor).clone() for tensor in (*grads, *model.parameters()) if tensor is not None])
    return found


@pytest.mark.parametrize("chain", ["tp", "hsdp", "zero3 twice", "hpz"])
def test_one_graph_on_two_axes_gives_what_the_module_gives(ranks: Ranks, chain: str) -> None:
    for compiled, eager in ranks(4, deadline_s=200).run(_on_axes, chain):
        assert len(compiled) == len(eager)
        assert all(map(torch.equal, compiled, eager))
