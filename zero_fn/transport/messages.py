"""Messages for the backend's own collectives: small pieces are packed into one message, large ones sent from where they lie.

What travels in which message is planned once: by `Gathering` for all-gathers of the same memory, by `Reducing` for reductions
of the same sizes. The memory of a message is freed on the stream that unpacks it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zero_fn.transport.segment import Contribution, Contributions, Segment

__all__ = ["Gathering", "Reducing"]

_TRAVELING = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})


class Gathering(list[Segment]):
    """The segments of an all-gather, with the views that the backend is given.

    Attributes:
        numel: Elements of all tensors.
        nbytes: Bytes of the pieces of one rank.
        of_first: The only tensor, if rank 0 holds all of it: a broadcast then does what an all-gather would.
        packs: Segments that are packed, by the message in which they travel.
        apart: Segments that travel alone because they are large, uneven or in place already; each with views of the whole
            and of this rank's piece.
        travels_as_it_is: Whether the backend is given the dtypes as they are; else bytes. gloo mixes up several dtypes in one
            group, and not every backend knows every dtype.
    """

    __slots__ = ("apart", "nbytes", "numel", "of_first", "packs", "travels_as_it_is")

    def __init__(self, segments: Sequence[Segment], rank: int, size: int) -> None:
        super().__init__(segments)
        together: dict[torch.dtype, list[Segment]] = {}
        self.apart: list[tuple[Segment, Tensor, Tensor]] = []
        only = segments[0] if segments and not segments[1:] else None
        if only is not None and (only.source is not None or only.numel > only.piece_numel):
            only = None
        self.of_first = only.piece(0) if only is not None else None
        for segment in segments if self.of_first is None else ():
            rests_apart = segment.source is not None and segment.numel == segment.piece_numel * size
            if rests_apart and segment.is_small:
                together.setdefault(segment.kind, []).append(segment)
                continue
            rows = segment.by_rank(size)
            # If pieces are even, the backend copies this rank's piece into its memory.
            whole, numel = rows.view(-1), segment.piece_numel  # a slice: where ranks are simulated, `rank` is symbolic
            own = segment.own(rank) if rests_apart else whole[rank * numel : (rank + 1) * numel]
            self.apart.append((segment, whole, own))
        self.packs = [_Pack(run, rank, size) for run in together.values()]
        self.numel = sum([segment.numel for segment in segments])
        self.nbytes = sum([segment.piece_numel * segment.kind.itemsize for segment in segments])
        dtypes = {segment.kind for segment in segments}
        self.travels_as_it_is = len(dtypes) == 1 and dtypes <= _TRAVELING


class _Pack:
    """Segments that are gathered in one message, which has memory until its pieces are in their places.

    Attributes:
        pieces: This rank's pieces.
        own: The same in one range of memory, if they lie back to back.
    """

    __slots__ = ("_is_on_host", "_nbytes", "_outs", "_parts", "_sizes", "_storage", "_whole", "own", "pieces")

    def __init__(self, segments: Sequence[Segment], rank: int, size: int) -> None:
        self.pieces = [segment.own(rank) for segment in segments]
        self.own = _back_to_back(self.pieces)
        self._sizes = [segment.piece_numel for segment in segments]
        self._outs = [segment.by_rank(size) for segment in segments]
        self._whole = self.pieces[0].new_empty(size * sum(self._sizes))
        self._parts = self._whole.view(size, -1).split_with_sizes(self._sizes, 1)
        # A simulated tensor has no storage of its own, so it keeps its memory.
        self._storage = self._whole.untyped_storage() if type(self._whole) is Tensor else None
        self._nbytes, self._is_on_host = self._whole.nbytes, self._whole.device.type == "cpu"
        if self._storage is not None:
            self._storage.resize_(0)

    def begin(self) -> Tensor:
        """Takes memory for the message, which holds the pieces of all ranks, those of one rank back to back."""
        if self._storage is not None:
            self._storage.resize_(self._nbytes)
        return self._whole

    def finish(self) -> None:
        """Copies the pieces to their places, and frees the message."""
        if self._is_on_host:
            torch._foreach_copy_(self._outs, self._parts)
        else:  # one kernel, which a foreach over pieces with gaps between them is not
            torch.split_with_sizes_copy(self._whole.view(len(self._outs[0]), -1), self._sizes, 1, out=self._outs)
        if self._storage is not None:
            self._storage.resize_(0)


def _back_to_back(pieces: Sequence[Tensor]) -> Tensor | None:
    """The range of memory that these flat pieces fill, if they lie back to back in this order; else None."""
    first = pieces[0]
    end = first.storage_offset()
    for piece in pieces:
        if piece.untyped_storage()._cdata != first.untyped_storage()._cdata or piece.storage_offset() != end:
            return None
        end += piece.numel()
    return first.as_strided((end - first.storage_offset(),), (1,), first.storage_offset())


class Reducing:
    """How contributions travel.

    Attributes:
        nbytes: Bytes of the sums of one rank.
        runs: The messages: large, uneven and complex contributions travel alone, the others together, by their dtypes.
    """

    __slots__ = ("nbytes", "runs")

    def __init__(self, contributions: Sequence[Contribution], size: int) -> None:
        buffers = contributions.buffers if isinstance(contributions, Contributions) else []
        together: dict[object, dict[int, Contribution]] = {}
        for at, contribution in enumerate(contributions):
            is_even = contribution.rows.numel() == contribution.piece_numel * size
            is_packed = contribution.is_small and is_even and not contribution.sum_dtype.is_complex
            together.setdefault(contribution.kind if is_packed else at, {})[at] = contribution
        self.runs = [Bundle(run, buffers, size, is_packed=not isinstance(key, int)) for key, run in together.items()]
        self.nbytes = sum([sum(run.sizes) * run.dtype.itemsize for run in self.runs])


class Bundle:
    """Contributions that travel in one message.

    Attributes:
        at: The numbers of the contributions.
        sizes: Elements of the piece of each.
        dtype: The dtype of the sum.
    """

    __slots__ = ("_buffer", "_is_all", "_is_packed", "_place", "_size", "_total", "at", "dtype", "sizes")

    def __init__(self, run: dict[int, Contribution], buffers: Sequence[Tensor], size: int, *, is_packed: bool) -> None:
        self._size, self._is_packed = size, is_packed
        self.at, self.sizes = list(run), [contribution.piece_numel for contribution in run.values()]
        outs = [contribution.out for contribution in run.values()]
        self.dtype = run[self.at[0]].sum_dtype
        self._buffer: int | None = None
        total = _back_to_back(outs) if outs[0].dtype == self.dtype else None
        self._total = total if total is not None and total.numel() == sum(self.sizes) else None
        if self._total is not None and buffers:  # the next step has other buffers of the same layout
            storages = [buffer.untyped_storage()._cdata for buffer in buffers]
            self._buffer = storages.index(self._total.untyped_storage()._cdata)
            self._place = self._total.shape, self._total.stride(), self._total.storage_offset()
            self._is_all = self._place == (buffers[self._buffer].shape, (1,), 0)
            self._total = None

    def message(self, rows: Sequence[Tensor]) -> Tensor:
        """The addends in the dtype of the sum, flat: first all pieces for rank 0, padded, then those for rank 1, ..."""
        if self._is_packed:
            message = torch._chunk_cat([rows[at] for at in self.at], 0, self._size).view(-1)
            return message if message.dtype == self.dtype else message.to(self.dtype)
        whole, padded_numel = rows[self.at[0]].reshape(-1), self.sizes[0] * self._size
        if whole.numel() == padded_numel and whole.dtype == self.dtype:
            return whole
        padded = torch.zeros(padded_numel, dtype=self.dtype, device=whole.device)
        padded.narrow(0, 0, whole.numel()).copy_(whole)
        return padded

    def total(self, buffers: Sequence[Tensor]) -> Tensor | None:
        """The range of memory that the means fill, if they lie back to back: then the sum is made there. Else None."""
        if self._buffer is None:
            return self._total
        buffer = buffers[self._buffer]
        return buffer if self._is_all else buffer.as_strided(*self._place)
