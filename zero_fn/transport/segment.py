"""What collectives move (segments to gather, contributions to sum), and the operations that every transport has.

[Note: small pieces travel together] A message over gloo takes 0.1 to 0.2 ms, however small. So the pieces of a call that are
smaller than `PACKED_NBYTES` are packed into one message for each peer. Larger pieces are sent from where they lie.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from zero_fn.kernels.nontemporal import copy, mean
from zero_fn.transport.waiting import Failure, OnStream, wait_for

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
"""The hops of a tensor, in the order in which axes cut it (see `zero_fn.transport.links`): the number of the axis, and
the elements of the largest piece into which it cuts what the hops before it left; None if it does not cut."""

_ONE_HOP: Route = ((0, None),)


class Segment:
    """Memory for a whole tensor, in which an all-gather completes what each rank has of it.

    Attributes:
        memory, start: The tensor lies in the storage of `memory`, from the element `start` on.
        numel: Elements of the tensor.
        piece_numel: Elements of the largest piece. Rank `r` owns those from `r * piece_numel` on, cut at `numel`.
        route: The hops by which the tensor travels; the segment describes the first. Left out for one axis.
        source: This rank's piece, if it lies elsewhere: an all-gather reads it there, for the peers and for `memory`.
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
        """Describes a range of memory.

        Args:
            memory: A flat tensor with `numel` elements from `start` on, or `n * piece_numel` for a transport that pads.
            numel, piece_numel, route, source: See the attributes.
            start: The first element, in the storage of `memory`; left out, the first of `memory`.
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

    def by_rank(self, size: int) -> Tensor:
        """A row for each rank, padding included."""
        return self.memory.as_strided((size, self.piece_numel), (self.piece_numel, 1), self.start)

    def own(self, rank: int) -> Tensor:
        """The piece of this rank, whose number is `rank`, where it lies before the all-gather."""
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
    """A tensor to sum over ranks, and the place for the mean of this rank's piece.

    Attributes:
        rows: This rank's addend, which pieces cut along the first dim. It is only read, and may have any strides: a gradient
            often comes transposed.
        piece_rows, piece_numel: Rows and elements of the largest piece.
        out: A flat tensor that receives the mean of this rank's piece.
        sum_dtype: Dtype of the running sum.
        route: The hops by which it travels; see `Segment`.
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
    """Contributions that come again in each step, with the same sizes and dtypes, and places in buffers of the same layout.

    Attributes:
        rows: The rows of each contribution.
        buffers: The tensors in which the means are placed.
        numel: Elements of all contributions.
        memo: What a transport has found out about them and keeps for later steps, by the class of the transport.
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
        """Describes them. `make` makes the contribution of a number from its rows, when a transport asks for it."""
        self.rows, self.buffers, self.numel, self.memo = rows, buffers, numel, memo
        self._make = make

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: Any) -> Any:
        return self._make(at, self.rows[at])


MOST_DROPPED_NBYTES = 1 << 30

_dropped: deque[tuple[int, object]] = deque(maxlen=1024)
"""Memory of the last collectives that nobody waited for: messages may still arrive in it, and nobody knows when they have."""


def keep_dropped(messages: object, nbytes: int) -> None:
    """Keeps the memory of a collective of some bytes that nobody will wait for: of the last 16, and of those before while all
    are small."""
    if _dropped is None:  # while the interpreter ends
        return
    _dropped.append((nbytes, messages))
    while len(_dropped) > 16 and sum(each for each, _ in _dropped) > MOST_DROPPED_NBYTES:
        _dropped.popleft()


class Pending:
    """A collective under way.

    Attributes:
        kept: Objects that must live until the collective is done.
        nbytes: Bytes of payload that this rank sends for it.
    """

    __slots__ = ("_finish", "_works", "kept", "nbytes")

    def __init__(
        self,
        works: Sequence[tuple[Any, int | None]] = (),
        finish: Callable[[], None] | None = None,
        kept: object = None,
        nbytes: int = 0,
    ) -> None:
        """
        Args:
            works: Messages to wait for, each with the peer at its other end; None for collectives of the backend.
            finish: What is left to do once they are done.
            kept, nbytes: See the attributes.
        """
        self._works, self._finish, self.kept, self.nbytes = works, finish, kept, nbytes

    def __del__(self) -> None:
        # The model failed and was dropped. If a receive were freed now, the next receive would get its message. On a device
        # the backend itself keeps what it reads and writes until then, and its memory is dear.
        works = getattr(self, "_works", ())  # an interrupt may have come before it was made
        if works and not isinstance(works[0][0], OnStream):
            keep_dropped((works, self._finish, self.kept), self.nbytes)

    def wait(self) -> None:
        """Waits until the result may be used. May be called again. On CUDA the current stream waits, not the host."""
        works, finish = self._works, self._finish
        self._works, self._finish = (), None
        for work, peer in works:
            wait_for(work, peer)
        if finish is not None:
            finish()
        self.kept = None


class Transport(Protocol):
    """What moves bytes along one axis. All ranks call the same operations in the same order.

    `mark` is a number below 2^31 that tells operations apart and is the same on every rank. A transport compares it with
    those of its peers, if it can.
    """

    pads: bool
    """Whether the memory of a `Segment` must have room for `n` full pieces."""

    def prepared(self, segments: Sequence[Segment]) -> Sequence[Segment]:
        """The same segments, prepared for many all-gathers of the same memory: views are cut once, here."""

    def all_gather(self, segments: Sequence[Segment], mark: int = 0) -> Pending:
        """Fills each segment from the pieces of all ranks."""

    def reduce_scatter(self, contributions: Sequence[Contribution], mark: int = 0) -> Pending:
        """Writes into each `out` the mean over ranks of this rank's piece."""

    def any(self, bits: Tensor, mark: int = 0) -> Pending:
        """Ors a uint8 tensor of 0 and 1 over the ranks, in place."""

    def exchange(self, rows: Tensor, mark: int = 0) -> Pending:
        """Fills the rows of the other ranks in a uint8 tensor with a row for each rank, in which this rank's is filled."""

    def give_up(self, failure: Failure | None = None) -> None:
        """Tells the peers, if it can, that this rank sends nothing more after a failure, and which rank it blames."""


_Item = TypeVar("_Item", Segment, Contribution)


def runs_of(items: Sequence[_Item]) -> list[list[_Item]]:
    """Items by the message in which they travel: each large one alone, small ones of a kind together. Alike on all ranks."""
    runs: list[list[_Item]] = []
    packs: dict[object, list[_Item]] = {}
    for item in items:
        if item.is_small:
            packs.setdefault(item.kind, []).append(item)
        else:
            runs.append([item])
    return runs + list(packs.values())


def fill_own(segments: Sequence[Segment], rank: int) -> None:
    """Copies this rank's pieces into `memory`, if they lie elsewhere."""
    apart = [segment for segment in segments if segment.source is not None]
    if apart:
        copy([s.piece(rank) for s in apart], [s.source for s in apart if s.source is not None])


def flat(piece: Tensor) -> Tensor:
    """The elements of a piece in one range of memory."""
    return piece if piece.dim() == 1 and piece.is_contiguous() else piece.contiguous().view(-1)


def joined(run: Sequence[Tensor]) -> Tensor:
    """The elements of several pieces in one range of memory, back to back."""
    return flat(run[0]) if len(run) == 1 else torch.cat([flat(piece) for piece in run])


class Sum:
    """The sum over the ranks of the contributions that travel in one message, and the means.

    Pieces are added in the order of the ranks, from where they lie. This rank's own pieces are not copied before, so the
    gradients that they are part of stay in memory until the sum is made.

    Attributes:
        numel: Elements of the sum on this rank.
    """

    __slots__ = ("_dtype", "_outs", "_pieces", "_rank", "numel")

    def __init__(self, run: Sequence[Contribution], rank: int) -> None:
        """Describes what to sum; `finish` sums it."""
        self._pieces = [contribution.piece(rank).detach() for contribution in run]
        self._outs, self._dtype, self._rank = [contribution.out for contribution in run], run[0].sum_dtype, rank
        self.numel = sum([out.numel() for out in self._outs])

    def finish(self, parts: Mapping[int, Tensor]) -> None:
        """Adds up this rank's pieces and those of its peers, which are given by rank; divides, and writes the means."""
        if len(self._outs) == 1:
            own = self._pieces[0]
            total = self._outs[0].view(own.shape)  # summed in place
        else:
            own = joined(self._pieces)
            total = torch.empty_like(own, dtype=self._dtype)
        addends = {**parts, self._rank: own}
        mean(total, [addends[rank].view(own.shape) for rank in sorted(addends)], self._dtype)
        if len(self._outs) > 1:
            torch._foreach_copy_(self._outs, torch.split(total, [out.numel() for out in self._outs]))
