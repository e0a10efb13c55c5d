"""`worlds.differences` of a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from tests.support import worlds
from tests.support.worlds import DAILY, Program, Run, mean_of_ranks, noise, trained

__all__ = ["Program", "Run", "differences", "mean_of_ranks", "noise"]


def differences(
    build: Callable[[], nn.Module], program: Program, *, stages: Sequence[str] = DAILY, **options: Any
) -> list[str]:
    """Where a stage differs from plain replicas."""
    return worlds.differences(trained(build, program, **options), stages=stages)
