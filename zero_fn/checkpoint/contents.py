"""A checkpoint that is read, whoever has written it: tensors, each made up of boxes, and values.

Readers of each format fill a `Contents`: where the boxes are, options of groups, other values. Whatever is done with a
checkpoint, loading or writing it anew, is done with a `Contents`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_fn.checkpoint.boxes import Box, ranges, spans, strides_of, whole_box
from zero_fn.checkpoint.files import BUFFER_NBYTES, StoredBox, TensorReader, damaged

__all__ = ["Contents", "Key"]

_OPEN_FILES = 32

Key = tuple[str, str]
"""The kind of a tensor, and its name."""


class Contents:
    """What is in files: of Hugging Face as it stands here; those of checkpoints know more.

    Attributes:
        path: The folder.
        rename: What names in the files are in the model.
        ranks: How many have written it.
        pieces: Of each tensor, by kind and name, by their box: those with the same elements once.
        aliases: Further names of tied parameters, and those they were saved by.
        options: Of the group of each parameter, with the rank that says so.
        values: States of each parameter that are no tensors, with the rank that says so.
    """

    def __init__(self, path: Path, rename: Callable[[str], str]) -> None:
        self.path, self.rename, self.ranks = path, rename, 1
        self.pieces: dict[Key, dict[Box, StoredBox]] = {}
        self.aliases: dict[str, str] = {}
        self.options: dict[str, tuple[int, Any]] = {}
        self.values: dict[str, tuple[int, Any]] = {}
        self._states: dict[str, list[tuple[str, Key]]] = {}
        self._readers: dict[Callable[[], TensorReader], TensorReader] = {}

    # -- what readers of a format say ----------------------------------------------------------------------------------

    def add_piece(self, kind: str, name: str, state: str, piece: StoredBox) -> StoredBox | None:
        """Notes a box of a tensor, of a parameter or of one of its states.

        Returns:
            One that it contradicts: of another shape or dtype, or with the same elements and other digests.
        """
        name = name if kind.startswith("extra") else self.rename(name)
        key = (kind, f"{name}/{state}" if kind == "optimizer" else name)
        if kind == "optimizer" and key not in self.pieces:
            self._states.setdefault(name, []).append((state, key))
        known = self.pieces.setdefault(key, {})
        same = known.setdefault(piece.box, piece)
        first = next(iter(known.values()))
        if same.digests != piece.digests or (same.shape, same.dtype) != (piece.shape, piece.dtype):
            return same
        return first if (first.shape, first.dtype) != (piece.shape, piece.dtype) else None

    # -- what it has ---------------------------------------------------------------------------------------------------

    def read_all(self) -> None:
        """Reads what every rank says, where only some were read."""

    def states_of(self, parameter: str) -> list[tuple[str, Key]]:
        """The states of a parameter that are tensors: their names and keys."""
        return self._states.get(parameter, [])

    def values_of(self, parameter: str) -> dict[str, Any]:
        """The states of a parameter that are none."""
        rank, values = self.values.get(parameter, (0, {}))
        return {name: self.value(rank, value) for name, value in values.items()}

    def said(self, rank: int, what: str) -> dict[str, Any]:
        """What a rank has saved as `extra`, or of its own `buffers`, by name, as it was written."""
        return {}

    def value(self, rank: int, encoded: Any) -> Any:
        """A value that a rank has saved."""
        return encoded

    def is_parted(self, what: str, name: str) -> bool:
        """Whether ranks, of those that were read, have saved different values of `extra` or `buffers` under a name."""
        return False

    # -- elements ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Lets go of all files."""
        while self._readers:
            self._readers.popitem()[1].close()

    def first(self, key: Key) -> StoredBox:
        """One piece of a tensor: all have its dtype and shape."""
        return next(iter(self.pieces[key].values()))

    def whole(self, key: Key) -> Tensor:
        """A whole tensor, in memory of the host."""
        piece = self.first(key)
        out = torch.empty(piece.shape, dtype=piece.dtype)
        self.require_all(key, whole_box(piece.shape))
        self.fill(key, whole_box(piece.shape), 0, out.view(-1))
        return out

    def require_all(self, key: Key, box: Box) -> None:
        """For a box of a tensor that is to be read.

        Raises:
            CheckpointError: Not all of it is there, or some of it twice.
        """
        for is_last in (False, True):
            if sum(meet.numel for _, meet in self._meeting(key, box)) == box.numel:
                return
            if not is_last:
                self.read_all()
        raise damaged(self.path, tensor=key[1], why="its pieces do not make up the whole")

    def read(self, key: Key, box: Box, *, parts: int = 1) -> Iterator[tuple[int, Tensor]]:
        """Reads a box of a tensor, a part of a buffer at a time: yields the number of the first element, and the values."""
        dtype = self.first(key).dtype
        for first, last in ranges(box.sizes, BUFFER_NBYTES // parts // dtype.itemsize):
            values = torch.empty(last - first, dtype=dtype)
            self.fill(key, box, first, values)
            yield first, values

    def verify(self, key: Key, box: Box) -> None:
        """Reads a box of a tensor, and compares the blocks that have digests with these.

        Raises:
            CheckpointError: A block is not what was written.
            StorageError: The disk refused.
        """
        dtype = self.first(key).dtype
        for first, last in ranges(box.sizes, BUFFER_NBYTES // dtype.itemsize):
            self.fill(key, box, first, torch.empty(last - first, dtype=dtype, device="meta"))

    def fill(self, key: Key, box: Box, first: int, out: Tensor) -> None:
        """Reads elements of a box of a tensor, row by row.

        Args:
            key: Which tensor.
            box: Which box of it.
            first: The number of the first element in the box.
            out: Where to: flat, on the host. On meta: blocks are only compared with their digests.

        Raises:
            CheckpointError: A block is not what was written.
            StorageError: The disk refused.
        """
        dtype = self.first(key).dtype
        values = out if out.dtype == dtype else torch.empty(out.numel(), dtype=dtype)
        at = 0
        for part in spans(box.sizes, first, first + out.numel()):
            region = box.around(part)
            room = values[at : at + part.numel].view(part.sizes)
            at += part.numel
            for piece, meet in self._meeting(key, region):
                self._read(piece, meet, None if out.is_meta else meet.within(region).of(room))
        if values is not out:
            out.copy_(values)

    def _meeting(self, key: Key, box: Box) -> Iterator[tuple[StoredBox, Box]]:
        for piece in self.pieces[key].values():
            meet = piece.box.meet(box)
            if meet is not None:
                yield piece, meet

    def _read(self, piece: StoredBox, box: Box, room: Tensor | None) -> None:
        """Reads a box of a piece into a view of its shape."""
        assert piece.open is not None, "it is being written"
        if piece.open not in self._readers:
            if len(self._readers) == _OPEN_FILES:
                self._readers.pop(next(iter(self._readers))).close()
            self._readers[piece.open] = piece.open()
        reader, inside = self._readers[piece.open], box.within(piece.box)
        leaves_gaps = not piece.digests  # blocks with a digest are read whole
        for first, last, part in _runs(inside, piece.box.sizes, piece.dtype.itemsize, leaves_gaps=leaves_gaps):
            target = None if room is None else part.within(inside).of(room)
            if target is None or (target.is_contiguous() and target.numel() == last - first):
                reader.read(piece, first, last, None if target is None else target.view(-1))
                continue
            read = torch.empty(last - first, dtype=piece.dtype)
            reader.read(piece, first, last, read)
            target.copy_(read.as_strided(part.sizes, strides_of(piece.box.sizes)))


_RUN_NUMEL = 4 << 20
"""Elements that are read at once where rows of a file are longer than those that are wanted."""

_SEEK_NBYTES = 16 << 10
"""From so many bytes on, a part of a row is read alone, where what lies between need not be read."""


def _runs(box: Box, sizes: tuple[int, ...], itemsize: int, *, leaves_gaps: bool) -> Iterator[tuple[int, int, Box]]:
    """Ranges of the elements of a tensor of these sizes that have a box of it: their ends, and the part of the box."""
    outer = next((dim for dim in reversed(range(len(sizes))) if box.sizes[dim] != sizes[dim]), -1)
    if all(size == 1 for size in box.sizes[: max(outer, 0)]):  # one range without gaps
        yield *_range(box, sizes), box
        return
    if leaves_gaps and prod(box.sizes[outer:]) * itemsize >= _SEEK_NBYTES:
        dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
        for number in range(box.sizes[dim]):
            yield from _runs(box.narrow(dim, number, 1), sizes, itemsize, leaves_gaps=True)
        return
    step = max(_RUN_NUMEL // prod(sizes[1:]), 1)
    for start in range(0, box.sizes[0], step):
        part = box.narrow(0, start, min(step, box.sizes[0] - start))
        yield *_range(part, sizes), part


def _range(box: Box, sizes: tuple[int, ...]) -> tuple[int, int]:
    """From the first element of a box of a tensor of these sizes to behind its last."""
    strides = strides_of(sizes)
    first = sum(start * stride for start, stride in zip(box.starts, strides, strict=True))
    span = sum((size - 1) * stride for size, stride in zip(box.sizes, strides, strict=True))
    return first, first + span + 1
