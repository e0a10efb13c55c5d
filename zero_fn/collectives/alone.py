"""One rank: nothing moves."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zero_fn.collectives.segment import Contribution, Pending, Segment, fill_own
from zero_fn.collectives.waiting import Failure

__all__ = ["Alone"]


class Alone:
    """The transport of an axis of size 1, and of no axis."""

    pads = False

    def prepared(self, segments: Sequence[Segment]) -> Sequence[Segment]:
        return segments

    def all_gather(self, segments: Sequence[Segment], mark: int = 0) -> Pending:
        fill_own(segments, 0)
        return Pending()

    def reduce_scatter(self, contributions: Sequence[Contribution], mark: int = 0) -> Pending:
        for contribution in contributions:
            piece = contribution.addend.piece(0)
            contribution.out.view(piece.shape).copy_(piece)
        return Pending()

    def any(self, bits: Tensor, mark: int = 0) -> Pending:
        return Pending()

    def exchange(self, message: Tensor, mark: int = 0) -> Tensor:
        return message.unsqueeze(0)

    def give_up(self, failure: Failure | None = None) -> None:
        """Nobody waits."""
