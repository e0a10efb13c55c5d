"""`save`: each rank writes its share of the tensors, and one rename makes the folder a checkpoint.

plan     each rank lists what it has to save
begin    ranks agree: all were given the same arguments, none has failed, who has tensors of the
         same names; rank 0 makes the folder
write    each rank writes its files, through a buffer, and its part of the manifest
commit   ranks agree: all have written; rank 0 renames the folder
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from zero_fn.checkpoint.agreement import Agreement, RankMeeting, failure_of
from zero_fn.checkpoint.file_transfer import transfer_files
from zero_fn.checkpoint.format.files import disk
from zero_fn.checkpoint.format.folders import CUT, Draft, part_name, prune, write_manifest
from zero_fn.checkpoint.format.own_folder import OwnFolder
from zero_fn.checkpoint.format.writer import Writer
from zero_fn.checkpoint.hosts import Hosts
from zero_fn.checkpoint.live.inventory import Inventory
from zero_fn.checkpoint.rank_files import RankFiles, shared_out
from zero_fn.errors import CheckpointError
from zero_fn.storage import Slab
from zero_fn.transforms.selection import Where
from zero_fn.transport.rank0_messages import meeting_threads
from zero_fn.values import watching
from zero_fn.values.chained_optimizer import Optimizers

__all__ = ["Saving", "begin_save", "save", "wait_for_saving"]

SAVING = "Saving a checkpoint"


def save(
    folder: str | os.PathLike[str],
    model: nn.Module | None = None,
    optimizer: Optimizers | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    where: Where = None,
    keep: int | None = None,
    background: bool = False,
) -> Saving:
    """Saves a model, its optimizer and anything else as one checkpoint. All ranks call it.

        extra = {"scheduler": scheduler, "step": 120}
        zf.save("runs/a/step-000120", model, optimizer, extra=extra, keep=3)

    Each rank writes the shards that it holds, through a buffer of 64 MiB, and its own part of the
    manifest; tensors that several ranks hold are divided among them. Files are written into a
    hidden folder, which is renamed when all of them are on the disk: a save that fails, or is
    killed, leaves no checkpoint of this name. `zf.load` reads it on any number of ranks, mesh,
    stage and tier.

    Communicates two messages of 640 bytes from each rank to rank 0,
    and two back, on a group of its own.

    Args:
        folder: The folder to make, on a disk that all ranks share.
            A number at the end of its name is its step.
        model: A module, transformed or not.
        optimizer: The optimizer of its parameters, any of torch or a streamed one;
            or a sequence of them: `(muon, adamw)`.
        extra: Values, or objects with a `state_dict()`, by name: made of numbers, strings, lists,
            dicts and plain tensors. Each rank saves its own. An average of the model (`zf.ema`) is
            saved as its shards.
        where: Which parameters and buffers: patterns of names,
            or a predicate of name and tensor; None: all.
        keep: How many checkpoints to keep in the folder above: the newest ones whose names differ
            only in the step. None: all.
        background: Returns when the values are copied, and a thread writes the files while training
            goes on. Values in memory are copied to the host, which takes as many bytes as this rank
            writes of them; values in tiers (parameters, states of streamed optimizers) are written
            to their files before `save` returns.

    Returns:
        The save. One in the background is under way: `wait()`, the next save and the next load wait
        for it, and raise on every rank if it failed.

    Raises:
        CheckpointError: Something cannot be saved, or there is a checkpoint of this name.
            Raised on every rank.
        StorageError: A disk refused, on this rank or another. Raised on every rank. Nothing has
            changed; training may go on.
        DisagreementError: Ranks were given different folders or options.
        LostRankError: A rank has ended, or did not call `save`.
    """
    return begin_save(
        Path(os.path.abspath(folder)),
        model,
        optimizer,
        extra,
        where=where,
        keep=keep,
        background=background,
    )


def begin_save(
    target: Path,
    model: nn.Module | None,
    optimizer: Optimizers | None,
    extra: Mapping[str, Any] | None,
    *,
    where: Where = None,
    keep: int | None,
    background: bool,
    hosts: Hosts | None = None,
    room: list[Slab] | None = None,
) -> Saving:
    """`save` into one folder that all ranks share, or into one in the memory of each of `hosts`:
    there the first rank of each host does what rank 0 does on a disk, and files are sent to the
    next host, too. `room` is memory for copies, for the next save, too."""
    wait_for_saving()
    meeting, draft, plan = RankMeeting(), Draft(target), Inventory()
    is_on_disk, hosts = hosts is None, hosts or Hosts([""] * meeting.size)

    def prepare() -> None:
        if keep is not None and keep < 1:
            raise CheckpointError("keep is a number from 1 on.", keep=keep, fix="keep=3")
        plan.add(model, optimizer, extra or {}, where)

    def make_on_this_host() -> None:
        if meeting.rank and hosts.is_first(meeting.rank):
            draft.make(agreed.text)

    failure = failure_of(prepare)
    same = (str(target), model is None, optimizer is None, keep, background)
    try:
        agreed = meeting.agree(SAVING, failure, draft.make, same=same, same_names=plan.cut_names())
        if hosts.are_several:
            meeting.agree(SAVING, failure_of(make_on_this_host))
    except BaseException:
        draft.drop()
        raise
    plan.end_differences()
    shares = shared_out(plan, agreed, small_apart=hosts.are_several)
    writer = Writer(draft.path, agreed.text)
    files = RankFiles(writer, meeting.rank, plan, shares, [] if room is None else room)
    nbytes = sum(share.piece.nbytes for share in files.each())

    def begin() -> None:
        draft.require(agreed.text)
        files.begin(copies=background)

    saved = _Save(meeting, draft, files, agreed, hosts, keep, is_on_disk, failure_of(begin))
    if not background:
        saved.finish()
    return Saving(nbytes, saved.finish if background else None)


class Saving:
    """A checkpoint that is complete, or that a thread is writing. `save` returns it.

    Attributes:
        nbytes: Bytes of tensors that this rank writes.
    """

    def __init__(self, nbytes: int, finish: Callable[[], None] | None = None) -> None:
        self.nbytes = nbytes
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        if finish is not None:
            self._thread = threading.Thread(target=self._run, args=[finish], name="zero_fn.save")
            self._thread.start()
            _under_way.append(self)
            meeting_threads[:] = [self._thread]

    def _run(self, finish: Callable[[], None]) -> None:
        try:
            finish()
        except Exception as error:
            self._failure = error

    def is_done(self) -> bool:
        """Whether the save has ended, with or without success."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Waits until the checkpoint is complete.

        Raises:
            StorageError: A disk refused, on this rank or another.
                No checkpoint of this name was made.
            TierError: The host has no memory for the copies, on this rank or another.
            LostRankError: A rank has ended.
        """
        if self._thread is not None:
            self._thread.join()
        if self in _under_way:
            _under_way.remove(self)
        if self._failure is not None:
            raise self._failure


_under_way: list[Saving] = []


def wait_for_saving() -> None:
    """Waits for the save that is under way, and raises if it failed."""
    while _under_way:
        _under_way[0].wait()


@dataclass
class _Save:
    """A save whose files this rank has begun to write."""

    meeting: RankMeeting
    draft: Draft
    files: RankFiles
    agreed: Agreement  # its text identifies the save
    hosts: Hosts
    keep: int | None
    is_on_disk: bool
    failure: Exception | None  # the other ranks hear of it when they agree to commit

    def finish(self) -> None:
        """Writes the rest, and commits."""
        rank = self.meeting.rank
        self.failure = self.failure or failure_of(self.files.write_rest)
        self.files.writer.close()
        is_first = self.hosts.is_first(rank)
        try:
            if self.hosts.are_several:
                self.meeting.agree(SAVING, self.failure)
                self.failure = failure_of(self._send)
            saved_at = self.meeting.agree(
                SAVING, self.failure, lambda: self._commit(time.time_ns()), waits_for_disks=True
            )
            if self.hosts.are_several:
                commit = partial(self._commit, int(saved_at.text)) if rank and is_first else str
                self.meeting.agree(SAVING, failure_of(commit))
        except BaseException:
            self.draft.drop()
            raise
        if self.is_on_disk:
            for watch in watching.watchers:
                watch.saved()
        if is_first:
            prune(self.draft.target, self.keep)

    def _send(self) -> None:
        """Sends the files of this rank to the next host, and takes those of the one before."""
        rank = self.meeting.rank
        sends = {self.hosts.keeper(rank): [*self.files.names(), part_name(rank)]}
        with disk(self.draft.path, "Keeping the files of another host"):
            transfer_files(self.meeting, self.draft.path, sends)

    def _commit(self, saved_at_ns: int) -> str:
        """Commits, once every rank has written. Each folder says the same time."""
        plan = self.files.plan
        named = {kind: held for kind, held in plan.held_tensors.items() if kind in CUT}
        names = {kind: len({each.name for each in held}) for kind, held in named.items()}
        is_counted = self.agreed.have_same_names and not plan.has_owners
        write_manifest(
            self.draft.path,
            self.agreed.text,
            self.meeting.size,
            names if is_counted else None,
            saved_at_ns,
        )
        # Names differ between stages of a pipeline: no two may give one name to different tensors.
        if not self.agreed.have_same_names and not self.hosts.are_several:
            OwnFolder(self.draft.path, lambda name: name)
        self.draft.commit()
        return str(saved_at_ns)
