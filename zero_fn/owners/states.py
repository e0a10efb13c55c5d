"""The states of all tensors, from their owners to all ranks and back: for `state_dict` and `load_state_dict`.

A state of the shape of its parameter becomes a DTensor that is cut as the parameter is, as a stock optimizer has it. Any
other tensor becomes whole on every rank. What is not a tensor, or has one element, is told with the names.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zero_fn.owners.dealing import Dealt, batches
from zero_fn.owners.routes import mesh_of
from zero_fn.owners.trips import Lines, Parcel, Trip, collected, spread
from zero_fn.resting import local_of, on_spec, spec_on
from zero_fn.runtime.tier_tensor import in_memory
from zero_fn.transport.agree import axes_of
from zero_fn.transport.links import line_over

__all__ = ["on_all_ranks", "on_owners"]

Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a state that is a tensor of several elements."""


def on_all_ranks(
    dealt: Sequence[Dealt], states: Mapping[Tensor, Mapping[str, Any]], lines: Lines, nbytes: int
) -> dict[Tensor, dict[str, Any]]:
    """The states of these tensors as every rank is to have them. All ranks call it."""
    said = {at: _said(states.get(each.parameter, {})) for at, each in enumerate(dealt) if each.is_mine}
    for mesh in dict.fromkeys(mesh_of(each.parameter) for each in dealt):
        assert mesh is not None
        said |= _told(mesh, {at: said for at, said in said.items() if mesh_of(dealt[at].parameter) is mesh})
    numbers, found = {id(each): at for at, each in enumerate(dealt)}, dict[Tensor, dict[str, Any]]()
    for batch in batches(dealt, nbytes):
        for follows in (True, False):  # states of the shape of their parameters, and others
            parcels: list[Parcel] = []
            for each in batch:
                forms, values = said.get(numbers[id(each)], ({}, {}))
                if not forms and not values:  # it was never stepped
                    continue
                own = found.setdefault(each.parameter, dict(values))
                for name, (shape, dtype) in forms.items():
                    if (shape == each.route.shape) is follows:
                        value = in_memory(states[each.parameter][name]) if each.is_mine else None
                        parcels.append(_leaving(each, shape, dtype, value))
                        own[name] = _shown(each, parcels[-1].part, shape)
            Trip(spread(parcels, lines, "states")).wait()
    return found


def _said(states: Mapping[str, Any]) -> tuple[dict[str, Form], dict[str, Any]]:
    """The tensors of several elements by their forms, and all other values."""
    large = {name: value for name, value in states.items() if isinstance(value, Tensor) and value.numel() > 1}
    forms = {name: (tuple(value.shape), value.dtype) for name, value in large.items()}
    return forms, {name: value for name, value in states.items() if name not in large}


def _told(mesh: DeviceMesh, said: dict[int, Any]) -> dict[int, Any]:
    """What the ranks of a mesh say of the tensors that they own."""
    line = line_over(axes_of(mesh, reversed(range(mesh.ndim)), "by_owner"))
    text = pickle.dumps(said)
    lengths = line.exchange(torch.tensor([len(text)]).view(torch.uint8), "sizes of states").view(torch.int64)
    room = torch.zeros(int(lengths.max()), dtype=torch.uint8)
    room[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = line.exchange(room, "names of states")
    found: dict[int, Any] = {}
    for row, length in zip(rows, lengths.flatten().tolist(), strict=True):
        found |= pickle.loads(row[:length].numpy().tobytes())  # what a rank of this program has written
    return found


def _leaving(dealt: Dealt, shape: tuple[int, ...], dtype: torch.dtype, value: Tensor | None) -> Parcel:
    local = local_of(dealt.parameter)
    if shape != dealt.route.shape:
        dealt = replace(dealt, route=dealt.route.uncut(shape))
    if not dealt.route.is_cut:
        part = (
            torch.empty(shape, dtype=dtype, device=local.device) if value is None else value.to(local.device, copy=True)
        )
        return Parcel(dealt, part, None)
    part = torch.empty_strided(local.shape, local.stride(), dtype=dtype, device=local.device)
    return Parcel(dealt, part, None if value is None else value.to(local.device))


def _shown(dealt: Dealt, part: Tensor, shape: tuple[int, ...]) -> Tensor:
    parameter = dealt.parameter
    if shape != dealt.route.shape or not isinstance(parameter, DTensor):
        return part
    return on_spec(part, spec_on(parameter._spec, parameter.shape, parameter.stride(), part.dtype))


def on_owners(
    dealt: Sequence[Dealt], states: Mapping[Tensor, Mapping[str, Any]], lines: Lines, nbytes: int
) -> dict[Tensor, dict[str, Any]]:
    """The states of the tensors that this rank owns, whole. All ranks call it, with DTensors and whole tensors."""
    found: dict[Tensor, dict[str, Any]] = {}
    for batch in batches([each for each in dealt if states.get(each.parameter)], nbytes):
        parcels: list[Parcel] = []
        for each in batch:
            own = found[each.parameter] = dict[str, Any]()
            for name, value in states[each.parameter].items():
                if isinstance(value, DTensor) and value.placements != getattr(each.parameter, "placements", None):
                    value = value.full_tensor()
                if isinstance(value, DTensor) and each.route.is_cut:
                    whole = own[name] = each.whole(value.dtype) if each.is_mine else None
                    parcels.append(Parcel(each, local_of(value), whole))
                else:
                    own[name] = local_of(value).clone() if isinstance(value, Tensor) else value
        Trip(collected(parcels, lines)).wait()
        found.update({each.parameter: {} for each in batch if not each.is_mine})
    return found
