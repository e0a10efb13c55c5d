"""Reads a checkpoint of `zf.save`: where each element is, and its bytes, verified."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from zero_fn.checkpoint.format.contents import Contents
from zero_fn.checkpoint.format.files import StoredBox, TensorReader, damaged, read_json, understood
from zero_fn.checkpoint.format.folders import (
    AVERAGES,
    CUT,
    KINDS,
    part_name,
    read_manifest,
    tensors_name,
)
from zero_fn.checkpoint.format.values import decoded
from zero_fn.errors import CheckpointError
from zero_fn.values.box import DEALT_RANKS

__all__ = ["OwnFolder"]

_BOX = {"dtype": str, "shape": [int], "starts": [int], "sizes": [int], "offset": int, "xxh3": str}
_FORM = {
    "id": str,
    "rank": int,
    "files": {str: [{"nbytes": int, "begin": int, "xxh3": str, "tensors": {str: _BOX}}]},
    "aliases?": {str: str},
    "groups?": [{"params": [str], "options": dict}],
    "values?": {str: dict},
    "buffers?": dict,
    "extra?": dict,
}


class OwnFolder(Contents):
    """A complete checkpoint of `zf.save`.

    Each rank that saved has written its part of the manifest (`rank-*.json`). A reader reads
    the parts that it probably needs: of the ranks that write small tensors, of those with its
    own numbers, and a share of the others, so that all readers together have read all. If
    names or elements are missing, it reads the rest. So a load on as many ranks takes as long
    on 512 as on 16.
    """

    def __init__(
        self, path: Path, rename: Callable[[str], str], reader: tuple[int, int] = (0, 1)
    ) -> None:
        """Reads parts of the manifest."""
        super().__init__(path, rename)
        manifest = read_manifest(path)
        self.ranks = manifest["ranks"]
        self._id = manifest["id"]
        self._parts: dict[int, dict[str, Any]] = {}
        number, readers = reader
        for rank in chain(
            range(min(self.ranks, DEALT_RANKS)),
            range(number * self.ranks // readers, -(-(number + 1) * self.ranks // readers)),
            range(number, self.ranks, readers),
        ):
            self._read_part(rank)
        names = chain(self.pieces.keys() - self.coded.keys(), self.in_parts)
        heard, expected = Counter(kind for kind, _ in names), manifest.get("names")
        # None: ranks had tensors of different names, and nobody has counted the names.
        if expected is None or any(heard[kind] != count for kind, count in expected.items()):
            self.read_all()

    def read_all(self) -> None:
        """Reads the parts of all ranks."""
        for rank in range(self.ranks):
            self._read_part(rank)

    def _read_part(self, rank: int) -> None:
        if rank in self._parts:
            return
        part = self._parts[rank] = read_json(self.path / part_name(rank), _FORM)
        if (part["id"], part["rank"]) != (self._id, rank):
            raise damaged(self.path / part_name(rank), why="it belongs to another checkpoint")
        with self._understood(rank):
            for kind, number, info in (
                (k, *each)
                for k in (*KINDS, AVERAGES)
                for each in enumerate(part["files"].get(k, ()))
            ):
                path = self.path / tensors_name(kind, rank, number)
                opened = partial(TensorReader, path, info["begin"], info["nbytes"], info["xxh3"])
                pieces = [
                    StoredBox.of_entry(name, entry, rank, opened, path)
                    for name, entry in info["tensors"].items()
                ]
                room = sum(piece.nbytes for piece in pieces)
                if info["begin"] + room != info["nbytes"] or any(
                    p.offset + p.nbytes > room for p in pieces
                ):
                    raise ValueError(f"tensors do not make up {path.name}")
                for piece in pieces:
                    self._add(kind, piece)
            self.aliases |= {
                self.rename(alias): self.rename(name)
                for alias, name in part.get("aliases", {}).items()
            }
            for group in part.get("groups", ()):
                if (
                    not isinstance(options := decoded(group["options"], str), dict)
                    or "params" in options
                ):
                    raise ValueError("options of a group are no options")
                for name in group["params"]:
                    self.options.setdefault(self.rename(name), (rank, group["options"]))
            for name, value in part.get("values", {}).items():
                self.values.setdefault(self.rename(name), (rank, value))

    def _add(self, kind: str, piece: StoredBox) -> None:
        name, _, state = piece.name.rpartition("/") if kind in CUT[1:] else (piece.name, "", "")
        other = self.add_piece(
            f"{kind} of rank {piece.rank}" if kind == "extra" else kind, name, state, piece
        )
        if other is not None:
            raise CheckpointError(
                f"Ranks {other.rank} and {piece.rank} have saved different tensors under one name.",
                name=piece.name,
                shapes=f"{list(other.shape)} and {list(piece.shape)}",
                why="stages of a pipeline whose modules have the same names, "
                "or replicas that have parted",
                fix="give every module the name that it has in the whole model, "
                "or save each model under a folder of its own",
            )

    def said(self, rank: int, what: str) -> dict[str, Any]:
        """What a rank has saved as `extra`, or of its own `buffers`, by name, as it was written."""
        self._read_part(rank)
        found: dict[str, Any] = self._parts[rank].get(what, {})
        return found

    def value(self, rank: int, encoded: Any) -> Any:
        """A value that a rank has saved."""
        with self._understood(rank):
            return decoded(encoded, lambda path: self.whole((f"extra of rank {rank}", path)))

    def differs_by_rank(self, what: str, name: str) -> bool:
        """Whether ranks, of those that were read, have saved different values of
        `extra` or `buffers` under a name."""
        told = [
            self._told(rank, part.get(what, {}).get(name)) for rank, part in self._parts.items()
        ]
        return any(each != told[0] for each in told)

    def _told(self, rank: int, encoded: Any) -> Any:
        """A value that a rank has saved, with the digests of tensors in place of tensors."""
        with self._understood(rank):
            return decoded(
                encoded, lambda path: self.first((f"extra of rank {rank}", path)).digests
            )

    def _understood(self, rank: int) -> AbstractContextManager[None]:
        return understood(
            self.path / part_name(rank), "unknown field, of a newer version or damaged"
        )
