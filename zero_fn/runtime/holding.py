"""Which elements this rank holds of a parameter, a buffer or a state of an optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

from zero_fn.errors import CheckpointError
from zero_fn.runtime.slot import slot_of, spec_of
from zero_fn.values.box import Holding, whole_box
from zero_fn.values.dtensors import local_of
from zero_fn.values.layout import ShardLayout
from zero_fn.values.numbering import Numbering

__all__ = ["holding_of", "holding_of_state", "numbering_of"]


def holding_of(tensor: Tensor) -> Holding | None:
    """What this rank holds of a parameter or buffer; None if nothing,
    since the rank is not on the mesh of the tensor."""
    slot, spec = slot_of(tensor), spec_of(tensor)
    box = whole_box(tensor.shape)
    if spec is None:
        return Holding(box.sizes, box)
    if spec.mesh.get_coordinate() is None:
        return None
    model = slot.model if slot is not None else spec
    for placement, size, rank in _over_axes(model) if model is not None else ():
        if isinstance(placement, Shard) and not isinstance(placement, _StridedShard):
            rows = ShardLayout(box.sizes, (placement.dim,), size).owned_rows(rank)
            box = box.narrow(placement.dim, *rows)
        elif not placement.is_replicate():
            raise CheckpointError(
                "A tensor is neither sharded nor replicated, and no checkpoint can hold it.",
                tensor=f"{list(tensor.shape)}, {placement}",
                fix="redistribute it to Shard or Replicate before",
            )
    for hop in slot.path.hops if slot is not None else ():
        if hop.layout is not None:
            box = box.narrow(hop.layout.dim, *hop.layout.owned_rows(hop.axis.rank))
    assert box.sizes == tuple(local_of(tensor).shape), f"{box} is not what {tensor.shape} rests as"
    replica, replicas = 0, 1
    for placement, size, rank in _over_axes(spec):
        if placement.is_replicate():
            replica, replicas = replica * size + rank, replicas * size
    return Holding(tuple(tensor.shape), box, (replica, replicas))


def _over_axes(spec: DTensorSpec) -> Iterator[tuple[Placement, int, int]]:
    """For each axis of the mesh of a tensor: its placement,
    how many ranks there are, and the number of this one."""
    coordinate = spec.mesh.get_coordinate()
    assert coordinate is not None, "a mesh without this rank"
    yield from zip(spec.placements, spec.mesh.shape, coordinate, strict=True)


def holding_of_state(name: str, state: Tensor, parameter: Tensor, place: Holding) -> Holding | None:
    """What this rank holds of an optimizer's state."""
    is_cut = place.box.sizes != place.shape
    if isinstance(state, DTensor):
        is_alike = isinstance(parameter, DTensor) and state.placements == parameter.placements
        return place if is_alike and state.shape == parameter.shape else holding_of(state)
    if tuple(state.shape) == place.box.sizes:
        return place
    if state.numel() > 1 and is_cut:
        raise CheckpointError(
            f"Nothing says which part of the state {name!r} this rank has.",
            state=f"a plain tensor of {list(state.shape)}",
            parameter=f"{list(place.shape)}, {list(place.box.sizes)} of it on this rank",
            fix="keep states as DTensors, or of the shape of the parameter: "
            "torch.zeros_like(parameter)",
        )
    return Holding(tuple(state.shape), whole_box(state.shape), None if is_cut else place.replica)


def numbering_of(parameter: Tensor) -> Numbering:
    """The numbers of the elements that this rank holds of a parameter, which lies densely in
    memory, with or without a transform."""
    held = holding_of(parameter)
    assert held is not None, "a rank that is not on the mesh of the tensor"
    return Numbering.of_held(held, local_of(parameter))
