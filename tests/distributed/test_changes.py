"""What a forward changes in its parameters is refused, in every stage and at every tier, when the forward ends."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import zero_fn as zf
from tests.axes.grids import batch, grid, parallelized
from tests.support.programs import STAGES
from tests.support.ranks import Ranks, axis
from tests.support.wholes import full
from tests.support.worlds import ALL, WIDTH, World, differences
from zero_fn.runtime.entry import units_of
from zero_fn.runtime.in_flight import Phase


def _tokens(seed: int) -> Tensor:
    return torch.randint(0, 11, (2, 3), generator=torch.Generator().manual_seed(seed))


class _Renormed(nn.Module):
    """`max_norm` renormalises, in place, the rows that are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH, max_norm=1.0)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


class _Clamped(nn.Module):
    """The weights of a critic are clamped where they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight.mul_(0.98).clamp_(-0.2, 0.2)
            self.last.weight.mul_(0.98)
        return self.last(torch.tanh(self.first(x)))


class _Codes(nn.Module):
    """The codes of a quantiser follow what they quantise, without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)
        self.codes = nn.Parameter(torch.randn(5, WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(x)
        nearest = self.codes[torch.cdist(y.detach().flatten(0, 1), self.codes).argmin(1)].view_as(y)
        if self.training:
            self.codes.mul_(0.9).add_(y.detach().mean((0, 1)), alpha=0.1)
        return y + (nearest - y).detach()


class _Inside(_Clamped):
    """Recomputes a part of itself."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([_Renormed(), _Clamped(), _Codes()])
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens
        for part in self.parts:
            x = part(x)
        return self.head(x)


def _shrink(module: nn.Module, _args: object) -> None:
    with torch.no_grad():
        module.weight.mul_(0.99)  # type: ignore[union-attr, operator]


class _Around(nn.Module):
    """Recomputes the whole of what changes its weights."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = _Clamped(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def _hooked() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.register_forward_pre_hook(_shrink)
    return layer


BUILDS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "max_norm": (_Renormed, "table.weight"),
    "clamps": (_Clamped, "first.weight"),
    "running means": (_Codes, "codes"),
    "a hook": (_hooked, "weight"),
    "a checkpoint inside": (lambda: _Inside(reentrant=False), "first.weight"),
    "a reentrant checkpoint inside": (lambda: _Inside(reentrant=True), "first.weight"),
    "a checkpoint around": (lambda: _Around(reentrant=False), "inner.first.weight"),
    "a reentrant checkpoint around": (lambda: _Around(reentrant=True), "inner.first.weight"),
}


def _refused(name: str, stage: str) -> None:
    """In training, in evaluation and in inference; and the module trains on once it is put right."""
    build, parameter = BUILDS[name]
    torch.manual_seed(0)
    model: Any = STAGES[stage](nn.Sequential(build(), nn.Linear(WIDTH, 2)), axis())
    before = {key: full(value) for key, value in model.named_parameters()}
    x = _tokens(0) if name == "max_norm" else torch.ones(2, 3, WIDTH, requires_grad=True)
    for mode in (nullcontext(), torch.no_grad(), torch.inference_mode()):
        with mode, pytest.raises(zf.PlacementError, match=f"changed '0.{parameter}' in place"):
            model(x)
    if stage == "zero3":
        assert all(torch.equal(before[key], full(value)) for key, value in model.named_parameters())
    model[1](torch.ones(2, WIDTH)).sum().backward()
    assert model[1].weight.grad is not None
    alone = STAGES[stage](build(), axis())
    with pytest.raises(zf.PlacementError, match=f"changed '{parameter}' in place"):
        alone(x)
    is_at_rest = [unit.in_flight.phase is Phase.AT_REST for unit in units_of(alone)]
    assert stage != "zero3" or all(is_at_rest), "kept for a backward that cannot come"


@pytest.mark.parametrize(
    ("name", "stage"), [(name, stage) for number, name in enumerate(BUILDS) for stage in ("zero3", ALL[number % 3])]
)
def test_what_a_forward_changes_in_place_is_refused(ranks: Ranks, name: str, stage: str) -> None:
    ranks(2).run(_refused, name, stage)


def _between_steps(world: World) -> None:
    """What to write instead."""
    model: Any = world.build(lambda: nn.Sequential(nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(3):
        world.step(model, optimizer, model(_tokens(seed)).square().mean())
        with torch.no_grad():
            model[1].weight.clamp_(-0.2, 0.2)
        with nullcontext() if world.is_replica else zf.unsharded(model, writeback=True), torch.no_grad():
            model[0].weight.renorm_(2, 0, 1.0)
        world.note_model(model)


def test_changes_between_steps_are_those_of_replicas(ranks: Ranks) -> None:
    for found in ranks(2).run(differences, _between_steps):
        assert found == []


def _accumulate(world: World) -> None:
    model = world.build(_Model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for seed in range(2):
        losses = []
        with world.accumulate(model) if world.is_replica else zf.accumulate(model, unshard=True):
            for microbatch in range(2):
                loss = model(_tokens(2 * seed + microbatch)).square().mean() / 2
                loss.backward()
                losses.append(loss)
        world.reduce(model)
        world.note("loss", losses[-1])
        world.note_model(model)
        optimizer.step()
        model.zero_grad()


def test_whole_parameters_of_a_block_may_be_changed(ranks: Ranks) -> None:
    for found in ranks(2).run(differences, _accumulate):
        assert found == []


def _require_refusal(model: Any, x: Tensor) -> None:
    with pytest.raises(zf.PlacementError, match="in place"):
        model(x)


def _over_two_axes() -> None:
    mesh = grid("outer", "inner")
    _require_refusal(zf.hybrid(_Model(), mesh), _tokens(0))
    _require_refusal(zf.shard_grads(zf.shard_params(_Model(), mesh["inner"]), mesh["outer"]), _tokens(0))


def test_changes_are_refused_over_two_axes(ranks: Ranks) -> None:
    ranks(4).run(_over_two_axes)


def _on_model_axes() -> None:
    mesh = grid("dp", "tp")
    for place in (zf.shard_grads, zf.shard_params):
        model: Any = place(parallelized(mesh["tp"]), mesh["dp"])
        for block in model.blocks:
            block.up.register_forward_pre_hook(_shrink)
        _require_refusal(model, batch(0, 0)[0])


def test_changes_are_refused_below_tensor_parallelism(ranks: Ranks) -> None:
    ranks(4).run(_on_model_axes)


def _in_a_tier(path: str) -> None:
    for stage in ("zero1", "zero3"):
        _require_refusal(zf.offload(STAGES[stage](_Model(), axis()), params=zf.nvme(path)), _tokens(0))


def test_changes_are_refused_in_another_tier(ranks: Ranks) -> None:
    with tempfile.TemporaryDirectory() as path:
        ranks(2).run(_in_a_tier, path)


def _compiled() -> None:
    for stage in ALL:
        model = STAGES[stage](_Model(), axis())
        model.compile(backend="aot_eager")
        _require_refusal(model, _tokens(0))


def test_changes_of_a_compiled_forward_are_refused(ranks: Ranks) -> None:
    ranks(2).run(_compiled)


class _ThroughData(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


def _through_data() -> None:
    torch.manual_seed(0)
    model: Any = zf.zero3(nn.Sequential(_ThroughData(WIDTH, WIDTH), nn.Linear(WIDTH, 2)), axis())
    before = full(model[0].weight)
    model(torch.ones(2, WIDTH)).sum().backward()
    assert torch.equal(full(model[0].weight), before)


def test_what_is_changed_through_data_is_dropped(ranks: Ranks) -> None:
    """A limit: it leaves no trace."""
    ranks(2).run(_through_data)


def _in_a_cast(block: str, infers: bool) -> None:
    model = zf.precision(zf.zero1(_Clamped(), axis()), compute=torch.bfloat16)
    before = {name: full(parameter) for name, parameter in model.named_parameters()}
    blocks: dict[str, Callable[..., Any]] = {
        "none": nullcontext,
        "accumulate": functools.partial(zf.accumulate, model, unshard=True),
        "unsharded": functools.partial(zf.unsharded, model, writeback=True),
    }
    try:
        with blocks[block](), torch.inference_mode(infers):
            model(torch.ones(2, WIDTH))
    finally:
        assert all(torch.equal(before[name], full(p)) for name, p in model.named_parameters())


@pytest.mark.parametrize(
    ("block", "infers"),
    [("none", False), ("none", True), ("accumulate", False), ("accumulate", True), ("unsharded", False)],
)
def test_a_change_of_a_copy_in_another_dtype_is_refused(ranks: Ranks, block: str, infers: bool) -> None:
    """Also where whole parameters are registered: it is not they that change."""
    with pytest.raises(zf.PlacementError, match=r"changed 'first.weight' in place"):
        ranks(2).run(_in_a_cast, block, infers)


# -- changed after it was saved -----------------------------------------------------------------------------------------


class _ChangedActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).exp()
        z = self.last(y)
        y.mul_(2)
        return z


def _backward_of_changed(stage: str | None) -> None:
    model = _ChangedActivation() if stage is None else STAGES[stage](_ChangedActivation(), axis())
    model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("stage", [None, *ALL])
def test_what_changed_after_it_was_saved_is_refused_as_without_a_transform(ranks: Ranks, stage: str | None) -> None:
    """Where hooks for saved tensors are pushed torch looks no longer, and gave another gradient."""
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        ranks(2).run(_backward_of_changed, stage)


class _ScaledHead(_ChangedActivation):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.last.weight.mul_(0.98)
        return self.last(self.first(x))


def _stand_in() -> None:
    """Tensors that stand in for some parameters are the user's: tensors of inference, which count no changes."""
    model: Any = zf.zero3(_ScaledHead(), axis())
    with zf.unsharded(model), torch.inference_mode():
        weight = torch.full((2, WIDTH), 0.5)
        functional_call(model, {"last.weight": weight}, (torch.ones(2, WIDTH),))
        assert torch.equal(weight, torch.full((2, WIDTH), 0.5).mul(0.98))


def test_tensors_that_stand_in_are_changed_themselves(ranks: Ranks) -> None:
    ranks(2).run(_stand_in)
