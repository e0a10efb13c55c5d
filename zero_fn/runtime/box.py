"""Which elements of a tensor a rank holds, and which it writes: arithmetic alone.

    whole tensor   ..........      a *box* is a range of each dim. Every cut of ZeRO and of tensor parallelism takes a range
                   ..####....      of one dim of what the cut before it left. So what a rank holds of a tensor is one box,
                   ..####....      and any checkpoint is a set of boxes that covers each tensor.

Elements of a box are numbered row by row, the last dim fastest, as a safetensors file has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

from zero_fn.errors import CheckpointError
from zero_fn.resting import local_of
from zero_fn.runtime.slot import slot_of, spec_of
from zero_fn.values.layout import ShardLayout

__all__ = [
    "DEALT_RANKS",
    "Box",
    "Holding",
    "holding_of",
    "holding_of_state",
    "ranges",
    "spans",
    "strides_of",
    "whole_box",
]

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A range of each dim of a tensor."""

    starts: Sizes
    sizes: Sizes

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return prod(self.sizes)

    def narrow(self, dim: int, start: int, count: int) -> Box:
        """Some rows of it; `start` is counted from its own first row."""
        starts, sizes = list(self.starts), list(self.sizes)
        starts[dim] += start
        sizes[dim] = count
        return Box(tuple(starts), tuple(sizes))

    def meet(self, other: Box) -> Box | None:
        """The elements that both have; None if there are none."""
        pairs = list(zip(self.starts, self.sizes, other.starts, other.sizes, strict=True))
        starts = tuple(max(start, begin) for start, _, begin, _ in pairs)
        sizes = tuple(
            min(start + size, begin + count) - first
            for (start, size, begin, count), first in zip(pairs, starts, strict=True)
        )
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: Box) -> Box:
        """The same elements, counted from the first of `outer`, a box that has them."""
        return Box(tuple(a - b for a, b in zip(self.starts, outer.starts, strict=True)), self.sizes)

    def around(self, inner: Box) -> Box:
        """The elements of `inner`, which is counted from the first of this box, counted from the first of the whole."""
        return Box(tuple(a + b for a, b in zip(self.starts, inner.starts, strict=True)), inner.sizes)

    def of(self, tensor: Tensor) -> Tensor:
        """These elements of a tensor, as a view."""
        for dim, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            if size != tensor.shape[dim]:
                tensor = tensor.narrow(dim, start, size)
        return tensor


def whole_box(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def strides_of(shape: Sizes) -> Sizes:
    """Strides of a tensor of this shape whose elements lie in the order of rows."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def spans(sizes: Sizes, first: int, last: int) -> Iterator[Box]:
    """The boxes, in order, that make up the elements from `first` up to `last` of a box of these sizes."""
    if first >= last:
        return
    if len(sizes) < 2:
        yield Box((first,), (last - first,)) if sizes else Box((), ())
        return
    row, zeros = prod(sizes[1:]), (0,) * (len(sizes) - 1)
    begin, end = -(-first // row), last // row
    if begin > end:  # inside one row
        yield from _in_row(sizes, end, first - end * row, last - end * row)
        return
    yield from _in_row(sizes, begin - 1, first - (begin - 1) * row, row)
    if begin < end:
        yield Box((begin, *zeros), (end - begin, *sizes[1:]))
    yield from _in_row(sizes, end, 0, last - end * row)


def _in_row(sizes: Sizes, number: int, first: int, last: int) -> Iterator[Box]:
    for box in spans(sizes[1:], first, last):
        yield Box((number, *box.starts), (1, *box.sizes))


def ranges(sizes: Sizes, most: int) -> Iterator[tuple[int, int]]:
    """Cuts the elements of a box into ranges of at most `most`, at the ends of rows where these are short enough."""
    numel, row = prod(sizes), prod(sizes[1:])
    step = max(most // row * row if 0 < row <= most else most, 1)
    for first in range(0, numel, step):
        yield first, min(first + step, numel)


@dataclass(frozen=True, slots=True)
class Holding:
    """The elements of a tensor that a rank holds."""

    shape: Sizes  # of the whole tensor
    box: Box
    replica: tuple[int, int] | None = None
    """(replica, number of replicas) of these elements. None for a plain tensor, which all ranks with these names hold."""

    def own(self, ordinal: int, itemsize: int, same_names: tuple[int, int]) -> Box | None:
        """The elements that this rank writes: each element is written by one rank, and all ranks write about as many.

        `ordinal` is the number of the tensor, by which small ones are dealt in turn; `same_names` is (index, number) of
        the ranks with tensors of the same names.
        """
        rank, size = self.replica or same_names
        sizes, numel = self.box.sizes, self.box.numel
        if numel == 0 and 0 not in self.shape:
            return None
        if size > 1 and sizes and sizes[0] >= size and numel * itemsize >= _DIVIDED_NBYTES:
            start, count = ShardLayout(sizes, tuple(range(len(sizes))), size).owned_rows(rank)
            return self.box.narrow(0, start, count) if count else None
        return self.box if ordinal % min(size, DEALT_RANKS) == rank else None


_DIVIDED_NBYTES = 64 << 10
"""A replicated tensor of fewer bytes is written by one rank."""

DEALT_RANKS = 8
"""How many ranks the small tensors are dealt to: a reader finds all of them in the parts of so few."""


def holding_of(tensor: Tensor) -> Holding | None:
    """What this rank holds of a parameter or buffer; None if nothing, since the rank is not on the mesh of the tensor."""
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
    """For each axis of the mesh of a tensor: its placement, how many ranks there are, and the number of this one."""
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
            fix="keep states as DTensors, or of the shape of the parameter: torch.zeros_like(parameter)",
        )
    return Holding(tuple(state.shape), whole_box(state.shape), None if is_cut else place.replica)
