"""`save`: each rank writes its share of the tensors, and one rename makes the folder a checkpoint.

plan     each rank lists what it has to save
begin    ranks agree: all were given the same arguments, none has failed, who has tensors of the same names; rank 0 makes
         the folder
write    each rank writes its files, through a buffer, and its part of the manifest
commit   ranks agree: all have written; rank 0 renames the folder
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_fn.checkpoint.format.catalog import Catalog
from zero_fn.checkpoint.format.files import BUFFER_NBYTES, StoredBox, TensorFile, require_dtype, write_json
from zero_fn.checkpoint.format.folders import (
    AVERAGES,
    CUT,
    KINDS,
    Draft,
    part_name,
    prune,
    tensors_name,
    write_manifest,
)
from zero_fn.checkpoint.format.values import encoded
from zero_fn.checkpoint.live.held_tensors import (
    HeldTensor,
    ModelTensors,
    ParcelWindow,
    held_averages,
    held_state,
    tensors_of_groups,
)
from zero_fn.checkpoint.live.streamed_states import cuts_of, each_state, held_codes, held_in_chunks, states_in_chunks
from zero_fn.checkpoint.rank_meeting import Agreement, RankMeeting, failure_of
from zero_fn.errors import CheckpointError
from zero_fn.extras.average import Average
from zero_fn.owners import ByOwner
from zero_fn.runtime.box import Box, Holding, ranges, whole_box
from zero_fn.runtime.door import units_of
from zero_fn.runtime.run import run_of
from zero_fn.runtime.slot import slot_of
from zero_fn.storage import Slab
from zero_fn.streamed import Streamed
from zero_fn.streamed.coded import CODES
from zero_fn.transforms.selection import Where
from zero_fn.values import watching
from zero_fn.values.tiers import Cpu

__all__ = ["Saving", "save", "wait_for_saving"]

SAVING = "Saving a checkpoint"


def save(
    folder: str | os.PathLike[str],
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    where: Where = None,
    keep: int | None = None,
    keep_every: int | None = None,
    background: bool = False,
) -> Saving:
    """Saves a model, its optimizer and anything else as one checkpoint. All ranks call it.

        zf.save("runs/a/step-000120", model, optimizer, extra={"scheduler": scheduler, "step": 120}, keep=3)

    Each rank writes the shards that it holds, through a buffer of 64 MiB, and its own part of the manifest; tensors that
    several ranks hold are divided among them. Files are written into a hidden folder, which is renamed when all of them are
    on the disk: a save that fails, or is killed, leaves no checkpoint of this name. `zf.load` reads it on any number of
    ranks, mesh, stage and tier.

    Communicates two messages of 640 bytes from each rank to rank 0, and two back, on a group of its own.

    Args:
        folder: The folder to make, on a disk that all ranks share. A number at the end of its name is its step.
        model: A module, transformed or not.
        optimizer: The optimizer of its parameters, any of torch or a streamed one.
        extra: Values, or objects with a `state_dict()`, by name: made of numbers, strings, lists, dicts and plain tensors.
            Each rank saves its own. An average of the model (`zf.ema`) is saved as its shards.
        where: Which parameters and buffers: patterns of names, or a predicate of name and tensor; None: all.
        keep: How many checkpoints to keep in the folder above: the newest ones whose names differ only in the step. None:
            all.
        keep_every: Checkpoints whose step is a multiple of this are kept, too.
        background: Returns when the values are copied, and a thread writes the files while training goes on. Values in
            memory are copied to the host, which takes as many bytes as this rank writes of them; values in tiers
            (parameters, states of streamed optimizers) are written to their files before `save` returns.

    Returns:
        The save. One in the background is under way: `wait()`, the next save and the next load wait for it, and raise on
        every rank if it failed.

    Raises:
        CheckpointError: Something cannot be saved, or there is a checkpoint of this name. Raised on every rank.
        StorageError: A disk refused, on this rank or another. Raised on every rank. Nothing has changed; training may go on.
        DisagreementError: Ranks were given different folders or options.
        LostRankError: A rank has ended, or did not call `save`.
    """
    wait_for_saving()
    meeting, draft, plan = RankMeeting(), Draft(Path(os.path.abspath(folder))), _Inventory()

    def prepare() -> None:
        if any(each is not None and each < 1 for each in (keep, keep_every)):
            raise CheckpointError(
                "keep and keep_every are numbers from 1 on.", keep=keep, keep_every=keep_every, fix="keep=3"
            )
        plan.add(model, optimizer, extra or {}, where)

    failure = failure_of(prepare)
    cut = [(kind, held) for kind in CUT for held in plan.held_tensors.get(kind, ())]
    names = [(kind, held.name, held.dtype, held.place.shape) for kind, held in cut]
    same = (str(draft.target), model is None, optimizer is None, keep, keep_every, background)
    try:
        agreed = meeting.agree(SAVING, failure, draft.make, same=same, same_names=names)
    except BaseException:
        draft.drop()
        raise
    for unit in units_of(model) if model is not None else ():
        unit.groups.is_held = False  # who loads this gets parameters in full, and goes on as this run does
    writing = _Writing(meeting, draft, plan, agreed, _shared_out(plan, agreed), (keep, keep_every))
    writing.failure = failure_of(lambda: writing.begin(copies=background))
    if not background:
        writing.finish()
        return Saving()
    return Saving(writing.finish)


class Saving:
    """A checkpoint that is complete, or that a thread is writing. `save` returns it."""

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        if finish is not None:
            self._thread = threading.Thread(target=self._run, args=[finish], name="zero_fn.save")
            self._thread.start()
            _under_way.append(self)

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
            StorageError: A disk refused, on this rank or another. No checkpoint of this name was made.
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


# -- what there is ---------------------------------------------------------------------------------------------------


@dataclass
class _Inventory:
    """What this rank has to save."""

    held_tensors: dict[str, list[HeldTensor]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    says: dict[str, Any] = field(default_factory=dict)  # its part of the manifest, but for the tensors
    streamed: Streamed | None = None

    def add(self, model: nn.Module | None, optimizer: Optimizer | None, extra: Mapping[str, Any], where: Where) -> None:
        """Adds everything that was given to `save`."""
        named, tensors = ModelTensors(), dict[str, Tensor]()
        if model is not None:
            named.add(model, where)
            self.held_tensors["model"] = named.held_tensors
            self.says["aliases"] = named.aliases
            self.says["homes"] = _homes(model, named)
            if any(run_of(unit).assignment.buffers == "local" for unit in units_of(model)):
                own = {
                    held.name: held.local
                    for held in named.held_tensors
                    if held.is_buffer and held.place.replica is None
                }
                self.says["buffers"] = encoded(own, "buffers", tensors)
        if optimizer is not None:
            self._add_optimizer(optimizer, named, tensors)
        states = {name: v.state_dict() if hasattr(v, "state_dict") else v for name, v in extra.items()}
        for name, value in extra.items():
            if isinstance(value, Average):
                self.held_tensors.setdefault(AVERAGES, []).extend(held_averages(name, value, named, where))
                states[name] = {"updates": value.updates}
        self.says["extra"] = encoded(states, "extra", tensors)
        for path, tensor in tensors.items():
            require_dtype(path, tensor.dtype)
            place = Holding(tuple(tensor.shape), whole_box(tensor.shape))
            self.held_tensors["extra"].append(HeldTensor(path, tensor.dtype, place, tensor))

    def _add_optimizer(self, optimizer: Optimizer, named: ModelTensors, tensors: dict[str, Tensor]) -> None:
        self.streamed = optimizer if isinstance(optimizer, Streamed) else None
        if isinstance(optimizer, ByOwner):
            optimizer.require_whole("zf.save")
        in_chunks = {} if self.streamed is None else states_in_chunks(self.streamed)
        cuts = {} if self.streamed is None else cuts_of(self.streamed)
        says, values = self.says, dict[str, dict[str, Any]]()
        says["groups"], says["values"] = [], values
        groups = zip(optimizer.param_groups, tensors_of_groups(optimizer, named), strict=True)
        for number, (group, held_tensors) in enumerate(groups):
            options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
            options = encoded(options, f"optimizer.param_groups[{number}]", tensors)
            says["groups"].append({"params": [held.name for held in held_tensors], "options": options})
            for parameter, own in zip(group["params"], held_tensors, strict=True):
                states = {} if self.streamed is not None else optimizer.state.get(parameter, {})
                dtypes, states = in_chunks.get(id(parameter), ({}, states))
                codes = held_codes(own, cuts.get(id(parameter), ()))
                as_codes = {held.in_chunks[1].removesuffix(CODES) for held in codes if held.in_chunks is not None}
                in_floats = (each for each in dtypes.items() if each[0] not in as_codes)
                self.held_tensors["optimizer"] += [*codes, *(held_in_chunks(own, parameter, *e) for e in in_floats)]
                for name, value in states.items():
                    if isinstance(value, Tensor):
                        held = held_state(name, value, parameter, own)
                        self.held_tensors["optimizer"] += [] if held is None else [held]
                    else:
                        path = f"optimizer.state[{own.name!r}][{name!r}]"
                        values.setdefault(own.name, {})[name] = encoded(value, path, tensors)


def _homes(model: nn.Module, named: ModelTensors) -> dict[str, str]:
    """How each parameter rests, in words: for people who read the manifest."""
    found = {}
    for parameter in model.parameters():
        slot, held = slot_of(parameter), named.parameters.get(id(parameter))
        if slot is not None and held is not None:
            found[held.name] = f"{slot.stages_text} over {', '.join(map(str, slot.path.axes)) or 'no axis'}"
    return found


# -- writing ---------------------------------------------------------------------------------------------------------


@dataclass
class _Share:
    """What this rank writes of a tensor."""

    piece: StoredBox
    held: HeldTensor
    first: int  # of its elements, in what the rank holds
    file: TensorFile | None = None

    def append(self, values: Tensor) -> None:
        assert self.file is not None, "no file was made"
        self.file.append(self.piece, values)

    def write(self, window: ParcelWindow) -> None:
        """Writes all elements, a buffer at a time."""
        for first, last in ranges(self.piece.box.sizes, BUFFER_NBYTES // self.piece.dtype.itemsize):
            self.append(self.held.read(self.first + first, self.first + last, window))


def _shared_out(plan: _Inventory, agreed: Agreement) -> dict[str, list[list[_Share]]]:
    """What this rank writes, by kind and file. A file has one box of each name: tiles go to several files."""
    found: dict[str, list[list[_Share]]] = {}
    for folder, held_tensors in plan.held_tensors.items():
        files: list[list[_Share]] = found.setdefault(folder, [])
        taken: Counter[str] = Counter()
        for ordinal, held in enumerate(held_tensors):
            place = held.place
            if folder == "extra":
                box: Box | None = place.box
            elif held.is_buffer and place.replica is None:  # ranks may differ: rank 0 decides, as in training
                box = place.box if agreed.replica == 0 else None
            else:
                box = place.own(ordinal, held.dtype.itemsize, (agreed.replica, agreed.replicas))
            if box is None:
                continue
            number = taken[held.name]
            taken[held.name] += 1
            if number == len(files):
                files.append([])
            row = place.box.numel // place.box.sizes[0] if place.box.numel and place.box.sizes else 0
            first = (box.starts[0] - place.box.starts[0]) * row if row else 0
            files[number].append(_Share(StoredBox(held.name, held.dtype, place.shape, box), held, first))
    return found


@dataclass
class _Writing:
    """A save under way."""

    meeting: RankMeeting
    draft: Draft
    plan: _Inventory
    agreed: Agreement  # its text identifies the save
    files: dict[str, list[list[_Share]]]  # what this rank writes, by kind and file
    keep: tuple[int | None, int | None]  # and `keep_every`
    failure: Exception | None = None  # the other ranks hear of it when they agree to commit

    def begin(self, *, copies: bool) -> None:
        """Makes the files, and writes what rests in tiers; with `copies`, what is in memory is copied to the host."""
        self.draft.require(self.agreed.text)
        for kind, files in self.files.items():
            for number, shares in enumerate(files):
                path = self.draft.path / tensors_name(kind, self.meeting.rank, number)
                file = TensorFile(path, [share.piece for share in shares], self.agreed.text)
                for share in shares:
                    share.file = file
        if copies:
            _copy([share for share in self._each() if share.held.is_in_memory])
        with ParcelWindow() as window:
            for share in self._each():
                if share.held.is_away:
                    share.write(window)
        if self.plan.streamed is not None:
            self._write_chunks(self.plan.streamed)

    def _write_chunks(self, optimizer: Streamed) -> None:
        in_chunks = {share.held.in_chunks: share for share in self._each() if share.held.in_chunks is not None}

        def take(parameter: Tensor, name: str, first: int, values: Tensor) -> None:
            share = in_chunks.get((id(parameter), name))
            if share is None:  # another rank writes this state
                return
            low, high = max(first, share.first), min(first + values.numel(), share.first + share.piece.box.numel)
            if low < high:
                share.append(values[low - first : high - first])

        each_state(optimizer, take, in_chunks)

    def finish(self) -> None:
        """Writes the rest, and commits."""
        self.failure = self.failure or failure_of(self._write_rest)
        for share in self._each():
            if share.file is not None:
                share.file.close()
        try:
            self.meeting.agree(SAVING, self.failure, self._commit, waits_for_disks=True)
        except BaseException:
            self.draft.drop()
            raise
        for watch in watching.watchers:
            watch.saved()
        if self.meeting.rank == 0:
            prune(self.draft.target, *self.keep)

    def _each(self) -> list[_Share]:
        """All that this rank writes, in the order of files."""
        return [share for files in self.files.values() for shares in files for share in shares]

    def _write_rest(self) -> None:
        with ParcelWindow() as window:
            for share in self._each():
                if share.held.is_in_memory:
                    share.write(window)
        written = {kind: [_finished(shares) for shares in files] for kind, files in self.files.items()}
        says = {"id": self.agreed.text, "rank": self.meeting.rank, "files": written, **self.plan.says}
        write_json(self.draft.path / part_name(self.meeting.rank), says)

    def _commit(self) -> str:
        """Commits on rank 0, once every rank has written."""
        named = {kind: held for kind, held in self.plan.held_tensors.items() if kind in CUT}
        names = {kind: len({each.name for each in held}) for kind, held in named.items()}
        write_manifest(
            self.draft.path, self.agreed.text, self.meeting.size, names if self.agreed.have_same_names else None
        )
        if not self.agreed.have_same_names:  # stages of a pipeline: no two may give one name to different tensors
            Catalog(self.draft.path, lambda name: name)
        return self.draft.commit()


def _finished(shares: list[_Share]) -> dict[str, Any]:
    """Makes sure that a file is on the disk; returns what the manifest says of it."""
    file = shares[0].file
    assert file is not None, "no file was made"
    return file.finish()


def _copy(shares: list[_Share]) -> None:
    """Copies what is to be written into memory of the host; it is written from there."""
    sizes = [-(-share.piece.nbytes // 64) * 64 for share in shares]
    if not sum(sizes):
        return
    memory = Slab(sum(sizes), Cpu(True, None), "copies of what is saved", forked=False, huge=False).memory
    is_on_device = False
    for share, part in zip(shares, torch.split(memory[: sum(sizes)], sizes), strict=True):
        copy = part[: share.piece.nbytes].view(share.piece.dtype)
        local, first, last = share.held.local, share.first, share.first + share.piece.box.numel
        if local is not None and local.is_contiguous() and local.device.type != "cpu":
            copy.copy_(local.view(-1)[first:last], non_blocking=True)
            is_on_device = True
        else:
            copy.copy_(share.held.read(first, last, ParcelWindow()))
        share.held, share.first = replace(share.held, local=copy), 0
    if is_on_device:
        torch.accelerator.synchronize()
