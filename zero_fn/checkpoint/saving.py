"""`save` and `save_async`: each rank writes what arithmetic gives it, and one rename makes it a checkpoint.

plan     what there is on this rank
begin    ranks agree: the same arguments, everybody well, who has tensors of the same names; rank 0 makes the folder
write    each rank its files, through a buffer, and what it says of them
commit   ranks agree: everybody has written, and rank 0 has renamed the folder
"""

from __future__ import annotations

import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_fn.checkpoint.boxes import Box, Holding, ranges, whole_box
from zero_fn.checkpoint.catalog import Catalog
from zero_fn.checkpoint.files import BUFFER_NBYTES, StoredBox, TensorFile, require_dtype, write_json
from zero_fn.checkpoint.folders import KINDS, Draft, part_name, prune, tensors_name, write_manifest
from zero_fn.checkpoint.leaves import Leaf, Named, ParcelWindow, leaves_of_groups, named_tensors, options_of, state_leaf
from zero_fn.checkpoint.passing import each_state, leaf_in_chunks, states_in_chunks
from zero_fn.checkpoint.together import Together
from zero_fn.checkpoint.values import encoded
from zero_fn.errors import CheckpointError
from zero_fn.runtime.entry import units_of
from zero_fn.runtime.registry import slot_of
from zero_fn.runtime.run import run_of
from zero_fn.storage import Slab
from zero_fn.streamed import Streamed
from zero_fn.transforms.selection import Where
from zero_fn.values.tiers import Cpu

__all__ = ["Saving", "save", "save_async", "wait_for_saving"]

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
) -> None:
    """Saves a model, its optimizer and anything else as one checkpoint. All ranks call it.

        zf.save("runs/a/step-000120", model, optimizer, extra={"scheduler": scheduler, "step": 120}, keep=3)

    Each rank writes the shards that it holds, through a buffer of 64 MiB, and its own part of the manifest; tensors that
    several ranks hold are divided among them. Files are written into a hidden folder, which is renamed when all of them are
    on the disk: a save that fails, or is killed, leaves no checkpoint of this name. `zf.load` reads it on any number of
    ranks, mesh, stage and tier.

    Communicates two messages of 640 bytes from each rank to rank 0, and two back.

    Args:
        folder: The folder to make, on a disk that all ranks share. A number at the end of its name is its step.
        model: A module, transformed or not.
        optimizer: The optimizer of its parameters, any of torch or a streamed one.
        extra: Values, or objects with a `state_dict()`, by name: made of numbers, strings, lists, dicts and plain tensors.
            Each rank saves its own.
        where: Which parameters and buffers: patterns of names, or a predicate of name and tensor; None: all.
        keep: How many checkpoints to keep in the folder above: the newest ones whose names differ only in the step. None:
            all.
        keep_every: Checkpoints whose step is a multiple of this are kept, too.

    Raises:
        CheckpointError: Something cannot be saved, or there is a checkpoint of this name. Raised on every rank.
        StorageError: A disk refused, on this rank or another. Raised on every rank; nothing has changed, and training may go
            on.
        DisagreementError: Ranks were given different folders or options.
        LostRankError: A rank has ended, or did not call `save`.
    """
    wait_for_saving()
    _begun(folder, model, optimizer, extra, where, keep, keep_every, copies=False).finish()


def save_async(
    folder: str | os.PathLike[str],
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    where: Where = None,
    keep: int | None = None,
    keep_every: int | None = None,
) -> Saving:
    """Saves as `save` does, and writes the files in a thread while training goes on.

        saving = zf.save_async("runs/a/step-000120", model, optimizer)
        ...
        saving.wait()

    Returns when the values are copied: values in memory to the host, which takes as many bytes as this rank writes of them;
    values in tiers (parameters, states of streamed optimizers) to their files.

    Communicates as `save`, on a group of its own.

    Args:
        folder: As in `save`.
        model: As in `save`.
        optimizer: As in `save`.
        extra: As in `save`.
        where: As in `save`.
        keep: As in `save`.
        keep_every: As in `save`.

    Returns:
        The save under way. `wait()`, the next save or the next load waits for it, and raises if it failed, on every rank.

    Raises:
        CheckpointError, StorageError, DisagreementError, LostRankError: As `save`; here those of its beginning.
    """
    wait_for_saving()
    saving = Saving(_begun(folder, model, optimizer, extra, where, keep, keep_every, copies=True))
    _under_way.append(saving)
    return saving


class Saving:
    """A checkpoint that a thread is writing; made by `save_async`."""

    def __init__(self, writing: _Writing) -> None:
        self._failure: Exception | None = None
        self._writing: _Writing | None = writing
        self._thread = threading.Thread(target=self._run, name="zero_fn.save_async")
        self._thread.start()

    def _run(self) -> None:
        assert self._writing is not None
        try:
            self._writing.finish()
        except Exception as error:
            self._failure = error
        self._writing = None

    def is_done(self) -> bool:
        """Whether the save has ended, with success or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Waits until the checkpoint is complete.

        Raises:
            StorageError: A disk refused, on this rank or another. No checkpoint of this name was made.
            TierError: The host has no memory for the copies, on this rank or another.
            LostRankError: A rank has ended.
        """
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
    """What this rank has to save.

    Attributes:
        leaves: Tensors, by kind.
        says: What its part of the manifest says beside them.
        streamed: The optimizer whose states come by themselves.
        chunks: Those of each parameter, by its identity and the name of the state.
    """

    leaves: dict[str, list[Leaf]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    says: dict[str, Any] = field(default_factory=dict)
    streamed: Streamed | None = None
    chunks: dict[tuple[int, str], Leaf] = field(default_factory=dict)


def _planned(
    model: nn.Module | None, optimizer: Optimizer | None, extra: Mapping[str, Any], where: Where
) -> _Inventory:
    plan = _Inventory()
    tensors: dict[str, Tensor] = {}
    named = Named([], {}, {})
    if model is not None:
        named = named_tensors(model, where)
        plan.leaves["model"] = named.leaves
        plan.says["aliases"] = named.aliases
        plan.says["homes"] = _homes(model, named)
        if any(run_of(unit).module.assignment.buffers == "local" for unit in units_of(model)):
            own = {leaf.name: leaf.local for leaf in named.leaves if leaf.is_buffer and leaf.place.alike is None}
            plan.says["buffers"] = encoded(own, "buffers", tensors)
    if optimizer is not None:
        _add_states(plan, optimizer, named, tensors)
    states = {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in extra.items()}
    plan.says["extra"] = encoded(states, "extra", tensors)
    for path, tensor in tensors.items():
        require_dtype(path, tensor.dtype)
        plan.leaves["extra"].append(
            Leaf(path, tensor.dtype, Holding(tuple(tensor.shape), whole_box(tensor.shape)), tensor)
        )
    return plan


def _homes(model: nn.Module, named: Named) -> dict[str, str]:
    """How parameters rest, in words: for people."""
    found = {}
    for parameter in model.parameters():
        slot, leaf = slot_of(parameter), named.parameters.get(id(parameter))
        if slot is not None and leaf is not None:
            found[leaf.name] = f"{slot.levels_text} over {', '.join(map(str, slot.path.axes)) or 'no axis'}"
    return found


def _add_states(plan: _Inventory, optimizer: Optimizer, named: Named, tensors: dict[str, Tensor]) -> None:
    groups = leaves_of_groups(optimizer, named)
    chunks = states_in_chunks(optimizer) if isinstance(optimizer, Streamed) else {}
    plan.streamed = optimizer if isinstance(optimizer, Streamed) else None
    values: dict[str, dict[str, Any]] = {}
    says = plan.says["groups"] = []
    for number, (group, leaves) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        options = encoded(options_of(group), f"optimizer.param_groups[{number}]", tensors)
        says.append({"params": [leaf.name for leaf in leaves], "options": options})
        for parameter, own in zip(group["params"], leaves, strict=True):
            dtypes: dict[str, torch.dtype] = {}
            if plan.streamed is None:
                states = dict(optimizer.state.get(parameter, {}))
            else:
                dtypes, states = chunks.get(id(parameter), ({}, {}))
            here = {(id(parameter), name): leaf_in_chunks(own, name, dtype) for name, dtype in dtypes.items()}
            plan.chunks |= here
            found: list[Leaf | None] = list(here.values())
            for name, value in states.items():
                if isinstance(value, Tensor):
                    found.append(state_leaf(name, value, parameter, own))
                else:
                    path = f"optimizer.state[{own.name!r}][{name!r}]"
                    values.setdefault(own.name, {})[name] = encoded(value, path, tensors)
            plan.leaves["optimizer"] += [leaf for leaf in found if leaf is not None]
    plan.says["values"] = values


# -- writing ---------------------------------------------------------------------------------------------------------


@dataclass
class _Own:
    """What this rank writes of a leaf.

    Attributes:
        piece: As it is in the file.
        leaf: Where it comes from.
        first: Its first element in what this rank holds.
        file: Where it goes to.
        copy: A copy of it on the host.
    """

    piece: StoredBox
    leaf: Leaf
    first: int
    file: TensorFile | None = None
    copy: Tensor | None = None

    def append(self, values: Tensor) -> None:
        """Writes the next elements."""
        assert self.file is not None, "no file was made"
        self.file.append(self.piece, values)


def _begun(
    folder: str | os.PathLike[str],
    model: nn.Module | None,
    optimizer: Optimizer | None,
    extra: Mapping[str, Any] | None,
    where: Where,
    keep: int | None,
    keep_every: int | None,
    *,
    copies: bool,
) -> _Writing:
    """A save whose ranks have agreed to it, and which has taken copies if it is to."""
    together, target = Together(), Path(os.path.abspath(folder))
    draft, plan, failure = Draft(target), _Inventory(), None
    try:
        if (keep is not None and keep < 1) or (keep_every is not None and keep_every < 1):
            raise CheckpointError(
                "keep and keep_every are numbers from 1 on.", keep=keep, keep_every=keep_every, fix="keep=3"
            )
        plan = _planned(model, optimizer, extra or {}, where)
    except Exception as error:
        failure = error
    names = [(kind, leaf.name, leaf.dtype, leaf.place.shape) for kind in KINDS[:2] for leaf in plan.leaves[kind]]
    same = (str(target), model is None, optimizer is None, keep, keep_every, copies)
    try:
        agreed = together.agree(SAVING, failure, draft.make, same=same, kind=names)
    except BaseException:
        draft.drop()
        raise
    own = _shared_out(plan, (agreed.number, agreed.alike))
    prune_after = partial(prune, target, keep, keep_every)
    writing = _Writing(together, draft, plan, own, agreed.text, agreed.is_of_one_kind, prune_after)
    writing.attempt(lambda: writing.begin(copies=copies))
    return writing


def _shared_out(plan: _Inventory, kind: tuple[int, int]) -> dict[str, list[list[_Own]]]:
    """What this rank writes, by kind and file: a file has one piece of each name."""
    found: dict[str, list[list[_Own]]] = {}
    for folder, leaves in plan.leaves.items():
        files: list[list[_Own]] = found.setdefault(folder, [])
        taken: Counter[str] = Counter()
        for ordinal, leaf in enumerate(leaves):
            place = leaf.place
            if folder == "extra":
                box: Box | None = place.box
            elif leaf.is_buffer and place.alike is None:  # ranks may differ: rank 0 decides, as in training
                box = place.box if kind[0] == 0 else None
            else:
                box = place.own(ordinal, leaf.dtype.itemsize, kind)
            if box is None:
                continue
            number = taken[leaf.name]
            taken[leaf.name] += 1
            if number == len(files):
                files.append([])
            row = place.box.numel // place.box.sizes[0] if place.box.numel and place.box.sizes else 0
            first = (box.starts[0] - place.box.starts[0]) * row if row else 0
            files[number].append(_Own(StoredBox(leaf.name, leaf.dtype, place.shape, box), leaf, first))
    return found


@dataclass
class _Writing:
    """A save under way.

    Attributes:
        together: The ranks.
        draft: The folder.
        plan: What this rank has.
        own: What it writes of that, by kind and file.
        id: Of this save.
        is_of_one_kind: Whether all ranks have tensors of the same names.
        prune: What to do after the commit, on rank 0.
        failure: What went wrong on this rank: the others hear of it when they meet.
    """

    together: Together
    draft: Draft
    plan: _Inventory
    own: dict[str, list[list[_Own]]]
    id: str
    is_of_one_kind: bool
    prune: Callable[[], None]
    failure: Exception | None = None
    files: dict[str, list[TensorFile]] = field(default_factory=lambda: defaultdict(list))

    def attempt(self, act: Callable[[], None]) -> None:
        """Does something unless something else has failed."""
        if self.failure is None:
            try:
                with torch.no_grad(), torch.device("cpu"):  # whatever the default device is
                    act()
            except Exception as error:
                self.failure = error

    def begin(self, *, copies: bool) -> None:
        """Makes the files, and writes everything; or, of what is in memory, copies it to the host."""
        for kind, files in self.own.items():
            for number, each in enumerate(files):
                path = self.draft.path / tensors_name(kind, self.together.rank, number)
                file = TensorFile(path, [one.piece for one in each], self.id)
                self.files[kind].append(file)
                for one in each:
                    one.file = file
        copied = []
        with ParcelWindow() as window:
            for one in self._each():
                if copies and one.leaf.local is not None and not one.leaf.is_away:
                    copied.append(one)
                elif one.leaf.local is not None:
                    self._write(one, window)
        if self.plan.streamed is not None:
            self._write_chunks(self.plan.streamed)
        self._copy(copied)

    def _write_chunks(self, optimizer: Streamed) -> None:
        by_leaf = {id(one.leaf): one for one in self._each()}

        def take(parameter: Tensor, name: str, first: int, values: Tensor) -> None:
            one = by_leaf.get(id(self.plan.chunks[id(parameter), name]))
            if one is None:  # another rank writes it
                return
            low, high = max(first, one.first), min(first + values.numel(), one.first + one.piece.box.numel)
            if low < high:
                one.append(values[low - first : high - first])

        each_state(optimizer, take)

    def _copy(self, owns: list[_Own]) -> None:
        sizes = [-(-one.piece.nbytes // 64) * 64 for one in owns]
        is_on_device = any(one.leaf.local is not None and one.leaf.local.device.type != "cpu" for one in owns)
        if not sum(sizes):
            return
        memory = Slab(sum(sizes), Cpu(True, None), "copies of what is saved", forked=False, huge=False).memory
        for one, part in zip(owns, torch.split(memory[: sum(sizes)], sizes), strict=True):
            one.copy = part[: one.piece.nbytes].view(one.piece.dtype)
            local, count = one.leaf.local, one.piece.box.numel
            if local is not None and local.is_contiguous() and local.device.type != "cpu":
                one.copy.copy_(local.view(-1)[one.first : one.first + count], non_blocking=True)
            else:
                one.copy.copy_(one.leaf.read(one.first, one.first + count, ParcelWindow()))
        if is_on_device:
            torch.accelerator.synchronize()

    def finish(self) -> None:
        """Writes the rest, and commits.

        Raises:
            ZeroError: It failed on some rank: on every rank.
        """
        self.attempt(self._write_rest)
        for files in self.files.values():
            for file in files:
                file.close()
        try:
            self.together.agree(SAVING, self.failure, self._commit, waits_for_disks=True)
        except BaseException:
            self.draft.drop()
            raise
        if self.together.rank == 0:
            self.prune()

    def _each(self) -> list[_Own]:
        """In the order of files."""
        return [one for files in self.own.values() for each in files for one in each]

    def _write(self, one: _Own, window: ParcelWindow) -> None:
        for first, last in ranges(one.piece.box.sizes, BUFFER_NBYTES // one.piece.dtype.itemsize):
            one.append(one.leaf.read(one.first + first, one.first + last, window))

    def _write_rest(self) -> None:
        for one in self._each():
            if one.copy is not None:
                one.append(one.copy)
        files = {kind: [file.finish() for file in files] for kind, files in self.files.items()}
        says = {"id": self.id, "rank": self.together.rank, "files": files, **self.plan.says}
        write_json(self.draft.path / part_name(self.together.rank), says)

    def _commit(self) -> str:
        """What rank 0 does once every rank has written."""
        names = {kind: len({leaf.name for leaf in self.plan.leaves[kind]}) for kind in KINDS[:2]}
        write_manifest(self.draft.path, self.id, self.together.size, names if self.is_of_one_kind else None)
        if not self.is_of_one_kind:  # stages of a pipeline: no two may give one name to different tensors
            Catalog(self.draft.path, lambda name: name)
        return self.draft.commit()
