"""Formats in which tensors travel: a code of four or eight bits for each element,
and a scale for each block of them.

    a row, w elements       |----- block -----|----- block -----|----- block ---|
    the same as it travels  |scale|codes      |scale|codes      |scale|codes    |

                            a record for each block, all of one size

A *row* is as many of the innermost dims as have 64 elements together, but never the outermost dim.
Axes cut parameters along the outermost dim, so no cut falls into a row, and what a block is does
not depend on how many ranks there are. The blocks of a row have as many elements, but for the last.

Source: ZeRO++, Wang et al. 2023 (blocks, weights and gradients); SDP4Bit,
Jia et al. 2024 (differences, rotations).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal, get_args

import torch

from zero_fn.errors import LayoutError

__all__ = ["Codes", "Records", "Wire", "delta4", "float8", "int4", "int8", "is_coded", "row_numel"]

Codes = Literal["int4", "int8", "float8_e4m3fn", "float8_e5m2"]

_TRAVELLING = (torch.float32, torch.bfloat16, torch.float16)
_ROW_NUMEL = 64  # a row has as many elements, if inner dims have them
_LEAST_ROW_NUMEL = 32  # with fewer, scales would be as large as what they save
_MOST_NUMEL = 4096  # of a block: as many fit into the first cache


@dataclass(frozen=True, slots=True)
class Wire:
    """A format in which parameters or gradients travel: see `int8`,
    `int4`, `float8` and `delta4`."""

    codes: Codes
    block: int = 256  # most elements that share a scale
    is_symmetric: bool = True  # a block has a scale alone; else a scale and its least value
    # The elements of a block are mixed by a Hadamard matrix before they are coded.
    rotates: bool = False
    is_difference: bool = False  # what travels is the change of what the others hold

    def __post_init__(self) -> None:
        """Refuses what cannot be."""
        is_float = self.codes.startswith("float8")
        if self.codes not in get_args(Codes) or (
            is_float and (self.rotates or not self.is_symmetric)
        ):
            raise LayoutError(
                "There is no such format.",
                got=repr(self),
                fix="zf.wire.int8(), zf.wire.int4(), zf.wire.float8() or zf.wire.delta4()",
            )
        if not 32 <= self.block <= _MOST_NUMEL:
            raise LayoutError(
                "A block has 32 to 4096 elements.",
                block=self.block,
                why="each block has a scale of four bytes, which fewer elements do not repay",
                fix="block=256",
            )

    def records(self, row_numel: int) -> Records:
        """How rows of so many elements travel."""
        return _records(self, row_numel)

    def __str__(self) -> str:
        name = self.codes.partition("_")[0] if self.codes == "float8_e4m3fn" else self.codes
        options = (
            ("difference", self.is_difference),
            ("asymmetric", not self.is_symmetric),
            ("rotated", self.rotates),
        )
        block = [f"block {self.block}"] * (self.block != 256)
        return ", ".join([name, *(option for option, holds in options if holds), *block])


@dataclass(frozen=True)
class Records:
    """Rows in a format: how many blocks a row has, and their bytes."""

    wire: Wire
    row_numel: int

    @cached_property
    def blocks(self) -> int:
        """The blocks of a row."""
        return -(-self.row_numel // self.wire.block)

    @cached_property
    def numel(self) -> int:
        """The elements of a block; the last of a row may have fewer, its other codes are zero."""
        return -(-self.row_numel // self.blocks)

    @cached_property
    def rotated(self) -> int:
        """How many elements that follow each other are mixed:
        the largest power of two that divides a block. 1: none."""
        return self.numel & -self.numel if self.wire.rotates else 1

    @cached_property
    def head_nbytes(self) -> int:
        """Bytes before the codes: the scale, and the least value of an
        asymmetric block, in float32."""
        return 4 if self.wire.is_symmetric else 8

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a block, so that the next one begins where a float32 may."""
        codes = -(-self.numel // 2) if self.wire.codes == "int4" else self.numel
        return self.head_nbytes + -(-codes // 4) * 4

    @cached_property
    def row_nbytes(self) -> int:
        """Bytes of a row."""
        return self.blocks * self.nbytes

    def nbytes_of(self, numel: int) -> int:
        """Bytes of so many elements, which are whole rows."""
        return numel // self.row_numel * self.row_nbytes


_records = cache(Records)  # each gather and reduction asks for the same few


def is_coded(dtype: torch.dtype) -> bool:
    """Whether numbers of a dtype may travel in a format."""
    return dtype in _TRAVELLING


def row_numel(shape: Sequence[int], order: Sequence[int]) -> int:
    """The elements of a row of a tensor whose dims lie in this order, the outermost first; 0 of one
    that travels as it is: it is too small or has one dim."""
    numel = 1
    for dim in reversed(order[1:]):
        numel *= shape[dim]
        if numel >= _ROW_NUMEL:
            break
    return numel if numel >= _LEAST_ROW_NUMEL else 0


def int8(*, block: int = 256, symmetric: bool = True, rotate: bool = False) -> Wire:
    """A byte an element, and a scale in float32 for each block:
    what travels has 0.51 of the bytes of bfloat16.

        model = zf.precision(model, gather=zf.wire.int8(), reduce=zf.wire.int4())

    Args:
        block: Most elements of a row of the tensor that share a scale, 32 to 4096.
        symmetric: Codes -127 to 127 of multiples of the scale; else 0 to 255 from the least value
            of the block on, which takes four bytes more.
        rotate: Mix the elements of each block by a Hadamard matrix before they are coded: a
            few large ones then leave the others more of the codes, and zeros do not stay
            zeros. Of a block whose size is no power of two, runs of the largest power of two
            that divides it are mixed.

    Returns:
        A format for `zf.precision(gather=, reduce=)`.

    Raises:
        LayoutError: A block has too few elements, or too many.
    """
    return Wire("int8", block, is_symmetric=symmetric, rotates=rotate)


def int4(*, block: int = 256, symmetric: bool = True, rotate: bool = False) -> Wire:
    """Half a byte an element, and a scale for each block: 0.26 of the bytes of bfloat16.

    Arguments: see `int8`; codes are -7 to 7, or 0 to 15.
    """
    return Wire("int4", block, is_symmetric=symmetric, rotates=rotate)


def float8(*, block: int = 256, dtype: torch.dtype = torch.float8_e4m3fn) -> Wire:
    """A float of eight bits an element, and a scale for each block,
    by which its largest value is the largest of the dtype.

    Args:
        block: See `int8`.
        dtype: torch.float8_e4m3fn (three bits of mantissa)
            or torch.float8_e5m2 (two, and a larger range).

    Raises:
        LayoutError: Another dtype, or a block of too few or too many elements.
    """
    if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise LayoutError(
            "Not a float of eight bits that travels.", dtype=dtype, fix="dtype=torch.float8_e4m3fn"
        )
    return Wire("float8_e4m3fn" if dtype == torch.float8_e4m3fn else "float8_e5m2", block)


def delta4(*, block: int = 256, rotate: bool = False) -> Wire:
    """Of parameters the change since they travelled last,
    in half a byte an element and a scale for each block.

    For parameters that ranks keep whole between uses (`shard_optimizer`, `shard_grads`), or whole
    inside a node (`shard_params` inside, `shard_grads` outside). What coding rounds away stays with
    the owner, who knows what the others hold, and travels later. The first time, and after
    parameters were loaded or saved, they travel in full.

    Source: SDP4Bit, Jia et al. 2024 (arXiv:2410.15526).
    """
    return Wire("int4", block, rotates=rotate, is_difference=True)
