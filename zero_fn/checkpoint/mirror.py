"""`mirror`: copies of the training state in shared memory,
from which `resume` goes on after a loss."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from zero_fn.checkpoint.format.files import disk
from zero_fn.checkpoint.format.folders import KINDS, part_name, tensors_name
from zero_fn.checkpoint.mirrored import Hosts, drawn_word, names_in
from zero_fn.checkpoint.rank_meeting import RankMeeting, failure_of
from zero_fn.checkpoint.saving import Saving, wait_for_saving
from zero_fn.checkpoint.writing import Inventory, Share, Writing, shared_out
from zero_fn.errors import LayoutError, LostRankError, StateError
from zero_fn.local.shared_folder import SharedFolder, host_name
from zero_fn.storage.host_memory import Slab, available, too_small
from zero_fn.values.chained_optimizer import Optimizers

__all__ = ["Mirror", "mirror"]

MIRRORING = "Mirroring"

_SMALL = 4096  # bytes


def mirror(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    every: int | Literal["auto"] = "auto",
    share: float = 0.02,
) -> Mirror:
    """Keeps a copy of the training state in shared memory, for `zf.resume`. All ranks call it.

        said = zf.resume("runs/a", model, optimizer, extra={"warmup": warmup})
        mirror = zf.checkpoint.memory_copies("runs/a", model, optimizer)
        for step in range(said["step"] if said else 0, 1000):
            ...
            mirror.update(extra={"warmup": warmup, "step": step + 1})

    A copy holds what a checkpoint holds. Each rank copies the shards that it holds, and goes on; a
    thread writes them into /dev/shm, and, where there are several hosts, sends them to a rank of
    the next host. So a run outlives all of its processes, or one of its hosts. Once every rank has
    written, the copy before it is removed: two are there for a moment. No other user can read them.
    They are removed when the launcher has ended, or ten minutes after the last process that uses
    them, or by `close`.

    Args:
        folder: The folder of the checkpoints of this run. A file in it,
            `.mirror`, names the copies.
        model: A module, transformed or not.
        optimizer: The optimizer of its parameters, or a sequence of them.
        every: How many steps lie between two copies. "auto": as many as make copies take `share` of
            the time, as rank 0 measures it.
        share: The part of the time that copies may take.

    Raises:
        LayoutError: `every` or `share` is out of its range.
        StateError: This system has no shared memory, or another user has made the folder; or
            another mirror of it is open, in this process or in another on one of the hosts. Raised
            on every rank.
        StorageError: The folder cannot be made.
        LostRankError: A rank has ended, or did not call `mirror`.
    """
    if (every != "auto" and (not isinstance(every, int) or every < 1)) or not 0 < share < 1:
        raise LayoutError(
            "A mirror is updated every so many steps.",
            every=every,
            share=share,
            fix='every="auto", or a number from 1 on',
        )
    return Mirror(Path(os.path.abspath(folder)), model, optimizer, every, share)


class Mirror:
    """The copies of a run in shared memory. `mirror` returns it.

    Attributes:
        every: How many steps lie between this copy and the next.
        nbytes: Bytes that this rank writes for a copy; as many again go to the next host,
            where there is one.
        path: The folder in shared memory.
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: Optimizers | None,
        every: int | Literal["auto"],
        share: float,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._asked = every
        self._share = share
        self.every = 1
        self.nbytes = 0
        self._steps = 0
        self._pace = _Pace()
        self._room: list[Slab] = []
        meeting, host = RankMeeting(), list[str]()
        failure, same = failure_of(lambda: host.append(host_name())), (str(folder), every, share)
        word = meeting.agree(MIRRORING, failure, lambda: drawn_word(folder), same=same).text
        self._hosts = Hosts(meeting.all_of(host[0]))
        folders: list[SharedFolder] = []

        def claim() -> None:
            folders.append(SharedFolder(word))
            if not folders[0].claim(locks=self._hosts.is_first(meeting.rank)):
                raise StateError(
                    "Another mirror makes copies of a run in this folder.",
                    folder=folder,
                    why="it is open, here or in another process: "
                    "`resume` would load the newest copy, whose ever it is",
                    fix="close() it first; of models that train together one mirror: "
                    "zf.checkpoint.memory_copies(folder, nn.ModuleDict({'actor': actor, 'critic': critic}), "
                    "(first, second))",
                )

        try:
            meeting.agree(MIRRORING, failure_of(claim))
        except BaseException:
            for each in folders:  # it would be in use while somebody keeps the error
                each.leave()
            raise
        self._folder: SharedFolder | None = folders[0]
        self.path: Path = folders[0].path

    def update(self, *, extra: Mapping[str, Any] | None = None) -> bool:
        """Makes a copy if it is time for one; returns whether it did, the same on every rank.

        All ranks call it once a step.

        Communicates, for a copy: two messages of 640 bytes from each rank to rank 0, and two back;
        with several hosts another, and the files to the next host. Else nothing.

        Args:
            extra: As `zf.save` takes it.

        Raises:
            StateError: The mirror is closed.
            CheckpointError: Something cannot be copied.
            TierError: Shared memory or the host has no room for the copies. Raised on every rank.
            StorageError: Shared memory is full. Raised on every rank,
                by the next call that makes a copy.
            LostRankError: A rank has ended.
        """
        if self._folder is None:
            raise StateError(
                "The mirror is closed.",
                fix="another one: zf.checkpoint.memory_copies(folder, model, optimizer)",
            )
        self._steps += 1
        if self._steps < self.every:
            return False
        wait_for_saving()
        self._pace.begin(self._steps)
        meeting, plan = RankMeeting(), Inventory()
        failure = failure_of(lambda: plan.add(self._model, self._optimizer, extra or {}, None))
        agreed = meeting.agree(
            MIRRORING, failure, partial(self._decide, meeting.size), same_names=plan.cut_names()
        )
        name, every = agreed.text.split()
        self.every = int(every)
        self._steps = 0
        plan.end_differences()
        writing = Writing(
            self.path / name,
            meeting.rank,
            plan,
            name,
            _small_apart(shared_out(plan, agreed)),
            self._room,
        )
        if not self._pace.copies:
            self.nbytes = sum(share.piece.nbytes for share in writing.each())
            self._require_room(meeting)
        is_on_cpu = next(self._model.parameters(), torch.empty(0)).device.type == "cpu"
        failure = failure_of(lambda: self._begin(writing, copies=not is_on_cpu))
        self._pace.end(counts_threads=is_on_cpu)
        Saving(partial(self._finish, meeting, writing, failure))
        return True

    def _decide(self, ranks: int) -> str:
        """On rank 0: how the copy is called, and after how many steps the next one is due."""
        every = self._asked if self._asked != "auto" else self._pace.steps_until_next(self._share)
        return f"{time.time_ns()}-{ranks} {every}"

    def _require_room(self, meeting: RankMeeting) -> None:
        """Raises on every rank if a host has no room for its copies:
        two of each rank on it, and of each that it keeps."""
        nbytes, hosts = meeting.all_of(self.nbytes), self._hosts

        def require() -> None:
            beside = hosts.beside(meeting.rank)
            needed = 2 * sum(
                nbytes[rank] for each in beside for rank in (each, *hosts.kept_by(each))
            )
            found = os.statvfs(self.path)
            copies = [self.path / name for name in names_in(self.path)]
            bounds = (
                (found.f_bavail * found.f_frsize, "its size (df /dev/shm; docker run --shm-size)"),
                available(),
            )
            room, bound = min(bounds)
            # Room of the copies that will be removed.
            room += sum(file.stat().st_size for copy in copies for file in copy.rglob("*"))
            if needed > room:
                raise too_small("Copies in /dev/shm", needed, room, bound)

        meeting.agree(MIRRORING, failure_of(require))

    def _begin(self, writing: Writing, *, copies: bool) -> None:
        """Writes what must not change meanwhile.

        On a CPU that is all: to copy first would take as long as to write.
        """
        with disk(writing.folder, "Making the folder of a copy"):
            for kind in KINDS:
                (writing.folder / kind).mkdir(parents=True, exist_ok=True)
        writing.begin(copies=copies)
        if not copies:
            writing.write_rest()

    def _finish(self, meeting: RankMeeting, writing: Writing, failure: Exception | None) -> None:
        """In a thread: writes the copy, sends it to the next host, and removes the others."""
        rank, hosts = meeting.rank, self._hosts
        if not writing.is_complete:
            failure = failure or failure_of(writing.write_rest)
        writing.close()
        try:
            neighbour = hosts.neighbour(rank)
            if neighbour is not None:
                meeting.agree(MIRRORING, failure)
                names = [
                    tensors_name(kind, rank, number)
                    for kind, files in writing.files.items()
                    for number in range(len(files))
                ]
                sends = {neighbour: [*names, part_name(rank)]}

                def trade() -> None:
                    with disk(writing.folder, "Keeping the files of another host"):
                        meeting.trade(writing.folder, sends, hosts.kept_by(rank))

                failure = failure_of(trade)
            meeting.agree(MIRRORING, failure)
        except LostRankError:
            raise  # perhaps all have written: `resume` will see
        except Exception:
            shutil.rmtree(writing.folder, ignore_errors=True)
            raise
        if hosts.is_first(rank):
            remove_copies(self.path, but=writing.folder.name)
        self._pace.end_thread()

    def close(self) -> None:
        """Removes the copies, once every rank of this host has called it or
        has ended: training is done."""
        wait_for_saving()
        if self._folder is not None:
            self._folder.close()
            self._folder = None


def _small_apart(files: Mapping[str, Sequence[Sequence[Share]]]) -> dict[str, list[list[Share]]]:
    """The same in more files: small tensors, which many ranks read,
    are not in the files that other hosts then would want."""
    found: dict[str, list[list[Share]]] = {}
    for kind, several in files.items():
        large = [[each for each in shares if each.piece.nbytes > _SMALL] for shares in several]
        small = [[each for each in shares if each.piece.nbytes <= _SMALL] for shares in several]
        found[kind] = [shares for shares in (*large, *small) if shares]
    return found


def remove_copies(folder: Path, *, but: str) -> None:
    """Removes the copies on this host but one."""
    for name in names_in(folder):
        if name != but:
            shutil.rmtree(folder / name, ignore_errors=True)


class _Pace:
    """How long copies take, and how long steps."""

    def __init__(self) -> None:
        self.copies = 0  # that were begun
        self._began = self._cost_s = self._step_s = 0.0
        self._counts_threads = False

    def begin(self, steps: int) -> None:
        """A copy begins, this many steps after the last one."""
        now = time.perf_counter()
        if self.copies:
            self._step_s = (now - self._ended) / steps
        self._began = now

    def end(self, *, counts_threads: bool) -> None:
        """This thread goes on; another writes. On a CPU that takes time of the steps."""
        self.copies += 1
        self._ended = time.perf_counter()
        self._counts_threads = counts_threads
        self._cost_s = self._ended - self._began

    def end_thread(self) -> None:
        self._cost_s += time.thread_time() if self._counts_threads else 0.0

    def steps_until_next(self, share: float) -> int:
        """After how many steps the copy that begins now is to be followed by another.

        The first one is not counted: it pays for what the others find there.
        """
        if self.copies < 2:
            return 1
        return max(math.ceil(self._cost_s / share / max(self._step_s, 1e-9)), 1)
