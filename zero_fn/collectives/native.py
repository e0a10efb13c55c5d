"""The backend's own collectives: NCCL, and any other.

Large pieces travel in one group, from where they rest to where they are used; small even ones packed into one message.
[Note: small pieces travel together] Packing has run on gloo and under torch's simulator of ranks, not on a device yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zero_fn.collectives.segment import Contribution, Contributions, Pending, Segment
from zero_fn.traffic import count

__all__ = ["Native"]


class Native:
    """Collectives of a process group. Sums are in the order the backend chooses."""

    pads = True

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self._group, self._rank, self._size = group, rank, size
        # The group's own methods: dist.all_gather_into_tensor for each tensor costs the host ten times as much. torch 2.13
        # renamed them.
        self._gather = _method(group, "all_gather_single_coalesced", "allgather_into_tensor_coalesced")
        self._reduce = _method(group, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")

    def prepared(self, segments: Sequence[Segment]) -> Sequence[Segment]:
        return _Prepared(segments, self._rank, self._size)

    def all_gather(self, segments: Sequence[Segment], mark: int = 0) -> Pending:
        if not segments:
            return Pending()
        plan = segments if isinstance(segments, _Prepared) else _Prepared(segments, self._rank, self._size)
        wholes: list[Tensor] = []
        pieces: list[Tensor] = []
        for pack in plan.packs:
            pieces.append(pack.own if pack.own is not None else torch.cat(pack.pieces))
            wholes.append(pack.begin())
        for segment, whole, piece in plan.apart:
            if segment.source is not None and piece is not segment.source:
                segment.piece(self._rank).copy_(segment.source)
            wholes.append(whole)
            pieces.append(piece)
        if not plan.travels_as_it_is:
            wholes, pieces = [w.view(torch.uint8) for w in wholes], [piece.view(torch.uint8) for piece in pieces]

        def unpack() -> None:
            for pack in plan.packs:
                pack.finish()

        count("all-gather", plan.nbytes * (self._size - 1))
        return Pending(
            [_work(self._gather(wholes, pieces), pieces[0])], unpack if plan.packs else None, (pieces, wholes)
        )

    def reduce_scatter(self, contributions: Sequence[Contribution], mark: int = 0) -> Pending:
        plan = self._plan(contributions)
        if isinstance(contributions, Contributions):
            rows = contributions.rows
        else:
            rows = [contribution.addend.in_chunks() for contribution in contributions]
        inputs: dict[torch.dtype, list[Tensor]] = {}  # one group each: gloo mixes up dtypes in a group
        outputs: dict[torch.dtype, list[Tensor]] = {}
        sums: list[Tensor] = []
        written: list[tuple[list[Tensor], Tensor, list[int]]] = []  # outs, the sums they take, pieces of these

        def issue(whole: Tensor, total: Tensor, dtype: torch.dtype) -> None:
            sums.append(total)
            inputs.setdefault(dtype, []).append(whole)
            outputs.setdefault(dtype, []).append(total)

        for pack in plan.packs:
            message = torch._chunk_cat([rows[at] for at in pack.at], 0, self._size).view(-1)
            if pack.place is not None and isinstance(contributions, Contributions):
                total = contributions.buffers[pack.buffer].as_strided(*pack.place)
            else:
                total = message.new_empty(sum(pack.sizes), dtype=pack.dtype)
                written.append(([contributions[at].out for at in pack.at], total, pack.sizes))
            issue(message if pack.is_as_summed else message.to(pack.dtype), total, pack.dtype)
        for at in plan.apart:
            contribution = contributions[at]
            out, dtype, piece_numel = contribution.out, contribution.sum_dtype, contribution.addend.piece_numel
            whole, total = self._padded_whole(contribution), out
            if out.dtype != dtype or out.numel() != piece_numel:
                total = whole.new_empty(piece_numel)
                written.append(([out], total, [piece_numel]))
            issue(_real(whole), _real(total), dtype)
        works = [_work(self._reduce(outputs[dtype], wholes), wholes[0]) for dtype, wholes in inputs.items()]

        def divide() -> None:
            if len(sums) == 1:
                sums[0].div_(self._size)
            else:
                torch._foreach_div_(sums, self._size)
            for outs, total, sizes in written:
                parts = total.split_with_sizes(sizes) if len(outs) > 1 else (total.narrow(0, 0, outs[0].numel()),)
                torch._foreach_copy_(outs, parts)

        count("reduce-scatter", sum([total.nbytes for total in sums]) * (self._size - 1))
        return Pending(works, divide if sums else None, (inputs, contributions))

    def _plan(self, contributions: Sequence[Contribution]) -> _Plan:
        """How they travel; found out once where there will be more of them."""
        if not isinstance(contributions, Contributions):
            return _Plan(contributions, self._size)
        plan: _Plan | None = contributions.memo.get(Native)
        if plan is None:
            plan = contributions.memo[Native] = _Plan(contributions, self._size)
        return plan

    def _padded_whole(self, contribution: Contribution) -> Tensor:
        """The addend in the dtype of the sum, with room for full pieces."""
        segment, dtype = contribution.addend, contribution.sum_dtype
        whole, padded_numel = segment.whole, segment.piece_numel * self._size
        if segment.numel == padded_numel and whole.dtype == dtype:
            return whole
        padded = torch.zeros(padded_numel, dtype=dtype, device=whole.device)
        padded.narrow(0, 0, segment.numel).copy_(whole)
        return padded

    def any(self, bits: Tensor, mark: int = 0) -> Pending:
        count("control", 2 * bits.numel() * (self._size - 1) // self._size)
        work = dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return Pending([_work(work, bits)], kept=bits)

    def exchange(self, message: Tensor, mark: int = 0) -> Tensor:
        rows = message.new_empty((self._size, message.numel()))
        Pending([_work(self._gather([rows.view(-1)], [message]), message)]).wait()
        count("control", message.numel() * (self._size - 1))
        return rows

    def give_up(self) -> None:
        """Peers wait for the watchdog of the backend, or see the connection closed when this rank ends."""


class _Prepared(list[Segment]):
    """The segments of an all-gather, with what is cut from them.

    Attributes:
        nbytes: Of one rank's pieces.
        packs: What travels in one message each.
        apart: What travels alone, because it is large, uneven or in place already: with the whole and this rank's piece.
    """

    __slots__ = ("apart", "nbytes", "packs", "travels_as_it_is")

    def __init__(self, segments: Sequence[Segment], rank: int, size: int) -> None:
        super().__init__(segments)
        together: dict[torch.dtype, list[Segment]] = {}
        self.apart: list[tuple[Segment, Tensor, Tensor]] = []
        for segment in segments:
            is_even = _is_even(segment, size)
            if segment.source is not None and is_even and segment.is_small:
                together.setdefault(segment.dtype, []).append(segment)
                continue
            # Of an even piece the backend itself writes this rank's into `whole`.
            rests_apart = segment.source is not None and is_even
            own = segment.own(rank) if rests_apart else segment.padded_piece(rank)
            self.apart.append((segment, segment.by_rank(size).view(-1), own))
        self.packs = [_Message(segments, rank, size) for segments in together.values()]
        self.nbytes = sum([segment.piece_numel * segment.dtype.itemsize for segment in segments])
        self.travels_as_it_is = _travels_as_it_is({segment.dtype for segment in segments})


class _Message:
    """Segments that are gathered in one message. It has memory from the all-gather until its pieces are in their places.

    Attributes:
        pieces: This rank's pieces.
        own: The same in one range of memory, if they lie back to back.
    """

    __slots__ = ("_nbytes", "_outs", "_parts", "_sizes", "_storage", "_whole", "own", "pieces")

    def __init__(self, segments: Sequence[Segment], rank: int, size: int) -> None:
        self.pieces = [segment.own(rank) for segment in segments]
        self.own = _back_to_back(self.pieces)
        self._sizes = [segment.piece_numel for segment in segments]
        self._outs = [segment.by_rank(size) for segment in segments]
        self._whole = self.pieces[0].new_empty(size * sum(self._sizes))
        self._parts = self._whole.view(size, -1).split_with_sizes(self._sizes, 1)
        # A simulated tensor has no storage of its own, and keeps its memory.
        self._storage = self._whole.untyped_storage() if type(self._whole) is Tensor else None
        self._nbytes = self._whole.nbytes
        if self._storage is not None:
            self._storage.resize_(0)

    def begin(self) -> Tensor:
        """Receives the pieces of all ranks, those of one rank back to back."""
        if self._storage is not None:
            self._storage.resize_(self._nbytes)
        return self._whole

    def finish(self) -> None:
        """Copies the pieces to their places."""
        if self._whole.device.type == "cpu":
            torch._foreach_copy_(self._outs, self._parts)
        else:  # one kernel, which a foreach over pieces with gaps between them is not
            torch.split_with_sizes_copy(self._whole.view(len(self._outs[0]), -1), self._sizes, 1, out=self._outs)
        if self._storage is not None:
            self._storage.resize_(0)


def _back_to_back(pieces: Sequence[Tensor]) -> Tensor | None:
    """The one range of memory that these flat pieces fill, in this order, if they do."""
    first = pieces[0]
    end = first.storage_offset()
    for piece in pieces:
        if piece.untyped_storage()._cdata != first.untyped_storage()._cdata or piece.storage_offset() != end:
            return None
        end += piece.numel()
    return first.as_strided((end - first.storage_offset(),), (1,), first.storage_offset())


class _Plan:
    """How contributions travel, by their numbers.

    Attributes:
        packs: Those in one message each: small, even and of the same dtypes.
        apart: Those that travel alone.
    """

    __slots__ = ("apart", "packs")

    def __init__(self, contributions: Sequence[Contribution], size: int) -> None:
        together: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
        self.apart: list[int] = []
        for at, contribution in enumerate(contributions):
            addend = contribution.addend
            if addend.is_small and _is_even(addend, size) and not addend.dtype.is_complex:
                together.setdefault((addend.dtype, contribution.sum_dtype), []).append(at)
            else:
                self.apart.append(at)
        self.packs = [_Pack(contributions, numbers) for numbers in together.values()]


class _Pack:
    """Contributions that travel in one message.

    Attributes:
        at: Their numbers.
        sizes: Elements of the pieces.
        dtype: Of the sum.
        is_as_summed: Whether the addends have that dtype too.
        place: Size, stride and offset of the one range of memory that the means fill, if they do: then the sum is made there.
        buffer: The number of the buffer that this range is in.
    """

    __slots__ = ("at", "buffer", "dtype", "is_as_summed", "place", "sizes")

    def __init__(self, contributions: Sequence[Contribution], at: list[int]) -> None:
        chosen = [contributions[number] for number in at]
        self.at, self.dtype = at, chosen[0].sum_dtype
        self.sizes = [contribution.addend.piece_numel for contribution in chosen]
        self.is_as_summed = chosen[0].addend.dtype == self.dtype
        self.place: tuple[tuple[int], tuple[int], int] | None = None
        self.buffer = 0
        memory, place = chosen[0].memory, chosen[0].place
        if place is None or memory.dtype != self.dtype or not isinstance(contributions, Contributions):
            return
        self.buffer = next(i for i, buffer in enumerate(contributions.buffers) if buffer is memory)
        end = place[0]
        for contribution, size in zip(chosen, self.sizes, strict=True):
            if contribution.memory is not memory or contribution.place != (end, size):
                return
            end += size
        self.place = (sum(self.sizes),), (1,), place[0]


def _is_even(segment: Segment, size: int) -> bool:
    return segment.numel == segment.piece_numel * size


def _work(work: Any, on: Tensor) -> tuple[Any, int | None]:
    """A work as `Pending` takes it. Where streams wait, the watchdog of the backend holds the time limit of the group."""
    return (work if on.device.type == "cpu" else _OnStream(work)), None


class _OnStream:
    """A collective that a stream waits for, not the host: with a time limit the host would wait too."""

    __slots__ = ("_work",)

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, _limit: timedelta) -> None:
        self._work.wait()


def _method(group: dist.ProcessGroup, *names: str) -> Callable[..., Any]:
    """The first of these methods that this torch has."""
    found = next(getattr(group, name) for name in names if hasattr(group, name))
    return cast(Callable[..., Any], found)


_TRAVELING = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})


def _travels_as_it_is(dtypes: set[torch.dtype]) -> bool:
    """Whether a group of these dtypes may be gathered as such, or only as bytes: several dtypes in one group are mixed up
    by gloo, and not every backend knows every dtype.
    """
    return len(dtypes) == 1 and dtypes <= _TRAVELING


def _real(flat: Tensor) -> Tensor:
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
