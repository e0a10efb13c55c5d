"""`memory_copies`: checkpoints in shared memory, from which `resume` goes on after a loss.

/dev/shm/zero_fn-WORD/      the copies of one run on this host; WORD is in the file
                            `.memory_copies` beside its checkpoints
    copy-1764316800000/     a checkpoint, as `save` writes it; the one before it is removed

Where there are several hosts, each has a folder of its own, with the files of its ranks and of
those of the host before it. All of them together are the checkpoint.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_fn.checkpoint.agreement import RankMeeting, failure_of
from zero_fn.checkpoint.format.files import disk
from zero_fn.checkpoint.hosts import Hosts
from zero_fn.checkpoint.saving import begin_save, wait_for_saving
from zero_fn.errors import LayoutError, StateError
from zero_fn.local.shared_folder import SharedFolder, host_name
from zero_fn.storage import Slab
from zero_fn.values.chained_optimizer import Optimizers

__all__ = ["MARK", "MemoryCopies", "memory_copies", "word_of"]

MARK = ".memory_copies"

_DOING = "Copying into memory"


def memory_copies(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    every: int,
) -> MemoryCopies:
    """Keeps a checkpoint of a run in shared memory, for `zf.resume`. All ranks call it.

        said = zf.resume("runs/a", model, optimizer, extra={"warmup": warmup})
        copies = zf.checkpoint.memory_copies("runs/a", model, optimizer, every=10)
        for step in range(said["step"] if said else 0, 1000):
            ...
            copies.update(extra={"warmup": warmup, "step": step + 1})

    A copy is what `zf.save` writes, in /dev/shm, and where there are several hosts is sent to a
    rank of the next host, too. Beside an accelerator each rank copies the shards that it holds, and
    goes on, while a thread writes and sends them. So a run outlives all of its processes, or one of
    its hosts. Once a copy is complete, the one before it is removed: two are there for a moment. No
    other user can read them. They are removed when the launcher has ended, or ten minutes after the
    last process that uses them, or by `close`.

    Args:
        folder: The folder of the checkpoints of this run. A file in it,
            `.memory_copies`, names the copies.
        model: A module, transformed or not.
        optimizer: The optimizer of its parameters, or a sequence of them.
        every: How many steps lie between two copies.

    Raises:
        LayoutError: `every` is no number of steps.
        StateError: This system has no shared memory, or another user has made the folder; or
            copies for this folder are being made already, in this process or in another on one of
            the hosts. Raised on every rank.
        StorageError: The folder cannot be made.
        LostRankError: A rank has ended, or did not call `memory_copies`.
    """
    if not isinstance(every, int) or every < 1:
        raise LayoutError("A copy is made every so many steps.", every=every, fix="every=10")
    return MemoryCopies(Path(os.path.abspath(folder)), model, optimizer, every)


class MemoryCopies:
    """The copies of a run in shared memory. `memory_copies` returns it.

    Attributes:
        every: How many steps lie between two copies.
        nbytes: Bytes of tensors that this rank writes for a copy; as many again go to the next
            host, where there is one.
        path: The folder in shared memory.
    """

    def __init__(
        self, folder: Path, model: nn.Module, optimizer: Optimizers | None, every: int
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self.every = every
        self.nbytes = 0
        self._steps = 0
        meeting, host = RankMeeting(), list[str]()
        failure, same = failure_of(lambda: host.append(host_name())), (str(folder), every)

        def draw() -> str:
            return f"{drawn_word(folder)} {time.time_ns()}"

        word, first = meeting.agree(_DOING, failure, draw, same=same).text.split()
        self._first = int(first)
        self._hosts = hosts = Hosts(meeting.all_of(host[0]))
        # On a CPU to copy first takes as long as to write.
        self._copies_first = next(model.parameters(), torch.empty(0)).device.type != "cpu"
        self._room: list[Slab] = []
        folders: list[SharedFolder] = []

        def claim() -> None:
            folders.append(SharedFolder(word))
            if not folders[0].claim(locks=hosts.is_first(meeting.rank)):
                raise StateError(
                    "Copies for this folder are being made already.",
                    folder=folder,
                    why="here or in another process: "
                    "`resume` would load the newest copy, whose ever it is",
                    fix="close() them first; of models that train together make one copy: "
                    "memory_copies(folder, nn.ModuleDict({'actor': actor, 'critic': critic}), "
                    "(first, second), every=10)",
                )

        try:
            meeting.agree(_DOING, failure_of(claim))
        except BaseException:
            for each in folders:  # it would be in use while somebody keeps the error
                each.leave()
            raise
        self._folder: SharedFolder | None = folders[0]
        self.path: Path = folders[0].path

    def update(self, *, extra: Mapping[str, Any] | None = None) -> bool:
        """Makes a copy if it is time for one; returns whether it did, the same on every rank.

        All ranks call it once a step. The first call makes one.

        Communicates what `zf.save` does, for a copy; with several hosts three messages more each
        way, and the files to the next host. Else nothing.

        Args:
            extra: As `zf.save` takes it.

        Raises:
            StateError: The copies are closed.
            CheckpointError: Something cannot be copied.
            TierError: The host has no memory for what a copy is written from. Raised on every rank.
            StorageError: Shared memory is full. Raised on every rank; where a thread writes, by the
                next call that makes a copy.
            LostRankError: A rank has ended.
        """
        if self._folder is None:
            raise StateError(
                "These copies are closed.",
                fix="others: zf.checkpoint.memory_copies(folder, model, optimizer, every=10)",
            )
        number, self._steps = self._steps, self._steps + 1
        if number % self.every:
            return False
        saving = begin_save(
            self.path / f"copy-{self._first + number}",
            self._model,
            self._optimizer,
            extra,
            keep=1,
            background=self._copies_first,
            hosts=self._hosts,
            room=self._room,
        )
        self.nbytes = saving.nbytes
        return True

    def close(self) -> None:
        """Removes the copies, once every rank of this host has called it or
        has ended: training is done."""
        wait_for_saving()
        if self._folder is not None:
            self._folder.close()
            self._folder = None


def word_of(folder: Path) -> str:
    """By which word the copies of a run are found; nothing if it has none."""
    with (
        disk(folder, "Looking for copies in memory"),
        suppress(FileNotFoundError, NotADirectoryError),
    ):
        found = re.fullmatch(r"(\w+) (\d+)\n", (folder / MARK).read_text())
        # A folder that was copied is another run, and must not go on from the memory of the first.
        if found is not None and int(found[2]) == folder.stat().st_ino:
            return found[1]
    return ""


def drawn_word(folder: Path) -> str:
    """The word of a run. One that has none gets one, which nobody else has."""
    with disk(folder, "Naming the copies of a run"):
        folder.mkdir(parents=True, exist_ok=True)
        word = word_of(folder)
        if not word:
            word = os.urandom(8).hex()
            drawn = folder / f"{MARK}-{word}"
            drawn.write_text(f"{word} {folder.stat().st_ino}\n")
            drawn.replace(folder / MARK)
    return word
