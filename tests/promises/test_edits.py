"""G33 edits of parameters, G34 parameters and modules that come late, G35 casts and `meta`, G36 methods beside `forward`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint

import zero_fn as zf
from tests.support.models import Block
from tests.support.profiles import SIZES
from tests.support.programs import STAGES, parameters
from tests.support.ranks import Ranks, axis
from tests.support.seeds import seed_generator
from tests.support.wholes import named_fulls
from tests.support.worlds import ALL, WIDTH, Tower, World, differences, noise

# -- G33 --------------------------------------------------------------------------------------------------------------


def _train(world: World, model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    world.step(model, optimizer, model(noise(4, WIDTH, seed=seed)).square().mean())


def _edits(world: World) -> None:
    """Of the resting parameters, as whole-tensor operations and through their local shards."""
    model: Any = world.build(Tower)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _train(world, model, optimizer, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5).add_(0.25)
    _train(world, model, optimizer, 1)
    for parameter in model.blocks.parameters():
        local = parameter.data.to_local() if isinstance(parameter, DTensor) else parameter.data
        local.clamp_(-0.1, 0.1)
    _train(world, model, optimizer, 2)
    with zf.unsharded(model, writeback=True) if not world.is_replica else nullcontext(), torch.no_grad():
        model.leave.weight[2] = 7.0
        model.blocks[1].gate.fill_(0.125)
        model.enter.weight.copy_(torch.linspace(-1, 1, model.enter.weight.numel()).view_as(model.enter.weight))
    _train(world, model, optimizer, 3)
    world.note_model(model)


@pytest.mark.parametrize("n", SIZES)
def test_g33_edits_at_rest_and_with_writeback_are_exact(ranks: Ranks, n: int) -> None:
    for found in ranks(n).run(differences, _edits):
        assert found == []


def _slices() -> None:
    """Rows, chunks and diagonals of resting parameters and gradients."""
    seed_generator(0)
    model: Any = zf.zero3(Tower(), axis())
    model(noise(4, WIDTH, seed=0)).square().mean().backward()
    before, grads = parameters(model), named_fulls({name: p.grad for name, p in model.named_parameters()})
    writes: tuple[Callable[[], object], ...] = (
        lambda: model.enter.weight.grad[1:4].zero_(),
        lambda: model.enter.bias.grad[:2].add_(1),
        lambda: model.enter.weight[2].mul_(0.5),
        lambda: model.leave.weight.chunk(2)[1].add_(0.125),
        lambda: model.leave.weight.diagonal().fill_(0.5),
        lambda: nn.init.ones_(model.enter.weight.data[3:5]),
        lambda: nn.init.uniform_(model.enter.weight),
    )
    for write in writes:
        with torch.no_grad(), pytest.raises(zf.ShardedAccessError, match=r"zf\.unsharded\(model, writeback=True\)"):
            write()
    others: tuple[Callable[[], object], ...] = (
        lambda: model.leave.weight.grad.masked_fill_(torch.arange(7) % 3 == 0, 0.0),
        lambda: model.leave.bias.grad.index_fill_(0, torch.tensor([0, 3]), 0.25),
        lambda: model.enter.bias.data.copy_(torch.ones(7)),
    )
    for write in others:
        with torch.no_grad(), pytest.raises(RuntimeError):  # torch's own
            write()
    after, now = parameters(model), named_fulls({name: p.grad for name, p in model.named_parameters()})
    assert all(torch.equal(after[name], before[name]) and torch.equal(now[name], grads[name]) for name in before)


def test_g33_edits_of_slices_raise_and_write_nothing(ranks: Ranks) -> None:
    """torch alone loses what is written into a view across shards."""
    ranks(2).run(_slices)


def _unwritten(stage: str) -> None:
    seed_generator(0)
    model: Any = STAGES[stage](Tower(), axis())
    before = parameters(model)
    with zf.unsharded(model), torch.no_grad():
        model.leave.weight.fill_(9)
        assert torch.equal(model.leave.weight, torch.full((WIDTH, 7), 9.0))
    assert all(torch.equal(value, before[name]) for name, value in parameters(model).items())
    with (
        pytest.raises(zf.DisagreementError, match="different edits"),
        zf.unsharded(model, writeback=True),
        torch.no_grad(),
    ):
        model.leave.weight.fill_(9)
        if dist.get_rank() == 0:
            model.blocks[0].up.weight[0, 0] = 5
    assert all(torch.equal(value, before[name]) for name, value in parameters(model).items())
    model(noise(4, WIDTH, seed=0)).sum().backward()


@pytest.mark.parametrize("stage", ALL)
def test_g33_edits_without_writeback_are_dropped_and_different_ones_refused(ranks: Ranks, stage: str) -> None:
    ranks(3).run(_unwritten, stage)


# -- G34 --------------------------------------------------------------------------------------------------------------


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(7, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.low(x) @ self.low.weight


LATE: dict[str, tuple[Callable[[Any], object], str]] = {
    "a parameter of the root": (lambda m: setattr(m, "extra", nn.Parameter(torch.ones(3))), "extra"),
    "a parameter of a block": (lambda m: setattr(m.blocks[1], "extra", nn.Parameter(torch.ones(3))), "blocks.1.extra"),
    "register_parameter": (
        lambda m: m.blocks[0].norm.register_parameter("extra", nn.Parameter(torch.ones(3))),
        "blocks.0.norm.extra",
    ),
    "a parameter of a container": (lambda m: setattr(m.blocks, "extra", nn.Parameter(torch.ones(3))), "blocks.extra"),
    "a parameter where there was None": (lambda m: setattr(m.none, "bias", nn.Parameter(torch.ones(7))), "none.bias"),
    "a tie under a new name": (lambda m: setattr(m, "alias", m.leave.weight), "alias"),
    "a module": (lambda m: setattr(m, "adapter", Adapter()), "adapter.low.weight"),
    "add_module": (lambda m: m.blocks[2].add_module("adapter", Adapter()), "blocks.2.adapter.low.weight"),
    "append": (lambda m: m.blocks.append(Block(7)), "blocks.3.gate"),
    "a replaced block": (lambda m: m.blocks.__setitem__(1, Block(7)), "blocks.1.gate"),
    "an append to a parameter list": (lambda m: m.table.append(nn.Parameter(torch.ones(3))), "table.1"),
    "a parameter of a late container": (
        lambda m: (setattr(m, "late", nn.Sequential()), m.late.append(nn.Linear(2, 2))),
        "late.0.weight",
    ),
}


class WithRoom(Tower):
    """With places where something may be added."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Linear(7, 7, bias=False)
        self.table = nn.ParameterList([torch.ones(3)])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0 * self.none.weight.sum() + 0 * self.table[0].sum())


def _late(case: str, twin: bool, stage: str) -> None:
    add, name = LATE[case]
    seed_generator(0)
    model: Any = STAGES[stage](WithRoom(), axis())
    if twin:
        model = copy.deepcopy(model)
    x = noise(2, WIDTH, seed=0)
    if stage != "zero1":  # before the first forward, too
        model(x).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    add(model)
    for use in (lambda: model(x), lambda: model.blocks[0](torch.ones(2, 7)), lambda: zf.check(model, optimizer)):
        with pytest.raises(zf.PlacementError, match=rf"'{name}' was added after the transform") as caught:
            use()
        assert "never reduced" in str(caught.value)


def _late_in_stages(case: str, twin: bool) -> None:
    for stage in ALL:
        _late(case, twin, stage)


@pytest.mark.parametrize(
    ("case", "twin"), [*((case, False) for case in LATE), ("a parameter of a block", True), ("append", True)]
)
def test_g34_what_comes_late_is_refused_by_the_next_forward_and_by_check(ranks: Ranks, case: str, twin: bool) -> None:
    ranks(2).run(_late_in_stages, case, twin)


def _taken_back() -> None:
    seed_generator(0)
    model: Any = zf.zero3(Tower(), axis())
    x = noise(2, WIDTH, seed=0)
    expected = model(x)
    model.adapter, model.extra = Adapter(), nn.Parameter(torch.ones(3))
    for name in ("extra", "adapter"):
        with pytest.raises(zf.PlacementError, match=name):
            model(x)
        delattr(model, name)
    assert torch.equal(model(x), expected)
    head, model.leave = model.leave, nn.Linear(7, WIDTH)
    with pytest.raises(zf.PlacementError, match=r"'leave.weight' was added"):
        model(x)
    model.leave = head
    assert torch.equal(model(x), expected)
    del head
    model.leave = nn.Linear(7, WIDTH)
    with pytest.raises(zf.PlacementError, match=r"held 'weight' was taken out of its unit"):
        model(x)


def test_g34_a_model_runs_on_without_what_came_late(ranks: Ranks) -> None:
    ranks(2).run(_taken_back)


def _allowed(world: World) -> None:
    """What goes on working: modules without parameters, transformed modules, None, replaced values, other models."""
    model: Any = world.build(Tower)
    model.dropout = nn.Sequential(nn.Tanh(), nn.Identity())
    parametrize.register_parametrization(nn.Linear(2, 2), "weight", nn.Identity())  # of another model
    model.leave.register_parameter("none", None)
    model.adapter = world.build(Adapter, seed=3)
    model.blocks.insert(1, model.adapter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        _train(world, model, optimizer, step)


def test_g34_what_needs_no_reduction_or_has_its_own_may_come_late(ranks: Ranks) -> None:
    for found in ranks(2).run(differences, _allowed):
        assert found == []


def _replaced() -> None:
    for stage in ALL:
        seed_generator(0)
        model: Any = STAGES[stage](Tower(), axis())
        model.leave.weight = nn.Parameter(torch.ones(WIDTH, 7))
        with pytest.raises(zf.PlacementError, match=r"'leave.weight' was replaced after the transform"):
            model(noise(2, WIDTH, seed=0))
        model = STAGES[stage](Tower(), axis())
        parametrize.register_parametrization(model.leave, "weight", nn.Identity())  # moves the parameter elsewhere
        with pytest.raises(zf.PlacementError, match=r"'leave.weight' was replaced after the transform"):
            model(noise(2, WIDTH, seed=0))


def test_g34_a_replaced_parameter_raises_at_the_next_forward(ranks: Ranks) -> None:
    ranks(2).run(_replaced)


# -- G35 --------------------------------------------------------------------------------------------------------------


def _cast(world: World) -> None:
    model = world.build(Tower)
    model(noise(2, WIDTH, seed=9))  # has run in the other dtype
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.to(torch.float64)
    for step in range(3):
        world.step(model, optimizer, model(noise(4, WIDTH, seed=step).double()).square().mean())
    saved = optimizer.state_dict()
    model.float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # as the error advises
    optimizer.load_state_dict(saved)
    for step in range(2):
        _train(world, model, optimizer, step)


@pytest.mark.parametrize("n", SIZES)
def test_g35_a_cast_before_the_first_step_or_with_its_states_is_exact(ranks: Ranks, n: int) -> None:
    for found in ranks(n).run(differences, _cast):
        assert found == []


def _cast_with_states(stage: str, moment: str) -> None:
    seed_generator(0)
    model: Any = STAGES[stage](Tower(), axis())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(noise(4, WIDTH, seed=0)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if moment == "before the forward":
        model.double()
        model(noise(4, WIDTH, seed=0).double()).square().mean().backward()
    else:
        model(noise(4, WIDTH, seed=0)).square().mean().backward()
        model.double()
    before = parameters(model)
    moments = named_fulls({name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()})
    with pytest.raises(zf.StateError, match=r"states have another dtype[\s\S]*float64, its exp_avg is float32"):
        optimizer.step()
    after = named_fulls({name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()})
    values = parameters(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(values[name], before[name])
        assert torch.equal(after[name], moments[name])
        assert optimizer.state[parameter]["step"].item() == 1
    model.float()
    model.zero_grad()
    model(noise(4, WIDTH, seed=0)).square().mean().backward()
    optimizer.step()  # the way back is open


@pytest.mark.parametrize(
    ("stage", "moment"),
    [
        ("replicate", "before the step"),
        ("zero1", "before the forward"),
        ("zero2", "before the step"),
        ("zero3", "before the forward"),
        ("zero3", "before the step"),
    ],
)
def test_g35_a_cast_under_states_raises_before_any_update(ranks: Ranks, stage: str, moment: str) -> None:
    ranks(2).run(_cast_with_states, stage, moment)


class Resettable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x)


def _reset(model: nn.Module) -> nn.Module:
    """As `materialize` resets: every module in order, from one seed."""
    seed_generator(0)
    for module in model.modules():
        reset: Any = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
    return model


def _from_meta(way: str, world: World) -> None:
    if world.is_replica:
        model = _reset(Resettable())
    else:
        with torch.device("meta"):
            model = world.place(Resettable())
        if way == "materialize":
            seed_generator(0)
            model = zf.materialize(model, "cpu")
        else:
            model.to_empty(device="cpu")
            model.load_state_dict(_reset(Resettable()).state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        _train(world, model, optimizer, step)


@pytest.mark.parametrize("way", ["materialize", "to_empty and load_state_dict"])
@pytest.mark.parametrize("n", SIZES)
def test_g35_a_model_from_meta_is_exact(ranks: Ranks, n: int, way: str) -> None:
    def trial(world: World) -> None:
        _from_meta(way, world)

    for found in ranks(n).run(differences, trial):
        assert found == []


# -- G36 --------------------------------------------------------------------------------------------------------------


class Coder(Tower):
    """Methods that call modules, methods that read weights."""

    def encode(self, x: Tensor) -> Tensor:
        return self.blocks[0](x @ self.enter.weight.T + self.enter.bias)  # reads weights of the root's unit

    def decode(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        for block in self.blocks[1:]:
            x = block(x)
        return self.leave(x) * scale

    def generate(self, x: Tensor, steps: int) -> Tensor:
        for _ in range(steps):
            x = self(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x), scale=2.0)


class Half(Block):
    def halved(self, x: Tensor) -> Tensor:
        return x @ self.up.weight.T * self.gate


class Deep(Coder):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Half(7) for _ in range(3))


def _coding(order: str, world: World) -> None:
    seed_generator(0)
    model: Any = Deep()
    if not world.is_replica:
        names = ("encode", "blocks.1.halved")
        if order == "before":
            model = world.place(zf.gather_in(model, *names))
        elif order == "after":
            model = zf.gather_in(world.place(model), *names)
        elif order == "between":
            model = zf.shard_optimizer(zf.gather_in(zf.replicate(model, axis()), *names), axis())
            model = world.place(model)
        else:
            model = copy.deepcopy(zf.gather_in(world.place(model), *names))
        assert "enter" not in vars(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        x = noise(4, WIDTH, seed=step)
        code = model.encode(x)
        loss = model.decode(code, scale=0.5).square().mean() + model.blocks[1].halved(code).sum()
        world.step(model, optimizer, loss + model(x).square().mean())
        with torch.no_grad():
            world.note("generated", model.generate(x, 2))
            world.note("encoded", model.encode(x))


@pytest.mark.parametrize("order", ["before", "after", "between", "deepcopy"])
@pytest.mark.parametrize("n", SIZES)
def test_g36_declared_methods_gather_as_forward_does(ranks: Ranks, n: int, order: str) -> None:
    def trial(world: World) -> None:
        _coding(order, world)

    for found in ranks(n).run(differences, trial, stages=["zero3"] if order == "between" else ALL):
        assert found == []


def _undeclared() -> None:
    seed_generator(0)
    model: Any = zf.zero3(Deep(), axis())
    x = noise(4, WIDTH, seed=0)
    before = parameters(model)
    model.decode(noise(4, 7, seed=0)).sum().backward()  # calls modules only
    model.generate(x, 2).sum().backward()  # calls itself
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()
    with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
        model.encode(x)
    with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
        model.blocks[1].halved(noise(4, 7, seed=0))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in parameters(model).items())
    model(x).sum().backward()


def test_g36_undeclared_methods_work_through_modules_and_raise_at_weights(ranks: Ranks) -> None:
    ranks(2).run(_undeclared)


class Streaming(Tower):
    def stream(self, x: Tensor) -> Iterator[Tensor]:
        yield x @ self.enter.weight.T

    async def later(self, x: Tensor) -> Tensor:
        return x @ self.enter.weight.T

    @contextmanager
    def within(self) -> Iterator[None]:
        yield


def _undeclarable() -> None:
    for name, match in (("stream", "after it has returned"), ("later", "after it has returned"), ("none", "no method")):
        with pytest.raises(zf.LayoutError, match=match):
            zf.gather_in(zf.zero3(Streaming(), axis()), name)
    with pytest.raises(zf.LayoutError, match=r"no method 'blocks\.7\.halved'"):
        zf.gather_in(Deep(), "blocks.7.halved")


def test_g36_methods_that_cannot_gather_are_refused(ranks: Ranks) -> None:
    ranks(1).run(_undeclarable)


# -- edits in a forward ------------------------------------------------------------------------------------------------


class Router(nn.Module):
    """Casts modules in its forward, as routers of transformers do (Switch, NLLB-MoE)."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier, self.memory = nn.Linear(WIDTH, 5), nn.LSTM(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.classifier = self.classifier.to(torch.float32)
        self.memory.float().to("cpu")
        output: Tensor = self.memory(self.classifier(x))[0]
        return x + output


class Plus(nn.Module):
    def __init__(self, delta: Tensor) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 1.5 + self.delta


class Adapted(nn.Module):
    """Adds factors to weights by parametrizations for one call, as PEFT does (`target_parameters`): of a frozen and a
    trained weight, and two of one."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.trained = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for base in (self.frozen, self.trained):
            is_trained = base.weight.requires_grad
            for _ in range(2):
                parametrize.register_parametrization(base, "weight", Plus(self.up.weight @ self.down.weight))
            base.parametrizations.weight.original.requires_grad_(is_trained)
            try:
                with parametrize.cached():
                    x = base(x)
            finally:
                parametrize.remove_parametrizations(base, "weight", leave_parametrized=False)
            assert type(base) is nn.Linear
            assert base.weight.requires_grad is is_trained
        return x


class Recomputed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.leave = inner, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.leave(checkpoint(self.inner, x, use_reentrant=False))
        return output


def _edited_in_forward(make: Callable[[], nn.Module], world: World) -> None:
    model = world.build(make)
    names = [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(3):
        _train(world, model, optimizer, step)
        with torch.no_grad():
            world.note("output", model(noise(4, WIDTH, seed=9)))
    with world.accumulate(model):
        model(noise(4, WIDTH, seed=7)).square().mean().backward()
    world.reduce(model)
    assert [name for name, _ in model.named_parameters()] == names
    world.note_model(model)


@pytest.mark.parametrize("is_recomputed", [False, True])
@pytest.mark.parametrize("kind", [Router, Adapted])
def test_modules_that_are_cast_or_parametrized_in_a_forward_train_as_replicas(
    ranks: Ranks, kind: type[nn.Module], is_recomputed: bool
) -> None:
    """torch swapped resting parameters under the forward, or found the gathered one in the way."""

    def trial(world: World) -> None:
        _edited_in_forward((lambda: Recomputed(kind())) if is_recomputed else kind, world)

    for found in ranks(2).run(differences, trial, stages=ALL):
        assert found == []


def _cast_of_what_is_rounded() -> None:
    """Under `precision` a router sees its rounded weight in the dtype that it asks for, and the resting one is not cast."""
    torch.manual_seed(0)
    plain = nn.Linear(WIDTH, 5)

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = plain

        def forward(self, x: Tensor) -> Tensor:
            assert self.classifier.weight.dtype == torch.bfloat16
            output: Tensor = self.classifier.float()(x.float())
            return output

    model, x = zf.precision(zf.zero3(Wide(), axis())), noise(3, WIDTH, seed=1).bfloat16()
    rounded = F.linear(x.float(), plain.weight.bfloat16().float(), plain.bias.bfloat16().float())
    assert torch.equal(model(x), rounded)
    model(x).sum().backward()
    assert all(p.dtype == torch.float32 and p.grad is not None for p in model.parameters())


def _parametrized_wrongly() -> None:
    class Inverse(Plus):
        def right_inverse(self, weight: Tensor) -> Tensor:
            return weight - self.delta

    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.leaves = nn.Linear(WIDTH, WIDTH), False
            self.kind: type[Plus] = Inverse

        def forward(self, x: Tensor) -> Tensor:
            parametrize.register_parametrization(self.base, "weight", self.kind(torch.ones(1)))
            try:
                return self.base(x)  # type: ignore[no-any-return]
            finally:
                parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=self.leaves)

    torch.manual_seed(0)
    model: Any = zf.zero3(plain := Wrong(), axis())
    x = noise(3, WIDTH, seed=1)
    with pytest.raises(zf.StateError, match="has a right_inverse"):
        model(x)
    model.kind, model.leaves = Plus, True
    with pytest.raises(zf.PlacementError, match=r"changed 'base\.weight' in place"):
        model(x)
    model.leaves = False
    plain.kind = Plus
    assert torch.equal(model(x), plain(x))


def test_a_cast_in_a_forward_is_of_what_the_module_sees(ranks: Ranks) -> None:
    ranks(2).run(_cast_of_what_is_rounded)


def test_parametrizations_that_would_change_a_weight_in_a_forward_are_refused(ranks: Ranks) -> None:
    ranks(2).run(_parametrized_wrongly)


AVERAGES: dict[str, Callable[[list[Any], list[Any]], object]] = {
    "in place": lambda averages, values: [a.lerp_(v, 0.25) for a, v in zip(averages, values, strict=True)],
    "copied": lambda averages, values: [a.copy_(a * 0.75 + v * 0.25) for a, v in zip(averages, values, strict=True)],
    "through .data": lambda averages, values: [
        a.data.mul_(0.75).add_(v.data, alpha=0.25) for a, v in zip(averages, values, strict=True)
    ],
    "to .data": lambda averages, values: [
        setattr(a, "data", a.data * 0.75 + v.data * 0.25) for a, v in zip(averages, values, strict=True)
    ],
    "in lists": lambda averages, values: torch._foreach_lerp_(averages, values, 0.25),
    "of views": lambda averages, values: [a.detach().lerp_(v, 0.25) for a, v in zip(averages, values, strict=True)],
}
"""How a forward moves averages towards values."""


class MomentumEncoder(nn.Module):
    """Moves the average of an encoder in its forward, and uses it, as MoCo, ALBEF and BLIP do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH))
        self.average, self.how = copy.deepcopy(self.encoder).requires_grad_(False), how
        self.moves = (False, True, False, True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.encoder(x)
        with torch.no_grad():
            for moves in self.moves:
                if moves:
                    AVERAGES[self.how]([*self.average.parameters()], [p for _, p in self.encoder.named_parameters()])
                x = self.average(x)
        return output - x


def _moved_in_forward(how: str, units: list[str] | None, world: World) -> None:
    model: Any = world.build(lambda: MomentumEncoder(how), **({} if units is None else {"units": units}))
    optimizer = torch.optim.AdamW(model.encoder.parameters(), lr=1e-1)
    for step in range(4):
        model.moves = model.moves[1:] + model.moves[:1]  # the order of a recorded schedule changes
        _train(world, model, optimizer, step)
    with world.accumulate(model):
        for step in range(2):
            model(noise(4, WIDTH, seed=step)).square().mean().backward()
    world.reduce(model)
    world.note_model(model)


@pytest.mark.parametrize("units", [None, ["encoder", "average"]], ids=["one unit", "two units"])
@pytest.mark.parametrize("how", AVERAGES)
def test_parameters_that_are_changed_at_rest_in_a_forward_are_used_as_they_are_then(
    ranks: Ranks, how: str, units: list[str] | None
) -> None:
    """It went on with what was gathered before the change, in silence."""

    def trial(world: World) -> None:
        _moved_in_forward(how, units, world)

    for found in ranks(2).run(differences, trial, stages=ALL):
        assert found == []


# -- pruning -----------------------------------------------------------------------------------------------------------

PRUNINGS: dict[str, Callable[[nn.Module], object]] = {
    "unstructured": lambda m: prune.l1_unstructured(m, "weight", 0.5),
    "structured": lambda m: prune.ln_structured(m, "weight", 0.5, n=2, dim=1),
    "mask": lambda m: prune.custom_from_mask(m, "weight", torch.arange(17 * 7).view(17, 7) % 2),
    "global": lambda m: prune.global_unstructured([(m, "weight"), (m, "bias")], prune.L1Unstructured, amount=0.4),
}


def _pruned(kind: str, world: World) -> None:
    """Before the transform the masks stay; after it, once or again, pruning is refused and changes nothing."""

    def make() -> nn.Module:
        tower: Any = Tower()
        PRUNINGS[kind](tower.blocks[1].up)
        return tower  # type: ignore[no-any-return]

    model: Any = world.build(make)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        if not world.is_replica:
            for module in (model.blocks[1].up, model.blocks[2].up):
                with pytest.raises(
                    zf.PlacementError, match=r"'blocks\.[12]\.up\..*' was to be pruned after the transform"
                ):
                    PRUNINGS[kind](module)
        _train(world, model, optimizer, step)
    world.note_model(model)


@pytest.mark.parametrize("kind", PRUNINGS)
def test_pruning_before_the_transform_is_exact_and_after_it_refused(ranks: Ranks, kind: str) -> None:
    def trial(world: World) -> None:
        _pruned(kind, world)

    for found in ranks(2).run(differences, trial, stages=ALL):
        assert found == []
