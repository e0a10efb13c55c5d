"""What a forward changes: gathered weights are refused, in every stage and at every tier; what rests elsewhere, casts and
parametrizations work as in replicas."""

import copy
from collections import OrderedDict
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import zero_fn as zf
from tests.axes.grids import batch, grid, parallelized
from tests.support.messages import refusals
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.ranks import axis
from tests.support.wholes import fulls
from tests.support.worlds import WIDTH, as_replicas, differences, noise
from zero_fn.runtime.registry import units_of


class Clamped(nn.Sequential):
    """The weights of a critic are clamped where they are used."""

    def __init__(self):
        layers = {"first": nn.Linear(WIDTH, 7), "tanh": nn.Tanh(), "last": nn.Linear(7, WIDTH)}
        super().__init__(OrderedDict(layers))

    @torch.no_grad()
    def clamp(self):
        self.first.weight.mul_(0.98).clamp_(-0.2, 0.2)
        self.last.weight.mul_(0.98)

    def forward(self, x):
        self.clamp()
        return super().forward(x)


class Recomputing(nn.Module):
    """Computes a part of itself, or the whole of another module, again."""

    def __init__(self, *, around, reentrant):
        super().__init__()
        self.inner, self.around, self.reentrant = Clamped(), around, reentrant

    def forward(self, x):
        function = self.inner if self.around else self.inner.forward
        return checkpoint(function, x, use_reentrant=self.reentrant)


def _shrink(module, _args):
    with torch.no_grad():
        module.weight.mul_(0.99)


def _hooked():
    layer = nn.Linear(WIDTH, WIDTH)
    layer.register_forward_pre_hook(_shrink)
    return layer


class Plus(nn.Module):
    def __init__(self, delta):
        super().__init__()
        self.delta = delta

    def forward(self, weight):
        return weight * 1.5 + self.delta


class Parametrized(nn.Linear):
    def forward(self, x):
        parametrize.register_parametrization(self, "weight", Plus(torch.ones(1)))
        try:
            return super().forward(x)
        finally:
            parametrize.remove_parametrizations(self, "weight")


CHANGES = {
    "max_norm": (lambda: nn.Embedding(11, WIDTH, max_norm=1.0), "weight"),
    "clamps": (Clamped, "first.weight"),
    "frozen": (lambda: Clamped().requires_grad_(False), "first.weight"),
    "a hook": (_hooked, "weight"),
    "a parametrization": (partial(Parametrized, WIDTH, WIDTH), "weight"),
    "a checkpoint inside": (partial(Recomputing, around=False, reentrant=False), "inner.first.weight"),
    "a reentrant checkpoint around": (partial(Recomputing, around=True, reentrant=True), "inner.first.weight"),
}


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
@pytest.mark.parametrize("name", CHANGES)
@on_ranks(2)
def test_what_a_forward_changes_in_place_is_refused(name, stage):
    """In training, in evaluation and in inference; and the module trains on once it is put right."""
    build, parameter = CHANGES[name]
    model = STAGES[stage](nn.Sequential(build(), nn.Linear(WIDTH, 2)), axis())
    before = fulls(model.parameters())
    x = torch.arange(6).view(2, 3) if name == "max_norm" else torch.ones(2, 3, WIDTH, requires_grad=True)
    for mode in (nullcontext(), torch.no_grad(), torch.inference_mode()):
        with mode, pytest.raises(zf.errors.PlacementError, match=f"changed '0.{parameter}' in place"):
            model(x)
    assert stage != "zero3" or all(map(torch.equal, before, fulls(model.parameters())))
    model[1](torch.ones(2, WIDTH)).sum().backward()
    assert model[1].weight.grad is not None
    alone = STAGES[stage](build(), axis())
    with pytest.raises(zf.errors.PlacementError, match=f"changed '{parameter}' in place"):
        alone(x)
    is_at_rest = [unit.gather.is_at_rest for unit in units_of(alone)]
    assert stage != "zero3" or all(is_at_rest), "kept for a backward that cannot come"


test_refusals = refusals(
    {"forward_changes_a_weight": lambda one: zf.shard_params(Clamped(), one)(torch.ones(2, WIDTH))}
)


class Several(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(11, WIDTH, max_norm=1.0), Clamped())


def _tokens(seed):
    return torch.randint(0, 11, (2, 3), generator=torch.Generator().manual_seed(seed))


@on_ranks(4, deadline_s=120)
def test_changes_are_refused_on_all_axes_and_tiers(folder):
    """Over two axes, below tensor parallelism, on a disk, and compiled."""
    mesh = grid("outer", "inner")
    models = [
        zf.hybrid(Several(), mesh),
        zf.shard_grads(zf.shard_params(Several(), mesh["inner"]), mesh["outer"]),
    ]
    for stage in ("zero1", "zero3"):
        models.append(zf.offload(STAGES[stage](Several(), axis()), params=zf.nvme(folder)))
        models.append(STAGES[stage](Several(), axis()))
        models[-1].compile(backend="aot_eager")
    for model in models:
        with pytest.raises(zf.errors.PlacementError):
            model(_tokens(0))
    mesh = grid("dp", "tp")
    for place in (zf.shard_grads, zf.shard_params):
        model = place(parallelized(mesh["tp"]), mesh["dp"])
        model.blocks[1].up.register_forward_pre_hook(_shrink)
        with pytest.raises(zf.errors.PlacementError):
            model(batch(0, 0)[0])


@pytest.mark.parametrize("infers", [False, True])
@on_ranks(2)
def test_a_change_of_a_copy_in_another_dtype_is_refused(infers):
    """Also where whole parameters are registered: it is not they that change."""
    model = zf.precision(zf.shard_optimizer(Clamped(), axis()), compute=torch.bfloat16)
    before = fulls(model.parameters())
    for block in (nullcontext(), zf.accumulate(model, unshard=True), zf.unsharded(model, writeback=True)):
        with pytest.raises(zf.errors.PlacementError), block, torch.inference_mode(infers):
            model(torch.ones(2, WIDTH))
        assert all(map(torch.equal, before, fulls(model.parameters())))


# -- what to write instead: between steps, `test_edits.py` ------------------------------------------------------------


@as_replicas()
def test_whole_parameters_in_a_block_may_be_changed(world):
    model = world.build(Several)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(2):
        with world.accumulate(model, unshard=True):
            for microbatch in range(2):
                (model(_tokens(2 * seed + microbatch)).square().mean() / 2).backward()
        world.reduce(model)
        world.note_model(model)
        optimizer.step()
        model.zero_grad()


AVERAGES = {
    "in place": lambda averages, values: [a.lerp_(v, 0.25) for a, v in zip(averages, values, strict=True)],
    "through .data": lambda averages, values: [
        a.data.mul_(0.75).add_(v.data, alpha=0.25) for a, v in zip(averages, values, strict=True)
    ],
    "to .data": lambda averages, values: [
        setattr(a, "data", a.data * 0.75 + v.data * 0.25) for a, v in zip(averages, values, strict=True)
    ],
    "in lists": lambda averages, values: torch._foreach_lerp_(averages, values, 0.25),
}
"""How a forward moves averages towards values."""


class MomentumEncoder(nn.Module):
    """Moves the average of an encoder at rest in its forward, and uses it, as MoCo, ALBEF and BLIP do."""

    def __init__(self, how):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH))
        self.average, self.how = copy.deepcopy(self.encoder).requires_grad_(False), how
        self.moves = (False, True, False, True)

    def forward(self, x):
        output = self.encoder(x)
        with torch.no_grad():
            for moves in self.moves:
                if moves:
                    AVERAGES[self.how]([*self.average.parameters()], [p for _, p in self.encoder.named_parameters()])
                x = self.average(x)
        return output - x


def _averages(world, how, units):
    model = world.build(lambda: MomentumEncoder(how), units=units)
    optimizer = torch.optim.AdamW(model.encoder.parameters(), lr=1e-1)
    for step in range(4):
        model.moves = model.moves[1:] + model.moves[:1]  # the order of a recorded schedule changes
        world.train(model, optimizer, step)
    with world.accumulate(model):
        for step in range(2):
            model(noise(4, WIDTH, seed=step)).square().mean().backward()
    world.reduce(model)
    world.note_model(model)


@pytest.mark.parametrize("how", AVERAGES)
@pytest.mark.parametrize("units", [None, ["encoder", "average"]])
@as_replicas()
def test_averages_that_move_in_a_forward_are_those_of_replicas(world, how, units):
    """It went on with what was gathered before the change, in silence."""
    _averages(world, how, units)


@pytest.mark.parametrize("how", AVERAGES)
def test_averages_that_move_while_they_are_gathered_are_those_of_replicas(simulated, how):
    """At stages 1 and 2 the all-gather ended with a copy of this rank's old part over the new one, in silence."""
    trial = partial(_averages, how=how, units=None)
    assert simulated(2, transport="native").run(differences, trial, stages=["zero1", "zero2"]) == [[], []]


class Router(nn.Module):
    """Casts modules in its forward, as routers of transformers do (Switch, NLLB-MoE)."""

    def __init__(self):
        super().__init__()
        self.classifier, self.memory = nn.Linear(WIDTH, 5), nn.LSTM(5, WIDTH)

    def forward(self, x):
        self.classifier = self.classifier.to(torch.float32)
        self.memory.float().to("cpu")
        output = self.memory(self.classifier(x))[0]
        return x + output


class Adapted(nn.Module):
    """Adds factors to weights by parametrizations for one call, as PEFT does (`target_parameters`): of a frozen and a
    trained weight, and two of one."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.trained = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
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


class Around(nn.Sequential):
    def forward(self, x):
        return self[1](checkpoint(self[0], x, use_reentrant=False))


@pytest.mark.parametrize("is_around", [False, True])
@pytest.mark.parametrize("kind", [Router, Adapted])
@as_replicas()
def test_casts_and_parametrizations_in_a_forward_are_those_of_replicas(world, kind, is_around):
    """torch swapped resting parameters under the forward, or found the gathered one in the way."""
    model = world.build(lambda: Around(kind(), nn.Linear(WIDTH, WIDTH)) if is_around else kind())
    names = [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(3):
        world.train(model, optimizer, step)
        with torch.no_grad():
            world.note("output", model(noise(4, WIDTH, seed=9)))
    with world.accumulate(model):
        model(noise(4, WIDTH, seed=7)).square().mean().backward()
    world.reduce(model)
    assert [name for name, _ in model.named_parameters()] == names
    world.note_model(model)


class Wide(nn.Sequential):
    def forward(self, x):
        assert self[0].weight.dtype == torch.bfloat16
        return self[0].float()(x.float())


@on_ranks(2)
def test_a_router_sees_its_rounded_weight_in_the_dtype_that_it_asks_for():
    """Under `precision`. The resting one is not cast."""
    plain = Wide(nn.Linear(WIDTH, 5))
    model = zf.precision(zf.shard_params(plain, axis()))
    x, (weight, bias) = noise(3, WIDTH, seed=1).bfloat16(), plain.parameters()
    assert torch.equal(model(x), F.linear(x.float(), weight.bfloat16().float(), bias.bfloat16().float()))
    model(x).sum().backward()
    assert all(p.dtype == torch.float32 and p.grad is not None for p in model.parameters())


@on_ranks(2)
def test_tensors_that_stand_in_may_be_changed():
    """They are the user's: tensors of inference, which count no changes."""
    model = zf.shard_params(Clamped(), axis())
    with zf.unsharded(model), torch.inference_mode():
        weight = torch.full((WIDTH, 7), 0.5)
        whole = {name: p.detach().clone() for name, p in model.named_parameters()}
        functional_call(model, {**whole, "last.weight": weight}, (torch.ones(2, WIDTH),))
        assert torch.equal(weight, torch.full((WIDTH, 7), 0.5).mul(0.98))


class ThroughData(nn.Linear):
    def forward(self, x):
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


@on_ranks(2)
def test_what_changes_through_data_is_dropped_with_the_whole():
    """A limit (docs/limits.md)."""
    model = zf.shard_params(nn.Sequential(ThroughData(WIDTH, WIDTH), nn.Linear(WIDTH, 2)), axis())
    before = fulls(model.parameters())
    model(torch.ones(2, WIDTH)).sum().backward()
    assert all(map(torch.equal, before, fulls(model.parameters())))


class ChangedActivation(nn.Sequential):
    def forward(self, x):
        y = self[0](x).exp()
        z = self[1](y)
        y.mul_(2)
        return z


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
@on_ranks(2)
def test_what_changed_after_it_was_saved_is_refused_as_without_a_transform(stage):
    """Where hooks for saved tensors are pushed torch looks no longer, and gave another gradient."""
    plain = ChangedActivation(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))
    for model in (plain, STAGES[stage](plain, axis())):
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
