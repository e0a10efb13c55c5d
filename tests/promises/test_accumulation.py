"""Gradients of several microbatches: reduced once in a block, or each time; what waits, and what an exception leaves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_fn as zf
from tests.support.models import Language, Stack
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES, loss_of
from tests.support.ranks import Ranks, axis
from tests.support.seeds import seed_generator
from tests.support.wholes import full, fulls
from tests.support.worlds import Program, Run, World, differences, noise, trained


def backward(model: Any, run: Run, seed: int, width: int = 6) -> None:
    run.backward(model(noise(3, width, seed=seed)).square().mean())


def _reduced_once(model: Any, run: Run, number: int) -> None:
    with run.accumulate():
        for i in range(3):
            backward(model, run, 10 * number + i)


def _reduced_each_time(model: Any, run: Run, number: int) -> None:
    for i in range(3):
        backward(model, run, 10 * number + i)


def _blocks_and_plain_backwards(model: Any, run: Run, number: int) -> None:
    backward(model, run, 10 * number)
    with run.accumulate():
        backward(model, run, 10 * number + 1)
        with run.accumulate():
            backward(model, run, 10 * number + 2)
    if number % 2:
        with run.accumulate():
            backward(model, run, 10 * number + 3)
    backward(model, run, 10 * number + 4)


def _exception_in_a_block(model: Any, run: Run, number: int) -> None:
    """The gradients before it are restored, and what it has summed is in no later sum."""
    backward(model, run, 10 * number)
    with pytest.raises(ZeroDivisionError), run.accumulate():
        backward(model, run, 10 * number + 1)
        raise ZeroDivisionError
    with run.accumulate():
        backward(model, run, 10 * number + 2)


def _frozen_in_a_block(model: Any, run: Run, number: int) -> None:
    """The reduction had no room for it: an assertion failed."""
    model.requires_grad_(True)
    with run.accumulate():
        backward(model, run, 10 * number)
        model.layers[number].first.requires_grad_(False)
        model.enter.bias.requires_grad_(False)
        backward(model, run, 10 * number + 1)


def _one_forward_one_backward(model: Any, run: Run, number: int) -> None:
    """The forward of a microbatch runs before the backward of the one before."""
    losses: list[Tensor] = []
    with run.accumulate():
        for microbatch in range(3):
            losses.append(model(noise(2, 6, seed=10 * number + microbatch)).square().mean() / 3)
            if len(losses) > 1:
                run.backward(losses.pop(0))
        run.backward(losses.pop())


def _drops_what_waits(set_to_none: bool, by_model: bool) -> Program:
    def program(model: Any, run: Run, number: int) -> None:
        backward(model, run, 1)
        with run.accumulate():
            backward(model, run, 10 * number + 2)
            run.zero_grad(set_to_none=set_to_none, by_model=by_model)
            if number != 1:  # in step 1 nothing comes after
                backward(model, run, 10 * number + 3)
                backward(model, run, 10 * number + 4)

    return program


PROGRAMS: dict[str, tuple[Program, dict[str, Any]]] = {
    "reduced once": (_reduced_once, {"optimizer": "adamw"}),
    "reduced once, other units": (_reduced_once, {"options": {"units": "*.first"}}),
    "reduced each time": (_reduced_each_time, {"optimizer": "adamw"}),
    "reduced each time, other units": (_reduced_each_time, {"options": {"units": "*.first"}}),
    "blocks and plain backwards, no zero_grad": (_blocks_and_plain_backwards, {"zeroes": False}),
    "an exception in a block": (_exception_in_a_block, {}),
    "frozen in a block": (_frozen_in_a_block, {}),
    "one forward, one backward": (_one_forward_one_backward, {}),
    "zero_grad drops": (_drops_what_waits(set_to_none=True, by_model=False), {"steps": 3}),
    "zero_grad to zeros of the model": (_drops_what_waits(set_to_none=False, by_model=True), {"steps": 3}),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_microbatches_add_up_as_in_replicas(ranks: Ranks, name: str) -> None:
    program, how = PROGRAMS[name]
    assert ranks(2).run(differences, trained(Stack, program, **how)) == [[]] * 2


class Fork(Stack):
    """Odd ranks leave out the middle layer."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = [layer(self.enter(x)) for layer in self.layers]
        return self.leave(outputs[0] + outputs[1 + axis().get_local_rank() % 2])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_gradients_that_wait_on_some_ranks_only(ranks: Ranks, set_to_none: bool) -> None:
    def program(model: Any, run: Run, number: int) -> None:
        with run.accumulate():
            backward(model, run, 10 * number + 2)
            run.zero_grad(set_to_none=set_to_none)
            if number:
                backward(model, run, 10 * number + 3)

    assert ranks(2).run(differences, trained(Fork, program)) == [[]] * 2


def _some_parts_accumulate(world: World) -> None:
    """The others are reduced in each backward."""
    model: Any = world.build(Stack)
    parts = model.layers[0], model.layers[2]
    with world.accumulate(*parts):
        for microbatch in range(2):
            model(noise(4, 6, seed=microbatch)).mean().backward()
    world.reduce(*parts)
    for part in parts:
        world.note_model(part)


def test_some_parts_may_accumulate(ranks: Ranks) -> None:
    assert ranks(2).run(differences, _some_parts_accumulate) == [[]] * 2


@pytest.mark.parametrize("breaks", [0, 1, 2])
@pytest.mark.parametrize(("stage", "unshard"), [("replicate", True), ("zero3", False), ("zero3", True)])
@on_ranks(2)
def test_a_block_of_two_models_ends_for_both(stage: str, unshard: bool, breaks: int) -> None:
    """A block of two models ends for both, also if a hook of one raises when it ends."""
    torch.manual_seed(0)
    plain = [nn.Linear(6, 6), nn.Linear(6, 6)]
    models: list[Any] = [STAGES[stage](model, axis()) for model in plain]

    def broken(_: object) -> None:
        raise ZeroDivisionError

    hook = models[breaks - 1].weight.register_post_accumulate_grad_hook(broken) if breaks else None
    with pytest.raises(ZeroDivisionError) if breaks else nullcontext(), zf.accumulate(*models, unshard=unshard):
        for seed in range(2):
            models[1](models[0](noise(3, 6, seed=seed))).sum().backward()
    if hook is not None:
        hook.remove()
        for model in models:
            model.zero_grad()
        for seed in range(2):  # neither is in a block any more: a backward reduces again
            models[1](models[0](noise(3, 6, seed=seed))).sum().backward()
    for seed in range(2):
        plain[1](plain[0](noise(3, 6, seed=seed))).sum().backward()
    for model, expected in zip(models, plain, strict=True):
        for parameter, own in zip(model.parameters(), expected.parameters(), strict=True):
            assert own.grad is not None
            dist.all_reduce(own.grad)
            torch.testing.assert_close(full(parameter.grad), own.grad / dist.get_world_size())


@pytest.mark.parametrize("stage", ["replicate", "zero1", "zero3"])
@on_ranks(2)
def test_pending_gradients_cannot_be_stepped_or_read(stage: str) -> None:
    seed_generator(0)
    model: Any = STAGES[stage](Stack(), axis())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = fulls(model.parameters())
    weight = model.enter.weight
    model(noise(3, 6, seed=1)).square().mean().backward()
    earlier = full(weight.grad)
    with zf.accumulate(model):
        model(noise(3, 6, seed=2)).square().mean().backward()
        assert weight.grad is not None
        assert (weight.grad.shape, weight.grad.dtype) == (weight.shape, weight.dtype)
        reads: list[Callable[[], object]] = [
            optimizer.step,
            lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            lambda: weight.grad.full_tensor(),
            lambda: weight.grad.to_local(),
            lambda: weight.grad.norm(),
            lambda: weight.grad * 2,
            lambda: weight.grad.mul_(2),
            lambda: torch._foreach_norm([weight.detach(), weight.grad]),
            lambda: weight + weight.grad,
            lambda: weight.grad.isnan(),
            lambda: torch.mul(torch.ones(6), 2, out=weight.grad),
        ]
        for read in reads:
            with pytest.raises(zf.StateError, match=r"enter\.weight"):
                read()
        optimizer.zero_grad()
        optimizer.step()  # nothing waits: nothing happens, as in replicas
    assert weight.grad is None
    assert all(map(torch.equal, fulls(model.parameters()), before))
    assert earlier.any()


@pytest.mark.parametrize("inside", [True, False])
@on_ranks(2)
def test_a_penalty_on_resting_parameters_is_added_to_pending_gradients(inside: bool) -> None:
    """It reaches the leaf beside the unit, as a resting gradient."""
    found = []
    for stage in STAGES.values():
        seed_generator(0)
        model: Any = stage(Stack(), axis())
        weight = model.layers[0].first.weight
        with zf.accumulate(model):
            model(noise(3, 6, seed=2)).square().mean().backward()
            if inside:
                weight.square().sum().backward()
        if not inside:
            weight.square().sum().backward()
        found.append(full(weight.grad))
    assert all(torch.equal(found[0], grad) for grad in found)


def _control_calls(stage: str) -> list[tuple[int, int]]:
    """Control messages and gathers of one accumulate block after another, the last with a block nested in it."""
    torch.manual_seed(0)
    model, found = STAGES[stage](Language(), axis()), []
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
