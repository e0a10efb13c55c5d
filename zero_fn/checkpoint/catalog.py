"""Reads a checkpoint of `zf.save`: where each element is, and its bytes, verified."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from zero_fn.checkpoint.boxes import DEALT_RANKS
from zero_fn.checkpoint.contents import Contents
from zero_fn.checkpoint.files import StoredBox, TensorReader, damaged, read_json, understood
from zero_fn.checkpoint.folders import MANIFEST, VERSION, part_name, tensors_name
from zero_fn.checkpoint.values import decoded
from zero_fn.errors import CheckpointError

__all__ = ["Catalog"]


class Catalog(Contents):
    """A complete checkpoint of `zf.save`.

    Each rank that saved has written its part of the manifest (`rank-*.json`). A reader reads the parts that it probably
    needs: of the ranks that write small tensors, of those with its own numbers, and a share of the others, so that all
    readers together have read all. If names or elements are missing, it reads the rest. So a load on as many ranks takes
    as long on 512 as on 16.
    """

    def __init__(self, path: Path, rename: Callable[[str], str], reader: tuple[int, int] = (0, 1)) -> None:
        """Reads parts of the manifest.

        Args:
            path: The folder.
            rename: The name in the model for a name in the checkpoint.
            reader: The number of this reader, and how many readers there are.

        Raises:
            CheckpointError: The checkpoint is damaged, or of a later version.
            StorageError: The disk refused.
        """
        super().__init__(path, rename)
        manifest = read_json(path / MANIFEST)
        if manifest.get("format") != "zero_fn checkpoint" or manifest.get("version", 0) > VERSION:
            raise CheckpointError(
                "This is a checkpoint of another format, or of a later version of it.",
                path=path,
                version=manifest.get("version"),
                read_here=f"up to version {VERSION}",
                fix="install the version of zero_fn that has written it, or a later one",
            )
        self.ranks, self._id = int(manifest["ranks"]), manifest["id"]
        self._parts: dict[int, dict[str, Any]] = {}
        number, readers = reader
        for rank in (
            *range(min(self.ranks, DEALT_RANKS)),
            *range(number * self.ranks // readers, -(-(number + 1) * self.ranks // readers)),
            *range(number, self.ranks, readers),
        ):
            self._read_part(rank)
        heard, expected = Counter(kind for kind, _ in self.pieces), manifest.get("names")
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
        part = self._parts[rank] = read_json(self.path / part_name(rank))
        if (part.get("id"), part.get("rank")) != (self._id, rank):
            raise damaged(self.path / part_name(rank), why="it belongs to another checkpoint")
        with understood(self.path / part_name(rank), "it says what no version has said"):
            for kind, files in part["files"].items():
                for number, info in enumerate(files):
                    path = self.path / tensors_name(kind, rank, number)
                    opened = partial(TensorReader, path, info["begin"], info["nbytes"], info["xxh3"])
                    for name, entry in info["tensors"].items():
                        self._add(kind, StoredBox.of_entry(name, entry, rank, opened))
            self.aliases |= {self.rename(alias): self.rename(name) for alias, name in part.get("aliases", {}).items()}
            for group in part.get("groups", ()):
                for name in group["params"]:
                    self.options.setdefault(self.rename(name), (rank, group["options"]))
            for name, value in part.get("values", {}).items():
                self.values.setdefault(self.rename(name), (rank, value))

    def _add(self, kind: str, piece: StoredBox) -> None:
        name, _, state = piece.name.rpartition("/") if kind == "optimizer" else (piece.name, "", "")
        other = self.add_piece(f"{kind} of rank {piece.rank}" if kind == "extra" else kind, name, state, piece)
        if other is not None:
            raise CheckpointError(
                f"Ranks {other.rank} and {piece.rank} have saved different tensors under one name.",
                name=piece.name,
                shapes=f"{list(other.shape)} and {list(piece.shape)}",
                why="stages of a pipeline whose modules have the same names, or replicas that have parted",
                fix="give every module the name that it has in the whole model, or save each model under a folder of its own",
            )

    def said(self, rank: int, what: str) -> dict[str, Any]:
        """What a rank has saved as `extra`, or of its own `buffers`, by name, as it was written."""
        self._read_part(rank)
        found: dict[str, Any] = self._parts[rank].get(what, {})
        return found

    def value(self, rank: int, encoded: Any) -> Any:
        """A value that a rank has saved."""
        return decoded(encoded, lambda path: self.whole((f"extra of rank {rank}", path)))

    def is_parted(self, what: str, name: str) -> bool:
        """Whether ranks, of those that were read, have saved different values of `extra` or `buffers` under a name."""
        told = [self._told(rank, part.get(what, {}).get(name)) for rank, part in self._parts.items()]
        return any(each != told[0] for each in told)

    def _told(self, rank: int, encoded: Any) -> Any:
        """A value that a rank has saved, with the digests of tensors in place of tensors."""
        return decoded(encoded, lambda path: self.first((f"extra of rank {rank}", path)).digests)
