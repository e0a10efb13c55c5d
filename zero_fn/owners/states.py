"""The states of all tensors, from their owners to all ranks and back:
for `state_dict` and `load_state_dict`.

A state of the shape of its parameter becomes a DTensor that is cut as the parameter is, as a stock
optimizer has it. Any other tensor becomes whole on every rank. What is not a tensor, or has one
element, is told with the names.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from zero_fn.owners.assignment import Dealt, batches
from zero_fn.owners.exchange import Carried, LinesByAxis, collected, spread
from zero_fn.runtime.slot import mesh_of
from zero_fn.tiers.tier_tensor import in_memory
from zero_fn.transport.agree import axes_of, exchange_bytes
from zero_fn.transport.links import line_over
from zero_fn.transport.trip import Trip
from zero_fn.values.dtensors import local_of, on_spec, spec_on

__all__ = ["on_owners", "states_on_all_ranks"]


@dataclass(frozen=True, slots=True)
class _Large:
    """In place of a state that is a tensor of several elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def states_on_all_ranks(
    dealt: Sequence[Dealt],
    states: Mapping[Tensor, Mapping[str, Any]],
    lines: LinesByAxis,
    nbytes: int,
) -> dict[Tensor, dict[str, Any]]:
    """The states of these tensors as every rank is to have them. All ranks call it."""
    said = {
        at: tree_map(_form_of, states.get(each.parameter, {}))
        for at, each in enumerate(dealt)
        if each.is_mine
    }
    for mesh in dict.fromkeys(mesh_of(each.parameter) for each in dealt):
        assert mesh is not None, "a plain parameter has no owner"
        said |= _told(
            mesh, {at: own for at, own in said.items() if mesh_of(dealt[at].parameter) == mesh}
        )
    numbers, found = {id(each): at for at, each in enumerate(dealt)}, dict[Tensor, dict[str, Any]]()
    for batch in batches([each for at, each in enumerate(dealt) if said.get(at)], nbytes):
        # States by whether they have the shape of their parameters.
        carried: dict[bool, list[Carried]] = {True: [], False: []}
        for each in batch:
            form = said[numbers[id(each)]]
            values = states[each.parameter] if each.is_mine else form

            def arriving(form: Any, value: Any, each: Dealt = each, carried: Any = carried) -> Any:
                if not isinstance(form, _Large):
                    return form
                follows = form.shape == each.route.shape
                parcel = _leaving(
                    each if follows else replace(each, route=each.route.uncut(form.shape)),
                    form,
                    value,
                )
                carried[follows].append(parcel)
                return _shown(each.parameter, parcel.part) if follows else parcel.part

            found[each.parameter] = tree_map(arriving, form, values)
        for alike in carried.values():
            Trip(spread(alike, lines, "states")).wait()
    return found


def _form_of(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() > 1:
        return _Large(tuple(value.shape), value.dtype)
    return value


def _told(mesh: DeviceMesh, said: dict[int, Any]) -> dict[int, Any]:
    """What the ranks of a mesh say of the tensors that they own."""
    line = line_over(axes_of(mesh, reversed(range(mesh.ndim)), "by_owner"))
    found: dict[int, Any] = {}
    for text in exchange_bytes(partial(line.exchange, what="names of states"), pickle.dumps(said)):
        found |= pickle.loads(text)  # what a rank of this program has written
    return found


def _leaving(dealt: Dealt, form: _Large, value: Any) -> Carried:
    """A state on its way from its owner, who has its value."""
    local = local_of(dealt.parameter)
    own = in_memory(value).to(local.device) if dealt.is_mine else None
    if not dealt.route.is_cut:
        part = (
            torch.empty(form.shape, dtype=form.dtype, device=local.device)
            if own is None
            else own.clone()
        )
        return Carried(dealt, part, None)
    part = torch.empty_strided(local.shape, local.stride(), dtype=form.dtype, device=local.device)
    return Carried(dealt, part, own)


def _shown(parameter: Tensor, part: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor), "a plain parameter has no owner"
    return on_spec(part, spec_on(parameter._spec, parameter.shape, parameter.stride(), part.dtype))


def on_owners(
    dealt: Sequence[Dealt],
    states: Mapping[Tensor, Mapping[str, Any]],
    lines: LinesByAxis,
    nbytes: int,
) -> dict[Tensor, dict[str, Any]]:
    """The states of the tensors that this rank owns, whole.

    All ranks call it, with DTensors and whole tensors.
    """
    found: dict[Tensor, dict[str, Any]] = {}
    for batch in batches([each for each in dealt if states.get(each.parameter)], nbytes):
        carried: list[Carried] = []
        for each in batch:

            def arriving(value: Any, each: Dealt = each, carried: list[Carried] = carried) -> Any:
                placements = getattr(each.parameter, "placements", None)
                if isinstance(value, DTensor) and value.placements != placements:
                    value = value.full_tensor()
                if isinstance(value, DTensor) and each.route.is_cut:
                    carried.append(
                        Carried(
                            each, local_of(value), each.whole(value.dtype) if each.is_mine else None
                        )
                    )
                    return carried[-1].whole
                if isinstance(value, Tensor) and each.is_mine:
                    return local_of(value).clone()
                return value

            own = tree_map(arriving, dict(states[each.parameter]))
            found[each.parameter] = own if each.is_mine else {}
        Trip(collected(carried, lines)).wait()
    return found
