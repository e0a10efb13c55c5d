"""Where every element of a parameter lives: pure arithmetic, no tensors, no communication.

A parameter is cut into `n` equal runs of rows, one per rank of the axis;
the last runs may be short or empty::

    |--- w: 5 rows ---|pad|        n = 3, shard_rows = 2, padded_rows = 6
    | rank 0| rank 1| rank 2|      rank 2 owns one row

A *row* is one index of the sharded dim. Elements are stored with the sharded dim outermost, so that
a shard is one contiguous range and the padded parameter is the concatenation of all shards, written
as einops patterns:

    shard            "(n rows) ... -> n rows ...", then row `rank`
    all-gather       "n rows ... -> (n rows) ..."
    reduce-scatter   "src (n rows) ... -> n rows ...", summed over src

These are exactly the shards of DTensor's `Shard(dim)` (`torch.chunk`),
so checkpoints need no conversion.

Source: ZeRO, Rajbhandari et al. 2020, section 5 (the partitions of P_os, P_g and P_p).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

__all__ = [
    "ALIGNMENT_NBYTES",
    "TOLERATED_PADDING_NUMEL",
    "ShardLayout",
    "aligned_offsets",
    "is_shardable",
    "shard_layout",
]

ALIGNMENT_NBYTES = 128
"""Every shard and every segment of a buffer starts on this boundary.

NCCL is ten times slower on memory that is aligned to 4 bytes (pytorch#195450), and vectorised CPU
kernels are faster on whole cache lines.
"""

TOLERATED_PADDING_NUMEL = 2**18
"""Most elements of padding, or of a parameter that rests whole instead,
for which a parameter keeps its strides."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ShardLayout:
    """One parameter cut over the ranks of an axis.

    All sizes are in elements unless they say rows.
    """

    shape: Shape  # the shape of the parameter
    # Its dims from the outermost in memory to the innermost; `order[0]` is the sharded dim.
    order: tuple[int, ...]
    shards: int  # number of ranks `n`

    @property
    def dim(self) -> int:
        return self.order[0]

    @cached_property
    def numel(self) -> int:
        """Elements of the parameter."""
        return prod(self.shape)

    @cached_property
    def rows(self) -> int:
        """Size of the sharded dim."""
        return self.shape[self.dim]

    @cached_property
    def row_numel(self) -> int:
        return prod(self.shape[dim] for dim in self.order[1:])

    @cached_property
    def shard_rows(self) -> int:
        """Rows of the largest shard, `ceil(rows / n)`."""
        return -(-self.rows // self.shards)

    @cached_property
    def shard_numel(self) -> int:
        """Elements of the largest shard."""
        return self.shard_rows * self.row_numel

    @cached_property
    def padded_numel(self) -> int:
        """Elements of `n` largest shards: the segment that a gathered parameter takes."""
        return self.shard_numel * self.shards

    @cached_property
    def stride(self) -> tuple[int, ...]:
        """Strides of the gathered parameter, in elements."""
        return self.strides_of(self.shape)

    def owned_rows(self, rank: int) -> tuple[int, int]:
        """First row and number of rows that `rank` owns; the number may be 0."""
        start = min(rank * self.shard_rows, self.rows)
        return start, min(self.shard_rows, self.rows - start)

    def owned_numel(self, rank: int) -> int:
        return self.owned_rows(rank)[1] * self.row_numel

    def local_shape(self, rank: int) -> Shape:
        rows = self.owned_rows(rank)[1]
        return tuple(rows if dim == self.dim else size for dim, size in enumerate(self.shape))

    def strides_of(self, shape: Shape) -> tuple[int, ...]:
        """Strides of a tensor of this shape whose dims lie in this order, contiguous."""
        strides, step = [0] * len(shape), 1
        for dim in reversed(self.order):
            strides[dim] = step
            step *= max(shape[dim], 1)
        return tuple(strides)


def is_shardable(shape: Sequence[int]) -> bool:
    """Whether a tensor of this shape has rows to cut.

    Scalars and empty tensors have none, and rest replicated.
    """
    return len(shape) > 0 and prod(shape) > 0


def shard_layout(shape: Sequence[int], stride: Sequence[int], shards: int) -> ShardLayout:
    """How to cut a parameter for which `is_shardable` holds.

    The sharded dim is the outermost in memory, and the other dims keep their order. So a gathered
    parameter has the strides that it had: with others a kernel may round differently. One case is
    cut otherwise: if the outermost dim has fewer rows than there are ranks and the padding would be
    large (stacked experts), another dim is cut and becomes the outermost. That is the largest dim,
    but the innermost only if no other has enough rows.
    """
    order = list(range(len(shape)))
    if not _is_dense(shape, stride, order):
        by_stride = sorted(order, key=lambda dim: (-stride[dim], dim))
        order = by_stride if _is_dense(shape, stride, by_stride) else order
    outermost = order[0]
    padding_numel = (shards - shape[outermost]) * (prod(shape) // shape[outermost])
    if padding_numel > TOLERATED_PADDING_NUMEL:
        inner = [dim for dim in order[1:-1] if shape[dim] >= shards] or order
        largest = max(inner, key=lambda dim: (shape[dim], -order.index(dim)))
        if shape[largest] > shape[outermost]:
            order.remove(largest)
            order.insert(0, largest)
    return ShardLayout(tuple(shape), tuple(order), shards)


def _is_dense(shape: Sequence[int], stride: Sequence[int], order: Sequence[int]) -> bool:
    """Whether the elements fill one range of memory without gaps or overlaps,
    with the dims in this order."""
    step = 1
    for dim in reversed(order):
        if shape[dim] > 1 and stride[dim] != step:
            return False
        step *= shape[dim]
    return True


def aligned_offsets(numels: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Where ranges start that lie back to back on aligned boundaries, in elements.

    One more entry at the end: the total.
    """
    unit = max(ALIGNMENT_NBYTES // itemsize, 1)
    return (0, *accumulate(-(-numel // unit) * unit for numel in numels))
