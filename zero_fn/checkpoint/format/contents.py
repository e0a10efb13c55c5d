"""What is in a checkpoint, whoever has written it: tensors, each made up of boxes, and values.

The reader of each format fills a `Contents`. Loading and converting use it alone.

[Note: states in 8 bits] Codes and scales of a state are read as the state itself, in float32. An
optimizer that keeps codes makes the same ones of it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_fn.checkpoint.format.files import BUFFER_NBYTES, StoredBox, TensorReader, damaged
from zero_fn.kernels.codes import BLOCK_NUMEL, decode_by
from zero_fn.streamed.state_codes import CODES, MOMENTS, SCALES, scales_shape
from zero_fn.values.box import Box, ranges, spans, strides_of, whole_box
from zero_fn.values.numbering import Numbering

__all__ = ["Contents", "Key", "range_of", "require_whole"]

_OPEN_FILES = 32

Key = tuple[str, str]
"""The kind of a tensor, and its name."""


class Contents:
    """What is in files.

    As it stands here, of safetensors of Hugging Face; readers of checkpoints know of values, too.
    """

    def __init__(self, path: Path, rename: Callable[[str], str]) -> None:
        self.path = path
        self.ranks = 1
        self.rename = rename  # the name in the model for a name in the files
        # A box that several ranks have written stands once.
        self.pieces: dict[Key, dict[Box, StoredBox]] = {}
        # Codes and scales. [Note: states in 8 bits]
        self.in_parts: dict[Key, dict[Box, StoredBox]] = {}
        self.coded: dict[Key, tuple[Key, Key]] = {}  # of states in 8 bits the keys of these
        # Further names of tied parameters, and those that they were saved by.
        self.aliases: dict[str, str] = {}
        # States of each parameter that are tensors.
        self.states: dict[str, list[tuple[str, Key]]] = {}
        # States that are no tensors, with the rank that says so.
        self.values: dict[str, tuple[int, Any]] = {}
        # Options of the group of each parameter, with the rank that says so.
        self.options: dict[str, tuple[int, Any]] = {}
        self._readers: dict[Callable[[], TensorReader], TensorReader] = {}
        self._scales: tuple[Key, Tensor] | None = None  # those that were read last

    def add_piece(self, kind: str, name: str, state: str, piece: StoredBox) -> StoredBox | None:
        """Adds a box of a tensor; returns a known box that contradicts
        it in shape, dtype or digests."""
        name = name if kind.startswith("extra") else self.rename(name)
        key, pieces = (kind, f"{name}/{state}" if state else name), self.pieces
        if kind == "optimizer" and state.endswith((CODES, SCALES)):
            pieces = self.in_parts
            if state.endswith(CODES):
                shown = key[0], key[1].removesuffix(CODES)
                self.coded[shown] = key, (kind, shown[1] + SCALES)
                self.add_piece(
                    kind, name, state.removesuffix(CODES), replace(piece, dtype=torch.float32)
                )
        elif kind == "optimizer" and key not in self.pieces:
            self.states.setdefault(name, []).append((state, key))
        known = pieces.setdefault(key, {})
        same = known.setdefault(piece.box, piece)
        for other in (same, next(iter(known.values()))):
            if (other.shape, other.dtype) != (piece.shape, piece.dtype):
                return other
        return None if same.digests == piece.digests else same

    # -- values ------------------------------------------------------------------------------------

    def read_all(self) -> None:
        """Reads what every rank says, where only some were read."""

    def values_of(self, parameter: str) -> dict[str, Any]:
        """The states of a parameter that are no tensors."""
        rank, values = self.values.get(parameter, (0, {}))
        return {name: self.value(rank, value) for name, value in values.items()}

    def said(self, rank: int, what: str) -> dict[str, Any]:
        """What a rank has saved as `extra`, or of its own `buffers`, by name, as it was written."""
        return {}

    def value(self, rank: int, encoded: Any) -> Any:
        """A value that a rank has saved."""
        return encoded

    def differs_by_rank(self, what: str, name: str) -> bool:
        """Whether ranks, of those that were read, have saved different values of
        `extra` or `buffers` under a name."""
        return False

    # -- elements ----------------------------------------------------------------------------------

    def close(self) -> None:
        while self._readers:
            self._readers.popitem()[1].close()

    def first(self, key: Key) -> StoredBox:
        """One box of a tensor: all have its dtype and shape."""
        return next(iter(_pieces(self, key).values()))

    def whole(self, key: Key) -> Tensor:
        """A whole tensor, in memory of the host."""
        first = self.first(key)
        require_whole(self, key)
        out = torch.empty(first.shape, dtype=first.dtype)
        self.fill(key, whole_box(first.shape), 0, out.view(-1))
        return out

    def require_all(self, key: Key, box: Box) -> None:
        """Requires that the files have each element of a box of a tensor once."""
        for read_more in (self.read_all, lambda: None):
            meets = _meeting(_pieces(self, key).values(), box)
            if sum(meet.numel for _, meet in meets) == box.numel:
                return
            read_more()
        raise damaged(self.path, tensor=key[1], why="its pieces do not make up the whole")

    def read(
        self, key: Key, box: Box, *, parts: int = 1, device: str = "cpu"
    ) -> Iterator[tuple[int, Tensor]]:
        """Reads a box of a tensor, a part of a buffer at a time: yields the number of the first
        element, and the values; none on the device "meta", as of `fill`."""
        dtype = self.first(key).dtype
        for first, last in ranges(box.sizes, BUFFER_NBYTES // parts // dtype.itemsize):
            values = torch.empty(last - first, dtype=dtype, device=device)
            self.fill(key, box, first, values)
            yield first, values

    def verify(self, key: Key, box: Box) -> None:
        """Reads a box of a tensor, and compares its blocks with their digests,
        if they have some."""
        for _ in self.read(key, box, device="meta"):
            pass

    def fill(self, key: Key, box: Box, first: int, out: Tensor) -> None:
        """Reads elements of a box of a tensor, from the number `first` on,
        into flat memory of the host.

        With `out` on meta, blocks are only compared with their digests.
        """
        if key in self.coded:
            _fill_decoded(self, key, box, first, out)
            return
        dtype, at = self.first(key).dtype, 0
        values = out if out.dtype == dtype else torch.empty(out.numel(), dtype=dtype)
        for part in spans(box.sizes, first, first + out.numel()):
            region = box.around(part)
            room = values[at : at + part.numel].view(part.sizes)
            at += part.numel
            for piece, meet in _meeting(_pieces(self, key).values(), region):
                self._read(piece, meet, None if out.is_meta else meet.within(region).of(room))
        if values is not out:
            out.copy_(values)

    def _read(self, piece: StoredBox, box: Box, room: Tensor | None) -> None:
        """Reads elements of a piece into a view of their shape; None: only compares digests."""
        reader, inside = _reader_of(self._readers, piece), box.within(piece.box)
        leaves_gaps = not piece.digests  # blocks with a digest are read whole
        for first, last, part in _runs(
            inside, piece.box.sizes, piece.dtype.itemsize, leaves_gaps=leaves_gaps
        ):
            target = None if room is None else part.within(inside).of(room)
            if target is None or (target.is_contiguous() and target.numel() == last - first):
                reader.read(piece, first, last, None if target is None else target.view(-1))
                continue
            read = torch.empty(last - first, dtype=piece.dtype)
            reader.read(piece, first, last, read)
            target.copy_(read.as_strided(part.sizes, strides_of(piece.box.sizes)))


def _pieces(source: Contents, key: Key) -> dict[Box, StoredBox]:
    return source.pieces[key] if key in source.pieces else source.in_parts[key]


def _fill_decoded(source: Contents, key: Key, box: Box, first: int, out: Tensor) -> None:
    """`fill`, of a state in 8 bits. [Note: states in 8 bits]"""
    of_codes, of_scales = source.coded[key]
    codes = torch.empty(out.numel(), dtype=torch.uint8, device=out.device)
    source.fill(of_codes, box, first, codes)
    if source._scales is None or source._scales[0] != of_scales:
        source.require_all(of_scales, whole_box(scales_shape(source.first(key).shape)))
        source._scales = of_scales, source.whole(of_scales).view(-1)
    if out.is_meta:
        return
    at, is_signed = 0, MOMENTS[key[1].rpartition("/")[2]]
    for part in spans(box.sizes, first, first + out.numel()):
        numbering = Numbering(
            source.first(key).shape, box.around(part), tuple(range(len(part.sizes)))
        )
        blocks = torch.from_numpy(numbering.numbers(0, part.numel) // BLOCK_NUMEL)
        values = decode_by(codes[at : at + part.numel], source._scales[1][blocks], is_signed)
        out[at : at + part.numel] = values
        at += part.numel


def require_whole(source: Contents, key: Key) -> None:
    """Requires that the files have all of a tensor, and are as large as that:
    before memory is taken for it."""
    source.require_all(key, whole_box(source.first(key).shape))
    for piece in _pieces(source, key).values():
        _reader_of(source._readers, piece)


def _reader_of(
    readers: dict[Callable[[], TensorReader], TensorReader], piece: StoredBox
) -> TensorReader:
    """The file of a piece, opened; of many the one that was opened first is closed."""
    assert piece.open is not None, "it is being written"
    if piece.open not in readers:
        if len(readers) == _OPEN_FILES:
            readers.pop(next(iter(readers))).close()
        readers[piece.open] = piece.open()
    return readers[piece.open]


def _meeting(pieces: Iterable[StoredBox], box: Box) -> Iterator[tuple[StoredBox, Box]]:
    """The pieces that have elements of a box, and which elements."""
    for piece in pieces:
        meet = piece.box.meet(box)
        if meet is not None:
            yield piece, meet


_RUN_NUMEL = 4 << 20
"""How many elements are read at once where rows of a file are longer
than the wanted parts of them."""

_SEEK_NBYTES = 16 << 10
"""A part of a row that has so many bytes is read alone,
where what lies between need not be read."""


def _runs(
    box: Box, sizes: tuple[int, ...], itemsize: int, *, leaves_gaps: bool
) -> Iterator[tuple[int, int, Box]]:
    """The ranges of elements to be read for a box of a tensor of these sizes:
    their ends, and the part of the box."""
    outer = next((dim for dim in reversed(range(len(sizes))) if box.sizes[dim] != sizes[dim]), -1)
    if all(size == 1 for size in box.sizes[: max(outer, 0)]):  # one range without gaps
        yield *range_of(box, sizes), box
        return
    if leaves_gaps and prod(box.sizes[outer:]) * itemsize >= _SEEK_NBYTES:
        dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
        for number in range(box.sizes[dim]):
            yield from _runs(box.narrow(dim, number, 1), sizes, itemsize, leaves_gaps=True)
        return
    step = max(_RUN_NUMEL // prod(sizes[1:]), 1)
    for start in range(0, box.sizes[0], step):
        part = box.narrow(0, start, min(step, box.sizes[0] - start))
        yield *range_of(part, sizes), part


def range_of(box: Box, sizes: tuple[int, ...]) -> tuple[int, int]:
    """From the first element of a box of a tensor of these sizes to behind its last."""
    strides = strides_of(sizes)
    first = sum(start * stride for start, stride in zip(box.starts, strides, strict=True))
    span = sum((size - 1) * stride for size, stride in zip(box.sizes, strides, strict=True))
    return first, first + span + 1
