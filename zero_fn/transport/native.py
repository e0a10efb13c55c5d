"""The collectives of the backend itself: of NCCL, and of any backend but gloo on the host.

Large pieces are gathered in one group of all-gathers, from where they rest to where they are used.
Small even pieces are packed into one message, whose memory is freed on the stream that unpacks it.
[Note: small pieces travel together]

[Note: gloo gathers one by one] gloo groups all-gathers of host memory only, and two groups at
once may free memory twice, inside torch: see `zero_fn.local.gloo`. So on gloo each all-gather
is issued alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zero_fn.transport.line import Work
from zero_fn.transport.segment import BufferPlace, ByRank, Contribution, Parcels, Segment
from zero_fn.transport.waiting import Failure

__all__ = ["Native", "NativeGatherPlan", "NativeReducePlan"]

_TRAVELING = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})


class Native:
    """Collectives of a process group. Sums are in the order the backend chooses."""

    pads = True

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self._group = group
        self._rank = rank
        self._size = size
        # Known from the device of the first tensor. [Note: gloo gathers one by one]
        self._one_by_one: bool | None = None
        # Methods of the group cost the host a tenth of dist.all_gather_into_tensor for each tensor.
        # torch 2.13 renamed them.
        self._gather_group = _method(
            group, "all_gather_single_coalesced", "allgather_into_tensor_coalesced"
        )
        self._gather_one = _method(group, "all_gather_single", "_allgather_base")
        self._reduce = _method(
            group, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
        )

    def gather_plan(self, segments: Sequence[Segment]) -> NativeGatherPlan:
        return NativeGatherPlan(segments, self._rank, self._size)

    def reduce_plan(
        self, contributions: Sequence[Contribution], buffers: Sequence[Tensor]
    ) -> NativeReducePlan:
        return NativeReducePlan(contributions, buffers, self._size)

    def all_gather(self, plan: NativeGatherPlan, mark: int = 0) -> Work:
        if plan.of_first is not None:
            return self._broadcast(plan.of_first)
        wholes, pieces = plan.wholes, plan.pieces
        if plan.packs:
            packed, own = zip(*[pack.begin() for pack in plan.packs], strict=True)
            wholes = [*packed, *wholes]
            pieces = [*own, *pieces]
        for place, source in plan.uneven:
            place.copy_(source)
        if not plan.travels_as_it_is:
            wholes = [w.view(torch.uint8) for w in wholes]
            pieces = [piece.view(torch.uint8) for piece in pieces]
        if not pieces:
            return Work()
        if self._one_by_one is None:
            self._one_by_one = self._is_gloo(pieces[0])
        if self._one_by_one:
            works = [
                (self._gather_one(whole, piece), None)
                for whole, piece in zip(wholes, pieces, strict=True)
            ]
        else:
            works = [(self._gather_group(wholes, pieces), None)]
        finish = plan.unpack if plan.packs else None
        return Work(
            works,
            finish,
            (pieces, wholes),
            plan.nbytes * (self._size - 1),
            on_stream=not pieces[0].is_cpu,
        )

    def reduce_scatter(
        self,
        plan: NativeReducePlan,
        rows: Sequence[Tensor],
        buffers: Sequence[Tensor],
        mark: int = 0,
    ) -> Work:
        # One group for each dtype: gloo mixes up dtypes in a group.
        inputs: dict[torch.dtype, list[Tensor]] = {}
        outputs: dict[torch.dtype, list[Tensor]] = {}
        sums: list[Tensor] = []
        apart: list[tuple[_Bundle, Tensor]] = []  # with the sums that are copied to their places
        for bundle in plan.bundles:
            message = bundle.message(rows)
            if bundle.place is not None:
                total = bundle.place.of(buffers)
            else:
                total = message.new_empty(bundle.numel)
                apart.append((bundle, total))
            sums.append(total)
            if bundle.dtype.is_complex:
                message = torch.view_as_real(message).view(-1)
                total = torch.view_as_real(total).view(-1)
            inputs.setdefault(bundle.dtype, []).append(message)
            outputs.setdefault(bundle.dtype, []).append(total)
        if not sums:
            return Work()
        works = [(self._reduce(outputs[dtype], wholes), None) for dtype, wholes in inputs.items()]
        nbytes, on_stream = plan.nbytes * (self._size - 1), not sums[0].is_cpu
        return Work(
            works, self._divide, (sums, apart, buffers, rows, inputs), nbytes, on_stream=on_stream
        )

    def _divide(
        self,
        sums: list[Tensor],
        apart: list[tuple[_Bundle, Tensor]],
        buffers: Sequence[Tensor],
        *_: object,
    ) -> None:
        if len(sums) == 1:
            sums[0].div_(self._size)
        else:
            torch._foreach_div_(sums, self._size)
        for bundle, total in apart:
            bundle.copy_out(total, buffers)

    def _broadcast(self, whole: Tensor) -> Work:
        if not whole.numel():
            return Work()
        work = dist.broadcast(whole, group=self._group, group_src=0, async_op=True)
        nbytes = whole.nbytes * (self._size - 1) // self._size
        return Work([(work, None)], None, (whole,), nbytes, on_stream=not whole.is_cpu)

    def all_to_all(
        self, sends: ByRank, places: ByRank, device: torch.device, mark: int = 0
    ) -> Work:
        # As bytes, in one collective: a rank does not know which dtypes others send,
        # and takes part though it sends nothing.
        out, into = Parcels(sends, device), Parcels(places, device)
        out.pack()
        work = dist.all_to_all_single(
            into.whole, out.whole, into.splits, out.splits, group=self._group, async_op=True
        )
        return Work([(work, None)], into.unpack, (out,), out.nbytes, on_stream=device.type != "cpu")

    def any(self, bits: Tensor, mark: int = 0) -> Work:
        work = dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        nbytes = 2 * bits.numel() * (self._size - 1) // self._size
        return Work([(work, None)], None, (bits,), nbytes, on_stream=not bits.is_cpu)

    def exchange(self, rows: Tensor, mark: int = 0) -> Work:
        # A narrow, because an index would not do where ranks are simulated.
        own = rows.narrow(0, self._rank, 1).view(-1)
        whole = rows.view(-1)
        work = (
            self._gather_one(whole, own)
            if self._is_gloo(own)
            else self._gather_group([whole], [own])
        )
        return Work(
            [(work, None)], None, (rows,), own.nbytes * (self._size - 1), on_stream=not rows.is_cpu
        )

    def _is_gloo(self, on: Tensor) -> bool:
        return bool(self._group._get_backend(on.device).name() == "gloo")

    def give_up(self, failure: Failure | None = None) -> None:
        """Does nothing: peers learn it from the watchdog of the backend, or when this rank ends."""


def _method(group: dist.ProcessGroup, *names: str) -> Callable[..., Any]:
    """The first of these methods that this torch has."""
    found = next(getattr(group, name) for name in names if hasattr(group, name))
    return cast(Callable[..., Any], found)


class NativeGatherPlan:
    """The messages of an all-gather: segments that are packed,
    and others that are large, uneven or in place already."""

    __slots__ = (
        "nbytes",
        "numel",
        "of_first",
        "packs",
        "pieces",
        "travels_as_it_is",
        "uneven",
        "wholes",
    )

    def __init__(self, segments: Sequence[Segment], rank: int, size: int) -> None:
        self.numel = sum([segment.numel for segment in segments])
        # Bytes of one rank.
        self.nbytes = sum([segment.piece_numel * segment.kind.itemsize for segment in segments])
        dtypes = {segment.kind for segment in segments}
        # Else bytes: gloo mixes up several dtypes in one group,
        # and not every backend knows every dtype.
        self.travels_as_it_is = len(dtypes) == 1 and dtypes <= _TRAVELING
        self.packs: list[_Pack | _Room] = []
        self.wholes: list[Tensor] = []
        self.pieces: list[Tensor] = []  # of this rank
        # Pieces that are copied before; the backend reads even pieces where they rest.
        self.uneven: list[tuple[Tensor, Tensor]] = []
        # The only segment, if rank 0 holds all of it: a broadcast does what a gather would.
        self.of_first: Tensor | None = None
        if (
            len(segments) == 1
            and segments[0].source is None
            and segments[0].numel <= segments[0].piece_numel
        ):
            self.of_first = segments[0].piece(0).view(torch.uint8)
            return
        together: dict[torch.dtype, list[Segment]] = {}
        for segment in segments:
            source, numel = segment.source, segment.piece_numel
            is_even = segment.numel == numel * size
            if source is not None and is_even and segment.is_small:
                together.setdefault(segment.kind, []).append(segment)
                continue
            if segment.is_tight and not is_even:
                self.packs.append(_Room(segment, rank, size))
                continue
            whole = segment.by_rank(size).view(-1)
            self.wholes.append(whole)
            if source is not None and is_even:
                self.pieces.append(source)
                continue
            if source is not None:
                self.uneven.append((segment.piece(rank), source))
            # A slice: where ranks are simulated, `rank` is symbolic.
            self.pieces.append(whole[rank * numel : (rank + 1) * numel])
        self.packs += [_Pack(run, rank, size) for run in together.values()]

    def unpack(self, *_: object) -> None:
        """Copies packed pieces to their places."""
        for pack in self.packs:
            pack.finish()


class _Pack:
    """Segments that are gathered in one message, which has memory until
    its pieces are in their places."""

    __slots__ = (
        "_is_on_host",
        "_nbytes",
        "_outs",
        "_own",
        "_parts",
        "_sizes",
        "_storage",
        "_whole",
        "pieces",
    )

    def __init__(self, segments: Sequence[Segment], rank: int, size: int) -> None:
        self.pieces = [segment.own(rank) for segment in segments]
        self._own = _back_to_back(self.pieces)  # the same in one range of memory, or None
        self._sizes = [segment.piece_numel for segment in segments]
        self._outs = [segment.by_rank(size) for segment in segments]
        self._whole = self.pieces[0].new_empty(size * sum(self._sizes))
        self._parts = self._whole.view(size, -1).split_with_sizes(self._sizes, 1)
        # A simulated tensor has no storage of its own, so it keeps its memory.
        self._storage = self._whole.untyped_storage() if type(self._whole) is Tensor else None
        self._nbytes = self._whole.nbytes
        self._is_on_host = self._whole.device.type == "cpu"
        if self._storage is not None:
            self._storage.resize_(0)

    def begin(self) -> tuple[Tensor, Tensor]:
        """Memory for the message, which holds the pieces of all ranks,
        those of one rank back to back; and this rank's."""
        if self._storage is not None:
            self._storage.resize_(self._nbytes)
        return self._whole, self._own if self._own is not None else torch.cat(self.pieces)

    def finish(self) -> None:
        """Copies the pieces to their places, and frees the message."""
        if self._is_on_host:
            torch._foreach_copy_(self._outs, self._parts)
        else:  # one kernel, which a foreach over pieces with gaps between them is not
            torch.split_with_sizes_copy(
                self._whole.view(len(self._outs[0]), -1), self._sizes, 1, out=self._outs
            )
        if self._storage is not None:
            self._storage.resize_(0)


class _Room:
    """A segment in memory without room for padding: a copy with room is gathered."""

    def __init__(self, segment: Segment, rank: int, size: int) -> None:
        self._place = segment.memory.as_strided((segment.numel,), (1,), segment.start)
        self._own = slice(rank * segment.piece_numel, (rank + 1) * segment.piece_numel)
        self._numel = size * segment.piece_numel
        self._whole: Tensor | None = None

    def begin(self) -> tuple[Tensor, Tensor]:
        """The copy, and this rank's piece in it."""
        self._whole = self._place.new_empty(self._numel)
        self._whole[: self._place.numel()] = self._place
        return self._whole, self._whole[self._own]

    def finish(self) -> None:
        """Copies the segment back, and drops the copy."""
        assert self._whole is not None
        self._place.copy_(self._whole[: self._place.numel()])
        self._whole = None


def _back_to_back(pieces: Sequence[Tensor]) -> Tensor | None:
    """The range of memory that these flat pieces fill, if they lie back to
    back in this order; else None."""
    first = pieces[0]
    end = first.storage_offset()
    for piece in pieces:
        if (
            piece.untyped_storage()._cdata != first.untyped_storage()._cdata
            or piece.storage_offset() != end
        ):
            return None
        end += piece.numel()
    return first.as_strided((end - first.storage_offset(),), (1,), first.storage_offset())


class NativeReducePlan:
    """The messages of a reduction: large, uneven and complex contributions travel alone,
    the others by their dtypes."""

    __slots__ = ("bundles", "nbytes", "numel")

    def __init__(
        self, contributions: Sequence[Contribution], buffers: Sequence[Tensor], size: int
    ) -> None:
        together: dict[object, dict[int, Contribution]] = {}
        for at, contribution in enumerate(contributions):
            is_even = contribution.rows.numel() == contribution.piece_numel * size
            is_packed = contribution.is_small and is_even and not contribution.sum_dtype.is_complex
            together.setdefault(contribution.kind if is_packed else at, {})[at] = contribution
        self.bundles = [
            _Bundle(run, buffers, size, is_packed=not isinstance(key, int))
            for key, run in together.items()
        ]
        self.numel = sum([contribution.rows.numel() for contribution in contributions])
        self.nbytes = sum([bundle.numel * bundle.dtype.itemsize for bundle in self.bundles])


class _Bundle:
    """Contributions that travel in one message.

    The sum is made in `place`, if the means fill one range of a buffer.
    """

    __slots__ = ("_at", "_is_packed", "_places", "_size", "_sizes", "dtype", "numel", "place")

    def __init__(
        self, run: dict[int, Contribution], buffers: Sequence[Tensor], size: int, *, is_packed: bool
    ) -> None:
        self._size = size
        self._is_packed = is_packed
        self._at = list(run)
        self._sizes = [each.piece_numel for each in run.values()]
        self.dtype = run[self._at[0]].sum_dtype
        self.numel = sum(self._sizes)
        outs = [each.out for each in run.values()]
        self._places = [BufferPlace(out, buffers) for out in outs]
        total = _back_to_back(outs) if outs[0].dtype == self.dtype else None
        self.place = (
            BufferPlace(total, buffers)
            if total is not None and total.numel() == self.numel
            else None
        )

    def message(self, rows: Sequence[Tensor]) -> Tensor:
        """The addends in the dtype of the sum, flat: first all pieces for rank 0,
        padded, then those for rank 1, ..."""
        if self._is_packed:
            message = torch._chunk_cat([rows[at] for at in self._at], 0, self._size).view(-1)
            return message if message.dtype == self.dtype else message.to(self.dtype)
        whole, padded_numel = rows[self._at[0]].reshape(-1), self.numel * self._size
        if whole.numel() == padded_numel and whole.dtype == self.dtype:
            return whole
        padded = torch.zeros(padded_numel, dtype=self.dtype, device=whole.device)
        padded.narrow(0, 0, whole.numel()).copy_(whole)
        return padded

    def copy_out(self, total: Tensor, buffers: Sequence[Tensor]) -> None:
        """Copies the means from the sum to their places."""
        outs = [place.of(buffers) for place in self._places]
        parts = (
            total.split_with_sizes(self._sizes)
            if len(outs) > 1
            else (total.narrow(0, 0, outs[0].numel()),)
        )
        torch._foreach_copy_(outs, parts)
