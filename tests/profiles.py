"""How much a run tests: profiles of Hypothesis, chosen by the environment variable HYPOTHESIS_PROFILE.

dev     few examples, the same in every run (the default)
ci      more, still the same in every run
deep    many, random, with the database of failures
"""

from __future__ import annotations

import os

from hypothesis import settings

__all__ = ["PROFILE", "cases"]

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "dev")

settings.register_profile("dev", max_examples=25, derandomize=True, deadline=None)
settings.register_profile("ci", max_examples=100, derandomize=True, deadline=None, print_blob=True)
settings.register_profile("deep", max_examples=2000, deadline=None, print_blob=True)


def cases(*, dev: int, ci: int, deep: int) -> int:
    """The number of examples of one test in the chosen profile."""
    return {"dev": dev, "ci": ci, "deep": deep}[PROFILE]
