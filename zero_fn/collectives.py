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
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zero_fn.mesh import Axis
from zero_fn.traffic import count

__all__ = ["PACKED_NBYTES", "Alone", "Contribution", "Pending", "Segment", "Transport", "transport"]

PACKED_NBYTES = 128 * 1024

# Message tags: directions never wait for one another, nor meet messages of the user on the same group.
_GATHER, _REDUCE, _CONTROL = 0x7A660001, 0x7A660002, 0x7A660003


class Segment:
    """The whole of one tensor, of which each rank has filled its own piece.

    Attributes:
        whole: Flat; at least `numel` elements, and `n * piece_numel` where the transport pads.
        numel: Valid elements.
        piece_numel: Elements of the largest piece; rank `r` owns those from `r * piece_numel`, cut at `numel`.
    """

    __slots__ = ("numel", "piece_numel", "whole")

    def __init__(self, whole: Tensor, numel: int, piece_numel: int) -> None:
        self.whole, self.numel, self.piece_numel = whole, numel, piece_numel

    def piece_bounds(self, rank: int) -> tuple[int, int]:
        """First element and number of elements that `rank` owns; the number may be 0."""
        start = min(rank * self.piece_numel, self.numel)
        return start, min(self.piece_numel, self.numel - start)

    def piece(self, rank: int) -> Tensor:
        """The elements that `rank` owns; may be empty."""
        return self.whole.narrow(0, *self.piece_bounds(rank))

    @property
    def is_small(self) -> bool:
        """Whether its pieces travel packed with others. The same on every rank."""
        return self.piece_numel * self.whole.element_size() < PACKED_NBYTES


class Contribution:
    """One tensor to be summed over ranks, and where the mean of this rank's piece goes.

    Attributes:
        addend: Segment with this rank's addend everywhere. It is only read.
        out: Receives the mean: as many elements as this rank's piece.
        sum_dtype: Dtype of the running sum.
    """

    __slots__ = ("addend", "out", "sum_dtype")

    def __init__(self, addend: Segment, out: Tensor, sum_dtype: torch.dtype) -> None:
        self.addend, self.out, self.sum_dtype = addend, out, sum_dtype


class Pending:
    """A collective under way. `wait` returns when its result may be used and may be called again."""

    __slots__ = ("_finish", "_works", "kept")

    def __init__(
        self, works: Sequence[Any] = (), finish: Callable[[], None] | None = None, kept: object = None
    ) -> None:
        self._works, self._finish, self.kept = works, finish, kept

    def is_done(self) -> bool:
        """Whether `wait` would not wait."""
        return all(work.is_completed() for work in self._works)

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
        works: list[Any] = []
        kept: list[Tensor] = []
        sent_nbytes = 0
        for segment in segments:
            if segment.is_small:
                continue
            own = segment.piece(self._rank)
            kept.append(own)
            for target, source in self._peers:
                self._receive(segment.piece(source), source, _GATHER, works)
                sent_nbytes += self._send(own, target, _GATHER, works)
        arrived: list[tuple[Tensor, list[Tensor]]] = []
        for pack in _packs(segments):
            message = torch.cat([segment.piece(self._rank) for segment in pack])
            kept.append(message)
            for target, source in self._peers:
                pieces = [segment.piece(source) for segment in pack]
                buffer = message.new_empty(sum(piece.numel() for piece in pieces))
                self._receive(buffer, source, _GATHER, works)
                sent_nbytes += self._send(message, target, _GATHER, works)
                arrived.append((buffer, pieces))

        def unpack() -> None:
            for buffer, pieces in arrived:
                torch._foreach_copy_(pieces, torch.split(buffer, [piece.numel() for piece in pieces]))

        count("all-gather", sent_nbytes)
        return Pending(works, unpack if arrived else None, kept)

    def reduce_scatter(self, contributions: Sequence[Contribution]) -> Pending:
        works: list[Any] = []
        kept: list[Tensor] = []
        sums: list[tuple[list[Tensor], list[Contribution]]] = []
        sent_nbytes = 0
        for contribution in contributions:
            addend = contribution.addend
            if addend.is_small:
                continue
            own = addend.piece(self._rank)
            parts = [own if rank == self._rank else torch.empty_like(own) for rank in range(self._size)]
            for target, source in self._peers:
                self._receive(parts[source], source, _REDUCE, works)
                sent_nbytes += self._send(addend.piece(target), target, _REDUCE, works)
            sums.append((parts, [contribution]))
        for pack in _packs(contributions):
            own = torch.cat([contribution.addend.piece(self._rank) for contribution in pack])
            parts = [own if rank == self._rank else torch.empty_like(own) for rank in range(self._size)]
            for target, source in self._peers:
                message = torch.cat([contribution.addend.piece(target) for contribution in pack])
                kept.append(message)
                self._receive(parts[source], source, _REDUCE, works)
                sent_nbytes += self._send(message, target, _REDUCE, works)
            sums.append((parts, pack))

        def add() -> None:
            for parts, pack in sums:
                if len(pack) == 1:
                    _mean_into(pack[0].out, parts, pack[0].sum_dtype, self._rank)
                    continue
                mean = torch.empty_like(parts[0], dtype=pack[0].sum_dtype)
                _mean_into(mean, parts, pack[0].sum_dtype, self._rank)
                outs = [contribution.out for contribution in pack]
                torch._foreach_copy_(outs, torch.split(mean, [out.numel() for out in outs]))

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
        # The group's own methods: dist.all_gather_into_tensor for each tensor costs the host ten times as much. torch 2.13
        # renamed them.
        self._gather = _method(group, "all_gather_single_coalesced", "allgather_into_tensor_coalesced")
        self._reduce = _method(group, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")

    def all_gather(self, segments: Sequence[Segment]) -> Pending:
        if not segments:
            return Pending()
        # As bytes: a group of several dtypes is mixed up by gloo, and not every backend knows every dtype.
        wholes = [
            segment.whole.narrow(0, 0, segment.piece_numel * self._size).view(torch.uint8) for segment in segments
        ]
        nbytes = [whole.numel() // self._size for whole in wholes]
        pieces = [whole.narrow(0, self._rank * n, n) for whole, n in zip(wholes, nbytes, strict=True)]
        count("all-gather", sum(map(_nbytes, pieces)) * (self._size - 1))
        return Pending([self._gather(wholes, pieces)], kept=pieces)

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
        works = []
        for dtype in dict.fromkeys(whole.dtype for whole in inputs):  # one group each: gloo mixes up dtypes in a group
            chosen = [(piece, whole) for piece, whole in zip(outputs, inputs, strict=True) if whole.dtype == dtype]
            works.append(self._reduce([_real(piece) for piece, _ in chosen], [_real(whole) for _, whole in chosen]))

        def divide() -> None:
            outs = [contribution.out for contribution in contributions]
            torch._foreach_div_(outputs, self._size)
            torch._foreach_copy_(outs, [p.narrow(0, 0, out.numel()) for p, out in zip(outputs, outs, strict=True)])

        count("reduce-scatter", sum(map(_nbytes, outputs)) * (self._size - 1))
        return Pending(works, divide if outputs else None, (inputs, contributions))

    def any(self, bits: Tensor) -> Pending:
        count("control", 2 * bits.numel() * (self._size - 1) // self._size)
        return Pending([dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=self._group, async_op=True)], kept=bits)

    def exchange(self, message: Tensor) -> Tensor:
        rows = message.new_empty((self._size, message.numel()))
        self._gather([rows.view(-1)], [message]).wait()
        count("control", message.numel() * (self._size - 1))
        return rows


def _method(group: dist.ProcessGroup, *names: str) -> Callable[..., Any]:
    """The first of these methods that this torch has."""
    found = next(getattr(group, name) for name in names if hasattr(group, name))
    return cast(Callable[..., Any], found)


def _mean_into(out: Tensor, parts: list[Tensor], dtype: torch.dtype, rank: int) -> None:
    """Adds the parts in the order of the ranks and divides; the part of `rank` is only read."""
    if out.dtype == dtype == parts[0].dtype:
        # `out` may be the part of `rank` itself, so it is not written before that part was read.
        if rank == 0:
            torch.add(parts[0], parts[1], out=out)
            for part in parts[2:]:
                out.add_(part)
        else:
            total = parts[0]
            for part in parts[1:-1]:
                total.add_(part)
            torch.add(total, parts[-1], out=out)
        out.div_(len(parts))
        return
    total = parts[0].to(dtype, copy=True)
    for part in parts[1:]:
        total.add_(part)
    out.copy_(total.div_(len(parts)))


_Item = TypeVar("_Item", Segment, Contribution)


def _packs(items: Sequence[_Item]) -> list[list[_Item]]:
    """Small items by dtypes: what travels in one message. The same on every rank."""
    packs: dict[object, list[_Item]] = {}
    for item in items:
        segment = item if isinstance(item, Segment) else item.addend
        if segment.is_small:
            key = segment.whole.dtype if isinstance(item, Segment) else (segment.whole.dtype, item.sum_dtype)
            packs.setdefault(key, []).append(item)
    return list(packs.values())


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _real(flat: Tensor) -> Tensor:
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
