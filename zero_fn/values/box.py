"""Which elements of a tensor a rank holds, and which it writes: arithmetic alone.

    whole tensor   ..........      a *box* is a range of each dim
                   ..####....
                   ..####....

Every cut of ZeRO and of tensor parallelism takes a range of one dim of what the cut before it left.
So what a rank holds of a tensor is one box, and any checkpoint is a set of boxes that covers each
tensor.

Elements of a box are numbered row by row, the last dim fastest, as a safetensors file has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from zero_fn.values.layout import ShardLayout

__all__ = [
    "DEALT_RANKS",
    "Box",
    "Holding",
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
        """The elements of `inner`, which is counted from the first of this box,
        counted from the first of the whole."""
        starts = tuple(a + b for a, b in zip(self.starts, inner.starts, strict=True))
        return Box(starts, inner.sizes)

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
    """The boxes, in order, that make up the elements from `first` up to
    `last` of a box of these sizes."""
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
    """Cuts the elements of a box into ranges of at most `most`,
    at the ends of rows where these are short enough."""
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
    """(replica, number of replicas) of these elements.

    None for a plain tensor, which all ranks with these names hold.
    """

    def own(self, ordinal: int, itemsize: int, same_names: tuple[int, int]) -> Box | None:
        """The elements that this rank writes: each element is written by one rank,
        and all ranks write about as many.

        `ordinal` is the number of the tensor, by which small ones are dealt in turn; `same_names`
        is (index, number) of the ranks with tensors of the same names.
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
"""How many ranks the small tensors are dealt to: a reader finds all of
them in the parts of so few."""
