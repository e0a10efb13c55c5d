"""How one parameter is cut over the data axes, and how it comes back: hops between placements.

                hop over axis 2            hop over axis 1
    rest (S,S) ------------> inner (R,S) ------------> whole (R,R)

A *hop* is one cut by one axis, and its inverse: an all-gather of the parameter one way, a
reduce-scatter of its gradient the other way. A *path* is the hops of one parameter. The axis that
cuts first comes first: the one that shards most, and of equals the innermost of the mesh. One axis
makes a path of one hop; HSDP and hpZ make a path of two.

Where an axis does not cut a parameter, the hop over it moves no parameter,
and gradients are summed over it all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from zero_fn.transport.segment import Contribution, Route, Segment
from zero_fn.values.grid import Cut, Grid
from zero_fn.values.home import Stage
from zero_fn.values.layout import ShardLayout, is_shardable, shard_layout
from zero_fn.values.mesh import Axis
from zero_fn.values.strides import flat_in
from zero_fn.values.wire import row_numel

__all__ = ["Hop", "Path", "path_of"]


@dataclass(frozen=True)
class Hop:
    """One axis on the path of a parameter."""

    axis: Axis
    number: int  # of the axis among the data axes of the module
    stage: Stage  # how much of the state it shards; NOTHING where it does not cut the parameter
    # How it cuts the part that the hops before have left to this rank; None where it does not.
    layout: ShardLayout | None
    numel: int  # of that part

    @property
    def piece_numel(self) -> int:
        """Elements of the largest piece when a gradient is reduced: a shard,
        or an even part where nothing is cut."""
        return self.piece_of(self.numel)

    def piece_of(self, numel: int, row_numel: int = 1) -> int:
        """Elements of the largest piece of so many, in whole rows: a shard,
        or an even part where nothing is cut."""
        if self.layout is not None:
            return self.layout.shard_numel
        return -(-(numel // row_numel) // self.axis.size) * row_numel


@dataclass(frozen=True)
class Path:
    """Where the elements of one parameter are, between rest and whole, on this rank."""

    shape: tuple[int, ...]  # of the whole parameter on this rank of its model axes
    stride: tuple[int, ...]
    # The dims in the order in memory, and the axes that cut the first of them;
    # None if no axis cuts.
    cut: Cut | None
    hops: tuple[Hop, ...]  # one for each data axis that its gradients are summed over

    @cached_property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return prod(self.shape)

    @cached_property
    def layout(self) -> ShardLayout | None:
        """How the first axis cuts it; None where it rests replicated,
        by its home or because it has no rows."""
        return self.hops[0].layout if self.hops else None

    @cached_property
    def sublayout(self) -> ShardLayout | None:
        """How the second axis cuts this rank's part on the first axis; None where it does not."""
        return self.hops[1].layout if len(self.hops) > 1 else None

    @cached_property
    def rank(self) -> int:
        """This rank's position on the first axis."""
        return self.hops[0].axis.rank if self.hops else 0

    @cached_property
    def size(self) -> int:
        """The number of ranks on the first axis."""
        return self.hops[0].axis.size if self.hops else 1

    @cached_property
    def piece_numel(self) -> int:
        """Elements of the largest piece on the first axis."""
        return self.hops[0].piece_numel if self.hops else self.numel

    @cached_property
    def padded_numel(self) -> int:
        """Elements that the whole parameter takes in a gathered buffer."""
        return self.layout.padded_numel if self.layout is not None else self.numel

    @cached_property
    def inner_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part on the first axis."""
        return self.layout.local_shape(self.rank) if self.layout is not None else self.shape

    @cached_property
    def inner_numel(self) -> int:
        """Elements of this rank's part on the first axis."""
        return self.layout.owned_numel(self.rank) if self.layout is not None else self.numel

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part at rest."""
        if self.sublayout is None:
            return self.inner_shape
        return self.sublayout.local_shape(self.hops[1].axis.rank)

    @cached_property
    def local_stride(self) -> tuple[int, ...]:
        """The strides of this rank's part at rest."""
        cut = self.sublayout or self.layout
        return cut.strides_of(self.local_shape) if cut is not None else self.stride

    @cached_property
    def local_numel(self) -> int:
        """Elements of this rank's part at rest."""
        return prod(self.local_shape)

    @cached_property
    def inner_start(self) -> int:
        """The first element of this rank's part at rest, within its flat and
        padded part on the first axis."""
        if self.sublayout is None:
            return 0
        return self.sublayout.owned_rows(self.hops[1].axis.rank)[0] * self.sublayout.row_numel

    @cached_property
    def start(self) -> int:
        """The first element of this rank's part at rest, within the flat and padded whole."""
        return (
            self.rank * self.layout.shard_numel if self.layout is not None else 0
        ) + self.inner_start

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """The data axes that cut it, first to last."""
        return tuple(hop.axis for hop in self.hops if hop.layout is not None)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """How much of its state each axis that cuts it shards."""
        return tuple(hop.stage for hop in self.hops if hop.layout is not None)

    @cached_property
    def is_spread(self) -> bool:
        """Whether any other rank of the data axes holds a part of it."""
        return any(hop.layout is not None and hop.axis.size > 1 for hop in self.hops)

    @cached_property
    def row_numel(self) -> int:
        """Elements of a row, of which no part is ever alone on a rank;
        0 if it travels as it is. (zero_fn.values.wire)"""
        if not is_shardable(self.shape):
            return 0
        order = (
            self.cut.order
            if self.cut is not None
            else shard_layout(self.shape, self.stride, 1).order
        )
        return row_numel(self.shape, order)

    # -- gradients ---------------------------------------------------------------------------------

    @cached_property
    def keeps_whole_gradient(self) -> bool:
        """Whether the gradient lives in a whole buffer, of which `.grad` is a view or all."""
        return self.layout is None or max(self.stages) == Stage.OPTIMIZER

    @cached_property
    def is_reduced_at_once(self) -> bool:
        """Whether the gradient is at rest after the reduce-scatter alone:
        it is sharded, or there is no other rank."""
        return self.layout is not None or self.size == 1

    @cached_property
    def is_in_order(self) -> bool:
        """Whether it is cut along its first dim, and its dims lie in order."""
        return self.layout is not None and self.layout.order == tuple(range(len(self.shape)))

    @cached_property
    def gradient_numel(self) -> int:
        """Elements of gradient memory between backward and step, without padding."""
        return self.numel if self.keeps_whole_gradient else self.local_numel

    @cached_property
    def gradient_room(self) -> int:
        """Elements of gradient memory with padding: as many as the rank
        with the largest part needs."""
        if self.keeps_whole_gradient:
            return self.piece_numel * self.size
        return self.sublayout.shard_numel if self.sublayout is not None else self.piece_numel

    def rows_of(self, grad: Tensor) -> Tensor:
        """A whole gradient permuted so that its pieces are cut along the first dim;
        copied only where it must be."""
        if self.layout is not None:
            return grad if self.is_in_order else grad.permute(self.layout.order)
        if grad.stride() != self.stride:
            laid = grad.new_empty_strided(self.shape, self.stride)
            grad = laid.copy_(grad)
        return grad.as_strided((self.numel,), (1,))

    def contribution(self, rows: Tensor, out: Tensor, sum_dtype: torch.dtype) -> Contribution:
        """The result of `rows_of`, as collectives take it.

        The mean of this rank's piece goes to `out`.
        """
        piece_rows = self.layout.shard_rows if self.layout is not None else self.piece_numel
        return Contribution(rows, piece_rows, out, sum_dtype, *self.way)

    # -- views -------------------------------------------------------------------------------------

    def whole_view(self, flat: Tensor) -> Tensor:
        """The whole parameter on a flat range in storage order."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset())

    def local_view(self, flat: Tensor) -> Tensor:
        """This rank's part at rest, on a flat range in storage order."""
        return flat.as_strided(self.local_shape, self.local_stride, flat.storage_offset())

    def flat_of(self, local: Tensor) -> Tensor:
        """What this rank holds, flat in storage order: a view,
        or a copy if it lies in another order."""
        return flat_in(local, self.local_stride)

    def owned(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor, as a view."""
        if self.layout is None:
            return whole
        return self.owned_of_inner(
            whole.narrow(self.layout.dim, *self.layout.owned_rows(self.rank))
        )

    def owned_of_inner(self, part: Tensor) -> Tensor:
        """This rank's part of its part on the first axis, as a view."""
        if self.sublayout is None:
            return part
        return part.narrow(self.sublayout.dim, *self.sublayout.owned_rows(self.hops[1].axis.rank))

    # -- travel ------------------------------------------------------------------------------------

    @cached_property
    def route(self) -> Route:
        """Its hops, as collectives take them."""
        return [
            (hop.number, hop.layout.shard_numel if hop.layout is not None else None)
            for hop in self.hops
        ]

    @cached_property
    def way(self) -> tuple[int, Route]:
        """The number of the first axis, and the hops after it. A rank alone has no axis."""
        return (self.hops[0].number, self.route[1:]) if self.hops else (0, ())

    def around(self, own: Tensor, dtype: torch.dtype, device: torch.device) -> Segment:
        """New memory for the whole tensor, with this rank's part,
        which is `own`; as collectives take it."""
        whole = own.new_empty(self.padded_numel, dtype=dtype, device=device)
        whole.narrow(0, self.start, self.local_numel).copy_(own)
        return self.segment(whole)

    def segment(self, whole: Tensor) -> Segment:
        """A flat range that holds the whole tensor, as collectives take it."""
        return Segment(whole, self.numel, self.piece_numel, *self.way)


def path_of(
    grid: Grid,
    shape: Sequence[int],
    stride: Sequence[int],
    model: DTensorSpec | None,
    stages: Sequence[Stage],
    *,
    is_cuttable: bool,
    before: Path | None,
) -> Path:
    """The path of a parameter over the data axes of a module.

    Its shape and strides are those on this rank of its `model` axes; `stages` is how much of its
    state each data axis shards. Over the axes of its path `before`, by earlier transforms, it stays
    cut along the same dim.
    """
    cut: Cut | None = None
    if is_cuttable:
        cut = grid.cut(shape if model is None else _largest(model), stride, model, stages)
        axes = () if cut is None else tuple(grid.axes[number] for number in cut.axes)
        if (
            cut is not None
            and before is not None
            and before.cut is not None
            and before.axes == axes
        ):
            cut = Cut(before.cut.order, cut.axes)
    hops: list[Hop] = []
    left = tuple(shape)
    for number in grid.order(stages, model):
        axis = grid.axes[number]
        layout, stage = None, Stage.NOTHING
        if cut is not None and number in cut.axes:
            layout, stage = ShardLayout(left, cut.order, axis.size), stages[number]
        hops.append(Hop(axis, number, stage, layout, prod(left)))
        left = left if layout is None else layout.local_shape(axis.rank)
    first = hops[0].layout if hops else None
    stride = first.stride if first is not None else _dense_stride(tuple(shape), tuple(stride))
    return Path(tuple(shape), tuple(stride), cut, tuple(hops))


def _largest(model: DTensorSpec) -> tuple[int, ...]:
    """The shape of the largest part of a parameter on its model axes."""
    shape = list(model.shape)
    for size, placement in zip(model.mesh.shape, model.placements, strict=True):
        if isinstance(placement, Shard):
            shape[placement.dim] = -(-shape[placement.dim] // size)
    return tuple(shape)


def _dense_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """The strides if they are dense, contiguous ones otherwise."""
    meta = torch.empty_strided(shape, stride, device="meta")
    return tuple(torch.empty_like(meta, memory_format=torch.preserve_format).stride())
