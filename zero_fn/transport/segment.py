"""What collectives move: segments to be gathered, contributions to be summed, and the operations every transport has.

[Note: small pieces travel together] A gloo message costs 0.1 to 0.2 ms whatever its size. Pieces below `PACKED_NBYTES`
of one call are packed into one message per peer; larger ones are sent from where they lie.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from zero_fn.kernels.nontemporal import copy, mean
from zero_fn.transport.waiting import Failure, wait_for

__all__ = [
    "PACKED_NBYTES",
    "Contribution",
    "Contributions",
    "Pending",
    "Route",
    "Segment",
    "Sum",
    "Transport",
    "fill_own",
    "flat",
    "joined",
    "keep_dropped",
    "runs_of",
]

PACKED_NBYTES = 128 * 1024

Route = Sequence[tuple[int, int | None]]
"""The hops of a tensor, in the order in which axes cut it: the number of the axis, and elements of the largest piece of what
the hops before have left to a rank; None where the axis does not cut it. See `zero_fn.transport.links`."""

_ONE_HOP: Route = ((0, None),)


class Segment:
    """The whole of one tensor, of which each rank has filled its own piece: what an all-gather completes.

    Attributes:
        memory, start: Where it lies: from this element of the storage on.
        numel: Valid elements.
        piece_numel: Elements of the largest piece; rank `r` owns those from `r * piece_numel`, cut at `numel`.
        route: The hops by which it travels; the segment describes the first. Left out where there is one axis.
        source: Where this rank's piece lies if it is not in `whole` yet: an all-gather reads it there, once, for its peers
            and for `whole`.
    """

    __slots__ = ("memory", "numel", "piece_numel", "route", "source", "start")

    def __init__(
        self,
        memory: Tensor,
        numel: int,
        piece_numel: int,
        route: Route = _ONE_HOP,
        *,
        start: int | None = None,
        source: Tensor | None = None,
    ) -> None:
        """Names a range of memory; views are cut when they are asked for.

        Args:
            memory: Flat. From `start` on it has `numel` elements, and `n * piece_numel` where the transport pads.
            numel, piece_numel, route, source: See the attributes.
            start: First element in the storage of `memory`; left out, the first of `memory`.
        """
        self.memory, self.start = memory, memory.storage_offset() if start is None else start
        self.numel, self.piece_numel, self.route, self.source = numel, piece_numel, route, source

    def piece_bounds(self, rank: int) -> tuple[int, int]:
        """First element and number of elements that `rank` owns; the number may be 0."""
        start = min(rank * self.piece_numel, self.numel)
        return start, min(self.piece_numel, self.numel - start)

    def piece(self, rank: int) -> Tensor:
        """The elements that `rank` owns; may be empty."""
        start, numel = self.piece_bounds(rank)
        return self.memory.as_strided((numel,), (1,), self.start + start)

    @property
    def whole(self) -> Tensor:
        """All elements, flat."""
        return self.memory.as_strided((self.numel,), (1,), self.start)

    def by_rank(self, size: int) -> Tensor:
        """A row for each rank, padding included."""
        return self.memory.as_strided((size, self.piece_numel), (self.piece_numel, 1), self.start)

    def own(self, rank: int) -> Tensor:
        """The piece of `rank`, which is this one, where it lies before the all-gather."""
        return self.source if self.source is not None else self.piece(rank)

    @property
    def kind(self) -> torch.dtype:
        """What small pieces that travel together have in common."""
        return self.memory.dtype

    @property
    def is_small(self) -> bool:
        """Whether its pieces travel packed with others. The same on every rank."""
        return self.piece_numel * self.memory.dtype.itemsize < PACKED_NBYTES


class Contribution:
    """One tensor to be summed over ranks, and where the mean of this rank's piece goes.

    Attributes:
        rows: This rank's addend, cut along the first dim, in any strides: a gradient often comes transposed. Only read.
        piece_rows, piece_numel: Rows and elements of the largest piece.
        out: Receives the mean, flat: as many elements as this rank's piece.
        sum_dtype: Dtype of the running sum.
        route: As of a segment.
    """

    __slots__ = ("out", "piece_numel", "piece_rows", "route", "rows", "sum_dtype")

    def __init__(
        self, rows: Tensor, piece_rows: int, out: Tensor, sum_dtype: torch.dtype, route: Route = _ONE_HOP
    ) -> None:
        self.rows, self.piece_rows, self.out, self.sum_dtype, self.route = rows, piece_rows, out, sum_dtype, route
        self.piece_numel = piece_rows * (rows.numel() // max(rows.shape[0], 1))

    def piece(self, rank: int) -> Tensor:
        """The rows that `rank` owns; may be empty."""
        count = self.rows.shape[0]
        start = min(rank * self.piece_rows, count)
        return self.rows.narrow(0, start, min(self.piece_rows, count - start))

    @property
    def kind(self) -> tuple[torch.dtype, torch.dtype]:
        """What small pieces that travel together have in common."""
        return self.rows.dtype, self.sum_dtype

    @property
    def is_small(self) -> bool:
        """Whether its pieces travel packed with others. The same on every rank."""
        return self.piece_numel * self.rows.dtype.itemsize < PACKED_NBYTES


class Contributions(Sequence[Contribution]):
    """Contributions of which there will be more, of the same sizes, dtypes and places, in each step.

    Attributes:
        rows: Of each.
        buffers: What the places of the means are in.
        numel: Elements of all of them.
        memo: Where a transport keeps what it has found out about them, by its class.
    """

    __slots__ = ("_make", "buffers", "memo", "numel", "rows")

    def __init__(
        self,
        rows: list[Tensor],
        buffers: list[Tensor],
        make: Callable[[int, Tensor], Contribution],
        numel: int,
        memo: dict[type, Any],
    ) -> None:
        """Names them; `make` makes one, from its number and rows, when a transport asks for it."""
        self.rows, self.buffers, self.numel, self.memo = rows, buffers, numel, memo
        self._make = make

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: Any) -> Any:
        return self._make(at, self.rows[at])


_dropped: deque[object] = deque(maxlen=1024)
"""What collectives that nobody waited for hold: kept until their messages have come, which nobody can ask for."""


def keep_dropped(messages: object) -> None:
    """Keeps messages under way that nobody will wait for."""
    if messages and _dropped is not None:  # None while the interpreter ends
        _dropped.append(messages)


class Pending:
    """A collective under way. `wait` returns when its result may be used and may be called again.

    Its works come with the peer at the other end of each; None for a collective of the backend.

    Attributes:
        kept: What must live until then.
        nbytes: Payload that this rank sends for it.
    """

    __slots__ = ("_finish", "_works", "kept", "nbytes")

    def __init__(
        self,
        works: Sequence[tuple[Any, int | None]] = (),
        finish: Callable[[], None] | None = None,
        kept: object = None,
        nbytes: int = 0,
    ) -> None:
        self._works, self._finish, self.kept, self.nbytes = works, finish, kept, nbytes

    def __del__(self) -> None:
        # Its model failed and was dropped. A receive that dies before its message came leaves it to the next receive.
        if self._works:
            keep_dropped((self._works, self._finish, self.kept))

    def wait(self) -> None:
        """Waits for the bytes, then finishes the arithmetic. On CUDA the current stream waits, not the host."""
        works, finish = self._works, self._finish
        self._works, self._finish = (), None
        for work, peer in works:
            wait_for(work, peer)
        if finish is not None:
            finish()
        self.kept = None


class Transport(Protocol):
    """What moves bytes along one axis. All ranks call the same operations in the same order.

    `mark` is a number below 2^31 that tells operations apart, the same on every rank: a transport that can compares those of
    its peers with its own.
    """

    pads: bool
    """Whether `Segment.whole` must have room for `n` full pieces."""

    def prepared(self, segments: Sequence[Segment]) -> Sequence[Segment]:
        """The same segments, for many all-gathers of the same memory: what is cut from them is cut now, once."""

    def all_gather(self, segments: Sequence[Segment], mark: int = 0) -> Pending:
        """Fills each segment from the pieces of all ranks."""

    def reduce_scatter(self, contributions: Sequence[Contribution], mark: int = 0) -> Pending:
        """Writes into each `out` the mean over ranks of this rank's piece."""

    def any(self, bits: Tensor, mark: int = 0) -> Pending:
        """Ors a uint8 tensor of 0 and 1 over the ranks, in place."""

    def exchange(self, rows: Tensor, mark: int = 0) -> Pending:
        """Fills the rows of the others in a uint8 tensor with a row for each rank, in which that of this rank is filled."""

    def give_up(self, failure: Failure | None = None) -> None:
        """After a failure: tells the peers, where it can, that nothing more will come, and whom this rank blames."""


_Item = TypeVar("_Item", Segment, Contribution)


def runs_of(items: Sequence[_Item]) -> list[list[_Item]]:
    """What travels in one message each: large items alone, small ones of a kind together. The same on every rank."""
    runs: list[list[_Item]] = []
    packs: dict[object, list[_Item]] = {}
    for item in items:
        if item.is_small:
            packs.setdefault(item.kind, []).append(item)
        else:
            runs.append([item])
    return runs + list(packs.values())


def fill_own(segments: Sequence[Segment], rank: int) -> None:
    """Copies this rank's pieces into `whole` where they lie elsewhere."""
    apart = [segment for segment in segments if segment.source is not None]
    if apart:
        copy([s.piece(rank) for s in apart], [s.source for s in apart if s.source is not None])


def flat(piece: Tensor) -> Tensor:
    """The elements of a piece in one range of memory, as collectives send it."""
    return piece.contiguous().view(-1)


def joined(run: Sequence[Tensor]) -> Tensor:
    """The elements of some pieces back to back."""
    return flat(run[0]) if len(run) == 1 else torch.cat([flat(piece) for piece in run])


class Sum:
    """The sum of one run of contributions over the ranks, and the means.

    The pieces are added in the order of the ranks, from where they lie: this rank's own are not copied before, so the
    gradients they are in stay in memory until the sum is made.

    Attributes:
        numel: Elements of the run on this rank.
    """

    __slots__ = ("_dtype", "_outs", "_pieces", "_rank", "numel")

    def __init__(self, run: Sequence[Contribution], rank: int) -> None:
        """Names what is to be summed."""
        self._pieces = [contribution.piece(rank).detach() for contribution in run]
        self._outs, self._dtype, self._rank = [contribution.out for contribution in run], run[0].sum_dtype, rank
        self.numel = sum([out.numel() for out in self._outs])

    def finish(self, parts: Mapping[int, Tensor]) -> None:
        """Adds this rank's pieces to those of its peers, by rank, in this order, divides, and writes the means."""
        if len(self._outs) == 1:
            own = self._pieces[0]
            total = self._outs[0].view(own.shape)  # the sum is made where the mean goes
        else:
            own = joined(self._pieces)
            total = torch.empty_like(own, dtype=self._dtype)
        addends = {**parts, self._rank: own}
        mean(total, [addends[rank].view(own.shape) for rank in sorted(addends)], self._dtype)
        if len(self._outs) > 1:
            torch._foreach_copy_(self._outs, torch.split(total, [out.numel() for out in self._outs]))
