"""Finds by name what of the files goes where in a model, an optimizer and `extra`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_fn.average import Average
from zero_fn.checkpoint.agreement import RankMeeting
from zero_fn.checkpoint.format.contents import Contents, Key, require_whole
from zero_fn.checkpoint.format.folders import AVERAGES
from zero_fn.checkpoint.live.load_plan import LoadPlan
from zero_fn.checkpoint.live.streamed_states import (
    StateFields,
    fill_states,
    held_in_chunks,
    note_scales,
    room_of_states,
)
from zero_fn.checkpoint.live.tensors import (
    HeldTensor,
    held_averages,
    held_state,
    tensors_of_groups,
)
from zero_fn.owners import ByOwner, Dealt
from zero_fn.runtime.bfloat16_step import COMPENSATION
from zero_fn.runtime.registry import units_of
from zero_fn.runtime.run import run_of
from zero_fn.streamed import Streamed
from zero_fn.transforms.selection import Where
from zero_fn.values.dtypes import keeps_every_bit

__all__ = ["match_all", "match_model"]


def match_model(plan: LoadPlan, source: Contents, *, is_strict: bool) -> None:
    """Finds the tensors of the model in the files."""
    for held in plan.named.held_tensors:
        key = ("model", _name_of(plan, source, held.name))
        if key not in source.pieces:
            plan.wrong += [f"{held.name}: not in the checkpoint"] if is_strict else []
            continue
        _match(plan, source, key, held)
        others = (("model", alias) for alias, of in plan.named.aliases.items() if of == held.name)
        plan.twins += [
            (key, other, held) for other in others if other != key and other in source.pieces
        ]


def _match(plan: LoadPlan, source: Contents, key: Key, held: HeldTensor) -> None:
    piece = source.first(key)
    if piece.shape != held.place.shape:
        plan.wrong.append(
            f"{held.name}: {list(piece.shape)} in the checkpoint, {list(held.place.shape)} here"
        )
    elif not (_is_near if plan.rounds else keeps_every_bit)(piece.dtype, held.dtype):
        plan.wrong.append(
            f"{held.name}: {piece.dtype} in the checkpoint, and bits would be lost in {held.dtype}"
        )
    elif held.local is not None and _is_expanded(held.local):
        plan.wrong.append(
            f"{held.name}: expanded here: elements share memory (.contiguous() where it is made)"
        )
    else:
        source.require_all(key, held.place.box)
        plan.todo.append((key, held))


def _name_of(plan: LoadPlan, source: Contents, name: str) -> str:
    """The name under which the checkpoint has a tensor that may be tied there, or here."""
    if ("model", name) in source.pieces:
        return name
    others = (alias for alias, of in plan.named.aliases.items() if of == name)
    return next(
        (other for other in others if ("model", other) in source.pieces),
        source.aliases.get(name, name),
    )


def match_local_buffers(plan: LoadPlan, source: Contents, meeting: RankMeeting) -> None:
    """Finds the buffers of `buffers="local"`, which each rank has saved for itself."""
    if source.ranks == meeting.size:
        own = source.said(meeting.rank, "buffers")
        values = {name: source.value(meeting.rank, value) for name, value in own.items()}
        for held in plan.named.held_tensors:
            value = values.get(held.name)
            if held.local is None or held.name not in values:
                continue
            if not isinstance(value, Tensor) or value.shape != held.local.shape:
                plan.wrong.append(
                    f"{held.name}: another value of this rank in the checkpoint, "
                    "and none of its shape"
                )
            else:
                plan.then.append(partial(held.local.copy_, value))
        return
    units = [] if plan.model is None else units_of(plan.model)
    if not any(run_of(unit).assignment.buffers == "local" for unit in units):
        return  # all ranks take the buffers of rank 0, which are in the files of the model
    names = {held.name for held in plan.named.held_tensors}
    plan.wrong += [
        f"{name}: {source.ranks} ranks have saved different values of a buffer, "
        f"and {meeting.size} are to load them; "
        'transform without buffers="local" to take those of rank 0 everywhere'
        for name in source.said(0, "buffers")
        if name in names and source.differs_by_rank("buffers", name)
    ]


def match_optimizer(
    plan: LoadPlan, source: Contents, optimizer: Optimizer, *, is_strict: bool
) -> None:
    """Finds the states of the optimizer and the options of its groups."""
    streamed = optimizer if isinstance(optimizer, Streamed) else None
    rooms = {} if streamed is None else room_of_states(streamed)
    kept: StateFields = {}
    begin = len(plan.todo)
    for group, held_tensors in zip(
        optimizer.param_groups, tensors_of_groups(optimizer, plan.named), strict=True
    ):
        options: dict[str, tuple[int, Any]] = {}
        for parameter, held in zip(group["params"], held_tensors, strict=True):
            own = replace(held, name=_name_of(plan, source, held.name))
            if own.name not in source.options:
                plan.wrong += (
                    [f"{held.name}: no states of an optimizer in the checkpoint"]
                    if is_strict
                    else []
                )
                continue
            rank, said = source.options[own.name]
            options.setdefault(repr(said), (rank, said))
            plan.stepped.add(own.name)
            dealt = optimizer.owner_of(parameter) if isinstance(optimizer, ByOwner) else None
            if dealt is not None and not dealt.is_mine:
                continue  # its owner has the states
            if streamed is None:
                _match_states(plan, source, optimizer, group, parameter, own, dealt)
            else:
                kept[id(parameter)] = _match_chunks(
                    plan, source, streamed, parameter, own, rooms.get(id(parameter), {})
                )
        if len(options) > 1:
            plan.wrong.append(
                f"a group of {len(held_tensors)} parameters: "
                "they had different options when they were saved"
            )
        elif options:
            plan.then.append(partial(group.update, source.value(*next(iter(options.values())))))
    if isinstance(optimizer, ByOwner):
        plan.then.append(partial(setattr, optimizer, "failed", None))
    if streamed is not None:
        boxes = {held.in_chunks: (key, held.place.box) for key, held in plan.todo[begin:]}

        def fill(parameter: Tensor, name: str, first: int, values: Tensor) -> None:
            source.fill(*boxes[id(parameter), name], first, values)

        plan.then.append(partial(fill_states, streamed, kept, fill))


def _match_states(
    plan: LoadPlan,
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
            device = parameter.device if is_there or piece.box.numel > 1 else torch.device("cpu")
            found[name] = torch.empty(piece.shape, dtype=piece.dtype, device=device)
        held = held_state(name, found[name], parameter, own)
        if held is not None:
            _match(plan, source, key, held)
    # A parameter that has never been stepped has no entry.
    plan.then.append(
        partial(optimizer.state.__setitem__ if found else optimizer.state.pop, parameter, found)
    )


def _match_chunks(
    plan: LoadPlan,
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
            _match(plan, source, key, held)
            plan.then.append(partial(note_scales, optimizer, parameter, held, name, source, key))
        elif prod(piece.shape) <= 1:
            others[name] = source.whole(key)
        else:
            plan.wrong.append(f"{key[1]}: the streamed optimizer has no such state")
    # The compensation of a value that was not rounded is zero.
    missing = room.keys() - dtypes.keys() - {COMPENSATION}
    if dtypes and missing:
        plan.wrong.append(f"{own.name}: the checkpoint has no {', '.join(missing)} of it")
    return dtypes, others


def match_extra(
    plan: LoadPlan,
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
        plan.wrong += [
            f"extra[{name!r}]: {source.ranks} ranks have saved different values, "
            f"and {meeting.size} are to load them; "
            'leave it with only=("model", "optimizer")'
            for name in said
            if source.differs_by_rank("extra", name)
        ]
    if is_strict:
        plan.wrong += [
            f"extra[{name!r}]: not in the checkpoint" for name in extra if name not in said
        ]
    plan.values = {name: source.value(rank, value) for name, value in said.items()}
    for name, taker in extra.items():
        if name in said and hasattr(taker, "load_state_dict"):
            plan.then.append(partial(taker.load_state_dict, plan.values[name]))
        if name not in said or not isinstance(taker, Average):
            continue
        plan.averages.add(name)
        for held in held_averages(name, taker, plan.named, where):
            key = (
                AVERAGES,
                f"{_name_of(plan, source, held.name.removesuffix(f'/{name}'))}/{name}",
            )
            if key in source.pieces:
                _match(plan, source, key, held)
            elif is_strict:
                plan.wrong.append(f"{held.name}: no average in the checkpoint")
        if isinstance(plan.values[name], dict):  # as of a torch.distributed.checkpoint, too
            plan.then.append(
                partial(setattr, taker, "updates", plan.values[name].get("updates", 0))
            )


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
        match_model(plan, source, is_strict=is_strict)
        match_local_buffers(plan, source, meeting)
    for optimizer in plan.optimizers:
        match_optimizer(plan, source, optimizer, is_strict=is_strict)
    if extra is not None:
        match_extra(plan, source, meeting, extra, where, is_strict=is_strict)


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
