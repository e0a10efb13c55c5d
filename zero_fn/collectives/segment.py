"""What collectives move: segments, contributions, and the operations every transport has.

[Note: small pieces travel together] A gloo message costs 0.1 to 0.2 ms whatever its size. Pieces below `PACKED_NBYTES`
of one call are packed into one message per peer; larger ones are sent from where they lie.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, overload

import torch
from torch import Tensor

from zero_fn.collectives.waiting import Failure, wait_for
from zero_fn.kernels.nontemporal import copy, mean

__all__ = [
    "PACKED_NBYTES",
    "Contribution",
    "Contributions",
    "Pending",
    "Route",
    "Rows",
    "Segment",
    "Sum",
    "Transport",
    "fill_own",
    "flat",
    "joined",
    "keep_dropped",
    "nbytes_of",
    "packs",
    "runs_of",
]

PACKED_NBYTES = 128 * 1024


Route = Sequence[tuple[int, int | None]]
"""The hops of a tensor, in the order in which axes cut it: the number of the axis, and elements of the largest piece of what
the hops before have left to a rank; None where the axis does not cut it. See `zero_fn.links`."""


class Segment:
    """The whole of one tensor, of which each rank has filled its own piece.

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
        route: Route = ((0, None),),
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

    def padded_piece(self, rank: int) -> Tensor:
        """The piece of a rank with room for a full one, where the transport pads."""
        return self.memory.as_strided((self.piece_numel,), (1,), self.start + rank * self.piece_numel)

    def by_rank(self, size: int) -> Tensor:
        """A row for each rank, padding included."""
        return self.memory.as_strided((size, self.piece_numel), (self.piece_numel, 1), self.start)

    def own(self, rank: int) -> Tensor:
        """The piece of `rank`, which is this one, where it lies before the all-gather."""
        return self.source if self.source is not None else self.piece(rank)

    def in_chunks(self) -> Tensor:
        """The elements in such a shape that pieces are cut along the first dim."""
        return self.whole

    @property
    def is_small(self) -> bool:
        """Whether its pieces travel packed with others. The same on every rank."""
        return self.piece_numel * self.dtype.itemsize < PACKED_NBYTES

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements."""
        return self.memory.dtype


class Rows(Segment):
    """A segment whose elements need not lie flat: a tensor cut along its first dim, in any strides.

    A gradient often comes transposed; its pieces can be copied to where they are needed without being laid flat first.
    """

    __slots__ = ("_piece_rows", "_rows")

    def __init__(self, rows: Tensor, piece_rows: int, route: Route = ((0, None),)) -> None:
        self._rows, self._piece_rows, self.route, self.source = rows, piece_rows, route, None
        self.numel = rows.numel()
        self.piece_numel = piece_rows * (self.numel // rows.shape[0])

    def piece(self, rank: int) -> Tensor:
        """The rows that `rank` owns; may be empty."""
        count = self._rows.shape[0]
        start = min(rank * self._piece_rows, count)
        return self._rows.narrow(0, start, min(self._piece_rows, count - start))

    def in_chunks(self) -> Tensor:
        return self._rows

    @property
    def whole(self) -> Tensor:
        """All elements, flat."""
        return self._rows.reshape(-1)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements."""
        return self._rows.dtype


class Contribution:
    """One tensor to be summed over ranks, and where the mean of this rank's piece goes.

    Attributes:
        addend: Segment with this rank's addend everywhere. It is only read.
        memory, place: Where the mean goes: the tensor, or this range of its storage (first element, number of elements).
        sum_dtype: Dtype of the running sum.
    """

    __slots__ = ("addend", "memory", "place", "sum_dtype")

    def __init__(
        self, addend: Segment, out: Tensor, sum_dtype: torch.dtype, place: tuple[int, int] | None = None
    ) -> None:
        self.addend, self.memory, self.sum_dtype, self.place = addend, out, sum_dtype, place

    @property
    def out(self) -> Tensor:
        """Receives the mean: as many elements as this rank's piece. Cut when it is asked for."""
        if self.place is None:
            return self.memory
        start, numel = self.place
        return self.memory.as_strided((numel,), (1,), start)


class Contributions(Sequence[Contribution]):
    """Contributions of which there will be more, of the same sizes, dtypes and places, in each step.

    Attributes:
        rows: The addends, one tensor each, in such a shape that pieces are cut along the first dim.
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

    @overload
    def __getitem__(self, at: int) -> Contribution: ...

    @overload
    def __getitem__(self, at: slice) -> list[Contribution]: ...

    def __getitem__(self, at: int | slice) -> Contribution | list[Contribution]:
        if isinstance(at, slice):
            return [self[i] for i in range(len(self.rows))[at]]
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
    """What the runtime asks of a group of ranks. All ranks call the same operations in the same order.

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

    def exchange(self, message: Tensor, mark: int = 0) -> Tensor:
        """Returns the uint8 messages of all ranks, one row each; lengths must agree. Waits."""

    def give_up(self, failure: Failure | None = None) -> None:
        """After a failure: tells the peers, where it can, that nothing more will come, and whom this rank blames."""


_Item = TypeVar("_Item", Segment, Contribution)


def packs(items: Sequence[_Item]) -> list[list[_Item]]:
    """Small items by dtypes: what travels in one message. The same on every rank."""
    packs: dict[object, list[_Item]] = {}
    for item in items:
        segment = item if isinstance(item, Segment) else item.addend
        if segment.is_small:
            key = segment.dtype if isinstance(item, Segment) else (segment.dtype, item.sum_dtype)
            packs.setdefault(key, []).append(item)
    return list(packs.values())


def fill_own(segments: Sequence[Segment], rank: int) -> None:
    """Copies this rank's pieces into `whole` where they lie elsewhere."""
    apart = [segment for segment in segments if segment.source is not None]
    if apart:
        copy([s.piece(rank) for s in apart], [s.source for s in apart if s.source is not None])


def nbytes_of(tensor: Tensor) -> int:
    """Bytes of the elements of a tensor."""
    return tensor.numel() * tensor.element_size()


def flat(piece: Tensor) -> Tensor:
    """The elements of a piece in one range of memory, as collectives send it."""
    return piece.contiguous().view(-1)


def joined(run: Sequence[Tensor]) -> Tensor:
    """The elements of some pieces back to back."""
    return flat(run[0]) if len(run) == 1 else torch.cat([flat(piece) for piece in run])


def runs_of(items: Sequence[_Item]) -> list[list[_Item]]:
    """What travels in one message each: large items alone, small ones of one dtype together."""
    runs: list[list[_Item]] = []
    for item in items:
        segment = item if isinstance(item, Segment) else item.addend
        if not segment.is_small:
            runs.append([item])
    return runs + packs(items)


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
        self._pieces = [contribution.addend.piece(rank).detach() for contribution in run]
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
