"""The mesh axes of a module: its data axes, over which transforms shard, and its model axes, on
which parameters lie already.

A module that was parallelized over `mesh["tp"]` and sharded over `mesh["dp"]` rests on the
mesh of both, ("dp", "tp"). A parameter that tensor parallelism left whole is `Replicate` on
tp. So all parameters lie on one mesh: `clip_grad_norm_`, grouped kernels of optimizers and
checkpoints need that.

[Note: cut from the inside] A parameter is cut over its model axes first, then over one data axis
after the other: first over the axis that shards most of its state, and of two that shard alike over
the inner one. DTensor, however, reads placements from the left of the mesh. So where two axes cut
the same dim of a tensor and the left one cuts later, the left placement is `_StridedShard`. If the
rows are so uneven that even this describes other rows, the last axis does not cut a small
parameter, and a large one is cut along another dim, whose strides change.

[Note: a model axis of some] A data axis may be a model axis of some parameters: experts lie on the
axis along which the batch differs, and their tokens are exchanged along it. A parameter that lies
there as `Shard`, and that no transform shards over this axis, is not data-parallel along it. Its
gradients hold the sum over the ranks of the axis already, so they are only divided by the number of
these ranks: the loss is a mean over every data axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from zero_fn.errors import MeshError, PlacementError
from zero_fn.values.home import Stage
from zero_fn.values.layout import TOLERATED_PADDING_NUMEL, ShardLayout, is_shardable, shard_layout
from zero_fn.values.mesh import Axis, axes_text, cut_from, dims_in, joined_mesh, root_of

__all__ = ["Cut", "Grid", "grid_of", "local_part"]


@dataclass(frozen=True, slots=True)
class Cut:
    """How a parameter is cut over the data axes."""

    # The dims of the parameter from the outermost in memory to the innermost.
    # The first is the one that is cut.
    order: tuple[int, ...]
    axes: tuple[int, ...]  # numbers of the data axes that cut it, in the order in which they cut

    @property
    def dim(self) -> int:
        return self.order[0]


@dataclass(frozen=True, slots=True)
class Grid:
    """The axes of one module."""

    axes: tuple[Axis, ...] = ()  # the data axes, the innermost of the mesh first
    # The mesh of all its data and model axes, on which parameters rest; None without any axis.
    mesh: DeviceMesh | None = None
    # For each dim of `mesh`, the number of the data axis or the name of the model axis.
    dims: tuple[int | str, ...] = ()

    def order(self, stages: Sequence[Stage], model: DTensorSpec | None = None) -> tuple[int, ...]:
        """Numbers of the data axes in the order in which gradients are summed over them.
        [Note: cut from the inside]

        A data axis among the model axes is left out. [Note: a model axis of some]
        """
        along = [
            number for number, axis in enumerate(self.axes) if axis.name not in _by_axis(model)
        ]
        return tuple(sorted(along, key=lambda number: (-stages[number], number)))

    def cut(
        self,
        shape: Sequence[int],
        stride: Sequence[int],
        model: DTensorSpec | None,
        stages: Sequence[Stage],
    ) -> Cut | None:
        """How to cut a parameter; None if it rests whole on every data axis.

        `shape`, `stride`: of its part on the first ranks of its model axes, which have the largest.
        """
        sharding = [
            number for number in self.order(stages, model) if stages[number] > Stage.NOTHING
        ]
        if not sharding or not is_shardable(shape):
            return None
        order = shard_layout(shape, stride, self.axes[sharding[0]].size).order
        whole = shape if model is None else model.shape
        others = (
            sorted(order[1:], key=lambda dim: -shape[dim])
            if prod(shape) > TOLERATED_PADDING_NUMEL
            else []
        )
        for axes in (tuple(sharding[:count]) for count in range(len(sharding), 0, -1)):
            for dim in (order[0], *others):
                cut = Cut((dim, *(other for other in order if other != dim)), axes)
                if self._is_described(model, cut, whole[dim]):
                    return cut
        return None

    def placements(self, model: DTensorSpec | None, cut: Cut | None) -> tuple[Placement, ...]:
        """The placements of a resting parameter on `mesh`. [Note: cut from the inside]"""
        assert self.mesh is not None
        order, on_model = self._cut_order(model, cut), _by_axis(model)
        found: list[Placement] = []
        for at, dim in enumerate(self.dims):
            if cut is None or isinstance(dim, str) or dim not in cut.axes:
                found.append(on_model.get(self._name(at), Replicate()))
                continue
            # Dims further right in the mesh that cut before this one.
            earlier = (k for k in order[: order.index(at)] if k > at)
            factor = prod(
                self.mesh.size(k)
                for k in earlier
                if self.dims[k] in cut.axes or on_model.get(self._name(k)) == Shard(cut.dim)
            )
            found.append(
                Shard(cut.dim) if factor == 1 else _StridedShard(cut.dim, split_factor=factor)
            )
        return tuple(found)

    def spec(
        self,
        model: DTensorSpec | None,
        cut: Cut | None,
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
    ) -> DTensorSpec | None:
        """How a parameter of this whole shape rests, as DTensor describes it;
        None without any axis."""
        if self.mesh is None:
            return None
        meta = TensorMeta(torch.Size(shape), tuple(stride), dtype)
        return DTensorSpec(self.mesh, self.placements(model, cut), tensor_meta=meta)

    def _cut_order(self, model: DTensorSpec | None, cut: Cut | None) -> list[int]:
        """The dims of the mesh over which a parameter is cut, in the order in which they cut."""
        names = [self._name(at) for at in range(len(self.dims))]
        axes = cut.axes if cut is not None else ()
        return [*map(names.index, _by_axis(model)), *map(self.dims.index, axes)]

    def _name(self, at: int) -> str:
        """The name of a dim of the mesh."""
        dim = self.dims[at]
        return dim if isinstance(dim, str) else self.axes[dim].name

    def _is_described(self, model: DTensorSpec | None, cut: Cut, rows: int) -> bool:
        """Whether DTensor, which reads placements from the left of the mesh,
        finds the rows where the cuts put them."""
        assert self.mesh is not None
        placements = self.placements(model, cut)
        order = tuple(at for at in self._cut_order(model, cut) if _cuts(placements[at], cut.dim))
        left_to_right = tuple(
            (at, getattr(placements[at], "split_factor", 1)) for at in sorted(order)
        )
        sizes = tuple(self.mesh.size(at) for at in sorted(order))
        return len(order) == 1 or _reads_alike(rows, left_to_right, order, sizes)


def grid_of(
    axes: Sequence[Axis],
    models: Mapping[str, DTensorSpec],
    stages: Callable[[str], Sequence[Stage]],
) -> Grid:
    """The axes of a module. `models`: where its DTensors lie on model axes, by name.

    Raises:
        MeshError: A parameter lies on another mesh than the data axes,
            or replicated on one of them.
        PlacementError: A parameter is sharded over a data axis already,
            or is neither sharded nor replicated.
    """
    if not models and len(axes) < 2:
        return Grid((axes[0],), axes[0].mesh, (0,)) if axes else Grid()
    root = root_of(axes[0].mesh if axes else next(iter(models.values())).mesh)
    submeshes: dict[int | str, DeviceMesh] = {number: axis.mesh for number, axis in enumerate(axes)}
    used = {dim: str(axis) for axis in axes for dim in dims_in(root, axis.mesh)}
    for fqn, model in models.items():
        # [Note: a model axis of some]
        free = {
            str(axis)
            for axis, stage in zip(axes, stages(fqn), strict=True)
            if stage is Stage.NOTHING
        }
        _add_model_axes(fqn, model, root, used, submeshes, free if len(axes) > 1 else set())
    keys = sorted(submeshes, key=lambda key: min(dims_in(root, submeshes[key]), default=root.ndim))
    return Grid(tuple(axes), joined_mesh([submeshes[key] for key in keys]), tuple(keys))


def _add_model_axes(
    fqn: str,
    model: DTensorSpec,
    root: DeviceMesh,
    used: dict[int, str],
    submeshes: dict[int | str, DeviceMesh],
    free: set[str],
) -> None:
    own = cut_from(root, model.mesh)
    if own is None:
        raise MeshError(
            f"{fqn!r} lies on another mesh than the axis that it is to be data-parallel over.",
            parameter=f"{model.placements} over {axes_text(model.mesh)}",
            axis=f"of {axes_text(root)}",
            fix='build one mesh and cut both from it: mesh = init_device_mesh("cpu", (dp, tp), '
            'mesh_dim_names=("dp", "tp")); parallelize_module(model, mesh["tp"], ...); then '
            'transform over mesh["dp"]',
        )
    for name, placement in zip(own.mesh_dim_names or (), model.placements, strict=True):
        mesh = own[name] if own.ndim > 1 else own
        if not (placement.is_replicate() or type(placement) is Shard):
            raise PlacementError(
                f"{fqn!r} is neither sharded nor replicated on axis {name!r}.",
                placement=f"{model.placements} over {axes_text(model.mesh)}",
                fix="redistribute it to Shard or Replicate before the transform",
            )
        for dim in dims_in(root, mesh):
            owner = used.setdefault(dim, name)
            if owner == name or (owner in free and not placement.is_replicate() and mesh.ndim == 1):
                continue
            if placement.is_replicate():
                raise MeshError(
                    f"{fqn!r} lies on the axis of the transform already.",
                    parameter=f"{model.placements} over {axes_text(model.mesh)}",
                    axis=owner,
                    fix="transform over another axis than the model-parallel one: "
                    'mesh["dp"] beside mesh["tp"]',
                )
            raise PlacementError(
                f"{fqn!r} is sharded over the axis already.",
                parameter=f"{model.placements} over {axes_text(model.mesh)}",
                axis=owner,
                fix="transform the module before others shard it (fully_shard), "
                'or over another axis of the mesh: mesh["dp"]; '
                "with experts first over that one, then over this one with a "
                "where= that leaves them out",
            )
        if not any(used[dim] in free for dim in dims_in(root, mesh)):
            submeshes[name] = mesh


def local_part(whole: Tensor, model: DTensorSpec | None) -> Tensor:
    """This rank's part of a whole tensor on its model axes, as a view.

    Each axis cuts as `torch.chunk` does.
    """
    if model is None:
        return whole
    coordinate = model.mesh.get_coordinate()
    assert coordinate is not None
    for rank, size, placement in zip(coordinate, model.mesh.shape, model.placements, strict=True):
        if isinstance(placement, Shard):
            layout = ShardLayout(tuple(whole.shape), (placement.dim,), size)
            whole = whole.narrow(placement.dim, *layout.owned_rows(rank))
    return whole


def _by_axis(model: DTensorSpec | None) -> dict[str, Placement]:
    """The placements of a parameter on its model axes, by name of the axis,
    in the order of the mesh."""
    if model is None:
        return {}
    return dict(zip(model.mesh.mesh_dim_names or (), model.placements, strict=False))


def _cuts(placement: Placement, dim: int) -> bool:
    """Whether a placement cuts this dim of a tensor."""
    return isinstance(placement, Shard | _StridedShard) and placement.dim == dim


_Numbers = NDArray[np.int64]
"""One number for each row of a tensor."""


@lru_cache(maxsize=4096)
def _reads_alike(
    rows: int,
    left_to_right: tuple[tuple[int, int], ...],
    order: tuple[int, ...],
    sizes: tuple[int, ...],
) -> bool:
    """Whether two ways to cut rows over some dims of a mesh give every rank the same rows.

    `left_to_right`: dims of the mesh with DTensor's split factors. `order`: the same dims as they
    cut. `sizes`: of these, from the left.
    """
    if rows % prod(sizes) == 0:
        return True
    size_of = dict(zip(sorted(order), sizes, strict=True))
    read = _ranks_of(rows, left_to_right, size_of)
    cut = _ranks_of(rows, [(at, 1) for at in order], size_of)
    return all(np.array_equal(read[at], cut[at]) for at in order)


def _ranks_of(
    rows: int, steps: Iterable[tuple[int, int]], size_of: Mapping[int, int]
) -> dict[int, _Numbers]:
    """For each dim of a mesh the rank on it that has a row.

    In each step the rows of a rank are cut into `factor` pieces, and each piece over the ranks of a
    dim, as `torch.chunk` cuts; the parts of a rank lie one after the other.
    """
    # Rows with one number of `group` lie on the same ranks of the dims before;
    # `at` counts them there.
    group, at, ranks = np.zeros(rows, np.int64), np.arange(rows), dict[int, _Numbers]()
    for dim, factor in steps:
        count = np.bincount(group)[group]
        longest = -(-count // factor)
        piece = np.minimum(longest, count - at // longest * longest)
        ranks[dim] = at % longest // -(-piece // size_of[dim])
        group = group * size_of[dim] + ranks[dim]
        by_group = np.argsort(group, kind="stable")
        group = np.unique(group, return_inverse=True)[1]
        at = np.empty(rows, np.int64)
        starts = np.concatenate(([0], np.cumsum(np.bincount(group))[:-1]))
        at[by_group] = np.arange(rows) - starts[group[by_group]]
    return ranks
