"""What a rank saves, which part of it this rank writes, and its files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_fn.advice import say_if_left_out
from zero_fn.average import Average
from zero_fn.checkpoint.format.files import (
    BUFFER_NBYTES,
    StoredBox,
    TensorFile,
    require_dtype,
    write_json,
)
from zero_fn.checkpoint.format.folders import AVERAGES, CUT, KINDS, part_name, tensors_name
from zero_fn.checkpoint.format.values import encoded
from zero_fn.checkpoint.live.held_tensors import (
    HeldTensor,
    ModelTensors,
    ParcelWindow,
    held_averages,
    held_state,
    tensors_of_groups,
)
from zero_fn.checkpoint.live.streamed_states import (
    cuts_of,
    each_state,
    held_codes,
    held_in_chunks,
    states_in_chunks,
)
from zero_fn.checkpoint.rank_meeting import Agreement
from zero_fn.owners import ByOwner
from zero_fn.runtime.registry import units_of
from zero_fn.runtime.run import run_of
from zero_fn.runtime.slot import slot_of
from zero_fn.runtime.unit import Unit
from zero_fn.storage import Slab
from zero_fn.streamed import Streamed
from zero_fn.streamed.state_codes import CODES
from zero_fn.transforms.selection import Where
from zero_fn.values.box import Box, Holding, ranges, whole_box
from zero_fn.values.chained_optimizer import Optimizers, members_of
from zero_fn.values.tiers import Cpu

__all__ = ["Inventory", "Share", "Writing", "shared_out"]


@dataclass
class Inventory:
    """What this rank has to save."""

    held_tensors: dict[str, list[HeldTensor]] = field(
        default_factory=lambda: {kind: [] for kind in KINDS}
    )
    # This rank's part of the manifest, but for the tensors.
    says: dict[str, Any] = field(default_factory=dict)
    streamed: list[Streamed] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)
    owned: list[HeldTensor] = field(
        default_factory=list
    )  # states that this rank alone has: the last of its "optimizer"
    has_owners: bool = False  # whether any rank has such

    def add(
        self,
        model: nn.Module | None,
        optimizer: Optimizers | None,
        extra: Mapping[str, Any],
        where: Where,
    ) -> None:
        """Adds everything that was given to `save`."""
        named, tensors = ModelTensors(), dict[str, Tensor]()
        if model is not None:
            named.add(model, where)
            self.held_tensors["model"] = named.held_tensors
            self.says["aliases"] = named.aliases
            self.says["homes"] = _homes(model, named)
            self.units = units_of(model)
            if any(run_of(unit).assignment.buffers == "local" for unit in self.units):
                own = {
                    held.name: held.local
                    for held in named.held_tensors
                    if held.is_buffer and held.place.replica is None
                }
                self.says["buffers"] = encoded(own, "buffers", tensors)
        optimizers = members_of(optimizer)
        if optimizers:
            self.says["groups"], self.says["values"] = [], {}
            say_if_left_out(
                [*optimizers, *extra.values()],
                {key: own.name for key, own in named.parameters.items()},
            )
        for each in optimizers:
            self._add_optimizer(each, named, tensors)
        self.held_tensors["optimizer"] += self.owned  # last: ranks number what they share alike
        states = {
            name: v.state_dict() if hasattr(v, "state_dict") else v for name, v in extra.items()
        }
        for name, value in extra.items():
            if isinstance(value, Average):
                self.held_tensors.setdefault(AVERAGES, []).extend(
                    held_averages(name, value, named, where)
                )
                states[name] = {"updates": value.updates}
        self.says["extra"] = encoded(states, "extra", tensors)
        for path, tensor in tensors.items():
            require_dtype(path, tensor.dtype)
            place = Holding(tuple(tensor.shape), whole_box(tensor.shape))
            self.held_tensors["extra"].append(HeldTensor(path, tensor.dtype, place, tensor))

    def cut_names(self) -> list[object]:
        """What is equal on ranks that are replicas: the tensors of which each writes a part."""
        owned = set(map(id, self.owned))
        cut = [
            (kind, held)
            for kind in CUT
            for held in self.held_tensors.get(kind, ())
            if id(held) not in owned
        ]
        return [(kind, held.name, held.dtype, held.place.shape) for kind, held in cut]

    def end_differences(self) -> None:
        """Who loads this gets parameters in full, and goes on as
        this run does: so does this run."""
        for unit in self.units:
            unit.gather.reference_is_shared = False

    def _add_optimizer(
        self, optimizer: Optimizer, named: ModelTensors, tensors: dict[str, Tensor]
    ) -> None:
        streamed = optimizer if isinstance(optimizer, Streamed) else None
        self.streamed += [] if streamed is None else [streamed]
        if isinstance(optimizer, ByOwner):
            optimizer.require_whole("zf.save")
        in_chunks = {} if streamed is None else states_in_chunks(streamed)
        cuts = {} if streamed is None else cuts_of(streamed)
        says, values = self.says, self.says["values"]
        groups = zip(optimizer.param_groups, tensors_of_groups(optimizer, named), strict=True)
        for number, (group, held_tensors) in enumerate(groups, len(says["groups"])):
            options = {
                name: value
                for name, value in group.items()
                if name not in ("params", "param_names")
            }
            options = encoded(options, f"optimizer.param_groups[{number}]", tensors)
            says["groups"].append(
                {"params": [held.name for held in held_tensors], "options": options}
            )
            for parameter, own in zip(group["params"], held_tensors, strict=True):
                is_owned = (
                    isinstance(optimizer, ByOwner) and optimizer.owner_of(parameter) is not None
                )
                self.has_owners |= is_owned
                found = self.owned if is_owned else self.held_tensors["optimizer"]
                states = {} if streamed is not None else optimizer.state.get(parameter, {})
                dtypes, states = in_chunks.get(id(parameter), ({}, states))
                codes = held_codes(own, cuts.get(id(parameter), ()))
                as_codes = {
                    held.in_chunks[1].removesuffix(CODES)
                    for held in codes
                    if held.in_chunks is not None
                }
                in_floats = (each for each in dtypes.items() if each[0] not in as_codes)
                found += [*codes, *(held_in_chunks(own, parameter, *e) for e in in_floats)]
                for name, value in states.items():
                    if isinstance(value, Tensor):
                        held = held_state(name, value, parameter, own)
                        found += [] if held is None else [held]
                    else:
                        path = f"optimizer.state[{own.name!r}][{name!r}]"
                        values.setdefault(own.name, {})[name] = encoded(value, path, tensors)


def _homes(model: nn.Module, named: ModelTensors) -> dict[str, str]:
    """How each parameter rests, in words: for people who read the manifest."""
    found = {}
    for parameter in model.parameters():
        slot, held = slot_of(parameter), named.parameters.get(id(parameter))
        if slot is not None and held is not None:
            found[held.name] = (
                f"{slot.stages_text} over {', '.join(map(str, slot.path.axes)) or 'no axis'}"
            )
    return found


# -- writing ---------------------------------------------------------------------------------------


class Taker(Protocol):
    """Where elements of boxes go: a file, or what only looks at them.

    Those of a box come in their order.
    """

    def append(self, piece: StoredBox, values: Tensor) -> None:
        """The next elements of a box: on the host, contiguous."""

    def finish(self) -> dict[str, Any]:
        """All have come; returns what a manifest says of them."""

    def close(self) -> None:
        """No more come."""


@dataclass
class Share:
    """What this rank writes of a tensor."""

    piece: StoredBox
    held: HeldTensor
    first: int  # of its elements, in what the rank holds
    file: Taker | None = None

    def append(self, values: Tensor) -> None:
        assert self.file is not None, "no file was made"
        self.file.append(self.piece, values)

    def write(self, window: ParcelWindow) -> None:
        """Writes all elements, a buffer at a time."""
        for first, last in ranges(self.piece.box.sizes, BUFFER_NBYTES // self.piece.dtype.itemsize):
            self.append(self.held.read(self.first + first, self.first + last, window))


def shared_out(plan: Inventory, agreed: Agreement) -> dict[str, list[list[Share]]]:
    """What this rank writes, by kind and file.

    A file has one box of each name: tiles go to several files.
    """
    found: dict[str, list[list[Share]]] = {}
    for folder, held_tensors in plan.held_tensors.items():
        files: list[list[Share]] = found.setdefault(folder, [])
        taken: Counter[str] = Counter()
        for ordinal, held in enumerate(held_tensors):
            place = held.place
            if folder == "extra":
                box: Box | None = place.box
            elif held.is_buffer and place.replica is None:
                # Buffers of ranks may differ: rank 0 decides, as in training.
                box = place.box if agreed.replica == 0 else None
            else:
                box = place.own(ordinal, held.dtype.itemsize, (agreed.replica, agreed.replicas))
            if box is None:
                continue
            number = taken[held.name]
            taken[held.name] += 1
            if number == len(files):
                files.append([])
            row = (
                place.box.numel // place.box.sizes[0] if place.box.numel and place.box.sizes else 0
            )
            first = (box.starts[0] - place.box.starts[0]) * row if row else 0
            files[number].append(
                Share(StoredBox(held.name, held.dtype, place.shape, box), held, first)
            )
    return found


@dataclass
class Writing:
    """The files of one rank, in a folder that is there."""

    folder: Path
    rank: int
    plan: Inventory
    saved_by: str  # what identifies the save
    files: dict[str, list[list[Share]]]  # what this rank writes, by kind and file
    room: list[Slab] = field(default_factory=list)  # memory for copies, for the next save, too
    make: Callable[[Path, list[StoredBox], str], Taker] = TensorFile
    is_complete: bool = False

    def begin(self, *, copies: bool) -> None:
        """Makes the files, and writes what rests in tiers; with `copies`,
        what is in memory is copied to the host."""
        for kind, files in self.files.items():
            for number, shares in enumerate(files):
                path = self.folder / tensors_name(kind, self.rank, number)
                file = self.make(path, [share.piece for share in shares], self.saved_by)
                for share in shares:
                    share.file = file
        if copies:
            _copy([share for share in self.each() if share.held.is_in_memory], self.room)
        with ParcelWindow() as window:
            for share in self.each():
                if share.held.is_away:
                    share.write(window)
        for optimizer in self.plan.streamed:
            self._write_chunks(optimizer)

    def _write_chunks(self, optimizer: Streamed) -> None:
        in_chunks = {
            share.held.in_chunks: share for share in self.each() if share.held.in_chunks is not None
        }

        def take(parameter: Tensor, name: str, first: int, values: Tensor) -> None:
            share = in_chunks.get((id(parameter), name))
            if share is None:  # another rank writes this state
                return
            low = max(first, share.first)
            high = min(first + values.numel(), share.first + share.piece.box.numel)
            if low < high:
                share.append(values[low - first : high - first])

        each_state(optimizer, take, in_chunks)

    def write_values(self) -> None:
        """Writes what is in memory."""
        with ParcelWindow() as window:
            for share in self.each():
                if share.held.is_in_memory:
                    share.write(window)

    def write_rest(self) -> None:
        """Writes what is in memory, and then this rank's part of the manifest:
        its files are complete."""
        self.write_values()
        written = {
            kind: [_finished(shares) for shares in files] for kind, files in self.files.items()
        }
        says = {"id": self.saved_by, "rank": self.rank, "files": written, **self.plan.says}
        write_json(self.folder / part_name(self.rank), says)
        self.is_complete = True

    def close(self) -> None:
        """Closes the files, also those that are not complete."""
        for share in self.each():
            if share.file is not None:
                share.file.close()

    def each(self) -> list[Share]:
        """All that this rank writes, in the order of files."""
        return [share for files in self.files.values() for shares in files for share in shares]


def _finished(shares: list[Share]) -> dict[str, Any]:
    """Makes sure that a file is on the disk; returns what the manifest says of it."""
    file = shares[0].file
    assert file is not None, "no file was made"
    return file.finish()


def _copy(shares: list[Share], room: list[Slab]) -> None:
    """Copies what is to be written into memory of the host; it is written from there."""
    sizes = [-(-share.piece.nbytes // 64) * 64 for share in shares]
    if not sum(sizes):
        return
    if not room or room[0].nbytes < sum(sizes):
        room[:] = [
            Slab(sum(sizes), Cpu(True, None), "copies of what is saved", forked=False, huge=False)
        ]
    memory = room[0].memory
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
