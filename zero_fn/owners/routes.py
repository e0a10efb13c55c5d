"""How one tensor travels between the ranks that hold it and its owner:
one leg for each axis of its mesh.

               leg over 'dp'              leg over 'tp'
    a shard  ---------------->  more rows  ---------------->  the whole, on one rank
    a shard  <----------------  more rows  <----------------

The axis that cuts a tensor last is the first on the way to the owner. Axes that do not cut it come
before all of these: the ranks along them hold the same, so nothing travels to the owner, and its
new values travel to all of them at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from zero_fn.errors import PlacementError
from zero_fn.runtime.slot import slot_of, spec_of
from zero_fn.values.layout import ShardLayout
from zero_fn.values.mesh import Axis, axes_text, mesh_axis

__all__ = ["AxisLeg", "Route", "route_of"]


@dataclass(frozen=True)
class AxisLeg:
    """One axis on the way of a tensor."""

    axis: Axis
    # How it cuts what the axes before have left; None: its ranks hold the same.
    layout: ShardLayout | None
    numel: int  # of what they have left

    def rows(self, whole: Tensor, rank: int) -> Tensor:
        """What a rank of the axis holds of what the axes before have left, as a view."""
        if self.layout is None:
            return whole
        return whole.narrow(self.layout.dim, *self.layout.owned_rows(rank))


@dataclass(frozen=True)
class Route:
    """The way of one tensor to its owner and back."""

    shape: tuple[int, ...]
    # Of axes of several ranks: those that cut it, in the order in which they cut, then the others.
    legs: tuple[AxisLeg, ...]

    @property
    def family(self) -> tuple[tuple[Axis, bool], ...]:
        """What the tensors of one message have in common: the axes of their legs,
        and whether each cuts."""
        return tuple((leg.axis, leg.layout is None) for leg in self.legs)

    @property
    def is_cut(self) -> bool:
        """Whether any rank holds a part of it only."""
        return bool(self.legs) and self.legs[0].layout is not None

    def local_shape(self, count: int) -> tuple[int, ...]:
        """The shape of what this rank holds once the first `count` legs have cut it."""
        layouts = [
            (leg.layout, leg.axis.rank) for leg in self.legs[:count] if leg.layout is not None
        ]
        return layouts[-1][0].local_shape(layouts[-1][1]) if layouts else self.shape

    def uncut(self, shape: Sequence[int]) -> Route:
        """The way of another tensor with the same owner, which all ranks are to hold whole."""
        legs = tuple(AxisLeg(leg.axis, None, prod(shape)) for leg in self.legs)
        return Route(tuple(shape), legs)


def route_of(parameter: Tensor) -> Route:
    """The way of a parameter that rests on a mesh.

    Raises:
        PlacementError: It is neither sharded nor replicated,
            or sharded by others in an order that cannot be read off it.
    """
    slot, spec = slot_of(parameter), spec_of(parameter)
    assert spec is not None, "a plain tensor has no way"
    legs: list[AxisLeg] = []
    left = tuple(parameter.shape)
    model = slot.model if slot is not None else spec
    for axis, placement in _placements_of(model):
        layout = None
        if type(placement) is Shard:
            layout = ShardLayout(
                left,
                (placement.dim, *(d for d in range(len(left)) if d != placement.dim)),
                axis.size,
            )
        elif type(placement) is not Replicate:
            raise PlacementError(
                "A parameter is neither sharded nor replicated, and has no owner.",
                parameter=slot if slot is not None else list(parameter.shape),
                placements=f"{spec.placements} over {axes_text(spec.mesh)}",
                fix="redistribute it to Shard or Replicate; or shard it by zf.shard_params",
            )
        legs.append(AxisLeg(axis, layout, prod(left)))
        left = left if layout is None else layout.local_shape(axis.rank)
    for hop in slot.path.hops if slot is not None else ():
        legs.append(AxisLeg(hop.axis, hop.layout, prod(left)))
        left = left if hop.layout is None else hop.layout.local_shape(hop.axis.rank)
    legs = [leg for leg in legs if leg.axis.size > 1]
    return Route(tuple(parameter.shape), tuple(sorted(legs, key=lambda leg: leg.layout is None)))


def _placements_of(spec: DTensorSpec | None) -> list[tuple[Axis, object]]:
    """The axes of a mesh, each with how a tensor lies on it."""
    if spec is None:
        return []
    mesh, names = spec.mesh, spec.mesh.mesh_dim_names
    parts = [mesh[names[dim]] if names and mesh.ndim > 1 else mesh for dim in range(mesh.ndim)]
    return list(
        zip([mesh_axis(part, verb="by_owner") for part in parts], spec.placements, strict=True)
    )
