"""A checkpoint that is read: where each element is, and its bytes, verified."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from zero_fn.checkpoint.contents import Contents
from zero_fn.checkpoint.files import StoredBox, TensorReader, damaged, read_json, understood
from zero_fn.checkpoint.folders import MANIFEST, VERSION, part_name, tensors_name
from zero_fn.checkpoint.values import decoded
from zero_fn.errors import CheckpointError

__all__ = ["Catalog"]


class Catalog(Contents):
    """A complete checkpoint of `zf.save`."""

    def __init__(self, path: Path, rename: Callable[[str], str]) -> None:
        """Reads what the ranks say of their files.

        Args:
            path: The folder.
            rename: What names in the checkpoint are in the model.

        Raises:
            CheckpointError: It is damaged, or of a later version.
            StorageError: The disk refused.
        """
        super().__init__(path)
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
        for rank, part in enumerate(self.parts):
            if (part.get("id"), part.get("rank")) != (manifest["id"], rank):
                raise damaged(path / part_name(rank), why="it belongs to another checkpoint")
            self._list(rank, part, rename)

    def _list(self, rank: int, part: dict[str, Any], rename: Callable[[str], str]) -> None:
        with understood(self.path / part_name(rank), "it says what no version has said"):
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

    def value(self, rank: int, encoded: Any) -> Any:
        """A value that a rank has saved."""
        return decoded(encoded, lambda path: self.whole((f"extra of rank {rank}", path)))

    def is_parted(self, what: str, name: str) -> bool:
        """Whether ranks have saved different values of `extra`, or of their buffers, under a name."""
        told = [self._told(rank, part.get(what, {}).get(name)) for rank, part in enumerate(self.parts)]
        return any(each != told[0] for each in told)

    def _told(self, rank: int, encoded: Any) -> Any:
        """A value that a rank has saved, with digests in place of tensors."""
        return decoded(encoded, lambda path: self.first((f"extra of rank {rank}", path)).digests)

    def open(self, kind: str, rank: int, file: int) -> TensorReader:
        """Opens a file that a rank has written."""
        info = self.parts[rank]["files"][kind][file]
        return TensorReader(self.path / tensors_name(kind, rank, file), info["begin"], info["nbytes"], info["xxh3"])
