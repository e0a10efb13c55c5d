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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from zero_fn.checkpoint.format.catalog import Catalog
from zero_fn.checkpoint.format.folders import CUT, Draft, prune, write_manifest
from zero_fn.checkpoint.rank_meeting import Agreement, RankMeeting, failure_of
from zero_fn.checkpoint.writing import Inventory, Writing, shared_out
from zero_fn.errors import CheckpointError
from zero_fn.transforms.selection import Where
from zero_fn.transport.rank0_messages import meeting_threads
from zero_fn.values import watching
from zero_fn.values.chained_optimizer import Optimizers

__all__ = ["Saving", "save", "wait_for_saving"]

SAVING = "Saving a checkpoint"


def save(
    folder: str | os.PathLike[str],
    model: nn.Module | None = None,
    optimizer: Optimizers | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    where: Where = None,
    keep: int | None = None,
    keep_every: int | None = None,
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
        keep_every: Checkpoints whose step is a multiple of this are kept, too.
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
    wait_for_saving()
    meeting, draft, plan = RankMeeting(), Draft(Path(os.path.abspath(folder))), Inventory()

    def prepare() -> None:
        if any(each is not None and each < 1 for each in (keep, keep_every)):
            raise CheckpointError(
                "keep and keep_every are numbers from 1 on.",
                keep=keep,
                keep_every=keep_every,
                fix="keep=3",
            )
        plan.add(model, optimizer, extra or {}, where)

    failure = failure_of(prepare)
    same = (str(draft.target), model is None, optimizer is None, keep, keep_every, background)
    try:
        agreed = meeting.agree(SAVING, failure, draft.make, same=same, same_names=plan.cut_names())
    except BaseException:
        draft.drop()
        raise
    plan.end_differences()
    writing = Writing(draft.path, meeting.rank, plan, agreed.text, shared_out(plan, agreed))

    def begin() -> None:
        draft.require(agreed.text)
        writing.begin(copies=background)

    saved = _Save(meeting, draft, writing, agreed, (keep, keep_every), failure_of(begin))
    if not background:
        saved.finish()
        return Saving()
    return Saving(saved.finish)


class Saving:
    """A checkpoint that is complete, or that a thread is writing. `save` returns it."""

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
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
    writing: Writing
    agreed: Agreement  # its text identifies the save
    keep: tuple[int | None, int | None]  # and `keep_every`
    failure: Exception | None  # the other ranks hear of it when they agree to commit

    def finish(self) -> None:
        """Writes the rest, and commits."""
        self.failure = self.failure or failure_of(self.writing.write_rest)
        self.writing.close()
        try:
            self.meeting.agree(SAVING, self.failure, self._commit, waits_for_disks=True)
        except BaseException:
            self.draft.drop()
            raise
        for watch in watching.watchers:
            watch.saved()
        if self.meeting.rank == 0:
            prune(self.draft.target, *self.keep)

    def _commit(self) -> str:
        """Commits on rank 0, once every rank has written."""
        plan = self.writing.plan
        named = {kind: held for kind, held in plan.held_tensors.items() if kind in CUT}
        names = {kind: len({each.name for each in held}) for kind, held in named.items()}
        is_counted = self.agreed.have_same_names and not plan.has_owners
        write_manifest(
            self.draft.path, self.agreed.text, self.meeting.size, names if is_counted else None
        )
        # Names differ between stages of a pipeline: no two may give one name to different tensors.
        if not self.agreed.have_same_names:
            Catalog(self.draft.path, lambda name: name)
        return self.draft.commit()
