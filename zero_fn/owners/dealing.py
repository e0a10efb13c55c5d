"""Which rank owns which tensor, and which tensors travel together:
arithmetic on shapes, the same on every rank.

The most expensive tensor goes to the rank with the least to do, then the next one (longest
processing time first). What a rank owns is cut into batches of bounded bytes; the first batches of
all ranks travel together, then the second ones, ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zero_fn.owners.routes import Route, route_of
from zero_fn.runtime.slot import mesh_of
from zero_fn.values.dtensors import local_of

__all__ = ["Cost", "Dealing", "Dealt", "batches", "cost_of"]

Cost = Callable[[Tensor], float]


def cost_of(parameter: Tensor) -> float:
    """What a step of a tensor costs: of a matrix, or a stack of them,
    elements times the shorter side, as its products do."""
    sides = parameter.shape[-2:]
    return parameter.numel() * min(sides) if len(sides) == 2 else parameter.numel()


@dataclass(frozen=True, eq=False)
class Dealt:
    """A tensor and its owner."""

    parameter: Tensor
    route: Route
    number: int  # of the owner among the ranks of the mesh
    owner: tuple[int, ...]  # its rank along the axis of each leg

    @cached_property
    def is_mine(self) -> bool:
        """Whether this rank is the owner."""
        return all(
            leg.axis.rank == rank for leg, rank in zip(self.route.legs, self.owner, strict=True)
        )

    def whole(self, dtype: torch.dtype | None = None) -> Tensor:
        """Memory for all of it, laid out as the parameter."""
        parameter, device = self.parameter, local_of(self.parameter).device
        return torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=dtype or parameter.dtype, device=device
        )

    def is_on_way(self, after: int) -> bool:
        """Whether the part that this rank holds has come the way of the legs after this number:
        along them, this rank is where the owner is."""
        return all(
            leg.axis.rank == rank
            for leg, rank in zip(self.route.legs[after + 1 :], self.owner[after + 1 :], strict=True)
        )


class Dealing:
    """Owners of tensors, of which more may come.

    Tensors of one mesh are balanced over its ranks.
    """

    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        self.load: dict[DeviceMesh, list[float]] = {}  # cost of what each rank of a mesh owns

    def deal(self, parameters: Sequence[Tensor]) -> list[Dealt]:
        """Gives each tensor an owner; those that rest on no mesh are left out."""
        dealt: list[Dealt] = []
        resting = [
            # `route_of` may refuse the tensor.
            (self._cost(each) if each.requires_grad else 0.0, each, mesh, route_of(each))
            for each in parameters
            if (mesh := mesh_of(each)) is not None
        ]
        for cost, parameter, mesh, route in sorted(resting, key=lambda row: -row[0]):
            load = self.load.setdefault(mesh, [0.0] * mesh.size())
            number = load.index(min(load))
            load[number] += cost
            dealt.append(Dealt(parameter, route, number, _ranks_of(mesh, number, route)))
        return dealt


def _ranks_of(mesh: DeviceMesh, number: int, route: Route) -> tuple[int, ...]:
    """The ranks, along the axes of a way, of a rank of its mesh."""
    names, at = mesh.mesh_dim_names or ("axis",), {}
    for dim in reversed(range(mesh.ndim)):
        number, at[names[dim]] = divmod(number, mesh.size(dim))
    return tuple(at[leg.axis.name] for leg in route.legs)


def batches(dealt: Sequence[Dealt], nbytes: int) -> list[list[Dealt]]:
    """What travels together: tensors that go the same ways, of each owner at most as many as have
    `nbytes` bytes of values and gradients, or one."""
    found: dict[tuple[object, int], list[Dealt]] = {}
    # The open batch of each owner, and its bytes.
    filled: dict[tuple[object, int], tuple[int, int]] = {}
    for each in dealt:
        family = each.route.family
        own = 2 * prod(each.route.shape) * each.parameter.dtype.itemsize
        batch, taken = filled.get((family, each.number), (0, 0))
        if taken and taken + own > nbytes:
            batch, taken = batch + 1, 0
        filled[family, each.number] = batch, taken + own
        found.setdefault((family, batch), []).append(each)
    return list(found.values())
