"""Finds the checkpoint that a folder means, and opens it with the reader of its format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from zero_fn.checkpoint.format.contents import Contents
from zero_fn.checkpoint.format.folders import MANIFEST, checkpoints, newest, read_manifest
from zero_fn.checkpoint.format.own_folder import OwnFolder
from zero_fn.checkpoint.others.dcp import METADATA, DcpFolder
from zero_fn.checkpoint.others.deepspeed import DeepSpeedFolder, deepspeed_folder
from zero_fn.errors import CheckpointError

__all__ = ["find_checkpoint", "foreign_in", "opened", "saved_as"]


def find_checkpoint(folder: Path) -> Path:
    """The folder itself if it is a checkpoint, or the checkpoint in it that was committed last."""
    if (folder / MANIFEST).exists():
        return folder
    foreign = foreign_in(folder)
    if foreign is None:
        return newest(folder)
    own = checkpoints(folder)
    if own:
        raise CheckpointError(
            "There are checkpoints of two kinds.",
            folder=folder,
            found=f"files of another library, and {own[-1].path.name}",
            fix="name one of the two: a folder of the other library without ours in it, "
            f"or {own[-1].path}",
        )
    return foreign


def foreign_in(folder: Path) -> Path | None:
    """The checkpoint of another library that a folder is, or has; None if there is none."""
    return folder if (folder / METADATA).is_file() else deepspeed_folder(folder)


def saved_as(folder: Path) -> str:
    """What identifies the save that has written a checkpoint;
    nothing if it is of another library, or is not there."""
    found: str = read_manifest(folder)["id"] if (folder / MANIFEST).exists() else ""
    return found


def opened(
    folder: Path,
    rename: Callable[[str], str],
    *,
    has_states: bool = True,
    reader: tuple[int, int] = (0, 1),
) -> Contents:
    """Reads what is in a checkpoint that `find_checkpoint` has found,
    but for the elements of tensors.

    `reader` is (index, number) of the readers, each of which needs a part.
    """
    if (folder / MANIFEST).exists():
        return OwnFolder(folder, rename, reader)
    kind = DcpFolder if (folder / METADATA).is_file() else DeepSpeedFolder
    return kind(folder, rename, has_states=has_states)
