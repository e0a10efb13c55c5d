"""Gradients of several microbatches: reduced once in a block, or each time; what waits, and what an exception leaves."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import zero_fn as zf
from tests.promises.tables import each_as_replicas
from tests.support.models import Language, Stack
from tests.support.on_ranks import on_ranks
from tests.support.programs import loss_of
from tests.support.ranks import axis
from tests.support.wholes import full, fulls
from tests.support.worlds import World, as_replicas, noise, one_backward


def _blocks_and_plain_backwards(model, run, number):
    one_backward(model, run, 10 * number)
    with run.accumulate():
        one_backward(model, run, 10 * number + 1)
        with run.accumulate():
            one_backward(model, run, 10 * number + 2)
    if number % 2:
        with run.accumulate():
            one_backward(model, run, 10 * number + 3)
    one_backward(model, run, 10 * number + 4)


def _frozen_in_a_block(model, run, number):
    """The reduction had no room for it: an assertion failed."""
    model.requires_grad_(True)
    with run.accumulate():
        one_backward(model, run, 10 * number)
        model.layers[number].first.requires_grad_(False)
        model.enter.bias.requires_grad_(False)
        one_backward(model, run, 10 * number + 1)


def _drops_what_waits(set_to_none, by_model):
    def program(model, run, number):
        one_backward(model, run, 1)
        with run.accumulate():
            one_backward(model, run, 10 * number + 2)
            run.zero_grad(set_to_none=set_to_none, by_model=by_model)
            if number != 1:  # in step 1 nothing comes after
                one_backward(model, run, 10 * number + 3)
                one_backward(model, run, 10 * number + 4)

    return program


PROGRAMS = {
    "blocks and plain backwards, no zero_grad": (Stack, _blocks_and_plain_backwards, {"zeroes": False}),
    "frozen in a block": (Stack, _frozen_in_a_block),
    "zero_grad drops": (Stack, _drops_what_waits(set_to_none=True, by_model=False), {"steps": 3}),
    "zero_grad to zeros of the model": (Stack, _drops_what_waits(set_to_none=False, by_model=True), {"steps": 3}),
}
"""Other units, more microbatches, and exceptions between them, are drawn by the laws; the next forward before a backward:
`test_calls.py`."""

test_microbatches_add_up_as_in_replicas = each_as_replicas(PROGRAMS)


class Fork(Stack):
    """Odd ranks leave out the middle layer."""

    def forward(self, x):
        outputs = [layer(self.enter(x)) for layer in self.layers]
        return self.leave(outputs[0] + outputs[1 + axis().get_local_rank() % 2])


@pytest.mark.parametrize("set_to_none", [True, False])
@as_replicas(Fork)
def test_zero_grad_drops_gradients_that_wait_on_some_ranks_only(model, run, number, set_to_none):
    with run.accumulate():
        one_backward(model, run, 10 * number + 2)
        run.zero_grad(set_to_none=set_to_none)
        if number:
            one_backward(model, run, 10 * number + 3)


@as_replicas()
def test_some_parts_may_accumulate(world):
    """The others are reduced in each backward."""
    model = world.build(Stack)
    parts = model.layers[0], model.layers[2]
    with world.accumulate(*parts):
        for microbatch in range(2):
            model(noise(4, 6, seed=microbatch)).mean().backward()
    world.reduce(*parts)
    world.note_model(*parts)


def _break(_):
    raise ZeroDivisionError


@pytest.mark.parametrize("breaks", [0, 1, 2])
@pytest.mark.parametrize("unshard", [False, True])
@as_replicas(stages=["replicate", "zero3"])
def test_a_block_of_two_models_ends_for_both(world, unshard, breaks):
    """Also if a hook of one raises when it ends: then neither is in a block any more."""
    models = [world.build(lambda: nn.Linear(6, 6), seed=seed) for seed in range(2)]
    if breaks and not world.is_replica:
        hook = models[breaks - 1].weight.register_post_accumulate_grad_hook(_break)
        with pytest.raises(ZeroDivisionError), zf.accumulate(*models, unshard=unshard):
            models[1](models[0](noise(3, 6, seed=2))).sum().backward()
        hook.remove()
        for model in models:
            model.zero_grad()
    with nullcontext() if breaks else world.accumulate(*models, unshard=unshard):
        for seed in range(1 if breaks else 2):
            models[1](models[0](noise(3, 6, seed=seed))).sum().backward()
    world.reduce(*models)
    world.note_model(*models)


@pytest.mark.parametrize("stage", ["replicate", "zero1", "zero3"])
@on_ranks(2)
def test_pending_gradients_cannot_be_stepped_or_read(stage):
    model = World(stage).build(Stack)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = fulls(model.parameters())
    weight = model.enter.weight
    model(noise(3, 6, seed=1)).square().mean().backward()
    earlier = full(weight.grad)
    with zf.accumulate(model):
        model(noise(3, 6, seed=2)).square().mean().backward()
        assert (weight.grad.shape, weight.grad.dtype) == (weight.shape, weight.dtype)
        reads = [
            optimizer.step,
            lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            lambda: weight.grad.to_local(),
            lambda: weight.grad.mul_(2),
            lambda: torch._foreach_norm([weight.detach(), weight.grad]),
            lambda: weight + weight.grad,
            lambda: torch.mul(torch.ones(6), 2, out=weight.grad),
        ]
        for read in reads:
            with pytest.raises(zf.errors.StateError, match=r"enter\.weight"):
                read()
        optimizer.zero_grad()
        optimizer.step()  # nothing waits: nothing happens, as in replicas
    assert weight.grad is None
    assert all(map(torch.equal, fulls(model.parameters()), before))
    assert earlier.any()


def _control_calls(stage):
    """Control messages and gathers of one accumulate block after another, the last with a block nested in it."""
    model, found = World(stage).build(Language), []
    for nested in (False, False, True):
        with zf.traffic() as sent, zf.accumulate(model):
            loss_of(model, 0).backward()
            with zf.accumulate(model) if nested else nullcontext():
                loss_of(model, 1).backward()
        found.append((sent.calls["control"], sent.calls["all-gather"]))
    return found


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_only_the_first_forward_compares_layouts(ranks, stage):
    """Every block of `accumulate` compared them once, and a nested block gathered kept parameters again."""
    for first, second, nested in ranks(2).run(_control_calls, stage):
        assert second[0] == 4 < first[0]  # one as each of two backwards begins, two as the block ends
        assert nested == second
