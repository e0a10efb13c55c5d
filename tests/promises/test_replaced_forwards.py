"""Forwards that users and profilers replace after a transform, around what stood there or in its place.

They had no entry any more: verbs found no transformed module, and another transform gave one that ran the old one.
"""

import copy
from functools import partial, update_wrapper, wraps
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import zero_fn as zf
from tests.support.models import Block
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.ranks import axis
from tests.support.worlds import WIDTH, Tower, as_replicas, noise


class Model(Tower):
    """Blocks that are units, a weight that is tied across them, and a head that computes its weight in a hook."""

    def __init__(self):
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight  # the unit of the root holds it: two entries in one module
        self.leave = nn.utils.spectral_norm(nn.Linear(7, 2))


calls = []


def time(model):
    """As profilers do: every forward is called by a function around it."""
    for name, module in model.named_modules():
        old = module.forward

        @wraps(old)
        def timed(*args, _old=old, _name=name, **kwargs):
            calls.append(_name)
            return _old(*args, **kwargs)

        module.forward = timed


def double(model):
    """As accelerate and `MethodType` patches do: other code for some modules, which does not call the old one."""

    def doubled(self, x):
        return F.linear(x, 2 * self.weight, self.bias)

    def negated(self, x):
        y = self.down(torch.tanh(self.up(x)))
        return x - self.gate * y

    model.enter.forward = MethodType(doubled, model.enter)
    model.blocks[0].up.forward = partial(doubled, model.blocks[0].up)
    model.blocks[1].forward = MethodType(negated, model.blocks[1])
    model.blocks[2].forward = update_wrapper(partial(negated, model.blocks[2]), model.blocks[2].forward)


def hook(model):
    """As accelerate does: the old one is an attribute, and a partial function that holds the module is in its place."""

    def hooked(module, *args, **kwargs):
        calls.append(type(module).__name__)
        return module._old_forward(*args, **kwargs)

    for module in model.modules():
        old = module.forward
        module._old_forward = old
        module.forward = update_wrapper(partial(hooked, module), old)


WAYS = {"timed": time, "doubled": double, "hooked": hook}


def _train(world, model, *, steps=2, seed=0):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        calls.clear()
        world.train(model, optimizer, seed + step)
        world.note("calls", torch.tensor(float(len(calls))))


@pytest.mark.parametrize("way", WAYS)
@as_replicas()
def test_a_forward_replaced_after_the_transform_gathers(world, way):
    """After steps, called alone, in a model that is transformed again, in blocks that accumulate, and after an edit. The
    model of before goes on."""
    model = world.build(Model)
    _train(world, model)
    before = [] if world.is_replica else [str(zf.plan(model)), str(zf.describe(model))]
    WAYS[way](model)
    if not world.is_replica:
        assert [str(zf.plan(model)), str(zf.describe(model))] == before
    _train(world, model, seed=10)
    model.blocks[0](noise(4, 7, seed=20)).sum().backward()  # called alone
    world.reduce(model)
    world.note_model(model)
    model.zero_grad()
    if not world.is_replica:
        first, model = model, zf.shard_params(zf.shard_grads(model, axis()), axis())
        first(noise(4, WIDTH, seed=30)).sum().backward()  # another model
    _train(world, model)
    for unshard in (False, True):
        with world.accumulate(model, unshard=unshard):
            for microbatch in range(2):
                model(noise(4, WIDTH, seed=40 + microbatch)).square().mean().backward()
        world.reduce(model)
        world.note_model(model)
        model.zero_grad()
    with world.unsharded(model.blocks[1]), torch.no_grad():
        model.blocks[1].up.weight.mul_(torch.arange(17.0)[:, None])
    _train(world, model)


@as_replicas()
def test_forwards_may_be_replaced_and_put_back_in_each_step(world):
    """In the end what stood there is put back, or nothing is."""
    model = world.build(Model)
    before = {name: module.forward for name, module in model.named_modules()}
    for step in range(3):
        double(model)
        _train(world, model, steps=1, seed=step)
        for name, module in model.named_modules():
            if step == 1 and name:
                vars(module).pop("forward", None)
            else:
                module.forward = before[name]
        _train(world, model, steps=1, seed=step + 10)


@pytest.mark.parametrize(("way", "use_reentrant"), [("hooked", False), ("timed", True)])
@as_replicas()
def test_a_replaced_forward_is_computed_again(world, way, use_reentrant):
    model = world.build(Model)
    WAYS[way](model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(noise(4, WIDTH, seed=9))  # modules that are a part of a unit are known to be replaced from then on
    for step in range(2):
        x = model.enter(noise(4, WIDTH, seed=step))
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        world.step(model, optimizer, x.square().mean() + model.leave(x).mean())


@as_replicas()
def test_a_replaced_forward_stays_in_a_copy(world):
    """Bound methods are copied; a partial function holds the original."""
    model = world.build(Model)
    double(model)
    for partially in (model.blocks[0].up, model.blocks[2]):
        del partially.forward
    twin = copy.deepcopy(model)
    _train(world, twin)
    _train(world, model)


class Switching(nn.Linear):
    """Takes another forward when it is first called."""

    def forward(self, x):
        self.forward = self._again
        return super().forward(x)

    def _again(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("units", [Switching, nn.Sequential])
@as_replicas()
def test_a_forward_that_a_unit_replaces_stays(world, units):
    """The one that was put there inside a unit was overwritten when the unit ended."""
    model = world.build(lambda: nn.Sequential(Switching(WIDTH, 7), nn.Tanh(), Switching(7, 2)), units=units)
    _train(world, model, steps=4)
    _train(world, copy.deepcopy(model))


@as_replicas()
def test_a_replaced_forward_of_the_root_stays(world):
    """Its entry does not run before somebody has seen that it was replaced."""

    def other(self, x):
        return 3 * self.leave(self.enter(x)) + self.enter.weight.sum()

    model = world.build(Model, units=Block)
    model.forward = MethodType(other, model)
    if not world.is_replica:
        zf.transforms.refresh(model)
    _train(world, model)


def _fused(self, x):
    """As trl's `add_fused_lm_head`: it never calls the old forward, nor the head, and takes the whole weight by itself."""
    x = self.blocks[0](self.enter(x))
    weight = self.leave.weight
    if isinstance(weight, DTensor):
        weight = weight.full_tensor()
    return x @ weight.t()


@pytest.mark.parametrize("runs_before", [False, True])
@pytest.mark.parametrize("units", [Block, [], [Block, nn.Linear]])
@as_replicas()
def test_a_replaced_forward_that_takes_the_whole_weight_has_the_gradients_of_all_ranks(world, units, runs_before):
    """The gradient of the head was that of one rank, silently."""
    model = world.build(Tower, units=units)
    if runs_before:
        _train(world, model)
    model.forward = MethodType(_fused, model)
    _train(world, model, seed=10)


@pytest.mark.parametrize("stage", ["replicate", "zero1", "zero3"])
@on_ranks(2)
def test_a_weight_that_a_forward_makes_whole_by_hand_is_refused(stage):
    """Nothing at all is entered past the call. The gradient was that of one rank, silently."""
    model = STAGES[stage](Tower(), axis(), units=Block)
    model.forward = MethodType(_fused, model)
    x = noise(4, WIDTH, seed=0)
    for _ in range(2):
        with pytest.raises(zf.errors.ShardedAccessError):
            model.forward(x)
    with torch.no_grad():
        model.forward(x)


def _in_another_dtype(way, *, replaced_first, unshard):
    torch.manual_seed(0)
    model = Model()
    model.leave = nn.Linear(7, 2)  # the buffers of a norm would keep their dtype
    if replaced_first:
        WAYS[way](model)
    model = zf.precision(zf.shard_params(model, axis()))
    if not replaced_first:
        WAYS[way](model)
    with zf.accumulate(model, unshard=unshard):
        output = model(noise(4, WIDTH, seed=0))
        output.square().mean().backward()
    return [output.detach(), *(p.grad.full_tensor() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(("way", "unshard"), [("doubled", False), ("hooked", True)])
@on_ranks(2)
def test_a_replaced_forward_computes_in_the_same_dtype(way, unshard):
    one, other = (_in_another_dtype(way, replaced_first=first, unshard=unshard) for first in (False, True))
    assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(one, other, strict=True))
