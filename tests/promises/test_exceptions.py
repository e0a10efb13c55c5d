"""G27: whatever raises in the middle of a step, the next step gives what replicas give; the user calls only `zero_grad`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_fn as zf
from tests.simulation import Simulated
from tests.simulation import axis as simulated_axis
from tests.support.programs import STAGES
from tests.support.ranks import Ranks, axis
from tests.support.seeds import seed_generator
from tests.support.wholes import full
from tests.support.worlds import ALL, WIDTH, Tower, World, differences, noise


class Breakdown(Exception):
    """What the tests raise."""


def _raise(*_: object) -> None:
    raise Breakdown


class Checkpointed(Tower):
    """Each block is recomputed in backward."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.leave(x)


class Reentrant(Checkpointed):
    reentrant = True


Trap = Callable[[Tower, Tensor], AbstractContextManager[Any]]


@contextmanager
def _while(*handles: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _in_a_module(name: str) -> Trap:
    return lambda model, loss: _while(model.get_submodule(name).register_forward_hook(_raise))


def _before_a_module(name: str) -> Trap:
    return lambda model, loss: _while(model.get_submodule(name).register_forward_pre_hook(_raise))


def _in_backward_of(name: str) -> Trap:
    def trap(model: Tower, loss: Tensor) -> AbstractContextManager[None]:
        module = model.get_submodule(name)

        def register(module: nn.Module, args: object, output: Tensor) -> None:
            if output.requires_grad:  # it does not in the first forward of a reentrant checkpoint
                output.register_hook(_raise)

        return _while(module.register_forward_hook(register))

    return trap


def _in_a_full_backward_hook(name: str) -> Trap:
    return lambda model, loss: _while(model.get_submodule(name).register_full_backward_hook(_raise))


def _in_a_hook_of(parameter: str) -> Trap:
    return lambda model, loss: _while(model.get_parameter(parameter).register_hook(_raise))


def _in_a_post_hook_of(parameter: str) -> Trap:
    return lambda model, loss: _while(model.get_parameter(parameter).register_post_accumulate_grad_hook(_raise))


def _in_recomputation(model: Tower, loss: Tensor) -> AbstractContextManager[None]:
    calls: list[int] = []

    def second_time(*_: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise Breakdown

    return _while(model.get_submodule("blocks.1.up").register_forward_hook(second_time))


def _nowhere(model: Tower, loss: Tensor) -> AbstractContextManager[None]:
    return nullcontext()


TRAPS: dict[str, tuple[type[Tower], Trap]] = {
    "forward of the root, at its beginning": (Tower, _before_a_module("")),
    "forward of the root, at its end": (Tower, _in_a_module("")),
    "forward of a unit, in its middle": (Tower, _in_a_module("blocks.1.up")),
    "forward between units": (Tower, _in_a_module("blocks.1")),
    "backward, before any unit": (Tower, _in_backward_of("")),
    "backward of a unit, in its middle": (Tower, _in_backward_of("blocks.1.up")),
    "backward between units": (Tower, _in_backward_of("blocks.0")),
    "a full backward hook": (Tower, _in_a_full_backward_hook("blocks.1.down")),
    "a hook of a parameter": (Tower, _in_a_hook_of("blocks.1.up.weight")),
    "a hook of a scalar": (Tower, _in_a_hook_of("blocks.0.gate")),
    "a post-accumulate hook": (Tower, _in_a_post_hook_of("blocks.2.down.bias")),
    "recomputation": (Checkpointed, _in_recomputation),
    "reentrant recomputation": (Reentrant, _in_recomputation),
    "backward between reentrant checkpoints": (Reentrant, _in_backward_of("blocks.0")),
}


TRAPS_IN_BLOCKS = (
    "forward of a unit, in its middle",
    "backward of a unit, in its middle",
    "backward between units",
    "a hook of a parameter",
    "a post-accumulate hook",
    "reentrant recomputation",
)
"""Traps that are also tried inside a block of `accumulate`."""


def _train_with(case: str, in_accumulate: bool, world: World) -> None:
    build, trap = TRAPS[case]
    model = world.build(build)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_of(seed: int) -> Tensor:
        return model(noise(4, WIDTH, seed=seed)).square().mean()

    for step in range(3):
        x = noise(4, WIDTH, seed=step)
        if step == 1:
            with pytest.raises(Breakdown), trap(model, x), world.accumulate(model) if in_accumulate else nullcontext():
                loss_of(10 + step).backward()
            optimizer.zero_grad()
        if in_accumulate:
            with world.accumulate(model):
                loss_of(20 + step).backward()
                loss_of(30 + step).backward()
            world.reduce(model)
            world.note_model(model)
            optimizer.step()
            optimizer.zero_grad()
        else:
            world.step(model, optimizer, loss_of(step))


@pytest.mark.parametrize(
    ("case", "in_accumulate"), [*((case, False) for case in TRAPS), *((case, True) for case in TRAPS_IN_BLOCKS)]
)
def test_g27_the_step_after_an_exception_is_exact(ranks: Ranks, case: str, in_accumulate: bool) -> None:
    def trial(world: World) -> None:
        _train_with(case, in_accumulate, world)

    for found in ranks(2).run(differences, trial):
        assert found == []


class Failing(torch.optim.SGD):
    """An optimizer that raises after it has updated half of the parameters."""

    fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if not self.fails:
            return super().step(closure)
        parameters = self.param_groups[0]["params"]
        for parameter in parameters[: len(parameters) // 2]:
            parameter.add_(parameter.grad, alpha=-self.param_groups[0]["lr"])
        raise Breakdown


def _optimizer_raises(world: World) -> None:
    model = world.build(Tower)
    optimizer = Failing(model.parameters(), lr=1e-2, momentum=0.9)
    for step in range(4):
        optimizer.fails = step % 2 == 0
        model(noise(4, WIDTH, seed=10 + step)).square().mean().backward()
        world.reduce(model)
        if optimizer.fails:
            with pytest.raises(Breakdown):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
        world.note_model(model)


def test_g27_the_step_after_an_exception_in_the_optimizer_is_exact(ranks: Ranks) -> None:
    for n in (2, 3):
        for found in ranks(n).run(differences, _optimizer_raises):
            assert found == []


def _closure_raises(world: World) -> None:
    model = world.build(Tower)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(3):

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            loss = model(noise(4, WIDTH, seed=step)).square().mean()
            loss.backward()
            world.reduce(model)
            return loss.item()

        def broken() -> float:
            model(noise(4, WIDTH, seed=99)).square().mean().backward()
            raise Breakdown

        with pytest.raises(Breakdown):
            optimizer.step(broken)
        optimizer.step(closure)
        world.note_model(model)


def test_g27_the_step_after_an_exception_in_a_closure_is_exact(ranks: Ranks) -> None:
    for found in ranks(2).run(differences, _closure_raises):
        assert found == []


def _names_after(case: str) -> None:
    """A gathered parameter stood under its name until the next forward; an edit of it was lost."""
    build, trap = TRAPS[case]
    for stage in ALL:
        seed_generator(0)
        model: Any = STAGES[stage](build(), axis())
        x = noise(4, WIDTH, seed=0)
        with pytest.raises(Breakdown), trap(model, x):
            model(x).square().mean().backward()
        for name, parameter in model.named_parameters():
            owner, _, attribute = name.rpartition(".")
            assert getattr(model.get_submodule(owner), attribute) is parameter, f"{stage}: {name}"


@pytest.mark.parametrize("case", [case for case in TRAPS if "hook of" not in case])
def test_g27_names_show_resting_parameters_after_an_exception(ranks: Ranks, case: str) -> None:
    ranks(2).run(_names_after, case)


class Detached(nn.Linear):
    """Has gradients on rank 0 only: the backward of rank 1 passes through it."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (each if dist.get_rank() == 0 else each.detach() for each in (self.weight, self.bias))
        return nn.functional.linear(x, weight, bias)


def _passes(raises: bool) -> list[list[float]]:
    """A rank with gradients issues a reduction as they come; one without, when backward has come further, or has raised."""
    seed_generator(0)
    layers = nn.Sequential(nn.Linear(3, 3), Detached(3, 3), Detached(3, 3))
    model = zf.shard_params(layers, simulated_axis(), units=(nn.Linear, Detached))
    for raises_now in (raises, False):
        model.zero_grad()
        middle = model[0](noise(2, 3, seed=1)).clone()  # so that backward raises between two units
        if raises_now:
            middle.register_hook(_raise)
        with pytest.raises(Breakdown) if raises_now else nullcontext():
            model[2](model[1](middle)).sum().backward()
    return [full(parameter.grad).flatten().tolist() for parameter in model.parameters()]


def test_g27_a_rank_without_gradients_issues_the_reductions_that_others_wait_for(simulated: Simulated) -> None:
    assert simulated(2).run(_passes, True) == simulated(2).run(_passes, False)
