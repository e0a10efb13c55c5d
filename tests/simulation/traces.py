"""What each rank asked of its axis: the same sequence on every rank, or something is wrong even if the numbers are right."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from torch import Tensor

from zero_fn.transport.segment import Contribution, Pending, Segment, Transport
from zero_fn.transport.waiting import Failure

__all__ = ["Recorded", "Traces"]


class Traces:
    """Collectives by group and rank, in the order they were called. Entries hold nothing that may differ between ranks."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[int, list[object]]] = {}

    def note(self, group: str, rank: int, entry: object) -> None:
        """Adds one entry."""
        self._entries.setdefault(group, {}).setdefault(rank, []).append(entry)

    def of(self, rank: int) -> list[object]:
        """All entries of a rank, group by group."""
        return [entry for ranks in self._entries.values() for entry in ranks.get(rank, [])]

    def difference(self, members: dict[str, Sequence[int]]) -> str | None:
        """Where two ranks of a group first differ; None if no two do.

        Args:
            members: The ranks of each group.
        """
        for group, ranks in self._entries.items():
            first, *others = members[group]
            expected = ranks.get(first, [])
            for other in others:
                pairs = zip_longest(expected, ranks.get(other, []))
                for number, (one, two) in enumerate(pairs):
                    if one != two:
                        return f"group {group!r}, collective {number}: rank {first} {one}, rank {other} {two}"
        return None


class Recorded:
    """A transport whose operations are noted before they are done."""

    def __init__(self, inner: Transport, note: object) -> None:
        self._inner, self._note = inner, note
        self.pads = inner.pads

    def prepared(self, segments: Sequence[Segment]) -> Sequence[Segment]:
        return self._inner.prepared(segments)

    def all_gather(self, segments: Sequence[Segment], mark: int = 0) -> Pending:
        self._note(("all-gather", mark, *map(_shape, segments)))  # type: ignore[operator]
        return self._inner.all_gather(segments, mark)

    def reduce_scatter(self, contributions: Sequence[Contribution], mark: int = 0) -> Pending:
        shapes = tuple(
            (contribution.rows.numel(), contribution.piece_numel, contribution.kind) for contribution in contributions
        )
        self._note(("reduce-scatter", mark, *shapes))  # type: ignore[operator]
        return self._inner.reduce_scatter(contributions, mark)

    def any(self, bits: Tensor, mark: int = 0) -> Pending:
        self._note(("any", mark, bits.numel()))  # type: ignore[operator]
        return self._inner.any(bits, mark)

    def exchange(self, rows: Tensor, mark: int = 0) -> Pending:
        self._note(("exchange", mark, rows.shape))  # type: ignore[operator]
        return self._inner.exchange(rows, mark)

    def give_up(self, failure: Failure | None = None) -> None:
        self._inner.give_up(failure)


def _shape(segment: Segment) -> tuple[object, ...]:
    return (segment.numel, segment.piece_numel, segment.kind)
