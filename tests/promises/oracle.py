"""The oracle of the acceptance matrix: plain replicas whose gradients are summed in the order of the ranks, bit by bit.

A *program* is what a user does in one step. It runs on plain replicas and on every stage, and calls `run.backward` and
`run.accumulate` for the two things that replicas must do by hand. After each step every whole gradient, every whole
parameter and whatever the program returned must be equal, to the bit: programs are trials of `tests/support/worlds.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import zero_fn as zf
from tests.support import worlds
from tests.support.seeds import seed_generator
from tests.support.wholes import means
from tests.support.worlds import DAILY, World, noise

__all__ = ["OPTIMIZERS", "Program", "Run", "differences", "mean_of_ranks", "noise"]

OPTIMIZERS: dict[str, Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
}


class Run(Protocol):
    """How gradients reach the other ranks."""

    optimizer: torch.optim.Optimizer

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """`loss.backward(**kwargs)`, reduced at its end, or at the end of `accumulate`."""

    def accumulate(self) -> Any:
        """Backwards inside are summed on each rank and reduced once."""

    def zero_grad(self, *, set_to_none: bool, by_model: bool = False) -> None:
        """`zero_grad` of the optimizer, or of the model."""

    def mean(self, grad: Tensor | None) -> Tensor | None:
        """A gradient that `torch.autograd.grad` gave, as it is over all ranks."""


Program = Callable[[Any, Run, int], object]


def mean_of_ranks(tensor: Tensor) -> Tensor:
    """The sum in the order of the ranks, divided by their number."""
    (mean,) = means([tensor.detach()], [tensor])
    assert mean is not None
    return mean


class _Replicas:
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self._depth = 0
        self._earlier: list[Tensor | None] = []

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        with self.accumulate():
            loss.backward(**kwargs)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        self._depth += 1
        try:
            if self._depth == 1:
                with self._reducing():
                    yield
            else:
                yield
        finally:
            self._depth -= 1

    def zero_grad(self, *, set_to_none: bool, by_model: bool = False) -> None:
        (self.model if by_model else self.optimizer).zero_grad(set_to_none=set_to_none)
        self._earlier = [None if grad is None or set_to_none else torch.zeros_like(grad) for grad in self._earlier]

    @contextmanager
    def _reducing(self) -> Iterator[None]:
        """What was in `.grad` before is set aside; what comes inside is reduced and added. An exception drops that."""
        everything = list(self.model.parameters())
        self._earlier = [parameter.grad for parameter in everything]
        for parameter in everything:
            parameter.grad = None
        try:
            yield
        except BaseException:
            for parameter, grad in zip(everything, self._earlier, strict=True):
                parameter.grad = grad
            raise
        fresh = means([parameter.grad for parameter in everything], everything)
        for parameter, grad, mean in zip(everything, self._earlier, fresh, strict=True):
            parameter.grad = None  # may have other strides than what is assigned
            parameter.grad = grad if mean is None else mean if grad is None else grad + mean

    def mean(self, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else mean_of_ranks(grad)


class _Transformed:
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        loss.backward(**kwargs)

    def accumulate(self) -> Any:
        return zf.accumulate(self.model)

    def zero_grad(self, *, set_to_none: bool, by_model: bool = False) -> None:
        (self.model if by_model else self.optimizer).zero_grad(set_to_none=set_to_none)

    def mean(self, grad: Tensor | None) -> Tensor | None:
        return grad


def differences(
    build: Callable[[], nn.Module],
    program: Program,
    *,
    steps: int = 2,
    optimizer: str = "sgd",
    stages: Sequence[str] = DAILY,
    options: Mapping[str, object] | None = None,
    transform: Callable[[nn.Module], nn.Module] = lambda model: model,
    zeroes: bool = True,
) -> list[str]:
    """Where a stage differs from plain replicas, as lines of text; empty when none does.

    Args:
        build: Makes the plain model; seeded before each call.
        program: What to run in each step; its results are compared too.
        steps: Optimizer steps: the second starts from states, and follows the order that the first has recorded.
        optimizer: A name in `OPTIMIZERS`.
        stages: Names in `STAGES`.
        options: Of each stage.
        transform: Applied to each transformed model.
        zeroes: Whether gradients are dropped after each step.
    """

    def trial(world: World) -> None:
        model: nn.Module = world.build(build, **(options or {}))
        model = model if world.is_replica else transform(model)
        trained = OPTIMIZERS[optimizer](list(model.parameters()))
        run: Run = (_Replicas if world.is_replica else _Transformed)(model, trained)
        for step in range(steps):
            seed_generator(step)
            for number, leaf in enumerate(tree_leaves(program(model, run, step))):
                world.note(f"result {number} of step {step}", _tensor(leaf))
            world.note_model(model)
            trained.step()
            if zeroes:
                trained.zero_grad()
        world.note_model(model)

    return worlds.differences(trial, stages=stages)


def _tensor(leaf: object) -> Tensor | None:
    return leaf if leaf is None or isinstance(leaf, Tensor) else torch.as_tensor(leaf)
