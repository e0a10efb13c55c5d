"""The verbs around training: unsharded, materialize, state dicts, checkpoints, check, memory and traffic as planned."""

from __future__ import annotations

import copy
import gc
import tempfile
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zero_fn as zf
from tests.support.models import Language, Odd
from tests.support.programs import OPTIMIZERS, STAGES, gradients, loss_of, parameters
from tests.support.ranks import Ranks, axis
from tests.support.wholes import full, named_fulls
from zero_fn.runtime.entry import units_of

ALL = list(STAGES)


def _built(stage: str, build: Callable[[], nn.Module] = Language, **options: object) -> nn.Module:
    torch.manual_seed(0)
    return STAGES[stage](build(), axis(), **options)


def _plain(build: Callable[[], nn.Module] = Language) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: parameter.detach() for name, parameter in build().named_parameters()}


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    loss = loss_of(model, step)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# -- unsharded ------------------------------------------------------------------------------------------------------


def _unsharded(stage: str) -> None:
    model = _built(stage, Odd)
    plain = _plain(Odd)
    with zf.unsharded(model):
        inside = dict(model.named_parameters())
        assert all(type(parameter) is nn.Parameter for parameter in inside.values())
        assert _equal({name: p.detach() for name, p in inside.items()}, plain)
        assert model.head.weight is model.embedding.weight  # type: ignore[union-attr]
        with zf.traffic() as sent, torch.no_grad():
            loss_of(model, 0)
        assert sent.nbytes == 0
        with torch.no_grad():
            model.norm.weight.add_(1)  # type: ignore[union-attr, operator]
    assert _equal(parameters(model), plain), "edits without writeback are dropped"
    with zf.unsharded(model.blocks[0], writeback=True), torch.no_grad():  # type: ignore[index, arg-type]
        model.blocks[0].down.weight.add_(1)  # type: ignore[index]
    plain["blocks.0.down.weight"] = plain["blocks.0.down.weight"] + 1
    assert _equal(parameters(model), plain)
    before = parameters(model)
    differing = pytest.raises(zf.DisagreementError, match="different edits")
    with differing, zf.unsharded(model, writeback=True), torch.no_grad():
        model.norm.bias.add_(dist.get_rank())  # type: ignore[union-attr, operator]
    assert _equal(parameters(model), before)
    with pytest.raises(ZeroDivisionError), zf.unsharded(model, writeback=True):
        with torch.no_grad():
            model.norm.bias.add_(1)  # type: ignore[union-attr, operator]
        raise ZeroDivisionError
    assert _equal(parameters(model), before)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _step(model, optimizer, 0)
    assert not _equal(parameters(model), before)
    for writeback in (False, True):  # an adapter freezes its base so
        with zf.unsharded(model, writeback=writeback):
            model.norm.requires_grad_(False)  # type: ignore[union-attr, operator]
        assert model.norm.weight.requires_grad is not writeback  # type: ignore[union-attr]
    assert model.head.weight.requires_grad  # type: ignore[union-attr]


@pytest.mark.parametrize("stage", ALL)
def test_unsharded_gives_whole_parameters_and_writes_back_on_request(ranks: Ranks, stage: str) -> None:
    ranks(3).run(_unsharded, stage)


def _backward_inside(stage: str) -> None:
    expected, model = _built(stage, Odd), _built(stage, Odd)
    loss_of(expected, 0).backward()
    loss = loss_of(model, 0)
    with zf.unsharded(model):
        loss.backward()
    assert _gradients(model)
    assert _equal(_gradients(model), _gradients(expected))


@pytest.mark.parametrize("stage", ALL)
def test_a_backward_inside_unsharded_is_that_of_the_forward_before(ranks: Ranks, stage: str) -> None:
    ranks(2).run(_backward_inside, stage)


def _gradient_of_a_whole_parameter(stage: str) -> None:
    model = _built(stage, Odd)
    with zf.unsharded(model):
        loss = loss_of(model, 0) + model.norm.weight.square().sum()  # type: ignore[union-attr, operator]
        (whole,) = torch.autograd.grad(model.norm.bias.square().sum(), model.norm.bias)  # type: ignore[union-attr, operator, arg-type]
    assert type(whole) is Tensor, "asked for, a gradient is there"
    with pytest.raises(zf.StateError, match=r"A backward reached the whole parameter .* of an unsharded"):
        loss.backward()
    with pytest.raises(zf.StateError, match=r"A backward reached the whole parameter"), zf.unsharded(model):
        loss_of(model, 0).backward()
    model.zero_grad()
    expected = _built(stage, Odd)
    for trained in (expected, model):
        loss_of(trained, 0).backward()
    assert _equal(_gradients(model), _gradients(expected)), "nothing is left of the backward that failed"


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: grad for name, grad in gradients(model).items() if grad is not None}


@pytest.mark.parametrize("stage", ALL)
def test_a_gradient_that_unsharded_would_lose_raises(ranks: Ranks, stage: str) -> None:
    ranks(2).run(_gradient_of_a_whole_parameter, stage)


# -- layers that come and go ----------------------------------------------------------------------------------------


def _new_head(stage: str) -> dict[str, Tensor]:
    """After two steps the head is another one, transformed by itself."""
    torch.manual_seed(0)
    model = STAGES[stage](nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), axis())
    for step in range(4):
        if step == 2:
            model[2] = STAGES[stage](nn.Linear(5, 4), axis())  # type: ignore[index, operator]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters(model)


@pytest.mark.parametrize("stage", ALL[1:])
def test_a_layer_may_be_replaced_by_a_transformed_one(ranks: Ranks, stage: str) -> None:
    expected = ranks(2).run(_new_head, "replicate")
    assert expected[0]["2.weight"].shape == (4, 5)
    for found in ranks(2).run(_new_head, stage):
        assert _equal(found, expected[0])


# -- meta -----------------------------------------------------------------------------------------------------------


class Positions(nn.Module):
    """Owns a buffer that only `reset_parameters` can make."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.empty(5), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.arange(5, out=self.angles) if not self.angles.is_meta else None  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.angles.unsqueeze(-1)  # type: ignore[operator]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 10)
        self.positions = Positions()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(10), nn.Linear(10, 10)) for _ in range(3))
        self.head = nn.Linear(10, 37)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.positions(self.embedding(tokens))
        for block in self.blocks:
            x = x + block(x)
        output: Tensor = self.head(x)
        return output


def _materialized(stage: str) -> tuple[dict[str, Tensor], list[int], float]:
    with torch.device("meta"):
        model = STAGES[stage](Small(), axis())
    assert all(parameter.is_meta for parameter in model.parameters())
    assert zf.held(model).parameters == 0
    torch.manual_seed(3)
    allocated: list[int] = []
    model = zf.materialize(model, "cpu")
    allocated.append(zf.held(model).parameters)
    loss = _step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)
    return parameters(model), allocated, loss


def _materialized_stages() -> list[bool]:
    runs = [_materialized(stage) for stage in ALL]
    return [_equal(runs[0][0], run[0]) and run[2] == runs[0][2] for run in runs]


def test_materialize_gives_the_same_values_in_every_stage(ranks: Ranks) -> None:
    for rank in ranks(3).run(_materialized_stages):
        assert all(rank)


def _optimized_on_meta(stage: str) -> list[dict[str, Tensor]]:
    found = []
    for is_late in (True, False):
        with torch.device("meta"):
            model = STAGES[stage](Small(), axis())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        torch.manual_seed(3)
        zf.materialize(model, "cpu")
        _step(model, torch.optim.AdamW(model.parameters(), lr=0.1) if is_late else optimizer, 0)
        found.append(parameters(model))
    with torch.device("meta"):
        model = STAGES[stage](Small(), axis())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    kept = [weakref.ref(parameter) for parameter in model.parameters()]
    zf.materialize(model, "cpu")
    with pytest.raises(zf.StaleError, match="memory for what was on meta"):
        _step(model, optimizer, 0)
    assert kept
    return found


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_an_optimizer_over_a_model_on_meta_trains_what_it_becomes(ranks: Ranks, stage: str) -> None:
    for late, early in ranks(2).run(_optimized_on_meta, stage):
        assert _equal(late, early)


def _materialized_apart() -> None:
    with torch.device("meta"):
        model = zf.zero3(nn.Linear(4, 6), axis())
    torch.manual_seed(dist.get_rank())
    model = zf.materialize(model, "cpu")
    with pytest.raises(zf.DisagreementError, match="different initial values"):
        model(torch.ones(1, 4))


def test_values_that_ranks_materialize_from_other_seeds_are_refused(ranks: Ranks) -> None:
    ranks(2).run(_materialized_apart)


def _materialize_refuses() -> None:
    with torch.device("meta"):
        model = zf.zero3(Language(), axis())
    with pytest.raises(zf.StateError, match="reset_parameters"):
        zf.materialize(model, "cpu")  # `Block` owns its gate and cannot reset it
    assert all(parameter.is_meta for parameter in model.parameters())


def test_materialize_refuses_a_module_that_cannot_reset(ranks: Ranks) -> None:
    ranks(2).run(_materialize_refuses)


class Table(nn.Module):
    """Sets one of its buffers."""

    used: Tensor
    left_out: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))
        self.register_buffer("used", torch.zeros(4), persistent=False)
        self.register_buffer("left_out", torch.zeros(4), persistent=False)

    def reset_parameters(self) -> None:
        self.weight.data.normal_()
        self.used.fill_(1)


def _materialized_in_part() -> None:
    with torch.device("meta"):
        model = zf.zero3(nn.Sequential(nn.Linear(4, 4), Table()), axis())
    with pytest.raises(zf.StateError, match=r"1 parameters and buffers[\s\S]*first +: 1.left_out"):
        zf.materialize(model, "cpu")
    model[1].left_out.fill_(2)  # type: ignore[operator]
    zf.materialize(model, "cpu")  # what is in memory stays
    assert model[1].left_out.tolist() == [2.0] * 4  # type: ignore[operator]


def test_materialize_names_what_nobody_wrote(ranks: Ranks) -> None:
    ranks(2).run(_materialized_in_part)


class Shared(nn.Module):
    """Two blocks whose linears share a weight: it belongs to the root, the biases to the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.blocks[1][0].weight = self.blocks[0][0].weight  # type: ignore[index]


def _materialized_ties() -> None:
    with torch.device("meta"):
        model = zf.zero3(Shared(), axis())
    zf.materialize(model, "cpu")
    for values in named_fulls(dict(model.named_parameters())).values():
        assert values.abs().max() < 1
        assert values.unique().numel() == values.numel()


def test_materialize_initialises_modules_whose_parameters_are_in_two_units(ranks: Ranks) -> None:
    """The unit that came second was left with the memory as it was."""
    ranks(2).run(_materialized_ties)


def _to_empty(stage: str) -> None:
    with torch.device("meta"):
        model = STAGES[stage](Small(), axis())
    model.to_empty(device="cpu")
    model.positions.reset_parameters()  # type: ignore[union-attr, operator]
    torch.manual_seed(0)
    values = Small().state_dict()
    model.load_state_dict(values)
    assert _equal(parameters(model), dict(values.items()))
    _step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)


@pytest.mark.parametrize("stage", ALL)
def test_to_empty_and_load_state_dict_start_a_meta_model(ranks: Ranks, stage: str) -> None:
    ranks(2).run(_to_empty, stage)


def _parameterless_parts(stage: str) -> None:
    model: Any = STAGES[stage](nn.Sequential(nn.Linear(6, 6), nn.Dropout()), axis())
    for part in model:
        with zf.unsharded(part):
            pass
        with zf.accumulate(part):
            model(torch.ones(2, 6)).sum().backward()
    assert model[0].weight.grad is not None
    with pytest.raises(zf.StateError, match="no transform returned"), zf.unsharded(nn.Linear(2, 2)):
        pass


@pytest.mark.parametrize("stage", ALL)
def test_parts_without_parameters_are_passed_over(ranks: Ranks, stage: str) -> None:
    ranks(2).run(_parameterless_parts, stage)


@dataclass(frozen=True)
class Batch:
    x: Tensor
    mask: Tensor
    inner: list[Tensor]
    name: str = "of tensors"


class Masked(nn.Module):
    """Takes and gives a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(6, 6), []  # type: ignore[var-annotated]

    def forward(self, batch: Batch) -> Batch:
        self.seen.append(batch)
        return replace(batch, x=self.layer(batch.x) * batch.mask + batch.inner[0])


def _dataclasses(stage: str) -> None:
    model: Any = zf.precision(STAGES[stage](Masked(), axis()), compute=torch.bfloat16, output=torch.float64)
    given = Batch(torch.ones(2, 6), torch.ones(2, 6, dtype=torch.bool), [torch.ones(2, 6)])
    output = model(given)
    (seen,) = model.seen
    assert (seen.x.dtype, seen.mask.dtype, seen.inner[0].dtype) == (torch.bfloat16, torch.bool, torch.bfloat16)
    assert (output.x.dtype, output.inner[0].dtype, output.name) == (torch.float64, torch.float64, "of tensors")
    assert given.x.dtype == torch.float32
    output.x.sum().backward()
    assert model.layer.weight.grad is not None


@pytest.mark.parametrize("stage", ALL)
def test_precision_casts_tensors_in_dataclasses(ranks: Ranks, stage: str) -> None:
    ranks(2).run(_dataclasses, stage)


def _attrs(stage: str) -> None:
    declared = pytest.importorskip("attrs")
    batch_type = declared.make_class("AttrsBatch", ["x", "mask", "inner"], frozen=True, slots=True)

    class Reading(nn.Linear):
        def forward(self, batch: Any) -> Tensor:
            assert (batch.x.dtype, batch.mask.dtype, batch.inner[0].dtype) == (
                torch.bfloat16,
                torch.bool,
                torch.bfloat16,
            )
            return super().forward(batch.x)

    model: Any = zf.precision(STAGES[stage](Reading(6, 6), axis()), compute=torch.bfloat16)
    given = batch_type(torch.ones(2, 6), torch.ones(2, 6, dtype=torch.bool), [torch.ones(2, 6)])
    model(given).sum().backward()
    assert given.x.dtype == torch.float32


def test_precision_casts_tensors_in_attrs(ranks: Ranks) -> None:
    ranks(2).run(_attrs, "zero3")


def _output_of_a_part(stage: str) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), nn.Linear(6, 6)
            self.seen: list[torch.dtype] = []

        def forward(self, x: Tensor) -> Tensor:
            x = self.one(x)
            self.seen.append(x.dtype)
            output: Tensor = self.two(x)
            return output

    model: Any = Two()
    model.one = zf.precision(model.one, compute=torch.bfloat16, output=torch.float32)
    model = STAGES[stage](model, axis())
    model = zf.precision(model, compute=torch.float32, where="two.*", output=torch.float16)
    output = model(torch.ones(2, 6))
    assert (model.seen, output.dtype) == ([torch.float32], torch.float16)
    assert copy.deepcopy(model)(torch.ones(2, 6)).dtype == torch.float16
    assert model.seen == [torch.float32]
    output.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with zf.accumulate(model, unshard=True):
        model(torch.ones(2, 6)).sum().backward()
    assert model.seen == [torch.float32] * 2


@pytest.mark.parametrize("stage", ALL)
def test_a_part_keeps_the_output_dtype_that_it_was_given_before_the_whole_was_transformed(
    ranks: Ranks, stage: str
) -> None:
    ranks(2).run(_output_of_a_part, stage)


def _transformed_part(stage: str) -> None:
    model: Any = zf.precision(_built(stage), output=torch.float64)
    part = zf.precision(model.blocks)  # repeated: as it was asked for
    assert [p.placements for p in part.parameters()] == [p.placements for p in model.blocks.parameters()]
    assert part[0](torch.ones(2, 4, 10)).dtype == torch.bfloat16
    again = STAGES[stage](nn.Sequential(part), axis())
    assert [p.placements for p in again.parameters()] == [p.placements for p in model.blocks.parameters()]
    tied: Any = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10, bias=False))
    tied[1].weight = tied[0].weight
    whole: Any = STAGES[stage](tied, axis())
    head = zf.precision(whole[1], compute=torch.float32)
    assert head.weight.placements == STAGES[stage](nn.Linear(10, 10), axis()).weight.placements


@pytest.mark.parametrize("stage", ALL)
def test_a_part_of_a_transformed_model_is_transformed_as_the_model_was(ranks: Ranks, stage: str) -> None:
    """It was replicated, without a word."""
    ranks(2).run(_transformed_part, stage)


def _to_double(stage: str) -> None:
    torch.manual_seed(0)
    reference = STAGES[stage](Language().double(), axis())
    model = _built(stage).double()
    first = _step(reference, torch.optim.SGD(reference.parameters(), lr=0.1), 0)
    second = _step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)
    assert first == second
    assert _equal(parameters(reference), parameters(model))


@pytest.mark.parametrize("stage", ALL)
def test_a_transformed_model_can_change_its_dtype(ranks: Ranks, stage: str) -> None:
    ranks(2).run(_to_double, stage)


# -- state dicts and checkpoints ------------------------------------------------------------------------------------


def _state_dicts(stage: str) -> None:
    model = _built(stage, Odd)
    assert list(model.state_dict()) == list(Odd().state_dict())
    torch.manual_seed(1)
    whole = Odd().state_dict()
    model.load_state_dict(whole)
    assert all(torch.equal(full(value), whole[name]) for name, value in model.state_dict().items())
    other = _built(stage, Odd)
    other.load_state_dict(model.state_dict())
    assert _equal(parameters(model), parameters(other))
    assigned = _built(stage, Odd)
    assigned.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    zf.refresh(assigned)  # torch unties tied weights here; a forward or `refresh` ties them again
    assert _equal(parameters(model), parameters(assigned))
    losses = {loss_of(each, 0).item() for each in (model, other, assigned)}
    assert len(losses) == 1
    with pytest.raises(zf.CheckpointError, match="size mismatch"):
        model.load_state_dict({**whole, "norm.weight": torch.zeros(3)})


@pytest.mark.parametrize("stage", ALL)
def test_state_dicts_round_trip_and_take_whole_tensors(ranks: Ranks, stage: str) -> None:
    ranks(3).run(_state_dicts, stage)


def _save(path: str, stage: str, steps: int) -> dict[str, Tensor]:
    """Trains, saves half-way, goes on; returns the final parameters."""
    model = _built(stage)
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
    for step in range(steps):
        _step(model, optimizer, step)
    dcp.save({"model": model.state_dict(), "optimizer": _optimizer_state(model, optimizer)}, checkpoint_id=path)
    for step in range(steps, 2 * steps):
        _step(model, optimizer, step)
    return parameters(model)


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    return dict(get_optimizer_state_dict(model, optimizer))


def _resume(path: str, stage: str, steps: int) -> dict[str, Tensor]:
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    torch.manual_seed(99)
    model = STAGES[stage](Language(), axis())
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
    state = {"model": model.state_dict(), "optimizer": _optimizer_state(model, optimizer)}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])  # type: ignore[arg-type]
    set_optimizer_state_dict(model, optimizer, state["optimizer"])  # type: ignore[arg-type]
    for step in range(steps, 2 * steps):
        _step(model, optimizer, step)
    return parameters(model)


@pytest.mark.parametrize(("saved", "resumed"), [("zero3", "zero3"), ("zero3", "zero1"), ("replicate", "zero2")])
def test_a_checkpoint_continues_exactly_in_any_stage(ranks: Ranks, saved: str, resumed: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        expected = ranks(3).run(_save, folder, saved, 3)
        for one, other in zip(expected, ranks(3).run(_resume, folder, resumed, 3), strict=True):
            assert _equal(one, other)


def test_a_checkpoint_loads_on_another_number_of_ranks(ranks: Ranks) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks(3).run(_save, folder, "zero3", 2)
        assert Path(folder, ".metadata").exists()
        ranks(2).run(_resume, folder, "zero2", 2)


# -- memory and traffic ---------------------------------------------------------------------------------------------


def _held_as_planned(stage: str, build: Callable[[], nn.Module], mixed: bool) -> list[tuple[int, int]]:
    model = _built(stage, build)
    if mixed:
        model = zf.precision(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    _step(model, optimizer, 0)
    loss_of(model, 1).backward()
    plan, held = zf.plan(model), zf.held(model, optimizer)
    return [
        (getattr(held, name), getattr(plan.held, name) + getattr(plan.padding, name))
        for name in ("parameters", "gradients", "optimizer")
    ]


@pytest.mark.parametrize(
    ("stage", "mixed"), [("replicate", False), ("zero1", True), ("zero2", False), ("zero3", False), ("zero3", True)]
)
def test_bytes_held_are_those_of_the_plan(ranks: Ranks, stage: str, mixed: bool) -> None:
    for rank in ranks(3).run(_held_as_planned, stage, Language, mixed):
        for measured, planned in rank:
            assert measured == planned


class Even(nn.Module):
    """Every parameter divides evenly, and into aligned shards: no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def _formulas(stage: str) -> tuple[int, int, list[int]]:
    model = _built(stage, Even)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        with zf.traffic() as sent:
            model(torch.randn(2, 128)).square().mean().backward()
        optimizer.step()
    held = zf.held(model, optimizer)
    return sum(p.numel() for p in model.parameters()), sent.nbytes, [held.parameters, held.gradients, held.optimizer]


@pytest.mark.parametrize("stage", ALL)
def test_held_and_sent_bytes_follow_the_formulas_of_the_paper(ranks: Ranks, stage: str) -> None:
    n = 4
    for numel, sent, held in ranks(n).run(_formulas, stage):
        whole, shard = 4 * numel, 4 * numel // n
        assert (
            held
            == {
                "replicate": [whole, whole, 2 * whole],
                "zero1": [whole, whole, 2 * shard],
                "zero2": [whole, shard, 2 * shard],
                "zero3": [shard, shard, 2 * shard],
            }[stage]
        )
        volume = (n - 1) * shard
        kept = volume // 4  # the last of four equal layers stays gathered from forward to backward
        assert sent == {"replicate": 2, "zero1": 2, "zero2": 2, "zero3": 3}[stage] * volume - kept * (stage == "zero3")


def _sent_as_planned(stage: str, mixed: bool, microbatches: int) -> list[tuple[int, int]]:
    model = _built(stage)
    if mixed:
        model = zf.precision(model)
    found = []
    for step in range(3):
        with zf.traffic() as sent:
            if microbatches > 1:
                with zf.accumulate(model):
                    for i in range(microbatches):
                        loss_of(model, 10 * step + i).backward()
            else:
                loss_of(model, step).backward()
        if step:
            found.append((sent.nbytes, zf.plan(model, backwards=microbatches).sent_nbytes))
    return found


@pytest.mark.parametrize(("mixed", "microbatches"), [(False, 3), (True, 1)])
@pytest.mark.parametrize("stage", ALL)
def test_bytes_sent_are_those_of_the_plan(ranks: Ranks, stage: str, mixed: bool, microbatches: int) -> None:
    for rank in ranks(3).run(_sent_as_planned, stage, mixed, microbatches):
        for counted, planned in rank:
            assert counted == planned


def _control_calls(stage: str) -> list[tuple[int, int]]:
    """Control messages and gathers of one accumulate block after another, the last with a block nested in it."""
    model = _built(stage)
    found = []
    for nested in (False, False, True):
        with zf.traffic() as sent, zf.accumulate(model):
            loss_of(model, 0).backward()
            with zf.accumulate(model) if nested else nullcontext():
                loss_of(model, 1).backward()
        found.append((sent.calls["control"], sent.calls["all-gather"]))
    return found


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_only_the_first_forward_compares_layouts(ranks: Ranks, stage: str) -> None:
    """Every block of `accumulate` compared them once, and a nested block gathered kept parameters again."""
    for first, second, nested in ranks(2).run(_control_calls, stage):
        assert second[0] == 4 < first[0]  # one as each of two backwards begins, two as the block ends
        assert nested == second


def _deleted(stage: str, program: str) -> list[str]:
    gc.collect()
    gc.disable()
    try:
        model = _built(stage)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if program == "after a forward whose graph is dropped":
            model(torch.tensor([[1, 2]])).tanh()
        elif program == "after unsharded":
            with zf.unsharded(model, writeback=True):
                model(torch.tensor([[1, 2]]))
        else:
            model(torch.tensor([[1, 2]])).tanh().sum().backward(inputs=list(model.norm.parameters()))  # type: ignore[union-attr]
        watched = {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
        watched.update({f"unit {unit.name}": weakref.ref(unit) for unit in units_of(model)})  # type: ignore[arg-type]
        del model, optimizer
        return [name for name, reference in watched.items() if reference() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "program",
    [
        "after unsharded",
        "after a forward whose graph is dropped",
        "after a backward of a part",
    ],
)
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_a_deleted_model_frees_its_memory_without_the_collector(ranks: Ranks, stage: str, program: str) -> None:
    """After other programs: `acceptance/test_memory.py`."""
    for rank in ranks(2).run(_deleted, stage, program):
        assert rank == []


def _gathered_after(stage: str) -> list[int]:
    """Bytes of transient buffers at rest: after a step, after an evaluation, after a failure."""
    model = _built(stage)
    resting = zf.held(model).parameters
    found = []
    loss_of(model, 0).backward()
    found.append(zf.held(model).parameters - resting)
    with torch.no_grad():
        loss_of(model, 0)
    found.append(zf.held(model).parameters - resting)
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.tensor([[10**6]]))
    found.append(zf.held(model).parameters - resting)
    return found


@pytest.mark.parametrize("stage", ALL)
def test_nothing_stays_gathered_at_rest(ranks: Ranks, stage: str) -> None:
    for rank in ranks(2).run(_gathered_after, stage):
        assert rank == [0, 0, 0]


# -- mistakes -------------------------------------------------------------------------------------------------------


def _mistakes() -> None:
    torch.manual_seed(0)
    plain = Language()
    stale = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = zf.zero3(plain, axis())
    with pytest.raises(zf.StaleError, match=r"embedding.weight, replaced by shard_params at .*test_verbs.py"):
        zf.check(model, stale)
    loss_of(model, 0).backward()
    with pytest.raises(zf.StaleError, match="build the optimizer after"):
        stale.step()
    hook = model.norm.register_forward_hook(  # type: ignore[union-attr, operator]
        lambda module, args, output: output @ model.blocks[0].up.weight.t()  # type: ignore[index, union-attr, operator]
    )
    with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor") as mixed:
        loss_of(model, 0)
    assert "outside the forward of its unit" in mixed.value.__notes__[0]
    hook.remove()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zf.check(model, optimizer)
    with zf.accumulate(model):
        loss_of(model, 0).backward()
        with pytest.raises(zf.StateError, match="inside accumulate"):
            optimizer.step()
    loss = loss_of(model, 0)
    optimizer.step()
    with pytest.raises(zf.StateError, match="changed between forward and backward"):
        loss.backward()
    optimizer.zero_grad()
    _step(model, optimizer, 1)
    with pytest.raises(zf.StateError, match="cannot be pickled"):
        import pickle

        pickle.dumps(model)
    with pytest.raises(zf.PlacementError, match="replaced after the transform"):
        model.norm.weight = nn.Parameter(torch.ones(10))  # type: ignore[union-attr]
        loss_of(model, 0)


def test_mistakes_are_named_with_their_fix(ranks: Ranks) -> None:
    ranks(2).run(_mistakes)


def _other_model() -> str:
    torch.manual_seed(0)
    model = zf.zero3(Language(blocks=2 + dist.get_rank() % 2), axis())
    with pytest.raises(zf.DisagreementError) as caught:
        loss_of(model, 0)
    return str(caught.value)


def _other_values() -> str:
    torch.manual_seed(dist.get_rank())
    model = zf.zero3(Language(), axis())
    with pytest.raises(zf.DisagreementError) as caught:
        loss_of(model, 0)
    torch.manual_seed(0)
    model.load_state_dict(Language().state_dict())  # one way out
    fresh = zf.zero3(Language(), axis())
    fresh.load_state_dict(model.state_dict())
    loss_of(fresh, 0).backward()
    return str(caught.value)


def test_ranks_that_built_different_models_get_the_same_error(ranks: Ranks) -> None:
    messages = set(ranks(3).run(_other_model))
    assert len(messages) == 1
    assert "different layouts" in messages.pop()
    messages = set(ranks(3).run(_other_values))
    assert len(messages) == 1
    assert "torch.manual_seed" in messages.pop()


def _hooks(stage: str) -> dict[str, list[str]]:
    torch.manual_seed(0)
    plain = Language()
    fired: dict[str, list[str]] = {"before": [], "after": [], "post": []}

    def note(key: str) -> Callable[[Tensor], None]:
        def hook(grad: Tensor) -> None:
            fired[key].append(type(grad).__name__ + str(list(grad.shape)))

        return hook

    plain.head.weight.register_hook(note("before"))
    model = STAGES[stage](plain, axis())
    weight = model.blocks[0].up.weight  # type: ignore[index, union-attr]
    weight.register_hook(lambda grad: grad * 3)
    reference = _built(stage)
    model.norm.weight.register_post_accumulate_grad_hook(lambda p: note("post")(p.grad))  # type: ignore[union-attr, operator]
    loss_of(model, 0).backward()
    loss_of(reference, 0).backward()
    assert torch.equal(full(weight.grad), 3 * full(reference.blocks[0].up.weight.grad))  # type: ignore[index, union-attr]
    return fired


@pytest.mark.parametrize("stage", ALL)
def test_hooks_of_parameters_fire_once_with_the_resting_gradient(ranks: Ranks, stage: str) -> None:
    for fired in ranks(2).run(_hooks, stage):
        assert fired == {"before": ["DTensor[37, 10]"], "after": [], "post": ["DTensor[10]"]}


def _purity(stage: str) -> None:
    torch.manual_seed(0)
    plain = Odd()
    before = copy.deepcopy(plain.state_dict())
    expected = loss_of(plain, 0).item()
    model = STAGES[stage](plain, axis())
    assert loss_of(model, 0).item() == expected
    _step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)
    assert all(torch.equal(value, before[name]) for name, value in plain.state_dict().items())
    assert loss_of(plain, 0).item() == expected
    assert not any(isinstance(parameter, DTensor) for parameter in plain.parameters())
    assert type(model) is Odd
    given = STAGES[stage](Odd(), axis(), donate=True)
    del given
    donated = Odd()
    STAGES[stage](donated, axis(), donate=True)
    assert zf.held(donated).parameters == 0
    with pytest.raises(zf.StateError, match="donated"):
        loss_of(donated, 0)
    with pytest.raises(zf.StateError, match="donated"):
        zf.zero3(donated, axis())


@pytest.mark.parametrize("stage", ALL)
def test_a_transform_leaves_its_argument_alone_unless_donated(ranks: Ranks, stage: str) -> None:
    ranks(2).run(_purity, stage)


def _cast_beside(stage: str, which: str) -> bool:
    """A model whose module of before, or whose successor, is still there is cast; both run."""
    plain = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    first = zf.replicate(plain, axis())
    second = getattr(zf, stage)(first, axis())
    chosen = {"plain": plain, "first": first, "second": second}[which]
    chosen.to(torch.float64)
    chosen(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    others = [model for model in (plain, first, second) if model is not chosen]
    for model in others:
        model(torch.ones(1, 4)).sum().backward()
    return all(p.grad is not None and p.grad.dtype == p.dtype for m in (chosen, *others) for p in m.parameters())


@pytest.mark.parametrize("which", ["plain", "first", "second"])
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_modules_before_and_after_a_transform_may_be_cast_while_the_others_live(
    ranks: Ranks, stage: str, which: str
) -> None:
    """torch swaps parameters that are DTensors, and refused: the transform referred to them weakly."""
    assert ranks(2).run(_cast_beside, stage, which) == [True, True]


def _assigned(stage: str, use: Callable[[nn.Module], object], is_plain: bool) -> None:
    """Values of parameters and gradients that are assigned are those of a plain model; old values are kept and put back."""
    torch.manual_seed(0)
    plain, batch = nn.Linear(4, 7), torch.ones(1, 4)
    model = getattr(zf, stage)(plain, axis())
    pairs = [*zip(model.parameters(), plain.parameters(), strict=True)]
    optimizers = [torch.optim.SGD(module.parameters(), 0.5) for module in (model, plain)]
    for _ in range(2):
        kept = [(p.data, q.data) for p, q in pairs]
        for p, q in pairs:
            q.data = q.data * 2
            p.data = q.data.clone() if is_plain else p.data * 2
        use(model)
        for module in (model, plain):
            module(batch).square().sum().backward()
        for p, q in pairs:
            assert p.grad is not None and q.grad is not None
            q.grad.data = q.grad.data * 3
            p.grad.data = q.grad.data.clone() if is_plain else p.grad.data * 3
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert all(torch.equal(full(p), q) for p, q in pairs)
        for (p, q), (old_p, old_q) in zip(pairs, kept, strict=True):
            p.data, q.data = old_p, old_q
        assert torch.equal(model(batch), plain(batch))
        assert all(torch.equal(full(p), q) for p, q in pairs)


MOVES: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda model: None,
    "to": lambda model: model.to("cpu"),
    "float": lambda model: model.float(),
    "casts": lambda model: model.double().float(),
    "apply": lambda model: model._apply(lambda t: t.clone()),  # type: ignore[no-untyped-call]
    "state_dict": lambda model: model.load_state_dict(model.state_dict()),
    "forward": lambda model: model(torch.ones(1, 4)),
}


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("stage", ["replicate", "zero1", "zero2", "zero3"])
def test_what_is_assigned_to_data_is_kept_through_the_next_use(
    ranks: Ranks, stage: str, move: str, is_plain: bool
) -> None:
    """torch drops the values of parameters and gradients, silently."""
    ranks(2).run(_assigned, stage, MOVES[move], is_plain)


def _refused_data(folder: str) -> None:
    model, tier = zf.zero3(nn.Linear(4, 6), axis()), zf.nvme(folder)
    whole = full(model.weight)
    for value in (torch.ones(6, 3), torch.ones(6, 4).double(), torch.ones(6, 4, device="meta"), torch.ones(3, 4)):
        with pytest.raises(zf.PlacementError, match="of another shape, dtype, device or mesh"):
            model.weight.data = value
    assert torch.equal(full(model.weight), whole)
    with pytest.raises(zf.ShardedAccessError, match="memory that processes share"):
        model.share_memory()  # type: ignore[no-untyped-call]
    model = zf.offload(model, params=tier)
    with pytest.raises(zf.PlacementError, match=r"rests in a tier"):
        model.weight.data = model.weight.data * 2
    with torch.no_grad():
        model.weight.copy_(model.weight.data * 2)
    assert torch.equal(full(model.weight), 2 * whole)


def test_what_does_not_fit_is_refused_where_it_is_assigned_to_data(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_refused_data, str(tmp_path))
