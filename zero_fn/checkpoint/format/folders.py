"""Folders of checkpoints: complete ones, those that a killed save has left,
and those to be removed.

runs/a/step-000120/             a checkpoint: one rename gave it this name once it was whole
runs/a/.step-000240.saving/     a checkpoint that is being saved by the holder of its lock;
                                without one its save was killed
runs/a/.step-000080.removing/   a checkpoint that is being removed, or whose removal was killed
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero_fn.checkpoint.format.files import (
    disk,
    read_json,
    require_form,
    sync_folder,
    understood,
    write_json,
)
from zero_fn.errors import CheckpointError, StorageError, ZeroError
from zero_fn.values.tiers import bytes_text

__all__ = [
    "AVERAGES",
    "CUT",
    "KINDS",
    "MANIFEST",
    "VERSION",
    "Checkpoint",
    "Draft",
    "checkpoints",
    "is_left",
    "newest",
    "part_name",
    "prune",
    "read_manifest",
    "tensors_name",
    "write_manifest",
]

VERSION = 1
MANIFEST = "manifest.json"
KINDS = ("model", "optimizer", "extra")
"""Folders of files of tensors in a checkpoint."""

AVERAGES = "averages"
"""The kind of averages of parameters: in the folder `extra`, and cut as parameters are."""

CUT = (*KINDS[:2], AVERAGES)
"""The kinds of tensors of which a rank writes its shards."""

_LEFT = (".saving", ".removing")


def is_left(path: Path) -> bool:
    """Whether a folder is what a save or a removal is at, or has left."""
    return path.name.endswith(_LEFT)


def part_name(rank: int) -> str:
    """The file in which a rank says what it has written: its part of the manifest."""
    return f"rank-{rank:05d}.json"


def tensors_name(kind: str, rank: int, number: int) -> str:
    """The path of a file of tensors that a rank writes, in the folder of its kind."""
    if kind == AVERAGES:
        return f"extra/averages-{rank:05d}-{number}.safetensors"
    return f"{kind}/{rank:05d}-{number}.safetensors"


def write_manifest(
    folder: Path,
    save_id: str,
    ranks: int,
    names: Mapping[str, int] | None = None,
    saved_at_ns: int | None = None,
) -> None:
    """Writes the manifest, the last file of a checkpoint, by which a folder is one."""
    # `names`: how many names of tensors there are, by kind, so a reader of some parts knows whether
    # it has heard of all. None if ranks have tensors of different names.
    body = {"format": "zero_fn checkpoint", "version": VERSION, "id": save_id, "ranks": ranks}
    made_by = {"torch": torch.__version__, "python": platform.python_version()}
    counted = {} if names is None else {"names": names}
    when = {"saved_at_ns": saved_at_ns or time.time_ns()}
    write_json(folder / MANIFEST, {**body, **counted, **when, "made_by": made_by})


_FORM = {"id": str, "ranks": int, "names?": {str: int}, "saved_at_ns": int, "made_by": {str: str}}


def read_manifest(folder: Path) -> dict[str, Any]:
    manifest = read_json(folder / MANIFEST, {"format": str, "version": int})
    if manifest["format"] != "zero_fn checkpoint" or manifest["version"] > VERSION:
        raise CheckpointError(
            "This is a checkpoint of another format, or of a later version of it.",
            path=folder,
            version=manifest["version"],
            read_here=f"up to version {VERSION}",
            fix="install the version of zero_fn that has written it, or a later one",
        )
    with understood(folder / MANIFEST, "unknown field, of a newer version or damaged"):
        require_form(manifest, _FORM)
    return manifest


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on a disk, complete or not, as `checkpoints` lists it.

    Attributes:
        path: The folder of the checkpoint.
        step: The number at the end of the folder's name; None if the name ends in no number.
        nbytes: Bytes of all its files.
        is_complete: Whether the save was finished, so that `load` takes the checkpoint.
        saved_at_ns: When the save was finished, in nanoseconds since 1970; 0 if it was not.
        ranks: How many ranks have saved it.
        made_by: Versions of the libraries that saved it, by name.
    """

    path: Path
    step: int | None
    nbytes: int
    is_complete: bool
    saved_at_ns: int
    ranks: int
    made_by: Mapping[str, str]

    def __str__(self) -> str:
        state = "complete" if self.is_complete else "not complete"
        return f"{self.path}  {bytes_text(self.nbytes)}, {state}, {self.ranks} ranks"


def checkpoints(folder: str | os.PathLike[str]) -> list[Checkpoint]:
    """Lists the checkpoints in a folder, the oldest first. Communicates nothing.

    Args:
        folder: A folder with checkpoints in it, or one checkpoint.

    Returns:
        All of them, also those whose save was interrupted, which are not complete.

    Raises:
        StorageError: The folder cannot be read.
    """
    folder = Path(folder)
    with disk(folder, "Looking for checkpoints"):
        if (folder / MANIFEST).exists():
            return [_described(folder)]
        inside = [path for path in folder.iterdir() if path.is_dir()]
    is_one = [path for path in inside if (path / MANIFEST).exists() or is_left(path)]
    return sorted(map(_described, is_one), key=lambda found: (found.saved_at_ns, found.path.name))


def _described(path: Path) -> Checkpoint:
    manifest: dict[str, Any] = {}
    if not is_left(path):
        with suppress(ZeroError):
            manifest = read_manifest(path)
    ranks = manifest.get("ranks", 0)
    is_complete = bool(ranks) and all((path / part_name(rank)).exists() for rank in range(ranks))
    nbytes = 0
    for folder, _, names in os.walk(path):  # others may be saving or removing it
        for name in names:
            with suppress(OSError):
                nbytes += os.stat(os.path.join(folder, name)).st_size
    saved_at = manifest.get("saved_at_ns", 0)
    return Checkpoint(
        path,
        _number(path.name)[1],
        nbytes,
        is_complete,
        saved_at,
        ranks,
        manifest.get("made_by", {}),
    )


def _number(name: str) -> tuple[str, int | None]:
    """A name without the number at its end, and the number; None if there is none."""
    found = re.fullmatch(r"(.*?)(\d+)", name.removesuffix(".saving").removesuffix(".removing"))
    return (found[1], int(found[2])) if found else (name, None)


def newest(folder: Path) -> Path:
    """The checkpoint that was committed last."""
    found = checkpoints(folder)
    for checkpoint in found:
        if not checkpoint.is_complete and not is_left(checkpoint.path):
            for rank in range(read_manifest(checkpoint.path)["ranks"]):
                read_json(checkpoint.path / part_name(rank), {})
    complete = [checkpoint for checkpoint in found if checkpoint.is_complete]
    if not complete:
        raise CheckpointError(
            "There is no complete checkpoint.",
            folder=folder,
            found=", ".join(checkpoint.path.name for checkpoint in found)
            or "nothing that looks like one",
            fix="give a folder that zf.save has written, or one with such folders in it",
        )
    return complete[-1].path


class Draft:
    """The folder of a checkpoint that is being saved.

    Rank 0 makes the folder, commits it and holds its lock; in memory the first rank of each host.
    """

    def __init__(self, target: Path, kinds: Sequence[str] = KINDS) -> None:
        """A draft of which nothing is on the disk yet; `kinds` are the folders in it."""
        self.target = target
        self.path = target.parent / f".{target.name}.saving"
        self._kinds = kinds
        self._lock = -1
        self._mark = self.path

    def make(self, made: str = "") -> str:
        """Makes the folder, and removes what other saves have left;
        returns what identifies this save: `made`, or a new text."""
        parent = self.target.parent
        if not self.target.name or self.target.name.startswith("."):
            raise CheckpointError(
                "This is no name for a checkpoint.",
                path=self.target,
                fix='a name that does not begin with a dot: "runs/a/step-000120"',
            )
        with disk(self.path, "Making the folder of a checkpoint"):
            parent.mkdir(parents=True, exist_ok=True)
            self._require_free()
            for left in parent.iterdir():
                if left.name.startswith(".") and is_left(left) and left.is_dir():
                    _remove_if_left(left)
            if self.path.exists():
                raise CheckpointError(
                    "Another process is saving this checkpoint.",
                    path=self.path,
                    fix="save under another name",
                )
            self.path.mkdir()
            try:
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for kind in self._kinds:
                    (self.path / kind).mkdir()
                self._mark = self.path / (made or os.urandom(8).hex())
                self._mark.touch()
            except BaseException:
                shutil.rmtree(self.path, ignore_errors=True)
                self._unlock()
                raise
        return self._mark.name

    def require(self, made: str) -> None:
        """Raises unless this is the folder that rank 0 has made: a host may have another one of
        this name, that a killed save has left.

        `made` is what `make` has returned there.
        """
        if not (self.path / made).exists():
            raise StorageError(
                "This rank does not see the folder that rank 0 has made for a checkpoint.",
                path=self.path,
                why="each host has a folder of its own at this path",
                fix="save to a folder that all hosts share (df, mount); "
                "earlier checkpoints are unchanged",
            )

    def commit(self) -> str:
        """Makes sure that all files are on the disk, and renames the folder to its target."""
        with disk(self.target, "Committing a checkpoint"):
            self._mark.unlink()
        for kind in self._kinds:
            sync_folder(self.path / kind)
        sync_folder(self.path)
        with disk(self.target, "Committing a checkpoint"):
            self._rename()
        try:
            sync_folder(self.target.parent)
        except BaseException:
            self._undo()
            raise
        self._unlock()
        return ""

    def _require_free(self) -> None:
        if os.path.lexists(self.target):
            raise CheckpointError(
                "A file or folder of this name exists already.",
                path=self.target,
                why="a checkpoint is never overwritten: "
                "a save that is killed would leave neither the old nor the new one",
                fix='save under another name: zf.save("runs/a/step-000120", ...); '
                "or remove the old one first",
            )

    def _rename(self) -> None:
        if os.path.lexists(self.target):  # a rename would replace an empty folder
            raise FileExistsError(17, "somebody made it meanwhile", str(self.target))
        os.rename(self.path, self.target)

    def _undo(self) -> None:
        """Renames the folder back, after a failure."""
        with suppress(OSError):
            os.rename(self.target, self.path)

    def drop(self) -> None:
        """Removes the folder, after a failure."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _remove_if_left(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # somebody is at it, or the file system has no locks
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
    finally:
        os.close(fd)


def prune(target: Path, keep: int | None) -> None:
    """Removes old checkpoints: those whose names differ from that of the one
    just saved only in the number.

    What cannot be removed stays, with a warning: the save has succeeded.
    """
    if keep is None:
        return
    stem, more = _number(target.name)[0], keep - 1
    try:
        for found in reversed(checkpoints(target.parent)):
            is_alike = found.ranks and _number(found.path.name)[0] == stem
            if not is_alike or found.path.name == target.name:
                continue
            if more:
                more -= found.is_complete
                continue
            going = found.path.parent / f".{found.path.name}.removing"
            os.rename(found.path, going)
            shutil.rmtree(going)
    except (OSError, ZeroError) as error:
        warnings.warn(
            f"zero_fn could not remove an old checkpoint: {error}", RuntimeWarning, stacklevel=2
        )
