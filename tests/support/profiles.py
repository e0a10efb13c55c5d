"""Profiles of Hypothesis, chosen by the environment variable HYPOTHESIS_PROFILE, and how many examples a test has in each.

dev     few examples, the same in every run (the default)
ci      more, still the same in every run
deep    many, random, with the database of failures
deep/50 a fiftieth of it, of its own: days of it may be had in hours, each with another --hypothesis-seed

@examples(dev=400, ci=4_000, deep=200_000)
@given(...)
def test_...
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings

__all__ = ["PROFILE", "by_night", "examples", "load_profile"]

F = TypeVar("F", bound=Callable[..., object])

PROFILE, _, _parts = os.environ.get("HYPOTHESIS_PROFILE", "dev").partition("/")
_PARTS = int(_parts or 1)

SIZES = (2, pytest.param(3, marks=pytest.mark.nightly))
"""Numbers of gloo ranks of a test that asks for several: what is right on 3 is seldom wrong on 2, where less can go wrong."""

UNEVEN = (3, *(pytest.param(n, marks=pytest.mark.nightly) for n in (2, 4)))
"""Numbers of gloo ranks of a test of uneven shards: 3 divides few shapes, and leaves ranks without a row of small ones."""


def by_night(table: Iterable[Any], daily: Container[Any]) -> list[Any]:
    """The rows of a table for `parametrize`: those that are not in `daily` run by night."""
    night = pytest.mark.nightly
    return [
        row if row in daily else pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=night)
        for row in table
    ]


def load_profile() -> None:
    """Makes PROFILE the profile of tests that ask for no number of examples."""
    settings.register_profile("dev", max_examples=25, derandomize=True, deadline=None)
    settings.register_profile("ci", max_examples=100, derandomize=True, deadline=None, print_blob=True)
    settings.register_profile("deep", max_examples=_part(2000), deadline=None, print_blob=True)
    settings.load_profile(PROFILE)


# Shrinking a program takes minutes: in the profile of everyday it is printed as it was found.
_PHASES = (Phase.explicit, Phase.generate) if PROFILE == "dev" else tuple(Phase)
_SLOW_TO_DRAW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


def examples(*, dev: int, ci: int, deep: int) -> Callable[[F], F]:
    """How many examples a test has in each profile. Programs are slow to draw and large: that is known."""
    number = {"dev": dev, "ci": ci, "deep": _part(deep)}[PROFILE]
    return settings(max_examples=number, suppress_health_check=_SLOW_TO_DRAW, phases=_PHASES)


def _part(deep: int) -> int:
    return max(1, deep // _PARTS)
