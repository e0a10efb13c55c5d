"""Tensors in files, each made up of boxes, whatever the format: where each element is, and its bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from zero_fn.checkpoint.boxes import Box, spans, whole_box
from zero_fn.checkpoint.files import StoredBox, TensorReader, damaged

__all__ = ["Key", "Pieces"]

_OPEN_FILES = 32

Key = tuple[str, str]
"""The kind of a tensor, and its name."""


class Pieces(ABC):
    """The tensors of a checkpoint.

    Attributes:
        path: Its folder.
        pieces: Of each tensor, by kind and name, by their box: those with the same elements once.
        aliases: Further names of tied parameters, and those they were saved by.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pieces: dict[Key, dict[Box, StoredBox]] = {}
        self.aliases: dict[str, str] = {}
        self._readers: dict[tuple[str, int, int], TensorReader] = {}

    @abstractmethod
    def open(self, kind: str, rank: int, file: int) -> TensorReader:
        """Opens a file of tensors.

        Raises:
            CheckpointError: It is damaged.
            StorageError: The disk refused.
        """

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
        if sum(meet.numel for _, meet in self._meeting(key, box)) != box.numel:
            raise damaged(self.path, tensor=key[1], why="its pieces do not make up the whole")

    def fill(self, key: Key, box: Box, first: int, out: Tensor, *, keeps: bool = True) -> None:
        """Reads elements of a box of a tensor, row by row.

        Args:
            key: Which tensor.
            box: Which box of it.
            first: The number of the first element in the box.
            out: Where to: flat, on the host, of the dtype in the checkpoint.
            keeps: False: elements are only verified, and `out` is not written.

        Raises:
            CheckpointError: A block is not what was written.
            StorageError: The disk refused.
        """
        at = 0
        for part in spans(box.sizes, first, first + out.numel()):
            region = box.around(part)
            room = out[at : at + part.numel].view(part.sizes)
            at += part.numel
            for piece, meet in self._meeting(key, region):
                self._read(key, piece, meet, meet.within(region).of(room) if keeps else None)

    def _meeting(self, key: Key, box: Box) -> Iterator[tuple[StoredBox, Box]]:
        for piece in self.pieces[key].values():
            meet = piece.box.meet(box)
            if meet is not None:
                yield piece, meet

    def _read(self, key: Key, piece: StoredBox, box: Box, room: Tensor | None) -> None:
        """Reads a box of a piece into a view of its shape."""
        reader, inside = self._reader(key[0].partition(" ")[0], piece), box.within(piece.box)
        leaves_gaps = not piece.digests  # blocks with a digest are read whole
        for first, last, part in _runs(inside, piece.box.sizes, piece.dtype.itemsize, leaves_gaps=leaves_gaps):
            target = None if room is None else part.within(inside).of(room)
            if target is None or (target.is_contiguous() and target.numel() == last - first):
                reader.read(piece, first, last, None if target is None else target.view(-1))
                continue
            read = torch.empty(last - first, dtype=piece.dtype)
            reader.read(piece, first, last, read)
            target.copy_(read.as_strided(part.sizes, _strides(piece.box.sizes)))

    def _reader(self, kind: str, piece: StoredBox) -> TensorReader:
        key = (kind, piece.rank, piece.file)
        if key not in self._readers:
            if len(self._readers) == _OPEN_FILES:
                self._readers.pop(next(iter(self._readers))).close()
            self._readers[key] = self.open(*key)
        return self._readers[key]


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
    strides = _strides(sizes)
    first = sum(start * stride for start, stride in zip(box.starts, strides, strict=True))
    span = sum((size - 1) * stride for size, stride in zip(box.sizes, strides, strict=True))
    return first, first + span + 1


def _strides(sizes: tuple[int, ...]) -> list[int]:
    return [prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
