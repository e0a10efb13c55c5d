"""Pieces of parameters that are stepped together, and room for their states in one range of bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from zero_fn.chunks import Piece
from zero_fn.resting import is_dense
from zero_fn.runtime.attributes import attributes_of
from zero_fn.runtime.registry import slot_of
from zero_fn.streamed.schema import Schema
from zero_fn.streamed.store import NOWHERE, Store

__all__ = ["Chunk", "Cut", "contiguous_stride", "name_of", "padded_nbytes", "states_nbytes"]

_ALIGNMENT_NBYTES = 64


def states_nbytes(schema: Schema, numel: int) -> int:
    """Bytes that the states of so many elements take in a chunk, with padding."""
    return sum(padded_nbytes(numel, dtype) for _, dtype in schema)


def padded_nbytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes of so many elements up to where the next ones may begin."""
    return -(-numel * dtype.itemsize // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES


class Cut:
    """One piece in its chunk.

    Attributes:
        piece: Which elements.
        group: The number of the parameter's group.
        shape, stride: Of what the optimizer sees: those of the parameter, or of one row where it is cut.
        fields: Where each state lies: its name, dtype and first byte in the chunk.
        in_parcel: Its first byte in the parcel of the chunk; None where the parameter is in memory.
        present: Names of the states that the chunk holds now.
        resident: What stays in memory: step counts, flags, and states that came later than the plan.
    """

    __slots__ = ("fields", "group", "in_parcel", "piece", "present", "resident", "shape", "stride")

    def __init__(
        self, piece: Piece, group: int, local: Tensor, schema: Schema, offset: int, in_parcel: int | None = None
    ) -> None:
        self.piece, self.group, self.in_parcel = piece, group, in_parcel
        # A row where it is cut: some decay matrices only, by `p.ndim`.
        self.shape = tuple(local.shape) if piece.is_whole else (*[1] * (local.dim() - 1), piece.numel)
        self.stride = tuple(local.stride()) if piece.is_whole and is_dense(local) else contiguous_stride(self.shape)
        self.fields: dict[str, tuple[torch.dtype, int]] = {}
        for name, dtype in schema:
            self.fields[name] = (dtype, offset)
            offset += states_nbytes(((name, dtype),), piece.numel)
        self.present: set[str] = set()
        self.resident: dict[str, Any] = {}

    def shift(self, nbytes: int) -> None:
        """Its states begin so many bytes later in the chunk."""
        self.fields = {name: (dtype, offset + nbytes) for name, (dtype, offset) in self.fields.items()}

    def stand_in(self, parameter: Tensor, values: Tensor, grad: Tensor) -> nn.Parameter:
        """What the optimizer updates in place of the parameter: its piece, with that of its gradient."""
        piece = nn.Parameter(values, requires_grad=parameter.requires_grad)
        vars(piece).update(attributes_of(parameter))
        if grad.dtype != piece.dtype:
            piece.grad_dtype = grad.dtype
        piece.grad = grad
        return piece

    def of(self, local: Tensor) -> Tensor:
        """The elements of the piece in a tensor that lies as the parameter does."""
        if self.piece.is_whole:
            return local
        return local.as_strided(self.shape, self.stride, local.storage_offset() + self.piece.start)

    def of_parcel(self, memory: Tensor, dtype: torch.dtype) -> Tensor:
        """The elements of the piece in the bytes of its parcel."""
        assert self.in_parcel is not None
        return self.laid(memory[self.in_parcel : self.in_parcel + self.piece.numel * dtype.itemsize].view(dtype))

    def view(self, buffer: Tensor, name: str) -> Tensor:
        """The room of a state in the bytes of the chunk."""
        dtype, offset = self.fields[name]
        return self.laid(buffer[offset : offset + self.piece.numel * dtype.itemsize].view(dtype))

    def laid(self, flat: Tensor) -> Tensor:
        """As many elements, in order of memory, as the optimizer sees them."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset())

    def states(self, buffer: Tensor) -> dict[str, Any]:
        """The states as the optimizer expects them."""
        return {**self.resident, **{name: self.view(buffer, name) for name in self.fields if name in self.present}}

    def keep(self, buffer: Tensor, states: Mapping[str, Any]) -> None:
        """Takes over the states after a step; those that are not where they belong are copied there."""
        self.present.clear()
        self.resident = {}
        is_on_host = buffer.device.type == "cpu"
        strays: list[tuple[Tensor, Tensor]] = []
        for name, value in states.items():
            room = self.view(buffer, name) if name in self.fields and isinstance(value, Tensor) else None
            if room is None or value.dtype != room.dtype or value.shape != room.shape:
                self.resident[name] = value.cpu() if is_on_host and isinstance(value, Tensor) else value
                continue
            self.present.add(name)
            if value.data_ptr() != room.data_ptr() or value.stride() != room.stride():
                strays.append((room, value))
        if len(strays) > 1:  # one may lie in the room of another: `state["a"], state["b"] = state["b"], state["a"]`
            strays = [(room, value.clone()) for room, value in strays]
        for room, value in strays:
            room.copy_(value)


@dataclass(slots=True)
class Chunk:
    """Pieces whose states are in one range of bytes.

    Attributes:
        cuts: The pieces.
        nbytes: Bytes of that range.
        device: Where the parameters are computed with.
        parcel: Of parameters, or gradients, that rest in another tier: the number of their parcel in their record.
        store: Where its states rest, once it has room.
        place: Where the store keeps it.
        is_stored: Whether the store holds it: false before the first step.
    """

    cuts: Sequence[Cut]
    nbytes: int
    device: torch.device
    parcel: int | None = None
    store: Store = NOWHERE
    place: int = 0
    is_stored: bool = False


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor laid out row by row."""
    return tuple(prod(max(n, 1) for n in shape[dim + 1 :]) for dim in range(len(shape)))


def name_of(parameter: Tensor) -> str:
    """A parameter as errors show it: with its name, if a transform made it."""
    slot = slot_of(parameter)
    return str(slot) if slot is not None else f"{str(parameter.dtype).removeprefix('torch.')}{list(parameter.shape)}"
