"""`resume`: loads the newest of what there is, copies in memory (`mirror`)
and checkpoints on the disk."""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from zero_fn.checkpoint.format.catalog import Catalog
from zero_fn.checkpoint.format.files import StoredBox, TensorReader, disk
from zero_fn.checkpoint.format.folders import (
    KINDS,
    MANIFEST,
    checkpoints,
    is_left,
    part_name,
    write_manifest,
)
from zero_fn.checkpoint.live.held_tensors import ModelTensors
from zero_fn.checkpoint.live.load_plan import LoadPlan, match_all
from zero_fn.checkpoint.loading import load
from zero_fn.checkpoint.mirror import remove_copies
from zero_fn.checkpoint.mirrored import Hosts, copies_in, ranks_of_copy, word_of
from zero_fn.checkpoint.others.find import find_checkpoint, foreign_in
from zero_fn.checkpoint.rank_meeting import RankMeeting, failure_of
from zero_fn.checkpoint.saving import wait_for_saving
from zero_fn.errors import CheckpointError, StorageError
from zero_fn.local.shared_folder import SharedFolder, host_name
from zero_fn.values.chained_optimizer import Optimizers, members_of

__all__ = ["resume"]

RESUMING = "Resuming"


def resume(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Loads the newest state of a run: a copy in memory (`zf.checkpoint.memory_copies`), or a checkpoint on the disk.

    All ranks call it.

        said = zf.resume("runs/a", model, optimizer, extra={"warmup": warmup})
        first = said["step"] if said else 0

    A copy is used if the parts of all ranks that have made it are on the hosts that are left, on
    any number of ranks. What a rank needs, and another host has, is sent. If a copy is damaged, or
    was lost, the newest complete checkpoint counts.

    Communicates what `zf.load` does, and names of copies; with several hosts,
    files that are missing on a host.

    Args:
        folder: The folder of the checkpoints of this run. It need not be there.
        model: The module whose parameters and buffers are loaded.
        optimizer: The optimizer of its parameters, or a sequence of them.
        extra: Objects with `load_state_dict`, by the names under which they were saved.

    Returns:
        What was saved as `extra`, by name; None if there is nothing yet: nothing was loaded.

    Raises:
        CheckpointError: What there is does not fit, or is damaged. Raised on every rank.
        StorageError: The disk refused, or shared memory is full. Raised on every rank.
        StateError: Another user has made the folder in shared memory.
        DisagreementError: Ranks were given different arguments.
        LostRankError: A rank has ended, or did not call `resume`.
    """
    wait_for_saving()
    meeting, path = RankMeeting(), Path(os.path.abspath(folder))
    same = str(path), optimizer is None, sorted(extra or {})
    word = meeting.agree(RESUMING, None, lambda: word_of(path), same=same).text
    memory: list[SharedFolder] = []

    def attach(*, is_wanted: bool) -> None:
        if not memory and (is_wanted or SharedFolder.path_of(word).exists()):
            memory.append(SharedFolder(word))

    try:
        if word:  # from here on nobody removes what is there
            meeting.agree(RESUMING, failure_of(lambda: attach(is_wanted=False)))
        found = _look(meeting, path, word)
        if found.copy:
            with _or_the_disk(found, meeting):
                meeting.agree(RESUMING, failure_of(lambda: attach(is_wanted=True)))
                copy = _Copy(meeting, found, memory[0].path / found.copy)
                copy.complete(model, optimizer, extra or {})
                said = load(copy.path, model, optimizer, extra=extra, verify="once")
                if found.hosts.is_first(meeting.rank):
                    remove_copies(memory[0].path, but=found.copy)
                return said
        return load(path, model, optimizer, extra=extra) if found.disk_ns else None
    finally:
        for each in memory:
            each.leave()


class _Newest(NamedTuple):
    """What there is, the same on every rank."""

    hosts: Hosts
    # The newest copy that has the parts of all ranks and is newer than the disk's;
    # "" if there is none.
    copy: str
    parts: dict[str, list[int]]  # whose parts of it are on each host
    disk_ns: int  # when the newest checkpoint was complete; 0 if there is none


def _look(meeting: RankMeeting, path: Path, word: str) -> _Newest:
    """Finds out what each host has of the copies of a run, and rank 0 what the disk has."""
    here: dict[str, Any] = {"host": "", "copies": {}, "disk_ns": 0}

    def look() -> None:
        if word:
            here["host"], here["copies"] = host_name(), copies_in(SharedFolder.path_of(word))
        if meeting.rank == 0 and path.is_dir():
            here["disk_ns"] = _saved_at_ns(path)

    meeting.agree(RESUMING, failure_of(look))
    said = meeting.all_of(here)
    disk_ns: int = said[0]["disk_ns"]
    on_hosts: dict[str, dict[str, list[int]]] = {each["host"]: each["copies"] for each in said}
    names = sorted({name for copies in on_hosts.values() for name in copies}, key=_time_of)
    for name in reversed(names):
        parts = {host: copies.get(name, []) for host, copies in on_hosts.items()}
        is_newer = _time_of(name) > disk_ns
        if is_newer and set().union(*parts.values()) == set(range(ranks_of_copy(name))):
            return _Newest(Hosts([each["host"] for each in said]), name, parts, disk_ns)
    return _Newest(Hosts([]), "", {}, disk_ns)


def _saved_at_ns(folder: Path) -> int:
    """When the checkpoint was saved that `load` would take; 0 if there is none,
    1 if it is of another library."""
    own = {each.path: each.saved_at_ns for each in checkpoints(folder)}
    if foreign_in(folder) is None and all(is_left(path) for path in own):
        return 0
    return own.get(find_checkpoint(folder), 1)


def _time_of(copy: str) -> int:
    return int(copy.partition("-")[0])


@contextmanager
def _or_the_disk(found: _Newest, meeting: RankMeeting) -> Iterator[None]:
    """A copy that is damaged does not count, if there is a checkpoint on the disk.

    All ranks hear of it.
    """
    try:
        yield
    except (CheckpointError, StorageError) as error:
        if not found.disk_ns:
            raise
        if meeting.rank == 0:
            warnings.warn(
                "zero_fn goes on from a checkpoint on the disk: "
                f"the newer copy in memory cannot be loaded. {error}",
                RuntimeWarning,
                stacklevel=4,
            )


class _Copy:
    """A copy of which each host has parts."""

    def __init__(self, meeting: RankMeeting, found: _Newest, path: Path) -> None:
        self.path = path
        self._meeting = meeting
        self._found = found
        # The ranks whose parts are on this host.
        self._here = set(found.parts[found.hosts.names[meeting.rank]])
        self._is_first = found.hosts.is_first(meeting.rank)

    def complete(
        self, model: nn.Module, optimizer: Optimizers | None, extra: Mapping[str, Any]
    ) -> None:
        """Makes it a checkpoint on this host, with all parts of the manifest,
        and the files that ranks of this host read."""
        if len(self._found.parts) == 1:  # this host has them all
            self._agree(self._write_manifest)
            return
        self._agree(self._clear)
        missing = sorted(set(range(ranks_of_copy(self.path.name))) - self._here)
        self._trade([part_name(rank) for rank in missing] if self._is_first else [])
        self._agree(self._write_manifest)
        wanted: set[str] = set()
        self._agree(lambda: wanted.update(self._files_to_read(model, optimizer, extra)))
        self._trade(sorted(wanted))

    def _agree(self, act: Callable[[], object]) -> None:
        self._meeting.agree(RESUMING, failure_of(act))

    def _clear(self) -> None:
        """Makes the folders, and removes what is not complete."""
        if self._is_first:
            with disk(self.path, "Making the folder of a copy"):
                for kind in KINDS:
                    (self.path / kind).mkdir(parents=True, exist_ok=True)
                for file in self.path.rglob("*-*.*"):
                    if _rank_of(file) not in self._here:
                        file.unlink()

    def _write_manifest(self) -> None:
        if self._is_first and not (self.path / MANIFEST).exists():
            write_manifest(self.path, self.path.name, ranks_of_copy(self.path.name))

    def _files_to_read(
        self, model: nn.Module, optimizer: Optimizers | None, extra: Mapping[str, Any]
    ) -> set[str]:
        """The files that a load would read on this rank, and that are not on this host."""
        wanted: set[str] = set()

        def opened(path: Path, begin: int, nbytes: int, digest: str | None) -> TensorReader:
            if path.exists():
                return TensorReader(path, begin, nbytes, digest)
            wanted.add(str(path.relative_to(self.path)))
            return _UnreadFile()

        named = ModelTensors()
        named.add(model, None)
        plan = LoadPlan(named, model, members_of(optimizer))
        source = Catalog(self.path, lambda name: name, open=opened)
        match_all(plan, source, self._meeting, extra, is_strict=False)
        twins = [(other, held) for _, other, held in plan.twins]
        for key, held in [*plan.todo, *twins]:
            source.verify(key, held.place.box)
        source.close()
        return wanted

    def _trade(self, wanted: Sequence[str]) -> None:
        """Gets files from other hosts, and sends them what they want.

        Ranks of one host do not want the same file twice.
        """
        hosts, rank = self._found.hosts, self._meeting.rank
        wants = dict[tuple[str, str], int]()
        for receiver, names in enumerate(self._meeting.all_of(list(wanted))):
            for name in names:
                wants.setdefault((hosts.names[receiver], name), receiver)
        sends, sources = defaultdict[int, list[str]](list), set[int]()
        for (_, name), receiver in wants.items():
            sender = self._holder(_rank_of(Path(name)), receiver)
            if sender == rank:
                sends[receiver].append(name)
            if receiver == rank:
                sources.add(sender)

        def trade() -> None:
            with disk(self.path, "Getting files of another host"):
                self._meeting.trade(self.path, sends, sorted(sources))

        self._agree(trade)

    def _holder(self, of: int, receiver: int) -> int:
        """The rank that sends the files of a rank: those who have them take turns."""
        names, parts = self._found.hosts.names, self._found.parts
        holders = [rank for rank, host in enumerate(names) if of in parts[host]]
        return holders[receiver % len(holders)]


def _rank_of(file: Path) -> int:
    """The rank that has written a file of a checkpoint: rank-00002.json,
    model/00002-0.safetensors."""
    numbers = [int(word) for word in file.stem.split("-") if word.isdigit()]
    return numbers[0]


class _UnreadFile(TensorReader):
    """Stands for a file that is on another host: its elements are anything."""

    def __init__(self) -> None:
        pass

    def read(self, piece: StoredBox, first: int, last: int, out: Tensor | None) -> None:
        """Reads nothing."""
