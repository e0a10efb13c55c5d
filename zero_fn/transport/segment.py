"""What collectives move: segments that an all-gather completes,
contributions that a reduce-scatter sums, and parcels.

Each transport makes a plan of them (`gather_plan`, `reduce_plan`), once for memory that is gathered
many times and for sums that are made in every step.

[Note: small pieces travel together] A message over gloo takes 0.1 to 0.2 ms, however small. So the
pieces of a call that are smaller than `PACKED_NBYTES` are packed into one message for each peer.
Larger pieces are sent from where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from zero_fn.kernels.nontemporal import copy

__all__ = [
    "PACKED_NBYTES",
    "BufferPlace",
    "ByRank",
    "Contribution",
    "Parcels",
    "Route",
    "Segment",
    "runs_of",
]

PACKED_NBYTES = 128 * 1024

Route = Sequence[tuple[int, int | None]]
"""Hops of a tensor, in the order in which axes cut it (see `zero_fn.transport.links`): the number
of the axis, and the elements of the largest piece into which it cuts what the hops before it left;
None if it does not cut."""

ByRank = Sequence[Sequence[Tensor]]
"""Tensors that go to each rank of an axis, or come from it; none for this rank.

Any shapes, strides and dtypes.
"""


class Segment:
    """Memory for a whole tensor, in which an all-gather completes what each rank has of it."""

    __slots__ = ("axis", "is_tight", "later", "memory", "numel", "piece_numel", "source", "start")

    def __init__(
        self,
        memory: Tensor,
        numel: int,
        piece_numel: int,
        axis: int = 0,
        later: Route = (),
        *,
        start: int | torch.SymInt | None = None,
        source: Tensor | None = None,
        is_tight: bool = False,
    ) -> None:
        # Flat memory, from the element `start` of its storage on: `numel` elements, or
        # `n * piece_numel` for a transport that pads.
        self.memory = memory
        self.start = memory.storage_offset() if start is None else start
        self.numel = numel
        # Rank `r` owns the elements from `r * piece_numel` on, cut at `numel`.
        self.piece_numel = piece_numel
        self.axis = axis  # the number of that along which it is gathered
        self.later = later  # the hops that cut the pieces: they are made before
        # This rank's piece, if it lies elsewhere: it is read there, for the peers and for `memory`.
        self.source = source
        # Whether `memory` has room for `numel` elements only, whatever the transport.
        self.is_tight = is_tight

    def piece_bounds(self, rank: int) -> tuple[int, int]:
        """First element and number of elements that `rank` owns; the number may be 0."""
        start = min(rank * self.piece_numel, self.numel)
        return start, min(self.piece_numel, self.numel - start)

    def piece(self, rank: int) -> Tensor:
        """The elements that `rank` owns; may be empty."""
        start, numel = self.piece_bounds(rank)
        return self.memory.as_strided((numel,), (1,), self.start + start)

    def piece_to_complete(self, rank: int) -> Segment | None:
        """The piece that `rank` owns, which the hops after the first complete before;
        None if no other axis cuts it."""
        hops = [hop for hop in self.later if hop[1] is not None]
        if not hops:
            return None
        (axis, piece_numel), *later = hops
        start, numel = self.piece_bounds(rank)
        return Segment(
            self.memory,
            numel,
            piece_numel or 0,
            axis,
            later,
            start=self.start + start,
            is_tight=True,
        )

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
    """A tensor to sum over ranks, and the place for the mean of this rank's piece."""

    __slots__ = ("axis", "later", "out", "piece_numel", "piece_rows", "rows", "sum_dtype")

    def __init__(
        self,
        rows: Tensor,
        piece_rows: int,
        out: Tensor,
        sum_dtype: torch.dtype,
        axis: int = 0,
        later: Route = (),
    ) -> None:
        # This rank's addend. It is only read, and has any strides:
        # a gradient often comes transposed.
        self.rows = rows
        self.out = out  # flat
        self.sum_dtype = sum_dtype
        self.axis = axis  # the number of that over which it is summed first
        self.later = later  # the hops over which the sums are summed after that
        self.piece_rows = piece_rows  # of the largest piece: pieces are cut along the first dim
        self.piece_numel = piece_rows * (rows.numel() // max(rows.shape[0], 1))

    def piece_bounds(self, rank: int) -> tuple[int, int]:
        """First row and number of rows that `rank` owns; the number may be 0."""
        count = self.rows.shape[0]
        start = min(rank * self.piece_rows, count)
        return start, min(self.piece_rows, count - start)

    def numel_of(self, rank: int) -> int:
        """The number of elements that `rank` owns."""
        return self.piece_bounds(rank)[1] * (self.piece_numel // max(self.piece_rows, 1))

    @property
    def kind(self) -> tuple[torch.dtype, torch.dtype]:
        """What small pieces that travel together have in common."""
        return self.rows.dtype, self.sum_dtype

    @property
    def is_small(self) -> bool:
        """Whether its pieces travel packed with others. The same on every rank."""
        return self.piece_numel * self.rows.dtype.itemsize < PACKED_NBYTES


_Item = TypeVar("_Item", Segment, Contribution)


def runs_of(items: Sequence[_Item]) -> list[list[int]]:
    """The numbers of items by the message in which they travel: each large one alone,
    small ones of a kind together.

    Alike on all ranks.
    """
    runs: list[list[int]] = []
    packs: dict[object, list[int]] = {}
    for number, item in enumerate(items):
        if item.is_small:
            packs.setdefault(item.kind, []).append(number)
        else:
            runs.append([number])
    return runs + list(packs.values())


class Parcels:
    """Tensors to or from each rank, as one message of bytes for each.

    In it every tensor begins where any dtype may.
    """

    def __init__(self, by_rank: ByRank, device: torch.device) -> None:
        self._tensors = [tensor.detach() for several in by_rank for tensor in several]
        rooms = [[-(-tensor.nbytes // 16) * 16 for tensor in several] for several in by_rank]
        self.splits = [sum(each) for each in rooms]
        self.whole = torch.empty(sum(self.splits), dtype=torch.uint8, device=device)
        self.messages = self.whole.split_with_sizes(self.splits)
        parts = self.whole.split_with_sizes([room for each in rooms for room in each])
        self._pieces = [
            room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for tensor, room in zip(self._tensors, parts, strict=True)
        ]
        self.nbytes = sum([tensor.nbytes for tensor in self._tensors])  # without padding

    def pack(self) -> None:
        """Copies the tensors into the messages."""
        copy(self._pieces, self._tensors)

    def unpack(self, *_: object) -> None:
        """Copies the messages to the tensors."""
        copy(self._tensors, self._pieces)


class BufferPlace:
    """A flat range of one of several buffers, of which every step has others of the same layout."""

    __slots__ = ("_buffer", "_is_all", "_numel", "_start")

    def __init__(self, out: Tensor, buffers: Sequence[Tensor]) -> None:
        storages = [buffer.untyped_storage()._cdata for buffer in buffers]
        self._buffer = storages.index(out.untyped_storage()._cdata)
        self._numel = out.numel()
        self._start = out.storage_offset()
        self._is_all = (out.shape, self._start) == (buffers[self._buffer].shape, 0)

    def of(self, buffers: Sequence[Tensor]) -> Tensor:
        """The range in these buffers."""
        buffer = buffers[self._buffer]
        return buffer if self._is_all else buffer.as_strided((self._numel,), (1,), self._start)
