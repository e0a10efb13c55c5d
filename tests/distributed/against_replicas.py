"""The oracle for everything a user may do between two optimizer steps: plain replicas whose gradients are averaged.

A *program* runs forwards and backwards on a model and leaves gradients. It is run on every stage and, with the same
seeds, on plain replicas; after each of a few steps whole gradients and parameters must agree. Everything is float64, where
the few orders of summation that differ stay far below the tolerance, and errors of meaning do not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.training import STAGES
from tests.ranks import axis
from tests.wholes import Held, held, means, wholes

__all__ = ["Program", "differences", "noise"]

Program = Callable[[nn.Module, int], object]

_TOLERANCE = 1e-11


def noise(*shape: int, seed: int) -> Tensor:
    """A float64 input of this rank."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def differences(
    build: Callable[[], nn.Module],
    program: Program,
    *,
    steps: int = 3,
    stages: tuple[str, ...] = tuple(STAGES),
    transform: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> list[str]:
    """Where a stage differs from plain replicas, as lines of text; empty when none does.

    Args:
        build: Makes the plain model; seeded before each call.
        program: What to run in each step; called with the model and the number of the step.
        steps: Optimizer steps.
        stages: Names in `STAGES`.
        transform: Applied to each transformed model.
    """
    torch.manual_seed(0)
    reference = build().double()
    expected = _run(reference, program, steps, is_replica=True)
    found = []
    for stage in stages:
        torch.manual_seed(0)
        model = transform(STAGES[stage](build().double(), axis()))
        for step, (one, other) in enumerate(zip(expected, _run(model, program, steps, is_replica=False), strict=True)):
            found += [f"{stage}, step {step}: {line}" for line in _compare(one, other)]
    return found


def _run(model: nn.Module, program: Program, steps: int, *, is_replica: bool) -> list[dict[str, Tensor | None]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    history: list[dict[str, Held]] = []
    for step in range(steps):
        torch.manual_seed(step)
        program(model, step)
        if is_replica:
            everything = list(model.parameters())
            for parameter, mean in zip(everything, means([p.grad for p in everything], everything), strict=True):
                parameter.grad = mean
        state = {f"grad of {name}": held(parameter.grad) for name, parameter in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        state.update({name: held(parameter) for name, parameter in model.named_parameters()})
        history.append(state)
    found = iter(wholes([part for state in history for part in state.values()]))
    return [{name: next(found) for name in state} for state in history]


def _compare(one: dict[str, Tensor | None], other: dict[str, Tensor | None]) -> list[str]:
    if one.keys() != other.keys():
        return [f"names differ: {sorted(one.keys() ^ other.keys())}"]
    lines = []
    for name, expected in one.items():
        value = other[name]
        if expected is None or value is None:
            if (expected is None) != (value is None):
                lines.append(f"{name} is {'None' if value is None else 'not None'}")
        elif expected.shape != value.shape or not torch.allclose(expected, value, rtol=0, atol=_TOLERANCE):
            lines.append(f"{name} is off by {(expected - value).abs().max().item():.2e}")
    return lines
