"""The states of an optimizer, in chunks, where they rest;
and the states of whole parameters, in memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zero_fn.errors import CheckpointError, PlacementError, StateError
from zero_fn.runtime.bfloat16_step import step_dtype_of
from zero_fn.storage import InMemory, Store, staging_for
from zero_fn.streamed.inner_optimizer import stand_in
from zero_fn.streamed.pieces import Chunk, ParameterPiece, Planner, name_of, rooms_of
from zero_fn.streamed.pipeline import ChunkPipeline
from zero_fn.streamed.state_codes import Divided
from zero_fn.streamed.tier_places import place_of
from zero_fn.values.dtensors import local_of, on_spec, spec_on
from zero_fn.values.mesh import axes_text
from zero_fn.values.strides import in_strides
from zero_fn.values.tiers import Tier

__all__ = ["States", "loaded"]


class States:
    """The states of an optimizer, as a `ChunkSource`."""

    def __init__(
        self,
        planner: Planner,
        parameters: list[Tensor],
        states: Mapping[Tensor, Mapping[str, Any]],
        divided: Mapping[Tensor, Divided],
    ) -> None:
        """Makes room for the states of these parameters, and copies those that there are."""
        self.known = parameters
        self.stores: dict[Tier | None, Store] = {}  # the store of the states of chunks, by tier
        self.chunks = planner.chunks(parameters, divided)
        # The pieces of states in 8 bits whose blocks other ranks have parts of,
        # and where they are stepped.
        self.divided: dict[Tensor, list[tuple[ParameterPiece, torch.device]]] = {}
        for chunk in self.chunks:
            for cut in chunk.cuts:
                if cut.coded is not None:
                    cut.coded.make(
                        device := chunk.device if chunk.tier is None else torch.device("cpu")
                    )
                    if cut.coded.divided is not None:
                        self.divided.setdefault(cut.parameter, []).append((cut, device))
        for (tier, device), members in rooms_of(self.chunks).items():
            if tier not in self.stores:
                self.stores[tier] = Store(tier, f"states of {type(planner.inner).__name__}")
            self.stores[tier].reserve(members, device)

        def fill(chunk: Chunk, room: InMemory) -> None:
            for cut in chunk.cuts:
                if states.get(cut.parameter):
                    cut.keep(room.memory, dict(_pieces_of(states[cut.parameter], cut)))

        filled = [
            chunk for chunk in self.chunks if any(states.get(cut.parameter) for cut in chunk.cuts)
        ]
        self._visit(filled, fill)
        sizes = [chunk.window_nbytes for chunk in self.chunks if chunk.window_nbytes]
        # Buffers for parameters and gradients that are not where they are stepped. (windows.py)
        self.ring = staging_for(sizes, "parameters and gradients")

    def whole(self) -> defaultdict[Tensor, dict[str, Any]]:
        """The states of whole parameters, in memory of their own."""
        found: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)

        def visit(chunk: Chunk, room: InMemory) -> None:
            for cut in chunk.cuts:
                for name, value in cut.states(room.memory).items():
                    _join(found[cut.parameter], name, value, cut)

        self._visit([chunk for chunk in self.chunks if chunk.is_stored], visit, writes=False)
        return defaultdict(
            dict, {parameter: found[parameter] for parameter in self.known if parameter in found}
        )

    def shown(self) -> Mapping[Tensor, Mapping[str, Any]]:
        """The states of each parameter, read-only: values in memory,
        and None for each state in a chunk."""
        found: defaultdict[Tensor, Mapping[str, Any]] = defaultdict(lambda: MappingProxyType({}))
        for chunk in self.chunks:
            for cut in chunk.cuts:
                if cut.resident or cut.present:
                    # By name: torch loads those states of a flattened state_dict whose
                    # names it finds here.
                    in_chunk = dict.fromkeys(name for name in cut.fields if name in cut.present)
                    states = MappingProxyType({**cut.resident, **in_chunk})
                    found.setdefault(cut.parameter, states)
        return MappingProxyType(found)

    def require_as_planned(self, chunk: Chunk) -> None:
        """Refuses to step a chunk whose parameters or gradients are not what was planned for."""
        for cut in chunk.cuts:
            parameter, local, grad = cut.parameter, local_of(cut.parameter), cut.parameter.grad
            if grad is None:
                continue
            if grad.layout is not torch.strided:
                raise PlacementError(
                    "Sparse gradients cannot be streamed.",
                    parameter=name_of(parameter),
                    fix="compute it with sparse=False: F.embedding(tokens, weight)",
                )
            if isinstance(parameter, DTensor) and (
                not isinstance(grad, DTensor) or grad.device_mesh != parameter.device_mesh
            ):
                raise PlacementError(
                    "A gradient does not rest as its parameter does.",
                    parameter=name_of(parameter),
                    gradient=f"over {axes_text(grad.device_mesh)}"
                    if isinstance(grad, DTensor)
                    else "a plain tensor",
                    fix="let backward compute it, or distribute_tensor(grad, "
                    "p.device_mesh, p.placements)",
                )
            is_alike = (local.numel(), local.dtype) == (cut.numel, cut.dtype)
            is_of_shape = not cut.piece.is_whole or tuple(local.shape) == cut.shape
            if not is_alike or not is_of_shape or not _is_in_its_parcel(cut, chunk):
                raise StateError(
                    "A parameter has changed since its optimizer was streamed.",
                    parameter=name_of(parameter),
                    expected=f"{cut.numel} elements of {str(cut.dtype).removeprefix('torch.')} "
                    "on this rank",
                    why="its states have the shape and dtype it had; nothing was updated",
                    fix="cast or replace parameters before the optimizer is built",
                )

    def fetch(self, chunk: Chunk) -> InMemory:
        return self.stores[chunk.tier].fetch(chunk)

    def keep(self, chunk: Chunk, part: InMemory) -> InMemory:
        return self.stores[chunk.tier].keep(chunk, part)

    def forget(self) -> None:
        for store in self.stores.values():
            store.forget()

    def _visit(self, chunks: Sequence[Chunk], act: Any, *, writes: bool = True) -> None:
        ChunkPipeline([self], chunks, act, writes=writes).run()


def _is_in_its_parcel(cut: ParameterPiece, chunk: Chunk) -> bool:
    """Whether the piece of a parameter still lies in its parcel as planned;
    true of one that rests in no tier."""
    if chunk.parcel is None:
        return True
    place = place_of(cut.parameter)
    if place is None or chunk.parcel >= len(place.parcels):
        return False
    parcel = place.parcels[chunk.parcel]
    span = (place.number, cut.piece.start, cut.piece.stop, cut.in_parcel)
    return any(
        (piece.parameter, piece.start, piece.stop, offset) == span
        for piece, offset in zip(parcel.pieces, parcel.offsets, strict=True)
    )


# -- whole parameters and pieces -------------------------------------------------------------------


def _pieces_of(states: Mapping[str, Any], cut: ParameterPiece) -> Iterator[tuple[str, Any]]:
    """The states of a piece, by name, cut from those of its whole parameter."""
    local = local_of(cut.parameter)
    for name, value in states.items():
        if not isinstance(value, Tensor):
            yield name, value
            continue
        own = local_of(value)
        if own.shape != local.shape or (name not in cut.fields and own.numel() <= 1):
            if name in cut.fields:
                raise CheckpointError(
                    f"The state {name!r} does not fit its parameter.",
                    parameter=f"{name_of(cut.parameter)}, {list(local.shape)} of it on this rank",
                    state=list(own.shape),
                    fix="load states that were saved with this layout, "
                    "or through torch.distributed.checkpoint",
                )
            yield name, own.clone()
            continue
        yield name, cut.of(own if cut.piece.is_whole else in_strides(own, local.stride()))


def _join(states: dict[str, Any], name: str, value: Any, cut: ParameterPiece) -> None:
    """Copies the state of a piece to where it belongs in the state of its whole parameter."""
    parameter, local = cut.parameter, local_of(cut.parameter)
    if not isinstance(value, Tensor):
        states[name] = value
    elif value.shape != cut.shape or (name not in cut.fields and local.numel() <= 1):
        states[name] = value.clone()
    else:
        if name not in states:
            stride = cut.stride if cut.piece.is_whole else local.stride()
            # Where it is stepped: on the host where the states of all
            # parameters may not fit the device.
            states[name] = torch.empty_strided(
                local.shape, stride, dtype=value.dtype, device=value.device
            )
            if isinstance(parameter, DTensor):
                spec = spec_on(parameter._spec, parameter.shape, parameter.stride(), value.dtype)
                states[name] = on_spec(states[name], spec)
        cut.of(local_of(states[name])).copy_(value)


def loaded(
    inner: Optimizer, state_dict: dict[str, Any], *, on_host: bool
) -> tuple[list[dict[str, Any]], dict[Tensor, dict[str, Any]]]:
    """The groups and states that an optimizer would load, states in host memory if wanted.

    The optimizer stays as it was.

    torch moves each state to the device of its parameter, which may not hold all states, and casts
    it to its dtype, in which it may not be stepped. So such parameters are replaced for the time by
    stand-ins, of the same shape and without memory.
    """
    own = [parameter for group in inner.param_groups for parameter in group["params"]]
    stand_in_of = {id(parameter): _as_stepped(parameter, on_host=on_host) for parameter in own}
    parameter_of = {id(stand_in_of[id(parameter)]): parameter for parameter in own}
    groups = [
        {**group, "params": [stand_in_of[id(p)] for p in group["params"]]}
        for group in inner.param_groups
    ]
    other = stand_in(inner, groups, defaultdict(dict))
    other.load_state_dict(state_dict)
    groups, states = other.param_groups, other.state
    for group, before in zip(groups, inner.param_groups, strict=True):
        group["params"] = before["params"]
    return groups, {parameter_of.get(id(key), key): value for key, value in states.items()}


def _as_stepped(parameter: Tensor, *, on_host: bool) -> Tensor:
    local, dtype = local_of(parameter), step_dtype_of(parameter)
    device = torch.device("cpu") if on_host else local.device
    if (local.device.type, local.dtype) == (device.type, dtype):
        return parameter
    nothing = torch.empty((), dtype=dtype, device=device).expand(local.shape)
    return nn.Parameter(nothing, requires_grad=parameter.requires_grad)
