"""States in 8 bits: which ones, and how those of a piece of a parameter are coded.

    exp_avg         |-- 256 elements --|-- 256 --|- 144 -|     of the whole parameter, row by row
    exp_avg.codes   |------------------|---------|-------|     a byte an element
    exp_avg.scales  |        4         |    4    |   4   |     the largest absolute value of each
                                                               block, in float32

Blocks are those of the whole tensor, so a state is the same number however the tensor is cut. Where
the cuts fall between blocks, a rank has all of its blocks, one after the other in memory. Else the
parameter is *divided*: each rank has the scales of all blocks, and ranks tell one another how large
the values of a step are before they are coded (`shared_blocks.py`). The codes of such a parameter
stay in memory, where its next step can be tried.

Small parameters keep their states in float32, as torchao and bitsandbytes do:
norms and biases are few, and need precision.

Source: 8-bit Optimizers via Block-wise Quantization, Dettmers et al. 2022,
arXiv:2110.02861: blocks, dynamic codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from zero_fn.errors import PlacementError
from zero_fn.kernels.codes import BLOCK_NUMEL, decode, decode_by, encode, encode_by
from zero_fn.runtime.bfloat16_step import COMPENSATION
from zero_fn.streamed.inner_optimizer import Schema
from zero_fn.values.dtensors import local_of
from zero_fn.values.numbering import Numbering
from zero_fn.values.strides import dense_stride, flat_in

__all__ = [
    "CODES", "MOMENTS", "SCALES", "Coded", "Divided", "blocks_of", "coded_schema", "may_be_coded",
    "note_largest", "scales_shape",
]  # fmt: skip

MOMENTS: Mapping[str, bool] = {
    "exp_avg": True,
    "exp_avg_sq": False,
    "max_exp_avg_sq": False,
    "exp_inf": False,
    "momentum_buffer": True,
    "square_avg": False,
    "acc_delta": False,
    "grad_avg": True,
    "sum": False,
}
"""States that can be coded, by the names that torch gives them,
and whether their values may be below zero."""

CODES, SCALES = ".codes", ".scales"
"""What follows the name of a state where its parts are saved."""

_LEAST_NUMEL = 4096
"""Parameters of fewer elements keep their states as they are."""


def blocks_of(numel: int) -> int:
    """How many blocks so many elements have."""
    return -(-numel // BLOCK_NUMEL)


def may_be_coded(parameter: Tensor) -> bool:
    """Whether a parameter is large enough."""
    return parameter.numel() >= _LEAST_NUMEL


def coded_schema(schema: Schema, parameter: Tensor, optimizer: str) -> Schema:
    """The states of a parameter as they rest: those that are coded in uint8.

    Raises:
        PlacementError: A state cannot be coded.
    """
    if not may_be_coded(parameter):
        return schema
    for name, dtype in schema:
        if name != COMPENSATION and (name not in MOMENTS or dtype != torch.float32):
            raise PlacementError(
                f"{optimizer} keeps a state that has no form in 8 bits.",
                state=f"{name!r}, {str(dtype).removeprefix('torch.')}{list(parameter.shape)}",
                why=f"known are {', '.join(MOMENTS)}, in float32",
                fix="AdamW, Adam, NAdam, RAdam, Adamax, SGD, RMSprop, Adagrad or Adadelta of "
                "torch.optim, over parameters in float32, or rounded: model = "
                "zf.precision(model, rest=torch.bfloat16, round='stochastic')",
            )
    return tuple((name, dtype if name == COMPENSATION else torch.uint8) for name, dtype in schema)


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape under which the scales of a tensor are saved: its outer dims,
    and the blocks of what is inside of them."""
    dims = next(
        (dim for dim in reversed(range(len(shape))) if prod(shape[dim:]) % BLOCK_NUMEL == 0), 0
    )
    return (*shape[:dims], blocks_of(prod(shape[dims:])))


@dataclass(eq=False)
class Divided:
    """The blocks of a parameter whose cuts fall into blocks,
    or whose elements lie in another order than its rows."""

    numbering: Numbering
    # By name of a state the scales of all blocks that the next values are coded by.
    coming: dict[str, Tensor] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many blocks the whole parameter has."""
        return blocks_of(prod(self.numbering.shape))

    def largest_of(self, parameter: Tensor, states: Mapping[str, Any]) -> dict[str, Tensor]:
        """The largest values of each block of whole states on this rank,
        which the states are coded by next."""
        local, found = local_of(parameter), dict[str, Tensor]()
        for name in sorted(states.keys() & MOMENTS.keys()):
            value = local_of(states[name])
            found[name] = self.coming[name] = torch.zeros(self.count, device=value.device)
            blocks = self.blocks(0, value.numel(), value.device)
            note_largest(found[name], flat_in(value, dense_stride(local)), blocks)
        return found

    def blocks(self, start: int, stop: int, device: torch.device) -> Tensor:
        """The block of each element from `start` up to `stop` in memory."""
        return torch.from_numpy(self.numbering.numbers(start, stop) // BLOCK_NUMEL).to(device)


def note_largest(largest: Tensor, values: Tensor, blocks: Tensor) -> None:
    """Notes the largest absolute value of each block; inf for what is no number."""
    values = values.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
    largest.scatter_reduce_(0, blocks, values, "amax")


class Coded:
    """The states of one piece of which some are coded."""

    __slots__ = ("divided", "in_memory", "names", "scales", "schema", "start", "stop")

    def __init__(self, schema: Schema, start: int, stop: int, divided: Divided | None) -> None:
        self.schema = schema
        self.start = start
        self.stop = stop
        self.divided = divided
        self.names = frozenset(name for name, dtype in schema if dtype == torch.uint8)
        self.scales: dict[str, Tensor] = {}
        self.in_memory: dict[str, Tensor] = {}  # all of a divided parameter, as it rests

    def make(self, device: torch.device) -> None:
        """Takes memory for what does not rest in a chunk."""
        for name, dtype in self.schema:
            if self.divided is not None:  # its scales come with its first values
                self.in_memory[name] = torch.zeros(
                    self.stop - self.start, dtype=dtype, device=device
                )
            elif name in self.names:
                self.scales[name] = torch.zeros(blocks_of(self.stop - self.start), device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes beside a chunk.

        The pieces of a divided parameter share its scales.
        """
        if self.divided is None:
            return 4 * len(self.names) * blocks_of(self.stop - self.start)
        scales = 4 * len(self.names) * self.divided.count if self.start == 0 else 0
        return scales + sum((self.stop - self.start) * dtype.itemsize for _, dtype in self.schema)

    def decoded(self, name: str, codes: Tensor) -> Tensor:
        """The values of a state, flat."""
        if self.divided is None:
            out = torch.empty(codes.numel(), device=codes.device)
            decode(codes, self.scales[name], out, is_signed=MOMENTS[name])
            return out
        return decode_by(codes, self._by_element(self.scales[name]), is_signed=MOMENTS[name])

    def encode(self, name: str, values: Tensor, codes: Tensor) -> None:
        """Codes flat values."""
        if self.divided is None:
            encode(values, codes, self.scales[name], is_signed=MOMENTS[name])
            return
        self.scales[name] = self.divided.coming[name].to(codes.device)
        codes.copy_(encode_by(values, self._by_element(self.scales[name]), is_signed=MOMENTS[name]))

    def _by_element(self, scales: Tensor) -> Tensor:
        assert self.divided is not None
        return scales[self.divided.blocks(self.start, self.stop, scales.device)]
