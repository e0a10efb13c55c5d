"""Writes the files of one rank: tensors, and its part of the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_fn.checkpoint.format.files import BUFFER_NBYTES, StoredBox, TensorFile, write_json
from zero_fn.checkpoint.format.folders import KINDS, part_name

__all__ = ["Writer"]


class Writer:
    """Files that are being written into a folder that is there."""

    def __init__(self, folder: Path, saved_by: str = "") -> None:
        """`saved_by` identifies the save."""
        self.folder = folder
        self._saved_by = saved_by
        self._files: dict[str, list[TensorFile]] = {kind: [] for kind in KINDS}
        self._file_of: dict[int, TensorFile] = {}  # by the identity of a box

    def make(self, kind: str, name: str, pieces: list[StoredBox]) -> None:
        """Makes a file of tensors for these boxes."""
        file = TensorFile(self.folder / name, pieces, self._saved_by)
        self._files.setdefault(kind, []).append(file)
        self._file_of.update((id(piece), file) for piece in pieces)

    def append(self, piece: StoredBox, values: Tensor) -> None:
        """Writes the next elements of a box, a buffer at a time."""
        for part in torch.split(values.reshape(-1), BUFFER_NBYTES // values.element_size()):
            self._file_of[id(piece)].append(piece, part.cpu())

    def finish(self) -> dict[str, list[dict[str, Any]]]:
        """Makes sure that the files are on the disk; returns what a manifest says of them,
        by kind."""
        return {kind: [file.finish() for file in files] for kind, files in self._files.items()}

    def finish_part(self, rank: int, says: Mapping[str, Any]) -> None:
        """The files are complete: writes this rank's part of the manifest, in which it `says` the
        rest."""
        body = {"id": self._saved_by, "rank": rank, "files": self.finish(), **says}
        write_json(self.folder / part_name(rank), body)

    def close(self) -> None:
        """Closes the files, also those that are not complete."""
        for files in self._files.values():
            for file in files:
                file.close()
