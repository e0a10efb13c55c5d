"""One collective of a transport or a line, with a plan that serves once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zero_fn.transport.line import Work
from zero_fn.transport.segment import Contribution, Segment

__all__ = ["gather", "reduce"]


def gather(through: Any, segments: Sequence[Segment], *what: str) -> Work:
    """An all-gather of segments; `what` on a line."""
    work: Work = through.all_gather(through.gather_plan(segments), *what)
    return work


def reduce(through: Any, contributions: Sequence[Contribution], *what: str) -> Work:
    """A reduce-scatter of contributions; `what` on a line."""
    rows, outs = [each.rows for each in contributions], [each.out for each in contributions]
    work: Work = through.reduce_scatter(through.reduce_plan(contributions, outs), rows, outs, *what)
    return work
