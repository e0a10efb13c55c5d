"""`resume`: loads the newest of what there is, copies in memory and checkpoints on the disk."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn

from zero_fn.checkpoint.agreement import RankMeeting, failure_of
from zero_fn.checkpoint.format.folders import checkpoints, is_left, part_name
from zero_fn.checkpoint.hosts import Hosts
from zero_fn.checkpoint.loading import load
from zero_fn.checkpoint.missing_files import MissingFiles
from zero_fn.checkpoint.others.find import find_checkpoint, foreign_in
from zero_fn.checkpoint.saving import wait_for_saving
from zero_fn.checkpoint.shared_memory import word_of
from zero_fn.errors import CheckpointError, StorageError
from zero_fn.local.shared_folder import SharedFolder, host_name
from zero_fn.values.chained_optimizer import Optimizers

__all__ = ["resume"]

RESUMING = "Resuming"


def resume(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Loads the newest state of a run: a copy in memory, or a checkpoint on the disk.

    All ranks call it.

        said = zf.resume("runs/a", model, optimizer, extra={"warmup": warmup})
        first = said["step"] if said else 0

    A copy (`zf.checkpoint.memory_copies`) is a checkpoint, loaded on any number of ranks. It is
    used if the hosts that are left have the parts of all ranks that have made it; what a rank
    needs, and another host has, is sent. If a copy is damaged, or was lost, the newest complete
    checkpoint on the disk counts.

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
    here: dict[str, Any] = {"host": "", "copies": {}, "disk_ns": 0}

    def look() -> None:
        if word:  # from here on nobody removes what is there
            memory.append(SharedFolder(word))
            here["host"], here["copies"] = host_name(), _copies_in(memory[0].path)
        if meeting.rank == 0 and path.is_dir():
            here["disk_ns"] = _saved_at_ns(path)

    try:
        meeting.agree(RESUMING, failure_of(look))
        there = meeting.all_of(here)
        disk_ns: int = there[0]["disk_ns"]
        hosts = Hosts([each["host"] for each in there])
        name, ranks, files = _newest_copy({each["host"]: each["copies"] for each in there}, disk_ns)
        if name:
            copy = memory[0].path / name
            try:
                if hosts.are_several:
                    MissingFiles(meeting, hosts, copy, files).get(ranks, model, optimizer)
                return load(copy, model, optimizer, extra=extra, verify="once")
            except (CheckpointError, StorageError) as error:  # on every rank
                if not disk_ns:
                    raise
                if meeting.rank == 0:
                    warnings.warn(
                        "zero_fn goes on from a checkpoint on the disk: "
                        f"the newer copy in memory cannot be loaded. {error}",
                        RuntimeWarning,
                        stacklevel=2,
                    )
        return load(path, model, optimizer, extra=extra) if disk_ns else None
    finally:
        for each in memory:
            each.leave()


def _copies_in(folder: Path) -> dict[str, Any]:
    """The copies on this host by name: when each was saved, by how many ranks, and its files."""
    return {
        copy.path.name: (
            copy.saved_at_ns,
            copy.ranks,
            [str(file.relative_to(copy.path)) for file in copy.path.rglob("*.*")],
        )
        for copy in checkpoints(folder)
        if copy.ranks
    }


def _newest_copy(
    hosts: Mapping[str, Mapping[str, Any]], disk_ns: int
) -> tuple[str, int, dict[str, list[str]]]:
    """The newest copy of which the hosts have the parts of all ranks, and that is newer than the
    disk's: its name, its ranks, and the files that each host has of it. No name if there is none.
    """
    found = {
        (saved_at_ns, name, ranks)
        for copies in hosts.values()
        for name, (saved_at_ns, ranks, _) in copies.items()
    }
    for saved_at_ns, name, ranks in sorted(found, reverse=True):
        files = {host: copies.get(name, (0, 0, []))[2] for host, copies in hosts.items()}
        parts = {part_name(rank) for rank in range(ranks)}
        if saved_at_ns > disk_ns and parts <= set(chain.from_iterable(files.values())):
            return name, ranks, files
    return "", 0, {}


def _saved_at_ns(folder: Path) -> int:
    """When the checkpoint was saved that `load` would take; 0 if there is none,
    1 if it is of another library."""
    own = {each.path: each.saved_at_ns for each in checkpoints(folder)}
    if foreign_in(folder) is None and all(is_left(path) for path in own):
        return 0
    return own.get(find_checkpoint(folder), 1)
