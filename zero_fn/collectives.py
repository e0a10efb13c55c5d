"""The collectives a step needs, over one axis. The only file that moves bytes between ranks.

Two transports speak the same four operations:

    all-gather       "n piece -> (n piece)", in place: each rank's piece of a segment reaches all ranks
    reduce-scatter   "src (n piece) -> n piece", mean over src: each rank receives the mean of its piece
    any              "src bits -> bits", or over src: which ranks take part
    exchange         "bytes -> src bytes": small agreement between ranks

[Note: direct exchange] On gloo a direct exchange (every rank sends each peer the piece it needs) takes a third of the
time of gloo's own ring collectives, and the receiver may add the pieces in the order of the ranks. So a sum does not
depend on how the tensor is cut: that is why every stage gives bitwise the same numbers. It also accumulates in float32
what travels as bfloat16.

[Note: small pieces travel together] A gloo message costs 0.1 to 0.2 ms whatever its size. Pieces below
`PACKED_NBYTES` of one call are packed into one message per peer; larger ones are sent from where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from zero_fn.mesh import Axis
from zero_fn.traffic import count

__all__ = ["PACKED_NBYTES", "Alone", "Contribution", "Pending", "Segment", "Transport", "transport"]

PACKED_NBYTES = 128 * 1024

# Message tags: directions never wait for one another, nor meet messages of the user on the same group.
_GATHER, _REDUCE, _CONTROL = 0x7A660001, 0x7A660002, 0x7A660003


@dataclass(frozen=True, slots=True)
class Segment:
    """The whole of one tensor, of which each rank has filled its own piece.

    Attributes:
        whole: Flat; at least `numel` elements, and `n * piece_numel` where the transport pads.
        numel: Valid elements.
        piece_numel: Elements of the largest piece; rank `r` owns those from `r * piece_numel`, cut at `numel`.
    """

    whole: Tensor
    numel: int
    piece_numel: int

    def piece(self, rank: int) -> Tensor:
        """The elements that `rank` owns; may be empty."""
        start = min(rank * self.piece_numel, self.numel)
        return self.whole.narrow(0, start, min(self.piece_numel, self.numel - start))


@dataclass(frozen=True, slots=True)
class Contribution:
    """One tensor to be summed over ranks, and where the mean of this rank's piece goes.

    Attributes:
        addend: Segment with this rank's addend everywhere. It is only read.
        out: Receives the mean: as many elements as this rank's piece.
        sum_dtype: Dtype of the running sum.
    """

    addend: Segment
    out: Tensor
    sum_dtype: torch.dtype


class Pending:
    """A collective under way. `wait` returns when its result may be used and may be called again."""

    __slots__ = ("_finish", "_works", "kept")

    def __init__(
        self, works: Sequence[Any] = (), finish: Callable[[], None] | None = None, kept: object = None
    ) -> None:
        self._works, self._finish, self.kept = works, finish, kept

    def wait(self) -> None:
        """Waits for the bytes, then finishes the arithmetic. On CUDA the current stream waits, not the host."""
        works, finish = self._works, self._finish
        self._works, self._finish = (), None
        for work in works:
            work.wait()
        if finish is not None:
            finish()
        self.kept = None


class Transport(Protocol):
    """What the runtime asks of a group of ranks. All ranks call the same operations in the same order."""

    pads: bool
    """Whether `Segment.whole` must have room for `n` full pieces."""

    def all_gather(self, segments: Sequence[Segment]) -> Pending:
        """Fills each segment from the pieces of all ranks."""

    def reduce_scatter(self, contributions: Sequence[Contribution]) -> Pending:
        """Writes into each `out` the mean over ranks of this rank's piece."""

    def any(self, bits: Tensor) -> Pending:
        """Ors a uint8 tensor of 0 and 1 over the ranks, in place."""

    def exchange(self, message: Tensor) -> Tensor:
        """Returns the uint8 messages of all ranks, one row each; lengths must agree. Waits."""


def transport(axis: Axis) -> Transport:
    """The transport for the backend of an axis: direct exchange on gloo, native collectives elsewhere."""
    if axis.size == 1:
        return Alone()
    group = axis.group
    if dist.get_backend(group) == "gloo":
        return _Exchange(group, axis.rank, axis.size)
    return _Native(group, axis.rank, axis.size)


class Alone:
    """One rank: nothing moves."""

    pads = False

    def all_gather(self, segments: Sequence[Segment]) -> Pending:
        return Pending()

    def reduce_scatter(self, contributions: Sequence[Contribution]) -> Pending:
        for contribution in contributions:
            contribution.out.copy_(contribution.addend.piece(0))
        return Pending()

    def any(self, bits: Tensor) -> Pending:
        return Pending()

    def exchange(self, message: Tensor) -> Tensor:
        return message.unsqueeze(0)


class _Exchange:
    """Every rank sends each peer the piece it needs; sums are in rank order. [Note: direct exchange]"""

    pads = False

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self._group, self._rank, self._size = group, rank, size
        # In this order no rank is the first target of all others.
        self._peers = [((rank + step) % size, (rank - step) % size) for step in range(1, size)]

    def all_gather(self, segments: Sequence[Segment]) -> Pending:
        packed, single = _by_size(segments, lambda segment: segment)
        works: list[Any] = []
        sent_nbytes = 0
        own = [segment.piece(self._rank) for segment in single]
        for target, source in self._peers:
            for segment, piece in zip(single, own, strict=True):
                self._receive(segment.piece(source), source, _GATHER, works)
                sent_nbytes += self._send(piece, target, _GATHER, works)
        arrived: list[tuple[int, Tensor]] = []
        if packed:
            message = _pack([segment.piece(self._rank) for segment in packed])
            for target, source in self._peers:
                buffer = message.new_empty(sum(_nbytes(segment.piece(source)) for segment in packed))
                self._receive(buffer, source, _GATHER, works)
                sent_nbytes += self._send(message, target, _GATHER, works)
                arrived.append((source, buffer))
            own.append(message)

        def unpack() -> None:
            for source, buffer in arrived:
                _unpack(buffer, [segment.piece(source) for segment in packed])

        count("all-gather", sent_nbytes)
        return Pending(works, unpack if packed else None, own)

    def reduce_scatter(self, contributions: Sequence[Contribution]) -> Pending:
        packed, single = _by_size(contributions, lambda contribution: contribution.addend)
        works: list[Any] = []
        sent_nbytes = 0
        addends: list[list[Tensor]] = []
        for contribution in single:
            own = contribution.addend.piece(self._rank)
            addends.append([own if rank == self._rank else torch.empty_like(own) for rank in range(self._size)])
        for target, source in self._peers:
            for contribution, parts in zip(single, addends, strict=True):
                self._receive(parts[source], source, _REDUCE, works)
                sent_nbytes += self._send(contribution.addend.piece(target), target, _REDUCE, works)
        arrived: dict[int, Tensor] = {}
        kept: list[Tensor] = []
        if packed:
            arrived[self._rank] = _pack([contribution.addend.piece(self._rank) for contribution in packed])
            for target, source in self._peers:
                message = _pack([contribution.addend.piece(target) for contribution in packed])
                arrived[source] = torch.empty_like(arrived[self._rank])
                self._receive(arrived[source], source, _REDUCE, works)
                sent_nbytes += self._send(message, target, _REDUCE, works)
                kept.append(message)

        def add() -> None:
            for contribution, parts in zip(single, addends, strict=True):
                _mean(parts, contribution, self._rank)
            if packed:
                by_rank = [_views(arrived[rank], [c.out.numel() for c in packed], packed) for rank in range(self._size)]
                for contribution, *parts in zip(packed, *by_rank, strict=True):
                    _mean(parts, contribution, self._rank)

        count("reduce-scatter", sent_nbytes)
        return Pending(works, add, (kept, contributions))

    def any(self, bits: Tensor) -> Pending:
        others = [torch.empty_like(bits) for _ in self._peers]
        works: list[Any] = []
        message = bits.clone()
        sent_nbytes = 0
        for (target, source), other in zip(self._peers, others, strict=True):
            self._receive(other, source, _CONTROL, works)
            sent_nbytes += self._send(message, target, _CONTROL, works)

        def merge() -> None:
            for other in others:
                bits.bitwise_or_(other)

        count("control", sent_nbytes)
        return Pending(works, merge, message)

    def exchange(self, message: Tensor) -> Tensor:
        rows = message.new_empty((self._size, message.numel()))
        rows[self._rank] = message
        works: list[Any] = []
        sent_nbytes = 0
        for target, source in self._peers:
            self._receive(rows[source], source, _CONTROL, works)
            sent_nbytes += self._send(message, target, _CONTROL, works)
        count("control", sent_nbytes)
        Pending(works, kept=message).wait()
        return rows

    def _send(self, piece: Tensor, target: int, tag: int, works: list[Any]) -> int:
        if not piece.numel():
            return 0
        works.append(self._group.send([piece], target, tag))
        return _nbytes(piece)

    def _receive(self, piece: Tensor, source: int, tag: int, works: list[Any]) -> None:
        if piece.numel():
            works.append(self._group.recv([piece], source, tag))


class _Native:
    """The backend's own collectives, grouped and in place (NCCL and others)."""

    pads = True

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self._group, self._rank, self._size = group, rank, size

    def all_gather(self, segments: Sequence[Segment]) -> Pending:
        if not segments:
            return Pending()
        # As bytes: a group of several dtypes is mixed up by gloo, and not every backend knows every dtype.
        wholes = [
            segment.whole.narrow(0, 0, segment.piece_numel * self._size).view(torch.uint8) for segment in segments
        ]
        nbytes = [whole.numel() // self._size for whole in wholes]
        pieces = [whole.narrow(0, self._rank * n, n) for whole, n in zip(wholes, nbytes, strict=True)]
        with _coalescing_manager(self._group, async_ops=True) as manager:
            for whole, piece in zip(wholes, pieces, strict=True):
                _all_gather_single(whole, piece, group=self._group, async_op=True)
        count("all-gather", sum(_nbytes(piece) for piece in pieces) * (self._size - 1))
        return Pending([manager], kept=pieces)

    def reduce_scatter(self, contributions: Sequence[Contribution]) -> Pending:
        inputs, outputs = [], []
        for contribution in contributions:
            segment = contribution.addend
            padded_numel = segment.piece_numel * self._size
            whole = segment.whole
            if whole.numel() != padded_numel or whole.dtype != contribution.sum_dtype:
                source = whole.narrow(0, 0, segment.numel)
                whole = torch.zeros(padded_numel, dtype=contribution.sum_dtype, device=source.device)
                whole.narrow(0, 0, segment.numel).copy_(source)
            inputs.append(whole)
            outputs.append(whole.new_empty(segment.piece_numel))
        managers = []
        for dtype in dict.fromkeys(whole.dtype for whole in inputs):  # one group each: gloo mixes up dtypes in a group
            with _coalescing_manager(self._group, async_ops=True) as manager:
                for whole, piece in zip(inputs, outputs, strict=True):
                    if whole.dtype == dtype:
                        real = (_real(piece), _real(whole))
                        _reduce_scatter_single(*real, op=dist.ReduceOp.SUM, group=self._group, async_op=True)
            managers.append(manager)

        def divide() -> None:
            for contribution, piece in zip(contributions, outputs, strict=True):
                mean = piece.narrow(0, 0, contribution.out.numel()).div_(self._size)
                contribution.out.copy_(mean)

        count("reduce-scatter", sum(_nbytes(piece) for piece in outputs) * (self._size - 1))
        return Pending(managers, divide, (inputs, contributions))

    def any(self, bits: Tensor) -> Pending:
        count("control", 2 * bits.numel() * (self._size - 1) // self._size)
        return Pending([dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=self._group, async_op=True)], kept=bits)

    def exchange(self, message: Tensor) -> Tensor:
        rows = message.new_empty((self._size, message.numel()))
        _all_gather_single(rows.view(-1), message, group=self._group)
        count("control", message.numel() * (self._size - 1))
        return rows


# torch 2.13 renamed these and warns about the old names, which are the only ones in 2.11.
_all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _mean(parts: list[Tensor], contribution: Contribution, rank: int) -> None:
    """Adds the parts in the order of the ranks and divides; the part of `rank` is only read."""
    out, dtype = contribution.out, contribution.sum_dtype
    if out.dtype == dtype == parts[0].dtype:
        # `out` may be the part of `rank` itself, so it is not written before that part was read.
        total = parts[0] if rank else out
        first, last = (1, parts[-1]) if rank else (2, None)
        if not rank:
            torch.add(parts[0], parts[1], out=out)
        for part in parts[first : len(parts) - (last is not None)]:
            total.add_(part)
        if last is not None:
            torch.add(total, last, out=out)
        out.div_(len(parts))
        return
    total = parts[0].to(dtype, copy=True)
    for part in parts[1:]:
        total.add_(part)
    out.copy_(total.div_(len(parts)))


_Item = TypeVar("_Item")


def _by_size(items: Sequence[_Item], segment_of: Callable[[_Item], Segment]) -> tuple[list[_Item], list[_Item]]:
    """Items whose pieces travel together, and those that travel alone. The same on every rank."""
    packed: list[_Item] = []
    single: list[_Item] = []
    for item in items:
        segment = segment_of(item)
        nbytes = segment.piece_numel * segment.whole.element_size()
        (packed if nbytes < PACKED_NBYTES else single).append(item)
    return packed, single


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _real(flat: Tensor) -> Tensor:
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def _pack(pieces: Sequence[Tensor]) -> Tensor:
    return torch.cat([piece.view(torch.uint8) for piece in pieces])


def _unpack(message: Tensor, pieces: Sequence[Tensor]) -> None:
    start = 0
    for piece in pieces:
        piece.view(torch.uint8).copy_(message.narrow(0, start, _nbytes(piece)))
        start += _nbytes(piece)


def _views(message: Tensor, numels: Sequence[int], contributions: Sequence[Contribution]) -> list[Tensor]:
    views, start = [], 0
    for numel, contribution in zip(numels, contributions, strict=True):
        dtype = contribution.addend.whole.dtype
        part = message.narrow(0, start, numel * dtype.itemsize)
        # A part that does not start on a multiple of its item size cannot be viewed in place.
        views.append((part if start % dtype.itemsize == 0 else part.clone()).view(dtype))
        start += numel * dtype.itemsize
    return views
