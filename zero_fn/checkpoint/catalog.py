"""A checkpoint that is read: where each element is, and its bytes, verified."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_fn.checkpoint.boxes import Box, spans, whole_box
from zero_fn.checkpoint.files import StoredBox, TensorReader, damaged, read_json
from zero_fn.checkpoint.folders import MANIFEST, VERSION, part_name, tensors_name
from zero_fn.checkpoint.values import decoded
from zero_fn.errors import CheckpointError

__all__ = ["Catalog", "Key"]

_OPEN_FILES = 32

Key = tuple[str, str]
"""The kind of a tensor, and its name."""


class Catalog:
    """A complete checkpoint.

    Attributes:
        path: Its folder.
        ranks: How many have written it.
        parts: What each of them says.
        aliases: Further names of tied parameters, and those they were saved by.
        options: Of the group of each parameter, with the rank that says so.
        pieces: Of each tensor, by kind and name, by their box: those with the same elements once.
    """

    def __init__(self, path: Path, rename: Callable[[str], str]) -> None:
        """Reads what the ranks say of their files.

        Args:
            path: The folder.
            rename: What names in the checkpoint are in the model.

        Raises:
            CheckpointError: It is damaged, or of a later version.
            StorageError: The disk refused.
        """
        self.path = path
        manifest = read_json(path / MANIFEST)
        if manifest.get("format") != "zero_fn checkpoint" or manifest.get("version", 0) > VERSION:
            raise CheckpointError(
                "This is a checkpoint of another format, or of a later version of it.",
                path=path,
                version=manifest.get("version"),
                read_here=f"up to version {VERSION}",
                fix="install the version of zero_fn that has written it, or a later one",
            )
        self.ranks = int(manifest["ranks"])
        self.parts = [read_json(path / part_name(rank)) for rank in range(self.ranks)]
        self.pieces: dict[Key, dict[Box, StoredBox]] = {}
        self.aliases: dict[str, str] = {}
        self.options: dict[str, tuple[int, Any]] = {}
        self._values: dict[str, tuple[int, Any]] = {}
        self._states: dict[str, list[tuple[str, Key]]] = {}
        self._readers: dict[tuple[str, int, int], TensorReader] = {}
        for rank, part in enumerate(self.parts):
            if (part.get("id"), part.get("rank")) != (manifest["id"], rank):
                raise damaged(path / part_name(rank), why="it belongs to another checkpoint")
            self._list(rank, part, rename)

    def _list(self, rank: int, part: dict[str, Any], rename: Callable[[str], str]) -> None:
        try:
            for kind, files in part["files"].items():
                for number, info in enumerate(files):
                    for name, entry in info["tensors"].items():
                        self._add(kind, rename, StoredBox.of_entry(name, entry, rank, number))
            self.aliases |= {rename(alias): rename(name) for alias, name in part.get("aliases", {}).items()}
            for group in part.get("groups", ()):
                for name in group["params"]:
                    self.options.setdefault(rename(name), (rank, group["options"]))
            for name, value in part.get("values", {}).items():
                self._values.setdefault(rename(name), (rank, value))
        except CheckpointError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise damaged(self.path / part_name(rank), why=f"it says what no version has said: {error!r}") from error

    def _add(self, kind: str, rename: Callable[[str], str], piece: StoredBox) -> None:
        parameter, slash, state = piece.name.rpartition("/") if kind == "optimizer" else (piece.name, "", "")
        key = (f"{kind} of rank {piece.rank}" if kind == "extra" else kind, f"{rename(parameter)}{slash}{state}")
        if kind == "optimizer" and key not in self.pieces:
            self._states.setdefault(rename(parameter), []).append((state, key))
        known = self.pieces.setdefault(key, {})
        known.setdefault(piece.box, piece)
        for other in (known[piece.box], next(iter(known.values()))):
            is_alike = (other.shape, other.dtype) == (piece.shape, piece.dtype)
            if not is_alike or (other.box == piece.box and other.digests != piece.digests):
                raise CheckpointError(
                    f"Ranks {other.rank} and {piece.rank} have saved different tensors under one name.",
                    name=key[1],
                    shapes=f"{list(other.shape)} and {list(piece.shape)}",
                    why="stages of a pipeline whose modules have the same names, or replicas that have parted",
                    fix="give every module the name that it has in the whole model, or save each model under a folder of "
                    "its own",
                )

    def close(self) -> None:
        """Lets go of all files."""
        while self._readers:
            self._readers.popitem()[1].close()

    def first(self, key: Key) -> StoredBox:
        """One piece of a tensor: all have its dtype and shape."""
        return next(iter(self.pieces[key].values()))

    def states_of(self, parameter: str) -> list[tuple[str, Key]]:
        """The states of a parameter that are tensors: their names and keys."""
        return self._states.get(parameter, [])

    def values_of(self, parameter: str) -> dict[str, Any]:
        """The states of a parameter that are none."""
        rank, values = self._values.get(parameter, (0, {}))
        return {name: self.value(rank, value) for name, value in values.items()}

    def whole(self, key: Key) -> Tensor:
        """A whole tensor, in memory of the host."""
        piece = self.first(key)
        out = torch.empty(piece.shape, dtype=piece.dtype)
        self.require_all(key, whole_box(piece.shape))
        self.fill(key, whole_box(piece.shape), 0, out.view(-1))
        return out

    def value(self, rank: int, encoded: Any) -> Any:
        """A value that a rank has saved."""
        return decoded(encoded, lambda path: self.whole((f"extra of rank {rank}", path)))

    def told(self, rank: int, name: str) -> Any:
        """A value of `extra` that a rank has saved, in a form that differs if the value does."""
        return decoded(
            self.parts[rank].get("extra", {}).get(name),
            lambda path: self.first((f"extra of rank {rank}", path)).digests,
        )

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
        for first, last, part in _runs(inside, piece.box.sizes):
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
            info = self.parts[piece.rank]["files"][kind][piece.file]
            self._readers[key] = TensorReader(self.path / tensors_name(*key), info)
        return self._readers[key]


_RUN_NUMEL = 4 << 20
"""Elements that are read at once where rows of a file are longer than those that are wanted."""


def _runs(box: Box, sizes: tuple[int, ...]) -> Iterator[tuple[int, int, Box]]:
    """Ranges of the elements of a tensor of these sizes that have a box of it: their ends, and the part of the box."""
    outer = next((dim for dim in reversed(range(len(sizes))) if box.sizes[dim] != sizes[dim]), -1)
    if all(size == 1 for size in box.sizes[: max(outer, 0)]):  # one range without gaps
        yield *_range(box, sizes), box
        return
    row = prod(sizes[1:])
    step = max(_RUN_NUMEL // row, 1)
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
