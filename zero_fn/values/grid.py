"""The mesh axes of a module: those that transforms share its state over, and those its parameters were placed on before.

A module that was parallelized over `mesh["tp"]` and sharded over `mesh["dp"]` rests on the mesh of both, ("dp", "tp"): a
plain parameter is `Replicate` on tp. So all parameters lie on one mesh, as `clip_grad_norm_`, grouped kernels of
optimizers and checkpoints need it.

[Note: cut from the inside] A parameter is cut over its model axes first, then over the data axes, one after the other: the
axis that shards more of its state comes first, and of equals the innermost. Where two axes cut the same dim of a tensor and
the one further left in the mesh was cut later, its placement is the strided one: DTensor reads placements from the left.
Where rows are so uneven that the two readings differ, the axis that comes last does not cut a small parameter; a large one is
cut along another dim, for which its strides are given up.

[Note: a model axis of some] A data axis may be a model axis of some parameters: experts lie on the axis along which the batch
differs and tokens are exchanged. A parameter that was placed there, `Shard`, and that no transform shards over this axis is
not data-parallel along it. It gets the gradients of all its ranks through that exchange, so they are divided by their
number: the loss is a mean over every data axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from zero_fn.errors import MeshError, PlacementError
from zero_fn.values.home import Sharded
from zero_fn.values.layout import TOLERATED_PADDING_NUMEL, ShardLayout, is_shardable, shard_layout
from zero_fn.values.mesh import Axis, axes_text, cut_from, dims_in, joined_mesh, root_of

__all__ = ["Cut", "Grid", "grid_of", "local_part"]


@dataclass(frozen=True, slots=True)
class Cut:
    """How a parameter is cut over the data axes.

    Attributes:
        order: The dims of the parameter from the outermost in memory to the innermost; the first is cut.
        axes: Numbers of the axes that cut it, first to last.
    """

    order: tuple[int, ...]
    axes: tuple[int, ...]

    @property
    def dim(self) -> int:
        """The dim that is cut."""
        return self.order[0]


@dataclass(frozen=True, slots=True)
class Grid:
    """The axes of one module.

    Attributes:
        axes: The data axes, the innermost of the mesh first.
        mesh: Over its data and model axes, where parameters rest; None if it has no axis.
        dims: For each dim of `mesh`, the number of the data axis, or the name of the model axis.
    """

    axes: tuple[Axis, ...] = ()
    mesh: DeviceMesh | None = None
    dims: tuple[int | str, ...] = ()

    def order(self, levels: Sequence[Sharded], model: DTensorSpec | None = None) -> tuple[int, ...]:
        """The numbers of the data axes in the order in which gradients are summed over them. [Note: cut from the inside]

        Args:
            levels: How much of the state of the parameter each axis shards.
            model: Where it was placed: not on the way are data axes among that. [Note: a model axis of some]
        """
        placed = (model.mesh.mesh_dim_names or ()) if model is not None else ()
        along = [number for number, axis in enumerate(self.axes) if axis.name not in placed]
        return tuple(sorted(along, key=lambda number: (-levels[number], number)))

    def cut(
        self, shape: Sequence[int], stride: Sequence[int], model: DTensorSpec | None, levels: Sequence[Sharded]
    ) -> Cut | None:
        """How to cut a parameter; None if it rests whole on every data axis.

        Args:
            shape: Its shape on the first ranks of its model axes, which have the largest part of it.
            stride: The strides of that part.
            model: Where it lies on its model axes.
            levels: How much of its state each axis shards.
        """
        sharding = [number for number in self.order(levels, model) if levels[number] > Sharded.NOTHING]
        if not sharding or not is_shardable(shape):
            return None
        order = shard_layout(shape, stride, self.axes[sharding[0]].size).order
        whole = shape if model is None else model.shape
        others = sorted(order[1:], key=lambda dim: -shape[dim]) if prod(shape) > TOLERATED_PADDING_NUMEL else []
        for axes in (tuple(sharding[:count]) for count in range(len(sharding), 0, -1)):
            for dim in (order[0], *others):
                cut = Cut((dim, *(other for other in order if other != dim)), axes)
                if self._is_described(whole[dim], self.placements(model, cut), self._cut_order(model, cut)):
                    return cut
        return None

    def placements(self, model: DTensorSpec | None, cut: Cut | None) -> tuple[Placement, ...]:
        """The placements of a resting parameter. [Note: cut from the inside]"""
        assert self.mesh is not None
        order = self._cut_order(model, cut)
        found: list[Placement] = []
        for at, dim in enumerate(self.dims):
            if isinstance(dim, str) or (cut is None or dim not in cut.axes):
                found.append(_on(model, self._name(at)))
            else:
                earlier = order[: order.index(at)]
                inside = [k for k in range(at + 1, len(self.dims)) if k in earlier]
                factor = 1
                for k in inside:
                    if self.dims[k] in cut.axes or _on(model, self._name(k)) == Shard(cut.dim):
                        factor *= self.mesh.size(k)
                found.append(Shard(cut.dim) if factor == 1 else _StridedShard(cut.dim, split_factor=factor))
        return tuple(found)

    def spec(
        self,
        model: DTensorSpec | None,
        cut: Cut | None,
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
    ) -> DTensorSpec | None:
        """How a parameter of this whole shape rests; None on no axis."""
        if self.mesh is None:
            return None
        meta = TensorMeta(torch.Size(shape), tuple(stride), dtype)
        return DTensorSpec(self.mesh, self.placements(model, cut), tensor_meta=meta)

    def _cut_order(self, model: DTensorSpec | None, cut: Cut | None) -> list[int]:
        """The dims of the mesh over which a parameter is cut, first to last."""
        names = (model.mesh.mesh_dim_names or ()) if model is not None else ()
        axes = cut.axes if cut is not None else ()
        every = [self._name(at) for at in range(len(self.dims))]
        return [*(every.index(name) for name in names), *(self.dims.index(number) for number in axes)]

    def _name(self, at: int) -> str:
        """The name of an axis of the mesh."""
        dim = self.dims[at]
        return dim if isinstance(dim, str) else self.axes[dim].name

    def _is_described(self, rows: int, placements: tuple[Placement, ...], order: list[int]) -> bool:
        """Whether DTensor, which reads `placements` from the left, finds the rows where the cuts in `order` put them."""
        assert self.mesh is not None
        dim = next(placements[at].dim for at in reversed(order) if _cuts(placements[at]))  # type: ignore[attr-defined]
        order = [at for at in order if _cuts(placements[at]) and placements[at].dim == dim]  # type: ignore[attr-defined]
        if len(order) == 1:
            return True
        factors = tuple(p.split_factor if isinstance(p, _StridedShard) else 1 for p in placements)
        left_to_right = tuple((at, int(factors[at])) for at in sorted(order))
        sizes = tuple(self.mesh.size(at) for at in sorted(order))
        return _reads_alike(rows, left_to_right, tuple(order), sizes)


def grid_of(
    axes: Sequence[Axis], models: Mapping[str, DTensorSpec], levels: Callable[[str], Sequence[Sharded]]
) -> Grid:
    """The axes of a module.

    Args:
        axes: Its data axes, of one mesh, innermost first, apart from one another.
        models: Where parameters lie on model axes, by name; plain ones are left out.
        levels: How much of the state of a parameter each data axis shards, by its name.

    Raises:
        MeshError: A parameter lies on another mesh than the data axes, or on one of them.
        PlacementError: A parameter is sharded over a data axis already, or neither sharded nor replicated.
    """
    if not models and len(axes) < 2:
        return Grid((axes[0],), axes[0].mesh, (0,)) if axes else Grid()
    root = root_of(axes[0].mesh if axes else next(iter(models.values())).mesh)
    submeshes: dict[int | str, DeviceMesh] = {number: axis.mesh for number, axis in enumerate(axes)}
    used = {dim: str(axis) for axis in axes for dim in dims_in(root, axis.mesh)}
    for fqn, model in models.items():
        # [Note: a model axis of some]
        free = {str(axis) for axis, level in zip(axes, levels(fqn), strict=True) if level is Sharded.NOTHING}
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
            fix='build one mesh and cut both from it: mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp")); '
            'parallelize_module(model, mesh["tp"], ...); then transform over mesh["dp"]',
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
                    f"{fqn!r} was placed on the axis that the transform is about.",
                    parameter=f"{model.placements} over {axes_text(model.mesh)}",
                    axis=owner,
                    fix='transform over another axis than the model-parallel one: mesh["dp"] beside mesh["tp"]',
                )
            raise PlacementError(
                f"{fqn!r} is sharded over the axis already.",
                parameter=f"{model.placements} over {axes_text(model.mesh)}",
                axis=owner,
                fix="transform the module before others shard it (fully_shard), "
                'or over another axis of the mesh: mesh["dp"]; '
                "with experts first over that one, then over this one with a where= that leaves them out",
            )
        if not any(used[dim] in free for dim in dims_in(root, mesh)):
            submeshes[name] = mesh


def local_part(whole: Tensor, model: DTensorSpec | None) -> Tensor:
    """This rank's part of a whole tensor on its model axes, as a view; `torch.chunk` over each axis."""
    if model is None:
        return whole
    coordinate = model.mesh.get_coordinate()
    assert coordinate is not None
    for rank, size, placement in zip(coordinate, model.mesh.shape, model.placements, strict=True):
        if isinstance(placement, Shard):
            layout = ShardLayout(tuple(whole.shape), (placement.dim,), size)
            whole = whole.narrow(placement.dim, *layout.owned_rows(rank))
    return whole


def _on(model: DTensorSpec | None, name: str) -> Placement:
    """The placement on a model axis; parameters that were not placed there are whole on it."""
    if model is not None and name in (model.mesh.mesh_dim_names or ()):
        return model.placements[(model.mesh.mesh_dim_names or ()).index(name)]
    return Replicate()


def _cuts(placement: Placement) -> bool:
    return isinstance(placement, Shard | _StridedShard)


_Runs = tuple[tuple[int, int], ...]
"""Rows of a tensor as runs: first row and number of rows."""


@lru_cache(maxsize=4096)
def _reads_alike(
    rows: int, left_to_right: tuple[tuple[int, int], ...], order: tuple[int, ...], sizes: tuple[int, ...]
) -> bool:
    """Whether two ways to cut rows over some dims of a mesh agree on every rank.

    Args:
        rows: The number of rows.
        left_to_right: As DTensor does it: dims of the mesh with their split factors.
        order: The same dims in the order they are cut.
        sizes: Sizes of the dims, from the left.
    """
    size_of = dict(zip(sorted(order), sizes, strict=True))
    total = 1
    for size in sizes:
        total *= size
    if rows % total == 0:
        return True
    for coordinates in product(*(range(size) for size in sizes)):
        rank_on = dict(zip(sorted(order), coordinates, strict=True))
        read: _Runs = ((0, rows),)
        for at, factor in left_to_right:
            read = _strided(read, size_of[at], rank_on[at], factor)
        cut: _Runs = ((0, rows),)
        for at in order:
            cut = _strided(cut, size_of[at], rank_on[at], 1)
        if read != cut:
            return False
    return True


def _strided(runs: _Runs, size: int, rank: int, factor: int) -> _Runs:
    """What `rank` of `size` holds of the rows in `runs`, cut into `factor` pieces that are each cut over the ranks."""
    total = sum(count for _, count in runs)
    piece = -(-total // factor)
    found: list[tuple[int, int]] = []
    for i in range(factor):
        start = min(i * piece, total)
        own = min(piece, total - start)
        part = -(-own // size)
        first = min(rank * part, own)
        found += _between(runs, start + first, min(part, own - first))
    return _merged(found)


def _between(runs: _Runs, start: int, count: int) -> list[tuple[int, int]]:
    found = []
    for first, length in runs:
        low, high = max(start, 0), min(start + count, length)
        if low < high:
            found.append((first + low, high - low))
        start -= length
    return found


def _merged(runs: list[tuple[int, int]]) -> _Runs:
    merged: list[tuple[int, int]] = []
    for first, count in runs:
        if merged and sum(merged[-1]) == first:
            merged[-1] = (merged[-1][0], merged[-1][1] + count)
        else:
            merged.append((first, count))
    return tuple(merged)
