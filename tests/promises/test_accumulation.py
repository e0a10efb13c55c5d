"""G1 to G3: gradients of several microbatches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from torch import nn

import zero_fn as zf
from tests.promises.models import Sizes, Stack, batches, several, sizes
from tests.promises.oracle import Program, Run, differences, noise
from tests.support.profiles import SIZES
from tests.support.programs import STAGES
from tests.support.ranks import Ranks, axis
from tests.support.seeds import seed_generator
from tests.support.wholes import full, fulls


def backward(model: Any, run: Run, seed: int, width: int = 6) -> None:
    run.backward(model(noise(3, width, seed=seed)).square().mean())


def checked(batch: list[Sizes], program: Callable[[Sizes], Program]) -> list[str]:
    """What differs, over a list of random models."""
    found = []
    for size in batch:
        wrong = differences(size, program(size), optimizer=size.optimizer, options=size.options)
        found += [f"{size}: {line}" for line in wrong]
    return found


@pytest.mark.parametrize("n", SIZES)
@several
@given(batch=batches(sizes))
def test_g01_accumulated_microbatches_are_reduced_once(ranks: Ranks, n: int, batch: list[Sizes]) -> None:
    def program(size: Sizes) -> Program:
        def step(model: Any, run: Run, number: int) -> None:
            with run.accumulate():
                for i in range(size.microbatches):
                    backward(model, run, size.seed + 10 * number + i, size.width)

        return step

    assert ranks(n).run(checked, batch, program) == [[]] * n


def _of_two_models(stage: str, unshard: bool, breaks: int) -> None:
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
    for model in models if breaks else ():
        model.zero_grad()
    if breaks:  # neither is in a block any more: a backward reduces again
        for seed in range(2):
            models[1](models[0](noise(3, 6, seed=seed))).sum().backward()
    for seed in range(2):
        plain[1](plain[0](noise(3, 6, seed=seed))).sum().backward()
    for model, expected in zip(models, plain, strict=True):
        for parameter, own in zip(model.parameters(), expected.parameters(), strict=True):
            assert own.grad is not None
            dist.all_reduce(own.grad)
            torch.testing.assert_close(full(parameter.grad), own.grad / dist.get_world_size())


@pytest.mark.parametrize("breaks", [0, 1, 2])
@pytest.mark.parametrize("unshard", [False, True])
@pytest.mark.parametrize("stage", ["replicate", "zero3"])
def test_g01_a_block_of_two_models_ends_for_both(ranks: Ranks, stage: str, unshard: bool, breaks: int) -> None:
    ranks(2).run(_of_two_models, stage, unshard, breaks)


@pytest.mark.parametrize("n", SIZES)
@several
@given(batch=batches(sizes))
def test_g02_gradients_reduced_each_time_add_up(ranks: Ranks, n: int, batch: list[Sizes]) -> None:
    def program(size: Sizes) -> Program:
        def step(model: Any, run: Run, number: int) -> None:
            for i in range(size.microbatches):
                backward(model, run, size.seed + 10 * number + i, size.width)

        return step

    assert ranks(n).run(checked, batch, program) == [[]] * n


WAYS = [(True, False), (False, True)]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("set_to_none", "by_model"), WAYS)
def test_g03_zero_grad_drops_pending_gradients(ranks: Ranks, n: int, set_to_none: bool, by_model: bool) -> None:
    def program(model: Any, run: Run, number: int) -> None:
        backward(model, run, 1)
        with run.accumulate():
            backward(model, run, 10 * number + 2)
            run.zero_grad(set_to_none=set_to_none, by_model=by_model)
            if number != 1:  # in step 1 nothing comes after
                backward(model, run, 10 * number + 3)
                backward(model, run, 10 * number + 4)

    assert ranks(n).run(differences, Stack, program, steps=3) == [[]] * n


class Fork(Stack):
    """Odd ranks leave out the middle layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = [layer(self.enter(x)) for layer in self.layers]
        rank = axis().get_local_rank()
        return self.leave(outputs[0] + outputs[1 + rank % 2])


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_g03_zero_grad_drops_gradients_that_wait_on_some_ranks_only(ranks: Ranks, n: int, set_to_none: bool) -> None:
    def program(model: Any, run: Run, number: int) -> None:
        with run.accumulate():
            backward(model, run, 10 * number + 2)
            run.zero_grad(set_to_none=set_to_none)
            if number:
                backward(model, run, 10 * number + 3)

    assert ranks(n).run(differences, Fork, program) == [[]] * n


@pytest.mark.parametrize("n", SIZES)
def test_g03_blocks_and_plain_backwards_add_up_without_zero_grad(ranks: Ranks, n: int) -> None:
    def program(model: Any, run: Run, number: int) -> None:
        backward(model, run, 10 * number)
        with run.accumulate():
            backward(model, run, 10 * number + 1)
            with run.accumulate():
                backward(model, run, 10 * number + 2)
        if number % 2:
            with run.accumulate():
                backward(model, run, 10 * number + 3)
        backward(model, run, 10 * number + 4)

    assert ranks(n).run(differences, Stack, program, zeroes=False) == [[]] * n


@pytest.mark.parametrize("n", SIZES)
def test_g03_an_exception_in_a_block_restores_the_gradients_before_it(ranks: Ranks, n: int) -> None:
    def program(model: Any, run: Run, number: int) -> None:
        backward(model, run, 10 * number)
        with pytest.raises(ZeroDivisionError), run.accumulate():
            backward(model, run, 10 * number + 1)
            raise ZeroDivisionError

    assert ranks(n).run(differences, Stack, program) == [[]] * n


@pytest.mark.parametrize("n", SIZES)
def test_g03_a_parameter_frozen_in_a_block_keeps_what_it_has(ranks: Ranks, n: int) -> None:
    """The reduction had no room for it: an assertion failed."""

    def program(model: Stack, run: Run, number: int) -> None:
        model.requires_grad_(True)
        with run.accumulate():
            backward(model, run, 10 * number)
            model.layers[number].first.requires_grad_(False)
            model.enter.bias.requires_grad_(False)
            backward(model, run, 10 * number + 1)

    assert ranks(n).run(differences, Stack, program) == [[]] * n


@pytest.mark.parametrize("stage", STAGES)
def test_g03_pending_gradients_cannot_be_stepped_or_read(ranks: Ranks, stage: str) -> None:
    def case() -> None:
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

    ranks(2).run(case)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("inside", [True, False])
def test_g03_a_penalty_on_resting_parameters_is_added_to_pending_gradients(ranks: Ranks, n: int, inside: bool) -> None:
    """It reaches the leaf beside the unit, as a resting gradient."""

    def case() -> list[bool]:
        equal = []
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
            equal.append(full(weight.grad))
        return [torch.equal(grad, equal[0]) for grad in equal]

    assert ranks(n).run(case) == [[True] * 4] * n
