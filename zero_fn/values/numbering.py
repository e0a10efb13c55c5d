"""Which number each element of a resting parameter has in its whole tensor,
counted row by row, the last dim fastest.

    whole, 3 x 4    0  1  2  3      a rank that holds the last two columns has, in order of memory,
                    4  5  6  7          2 3 6 7 10 11      its columns lie in rows: runs of two
                    8  9 10 11          2 6 10 3 7 11      its rows lie in columns: runs of one

What is computed from these numbers does not depend on how the tensor is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from zero_fn.values.box import Box, Holding, strides_of, whole_box
from zero_fn.values.strides import dense_stride

__all__ = ["Numbering"]


@dataclass(frozen=True)
class Numbering:
    """The numbers of the elements that this rank holds of a tensor."""

    shape: tuple[int, ...]  # of the whole tensor
    box: Box
    # The dims of what this rank holds, from the outermost in memory to the innermost.
    order: tuple[int, ...]

    @classmethod
    def of_held(cls, held: Holding, local: Tensor) -> Numbering:
        """That of what a rank holds of a tensor. `local` is its memory, and lies densely."""
        return cls(held.shape, held.box, _order_of(local))

    @classmethod
    def of_whole(cls, tensor: Tensor) -> Numbering:
        """That of a whole tensor."""
        box = whole_box(tensor.shape)
        return cls(box.sizes, box, _order_of(tensor))

    @property
    def is_in_order(self) -> bool:
        """Whether elements lie in memory in the order of their numbers."""
        dims = [dim for dim in self.order if self.box.sizes[dim] > 1]
        return dims == sorted(dims)

    @cached_property
    def run_numel(self) -> int:
        """How many elements lie in memory, one after the other,
        with numbers one after the other: in each run as many."""
        if not self.is_in_order:
            return 1
        cut = [dim for dim, size in enumerate(self.box.sizes) if size != self.shape[dim]]
        return prod(self.box.sizes[cut[-1] :]) if cut else self.box.numel

    def numbers(self, start: int, stop: int) -> NDArray[np.int64]:
        """The numbers of the elements from `start` up to `stop`, counted in order of memory."""
        return self._at(np.arange(start, stop))

    def runs(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The same as runs: the first number of each, and how many follow one another."""
        numel = max(self.run_numel, 1)
        begins = np.maximum(np.arange(start // numel, -(-stop // numel)) * numel, start)
        begins = begins[: stop - start]  # an empty range in the midst of a run has none
        return self._at(begins), np.diff(np.append(begins, stop))

    def _at(self, elements: NDArray[np.int64]) -> NDArray[np.int64]:
        found, strides = np.zeros(len(elements), np.int64), strides_of(self.shape)
        for dim in reversed(self.order):
            elements, at = np.divmod(elements, max(self.box.sizes[dim], 1))
            found += (at + self.box.starts[dim]) * strides[dim]
        return found


def _order_of(local: Tensor) -> tuple[int, ...]:
    strides = dense_stride(local)
    return tuple(sorted(range(local.dim()), key=lambda dim: (-strides[dim], dim)))
