"""What a forward changes in its parameters stays changed, in every stage and at every tier, or is refused."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import zero_fn as zf
from tests.composition.grids import batch, differing, grid, loss_of, parallelized, snapshot
from tests.distributed.training import STAGES
from tests.ranks import Ranks, axis
from tests.versions import IS_2_11
from tests.wholes import full
from tests.worlds import ALL, WIDTH, Trial, World, differences


def _tokens(seed: int) -> Tensor:
    """The same on every rank: replicas that look up different rows would renormalise different rows."""
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
    """Recomputes a part of itself: its parameters are changed again in backward, inside their unit."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class _Model(nn.Module):
    def __init__(self, *, reentrant: bool | None = None) -> None:
        super().__init__()
        self.parts = nn.ModuleList([_Renormed(), _Clamped(), _Codes()])
        if reentrant is not None:
            self.parts.append(_Inside(reentrant=reentrant))
        self.head = nn.Linear(WIDTH, 4)
        self.head.register_forward_pre_hook(_shrink)
        self.reentrant = reentrant
        self.fails = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.parts[0](tokens)
        for part in self.parts[1:]:
            x = part(x) if self.reentrant is None else checkpoint(part, x, use_reentrant=self.reentrant)
        if self.fails:
            raise ValueError("as asked")
        return self.head(x)


def _shrink(module: nn.Module, _args: object) -> None:
    with torch.no_grad():
        module.weight.mul_(0.99)  # type: ignore[union-attr, operator]


def _train(world: World, **options: Any) -> None:
    model = world.build(_Model, **options)
    _steps(world, model)


def _train_recomputed(world: World, *, reentrant: bool) -> None:
    _steps(world, world.build(lambda: _Model(reentrant=reentrant)))


def _steps(world: World, model: nn.Module) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for seed in range(3):
        world.step(model, optimizer, model(_tokens(seed)).square().mean())


def _evaluate(world: World) -> None:
    """A forward in evaluation changes parameters too, and so does one that raises at its end."""
    model: Any = world.build(_Model)
    with torch.no_grad():
        world.note("evaluated", model(_tokens(7)))
    with torch.inference_mode():
        model(_tokens(8))
    world.note_model(model)
    model.fails = True
    with pytest.raises(ValueError, match="as asked"):
        model(_tokens(9))
    world.note_model(model)
    model.fails = False
    _steps(world, model)


def _accumulate(world: World, *, unshard: bool) -> None:
    model = world.build(_Model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for seed in range(2):
        losses = []
        block = world.accumulate(model) if world.is_replica else zf.accumulate(model, unshard=unshard)
        with block:
            for microbatch in range(2):
                loss = model(_tokens(2 * seed + microbatch)).square().mean() / 2
                loss.backward()
                losses.append(loss)
        world.reduce(model)
        world.note("loss", losses[-1])
        world.note_model(model)
        optimizer.step()
        model.zero_grad()


TRIALS: dict[str, Trial] = {
    "steps": _train,
    "gathered until backward": lambda world: _train(
        world, **({} if world.stage != "zero3" else {"reshard_after": "backward"})
    ),
    "checkpoints": lambda world: _train_recomputed(world, reentrant=False),
    "reentrant checkpoints": lambda world: _train_recomputed(world, reentrant=True),
    "evaluation and a failure": _evaluate,
    "accumulated": lambda world: _accumulate(world, unshard=False),
    "accumulated whole": lambda world: _accumulate(world, unshard=True),
}


@pytest.mark.parametrize("trial", TRIALS)
def test_what_a_forward_changes_in_place_stays_changed(ranks: Ranks, trial: str) -> None:
    for found in ranks(2).run(differences, TRIALS[trial]):
        assert found == []


def _as_it_is(module: nn.Module) -> nn.Module:
    return module


def _with(
    transform: Callable[[nn.Module], nn.Module], plain: Callable[[nn.Module], nn.Module] = _as_it_is
) -> list[str]:
    """Names of parameters that differ from those of a plain module which saw the same batch as each rank."""
    results = []
    for place in (plain, transform):
        torch.manual_seed(0)
        model = place(_Model())
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for seed in range(3):
            model(_tokens(seed)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append({name: full(parameter) for name, parameter in model.named_parameters()})
    return [name for name, value in results[0].items() if not torch.equal(value, results[1][name])]


def _over_two_axes() -> list[str]:
    mesh = grid("outer", "inner")
    found = _with(lambda model: zf.hybrid(model, mesh))
    found += _with(lambda model: zf.shard_grads(zf.shard_params(model, mesh["inner"]), mesh["outer"]))
    return found + _with(lambda model: zf.shard_params(zf.shard_params(model, mesh["inner"]), mesh["outer"]))


def test_changes_stay_over_two_axes(ranks: Ranks) -> None:
    for found in ranks(4).run(_over_two_axes):
        assert found == []


def _on_model_axes() -> list[str]:
    """Each rank of an axis of the mesh sees the same batch: the model that is only tensor parallel is the oracle."""
    mesh = grid("dp", "tp")
    results = []
    for place in (
        lambda module: module,
        lambda module: zf.shard_grads(module, mesh["dp"]),
        lambda module: zf.shard_params(module, mesh["dp"]),
    ):
        model: Any = place(parallelized(mesh["tp"]))
        for block in model.blocks:
            block.up.register_forward_pre_hook(_shrink)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(3):
            with torch.inference_mode():
                model(batch(seed, 0)[0])
            loss_of(model, seed, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(snapshot(model))
    return [name for other in results[1:] for name in differing(results[0], other)]


def test_changes_stay_below_tensor_parallelism(ranks: Ranks) -> None:
    for found in ranks(4).run(_on_model_axes):
        assert found == []


def _in_a_tier(path: str) -> list[str]:
    found = []
    for stage in ("zero1", "zero3"):
        torch.manual_seed(0)
        plain, offloaded = _Model(), zf.offload(STAGES[stage](_Model(), axis()), params=zf.nvme(path))
        offloaded.load_state_dict(plain.state_dict())
        for seed in range(2):
            assert torch.equal(plain(_tokens(seed)), offloaded(_tokens(seed)))
        whole = {name: full(parameter) for name, parameter in offloaded.named_parameters()}
        found += [name for name, value in plain.named_parameters() if not torch.equal(value, whole[name])]
    return found


def test_changes_reach_another_tier(ranks: Ranks) -> None:
    with tempfile.TemporaryDirectory() as path:
        for found in ranks(2).run(_in_a_tier, path):
            assert found == []


def _compile(stage: str | None, model: nn.Module) -> nn.Module:
    placed = STAGES[stage](model, axis()) if stage is not None else model
    placed.compile(backend="aot_eager")
    return placed


def _compiled() -> list[str]:
    """Beside a plain module, which is compiled too where the compiler rounds in its own way."""
    plain = functools.partial(_compile, None) if IS_2_11 else _as_it_is
    return [f"{stage}: {name}" for stage in ALL for name in _with(functools.partial(_compile, stage), plain)]


class _ThroughData(nn.Linear):
    """Changes its weight through `.data`: `how` says in which way."""

    how = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "in place":
            self.weight.data.clamp_(-0.1, 0.1)
        elif self.how == "assigned":
            self.weight.data = self.weight.data.clamp(-0.1, 0.1)
        return super().forward(x)


def _through_data(stage: str, how: str) -> float:
    torch.manual_seed(0)
    model: Any = STAGES[stage](nn.Sequential(_ThroughData(WIDTH, WIDTH), nn.Linear(WIDTH, 2)), axis())
    model[0].how = how
    try:
        model(torch.ones(2, WIDTH))
    except zf.PlacementError:
        model[0].how = ""
        model(torch.ones(2, WIDTH)).sum().backward()  # nothing was lost but the change
        raise
    return full(model[0].weight).abs().max().item()


@pytest.mark.parametrize("how", ["in place", "assigned"])
@pytest.mark.parametrize("stage", ALL)
def test_what_would_be_lost_is_refused(ranks: Ranks, stage: str, how: str) -> None:
    """Where the parameter rests whole, `.data` is the memory at rest, and a change of it stays."""
    if how == "in place" and stage != "zero3":
        assert ranks(2).run(_through_data, stage, how) == [pytest.approx(0.1)] * 2
        return
    with pytest.raises(zf.PlacementError, match=r"changed '0\.weight' through"):
        ranks(2).run(_through_data, stage, how)


def _in_a_cast(unshard: bool, infers: bool) -> None:
    model = zf.precision(zf.zero1(_Clamped(), axis()), compute=torch.bfloat16)
    before = {name: full(parameter) for name, parameter in model.named_parameters()}
    try:
        with zf.accumulate(model, unshard=True) if unshard else nullcontext(), torch.inference_mode(infers):
            model(torch.ones(2, WIDTH))
    finally:
        assert all(torch.equal(before[name], full(p)) for name, p in model.named_parameters())


@pytest.mark.parametrize("infers", [False, True])
@pytest.mark.parametrize("unshard", [False, True])
def test_a_change_of_a_copy_in_another_dtype_is_refused(ranks: Ranks, unshard: bool, infers: bool) -> None:
    with pytest.raises(zf.PlacementError, match=r"changed 'first.weight' in place, in its copy in torch.bfloat16"):
        ranks(2).run(_in_a_cast, unshard, infers)


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


class _ChangedWeight(_ChangedActivation):
    def forward(self, x: Tensor) -> Tensor:
        z = self.last(torch.tanh(self.first(x)))
        with torch.no_grad():
            self.last.weight.mul_(1.5)
        return z


def _backward_of(build: Callable[[], nn.Module], stage: str | None, forwards: int) -> None:
    model = build() if stage is None else STAGES[stage](build(), axis())
    outputs = [model(torch.ones(2, WIDTH, requires_grad=True)) for _ in range(forwards)]
    outputs[0].sum().backward()


@pytest.mark.parametrize("stage", [None, *ALL])
@pytest.mark.parametrize("build", [_ChangedActivation, _ChangedWeight])
def test_what_changed_after_it_was_saved_is_refused_as_without_a_transform(
    ranks: Ranks, build: type[nn.Module], stage: str | None
) -> None:
    """Where hooks for saved tensors are pushed torch looks no longer, and gave another gradient."""
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        ranks(2).run(_backward_of, build, stage, 1)


@pytest.mark.parametrize("stage", [None, "zero3"])
def test_what_a_later_forward_changes_is_refused_by_the_backward_of_an_earlier_one(
    ranks: Ranks, stage: str | None
) -> None:
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        ranks(2).run(_backward_of, _Clamped, stage, 2)


def _swapped() -> None:
    """Tensors that stand in for some parameters are the user's: tensors of inference, which count no changes."""
    torch.manual_seed(0)
    model: Any = zf.zero3(_Clamped(), axis())
    with torch.inference_mode():
        weight = torch.full((WIDTH, 7), 0.5)
        functional_call(model, {"last.weight": weight}, (torch.ones(2, WIDTH),))
        assert torch.equal(weight, torch.full((WIDTH, 7), 0.5).mul(0.98))
    assert full(model.first.weight).abs().max() <= 0.2


def test_tensors_that_stand_in_are_changed_themselves(ranks: Ranks) -> None:
    ranks(2).run(_swapped)


def _of_one_rank() -> None:
    """A rank whose forward changes nothing goes on beside one whose does."""
    model: Any = zf.zero3(_Clamped(), axis())
    with torch.no_grad():
        shard = model.first.weight.to_local()
        shard.fill_(0.1 if dist.get_rank() else 0.3)
    F.mse_loss(model(torch.ones(2, WIDTH)), torch.zeros(2, WIDTH)).backward()
    assert full(model.first.weight).abs().max() <= 0.2


def test_a_shard_in_which_nothing_changes_is_written_too(ranks: Ranks) -> None:
    ranks(2).run(_of_one_rank)


def test_changes_of_a_compiled_forward_stay(ranks: Ranks) -> None:
    for found in ranks(2).run(_compiled):
        assert found == []
