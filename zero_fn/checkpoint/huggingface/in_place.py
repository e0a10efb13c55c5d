"""Parameters that stay where a folder of safetensors has them, and are read there for each use."""

from __future__ import annotations

from math import prod

from torch import nn

from zero_fn.checkpoint.format.contents import Contents, Key, range_of
from zero_fn.checkpoint.live.load_plan import LoadPlan
from zero_fn.checkpoint.live.tensors import HeldTensor
from zero_fn.errors import CheckpointError
from zero_fn.runtime.group import Group
from zero_fn.runtime.registry import runs_of, units_of
from zero_fn.runtime.slot import Slot
from zero_fn.storage import stagings_for
from zero_fn.storage.stored_files import FileRange, StoredFiles
from zero_fn.tiers.parcels import Parcel, lands
from zero_fn.values.box import strides_of
from zero_fn.values.chunks import Piece
from zero_fn.values.tiers import is_away

__all__ = ["leave_in_files", "open_files", "require_readable"]

_SHOWN = 8


def require_readable(model: nn.Module, plan: LoadPlan, source: Contents, device_type: str) -> None:
    """Requires that each parameter that is to rest in another tier than such a device can be
    read where the files have it.

    Raises:
        CheckpointError: Some cannot; or there are none.
    """
    keys = {id(held): key for key, held in plan.todo}
    slots = [slot for unit in units_of(model) for slot in unit.slots]
    away = [slot for slot in slots if is_away(slot.home.tiers.params, device_type)]
    wrong: dict[str, list[str]] = {}
    for slot in away:
        held = plan.named.parameters.get(id(slot.parameter))
        key = keys.get(id(held))
        why = (
            "not in the files"
            if held is None or key is None
            else _unreadable(slot, held, key, source)
        )
        if why:
            wrong.setdefault(why, []).append(slot.fqn)
    if wrong or not away:
        lines = [
            f"{why}: {len(names)} parameters, such as {names[0]}" for why, names in wrong.items()
        ]
        raise CheckpointError(
            "copy=False: parameters cannot be read in place. Nothing was loaded.",
            folder=source.path,
            **{
                f"{number}": line
                for number, line in enumerate(lines[:_SHOWN] or ["none rests in another tier"], 1)
            },
            fix="without copy=False they are copied to their tier. To read them in place: "
            "zf.offload(model, params=...), model.requires_grad_(False); and build the model on "
            "meta in the dtype of the files",
        )


def _unreadable(slot: Slot, held: HeldTensor, key: Key, source: Contents) -> str:
    """Why a parameter cannot be read in place; "" if it can."""
    piece, shape = source.first(key), held.place.shape
    if slot.parameter.requires_grad:
        return "trained, and copy=False leaves the files as they are"
    if not slot.parameter.is_meta:
        return "have values already"
    if piece.dtype != slot.dtype or piece.dtype != slot.kind.compute_dtype:
        return (
            f"{piece.dtype} in the files, {slot.dtype} here, computed in {slot.kind.compute_dtype}"
        )
    is_in_order = tuple(slot.path.stride) == strides_of(tuple(slot.path.shape))
    first, end = range_of(held.place.box, shape)
    if not is_in_order or end - first > max(held.place.box.numel, 1):
        return "elements of this rank do not lie in a row in the file"
    return ""


def open_files(model: nn.Module) -> None:
    """From now on what is in files gets no room in its tier when units are given memory."""
    for run in runs_of(model, verb="load_pretrained"):
        tiers = [slot.home.tiers.params for unit in run.live_units() for slot in unit.slots]
        for tier in tiers:
            if tier is not None:
                run.offloaded.files = run.offloaded.files or StoredFiles(tier)


def leave_in_files(model: nn.Module, plan: LoadPlan, source: Contents) -> None:
    """Points the records of a model that was given memory at the files,
    and takes their tensors out of the plan."""
    keys = {id(held): key for key, held in plan.todo}
    left: set[int] = set()
    for run in runs_of(model, verb="load_pretrained"):
        for group in (group for unit in run.live_units() for group in unit.memory.groups):
            if group.record is not None and run.offloaded.files is not None:
                helds = [plan.named.parameters[id(slot.parameter)] for slot in group.slots]
                _leave(
                    group, run.offloaded.files, [(keys[id(held)], held) for held in helds], source
                )
                left |= {id(held) for held in helds}
    plan.todo = [(key, held) for key, held in plan.todo if id(held) not in left]


def _leave(
    group: Group, files: StoredFiles, tensors: list[tuple[Key, HeldTensor]], source: Contents
) -> None:
    assert group.record is not None
    ranges, parcels, start = [], [], 0
    for number, (key, held) in enumerate(tensors):
        piece, numel = source.first(key), held.place.box.numel
        first, _ = range_of(held.place.box, held.place.shape)
        if not numel or piece.open is None:
            continue
        reader = piece.open()
        path, offset = reader.located(piece, first)
        reader.close()
        each = FileRange(str(path), offset, numel * piece.dtype.itemsize)
        whole = Piece(number, 0, numel, numel == prod(held.place.shape))
        parcels.append(Parcel((whole,), (each.before,), start, each.room_nbytes, is_stored=True))
        ranges.append(each)
        start += each.room_nbytes
    group.record.rest_in(files, files.place(ranges), parcels)
    if not lands(group.record.forms):
        files.stage(group.record.nbytes, stagings_for(group.kind.device.type))
