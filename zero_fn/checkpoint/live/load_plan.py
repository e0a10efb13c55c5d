"""What of the files goes where in a model, an optimizer and `extra`: found by name,
checked, verified, put there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_fn.average import Average
from zero_fn.checkpoint.agreement import RankMeeting
from zero_fn.checkpoint.format.contents import Contents, Key, require_whole
from zero_fn.checkpoint.format.folders import AVERAGES, CUT
from zero_fn.checkpoint.live.streamed_states import (
    StateFields,
    end_step,
    fill_states,
    held_in_chunks,
    note_scales,
    room_of_states,
)
from zero_fn.checkpoint.live.tensors import (
    HeldTensor,
    ModelTensors,
    ParcelWindow,
    held_averages,
    held_state,
    tensors_of_groups,
)
from zero_fn.errors import CheckpointError
from zero_fn.owners import ByOwner, Dealt
from zero_fn.runtime.bfloat16_step import COMPENSATION
from zero_fn.runtime.registry import units_of
from zero_fn.runtime.run import run_of
from zero_fn.streamed import Streamed
from zero_fn.transforms.selection import Where
from zero_fn.transforms.unsharded import refresh
from zero_fn.values.box import Box
from zero_fn.values.dtypes import keeps_every_bit

__all__ = ["LoadPlan", "match_all"]

_SHOWN = 30
"""How many lines of what does not fit an error shows."""


@dataclass
class LoadPlan:
    """What this rank loads from files, and what of it does not fit."""

    named: ModelTensors
    model: nn.Module | None
    optimizers: Sequence[Optimizer] = ()
    # Whether floating-point numbers may lose bits in the dtype that they rest in.
    rounds: bool = False
    # Tensors to be filled, and what of the files fills them.
    todo: list[tuple[Key, HeldTensor]] = field(default_factory=list)
    # Tensors that are tied here and were saved separately: they must be equal.
    twins: list[tuple[Key, Key, HeldTensor]] = field(default_factory=list)
    # Names in the files of the parameters that it steps.
    stepped: set[str] = field(default_factory=set)
    # What is to be done once the tensors are filled.
    then: list[Callable[[], object]] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)  # of `extra`
    averages: set[str] = field(default_factory=set)  # names in `extra` of those that are loaded
    wrong: list[str] = field(default_factory=list)  # what does not fit, in words

    # -- names, shapes, dtypes ---------------------------------------------------------------------

    def match_model(self, source: Contents, *, is_strict: bool) -> None:
        """Finds the tensors of the model in the files."""
        for held in self.named.held_tensors:
            key = ("model", self._name_of(source, held.name))
            if key not in source.pieces:
                self.wrong += [f"{held.name}: not in the checkpoint"] if is_strict else []
                continue
            self._match(source, key, held)
            others = (
                ("model", alias) for alias, of in self.named.aliases.items() if of == held.name
            )
            self.twins += [
                (key, other, held) for other in others if other != key and other in source.pieces
            ]

    def _match(self, source: Contents, key: Key, held: HeldTensor) -> None:
        piece = source.first(key)
        if piece.shape != held.place.shape:
            self.wrong.append(
                f"{held.name}: {list(piece.shape)} in the checkpoint, {list(held.place.shape)} here"
            )
        elif not (_is_near if self.rounds else keeps_every_bit)(piece.dtype, held.dtype):
            self.wrong.append(
                f"{held.name}: {piece.dtype} in the checkpoint, "
                f"and bits would be lost in {held.dtype}"
            )
        elif held.local is not None and _is_expanded(held.local):
            self.wrong.append(
                f"{held.name}: expanded here: elements share memory "
                "(.contiguous() where it is made)"
            )
        else:
            source.require_all(key, held.place.box)
            self.todo.append((key, held))

    def _name_of(self, source: Contents, name: str) -> str:
        """The name under which the checkpoint has a tensor that may be tied there, or here."""
        if ("model", name) in source.pieces:
            return name
        others = (alias for alias, of in self.named.aliases.items() if of == name)
        return next(
            (other for other in others if ("model", other) in source.pieces),
            source.aliases.get(name, name),
        )

    def match_local_buffers(self, source: Contents, meeting: RankMeeting) -> None:
        """Finds the buffers of `buffers="local"`, which each rank has saved for itself."""
        if source.ranks == meeting.size:
            own = source.said(meeting.rank, "buffers")
            values = {name: source.value(meeting.rank, value) for name, value in own.items()}
            for held in self.named.held_tensors:
                value = values.get(held.name)
                if held.local is None or held.name not in values:
                    continue
                if not isinstance(value, Tensor) or value.shape != held.local.shape:
                    self.wrong.append(
                        f"{held.name}: another value of this rank in the checkpoint, "
                        "and none of its shape"
                    )
                else:
                    self.then.append(partial(held.local.copy_, value))
            return
        units = [] if self.model is None else units_of(self.model)
        if not any(run_of(unit).assignment.buffers == "local" for unit in units):
            return  # all ranks take the buffers of rank 0, which are in the files of the model
        names = {held.name for held in self.named.held_tensors}
        self.wrong += [
            f"{name}: {source.ranks} ranks have saved different values of a buffer, "
            f"and {meeting.size} are to load them; "
            'transform without buffers="local" to take those of rank 0 everywhere'
            for name in source.said(0, "buffers")
            if name in names and source.differs_by_rank("buffers", name)
        ]

    def match_optimizer(self, source: Contents, optimizer: Optimizer, *, is_strict: bool) -> None:
        """Finds the states of the optimizer and the options of its groups."""
        streamed = optimizer if isinstance(optimizer, Streamed) else None
        rooms = {} if streamed is None else room_of_states(streamed)
        kept: StateFields = {}
        begin = len(self.todo)
        for group, held_tensors in zip(
            optimizer.param_groups, tensors_of_groups(optimizer, self.named), strict=True
        ):
            options: dict[str, tuple[int, Any]] = {}
            for parameter, held in zip(group["params"], held_tensors, strict=True):
                own = replace(held, name=self._name_of(source, held.name))
                if own.name not in source.options:
                    self.wrong += (
                        [f"{held.name}: no states of an optimizer in the checkpoint"]
                        if is_strict
                        else []
                    )
                    continue
                rank, said = source.options[own.name]
                options.setdefault(repr(said), (rank, said))
                self.stepped.add(own.name)
                dealt = optimizer.owner_of(parameter) if isinstance(optimizer, ByOwner) else None
                if dealt is not None and not dealt.is_mine:
                    continue  # its owner has the states
                if streamed is None:
                    self._match_states(source, optimizer, group, parameter, own, dealt)
                else:
                    kept[id(parameter)] = self._match_chunks(
                        source, streamed, parameter, own, rooms.get(id(parameter), {})
                    )
            if len(options) > 1:
                self.wrong.append(
                    f"a group of {len(held_tensors)} parameters: "
                    "they had different options when they were saved"
                )
            elif options:
                self.then.append(partial(group.update, source.value(*next(iter(options.values())))))
        if isinstance(optimizer, ByOwner):
            self.then.append(partial(setattr, optimizer, "failed", None))
        if streamed is not None:
            boxes = {held.in_chunks: (key, held.place.box) for key, held in self.todo[begin:]}

            def fill(parameter: Tensor, name: str, first: int, values: Tensor) -> None:
                source.fill(*boxes[id(parameter), name], first, values)

            self.then.append(partial(fill_states, streamed, kept, fill))

    def _match_states(
        self,
        source: Contents,
        optimizer: Optimizer,
        group: Mapping[str, Any],
        parameter: Tensor,
        own: HeldTensor,
        dealt: Dealt | None,
    ) -> None:
        found = dict(source.values_of(own.name))
        for name, key in source.states.get(own.name, []):
            piece, old = source.first(key), optimizer.state.get(parameter, {}).get(name)
            follows = piece.shape == own.place.shape and name != "step"
            if (
                follows
                and isinstance(old, Tensor)
                and old.dtype == piece.dtype
                and old.shape == parameter.shape
            ):
                found[name] = old
            elif follows:
                like = parameter.detach() if dealt is None else dealt.whole()
                found[name] = torch.empty_like(like, dtype=piece.dtype)
            else:
                if piece.shape:  # and no step, which takes no memory
                    require_whole(source, key)
                is_there = group.get("fused") or group.get("capturable")
                device = (
                    parameter.device if is_there or piece.box.numel > 1 else torch.device("cpu")
                )
                found[name] = torch.empty(piece.shape, dtype=piece.dtype, device=device)
            held = held_state(name, found[name], parameter, own)
            if held is not None:
                self._match(source, key, held)
        # A parameter that has never been stepped has no entry.
        self.then.append(
            partial(optimizer.state.__setitem__ if found else optimizer.state.pop, parameter, found)
        )

    def _match_chunks(
        self,
        source: Contents,
        optimizer: Streamed,
        parameter: Tensor,
        own: HeldTensor,
        room: Mapping[str, torch.dtype],
    ) -> tuple[dict[str, torch.dtype], dict[str, Any]]:
        """Finds the states of a parameter for which chunks have this room;
        returns their dtypes, and other values."""
        dtypes, others = {}, dict(source.values_of(own.name))
        for name, key in source.states.get(own.name, []):
            piece = source.first(key)
            if name in room and piece.shape == own.place.shape:
                dtypes[name] = room[name]
                held = held_in_chunks(own, parameter, name, room[name])
                self._match(source, key, held)
                self.then.append(
                    partial(note_scales, optimizer, parameter, held, name, source, key)
                )
            elif prod(piece.shape) <= 1:
                others[name] = source.whole(key)
            else:
                self.wrong.append(f"{key[1]}: the streamed optimizer has no such state")
        # The compensation of a value that was not rounded is zero.
        missing = room.keys() - dtypes.keys() - {COMPENSATION}
        if dtypes and missing:
            self.wrong.append(f"{own.name}: the checkpoint has no {', '.join(missing)} of it")
        return dtypes, others

    def match_extra(
        self,
        source: Contents,
        meeting: RankMeeting,
        extra: Mapping[str, Any],
        where: Where,
        *,
        is_strict: bool,
    ) -> None:
        """Finds the values of `extra`, and what they are to be loaded into."""
        rank = meeting.rank if source.ranks == meeting.size else 0
        said = source.said(rank, "extra")
        if source.ranks != meeting.size:
            self.wrong += [
                f"extra[{name!r}]: {source.ranks} ranks have saved different values, "
                f"and {meeting.size} are to load them; "
                'leave it with only=("model", "optimizer")'
                for name in said
                if source.differs_by_rank("extra", name)
            ]
        if is_strict:
            self.wrong += [
                f"extra[{name!r}]: not in the checkpoint" for name in extra if name not in said
            ]
        self.values = {name: source.value(rank, value) for name, value in said.items()}
        for name, taker in extra.items():
            if name in said and hasattr(taker, "load_state_dict"):
                self.then.append(partial(taker.load_state_dict, self.values[name]))
            if name not in said or not isinstance(taker, Average):
                continue
            self.averages.add(name)
            for held in held_averages(name, taker, self.named, where):
                key = (
                    AVERAGES,
                    f"{self._name_of(source, held.name.removesuffix(f'/{name}'))}/{name}",
                )
                if key in source.pieces:
                    self._match(source, key, held)
                elif is_strict:
                    self.wrong.append(f"{held.name}: no average in the checkpoint")
            if isinstance(self.values[name], dict):  # as of a torch.distributed.checkpoint, too
                self.then.append(
                    partial(setattr, taker, "updates", self.values[name].get("updates", 0))
                )

    def note_unexpected(self, keys: Iterable[Key]) -> None:
        """Notes as wrong what is in the files and on no rank."""
        self.wrong += [f"{name}: in the checkpoint, and not in the {kind}" for kind, name in keys]

    def missed(self, source: Contents) -> list[Key]:
        """What is in the files and has no place on this rank."""
        taken = {key for key, _ in self.todo} | {key for _, key, _ in self.twins}
        taken |= {("model", held.name) for held in self.named.held_tensors}
        kinds = {"model"} if self.model is not None else set()
        kinds |= {"optimizer"} if self.optimizers else set()
        kinds |= {AVERAGES} if self.averages else set()
        return [
            (kind, name)
            for kind, name in source.pieces
            if kind in kinds and (kind, name) not in taken
            if kind != "optimizer" or name.rpartition("/")[0] not in self.stepped
            if kind != AVERAGES or name.rpartition("/")[2] in self.averages
        ]

    def require(self, path: Path) -> None:
        """Raises:
        CheckpointError: Something does not fit; lists all of it.
        """
        if self.wrong:
            more = len(self.wrong) - _SHOWN
            shown = [*self.wrong[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]
            raise CheckpointError(
                "The checkpoint does not fit: nothing was loaded.",
                checkpoint=path,
                **{f"{number}": line for number, line in enumerate(shown, 1)},
                fix="build the model with the sizes and dtypes of the checkpoint; "
                "rename= for other names; strict=False to leave what is in one of them only; "
                + (
                    "from_pretrained inside zero_fn.integrations.transformers.placed, "
                    "where transformers converts names"
                    if self.rounds
                    else "only= for a part"
                ),
            )

    def require_wanted(self, source: Contents, meeting: RankMeeting, *, is_strict: bool) -> None:
        """Where ranks have parameters of different names: refuses what no rank has a place for.

        Sends a byte a tensor.
        """
        source.read_all()
        keys = sorted(key for key in source.pieces if key[0] in CUT)
        missed = set(self.missed(source))
        wanted = meeting.union([key not in missed for key in keys])
        if is_strict:
            self.note_unexpected(
                key for key, is_wanted in zip(keys, wanted, strict=True) if not is_wanted
            )
            self.require(source.path)

    # -- elements ----------------------------------------------------------------------------------

    def verify(self, source: Contents, *, everything: bool) -> None:
        """Compares values that must be equal, and, if `everything`,
        reads all that this rank will read."""
        for key, other, held in self.twins:
            _require_one_value(source, key, other, held.place.box)
        for key, held in self.todo if everything else ():
            source.verify(key, held.place.box)

    def follow(self, named: ModelTensors) -> None:
        """Takes note that the tensors of the model are elsewhere now: they were given memory."""
        there = dict(zip(map(id, self.named.held_tensors), named.held_tensors, strict=True))
        self.todo = [(key, there[id(held)]) for key, held in self.todo]

    def put(self, source: Contents) -> None:
        """Reads everything to where it rests."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, Streamed):
                end_step(optimizer)
        with ParcelWindow() as window:
            for key, held in self.todo:
                if held.in_chunks is None:
                    held.fill(
                        source.first(key).dtype, partial(source.fill, key, held.place.box), window
                    )
        if self.model is not None:
            _note_loaded(self.model)
        for act in self.then:
            act()


def match_all(
    plan: LoadPlan,
    source: Contents,
    meeting: RankMeeting,
    extra: Mapping[str, Any] | None,
    where: Where = None,
    *,
    is_strict: bool,
) -> None:
    """Finds everything in the files; with `extra` None, nothing of what was
    saved beside model and optimizer."""
    if plan.model is not None:
        plan.match_model(source, is_strict=is_strict)
        plan.match_local_buffers(source, meeting)
    for optimizer in plan.optimizers:
        plan.match_optimizer(source, optimizer, is_strict=is_strict)
    if extra is not None:
        plan.match_extra(source, meeting, extra, where, is_strict=is_strict)


def _require_one_value(source: Contents, key: Key, other: Key, box: Box) -> None:
    one, two = source.first(key), source.first(other)
    if (one.shape, one.dtype) == (two.shape, two.dtype):
        pairs = zip(source.read(key, box, parts=2), source.read(other, box, parts=2), strict=True)
        if all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for (_, a), (_, b) in pairs):
            return
    raise CheckpointError(
        f"{key[1]} and {other[1]} are one parameter here, and the files have a value for each.",
        files=source.path,
        why="one of them would be lost",
        fix="untie them before the transform, or leave one of them out: rename=",
    )


def _is_expanded(tensor: Tensor) -> bool:
    return any(
        size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _is_near(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether values of one dtype become values of the other but for rounding.

    Numbers of a byte have scales elsewhere.
    """
    if source.is_floating_point and target.is_floating_point:
        return source == target or min(source.itemsize, target.itemsize) > 1
    return keeps_every_bit(source, target)


def _note_loaded(model: nn.Module) -> None:
    """Tells the units of a model that resting parameters were written: what was gathered before is
    stale, and ranks compare what several of them hold."""
    units = units_of(model)
    if not units:
        return
    refresh(model)
    for unit in units:
        run_of(unit).note_loaded()
        for slot in unit.slots:
            slot.initial = None
