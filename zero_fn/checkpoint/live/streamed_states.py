"""Reads and fills the states of streamed optimizers, a chunk at a time, through the buffers of the optimizer itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from zero_fn.checkpoint.live.held_tensors import HeldTensor
from zero_fn.errors import CheckpointError, StateError, StorageError
from zero_fn.resting import local_of
from zero_fn.streamed import Streamed
from zero_fn.streamed.pieces import Chunk, ParameterPiece
from zero_fn.streamed.pipeline import ChunkPipeline

__all__ = [
    "StateFields",
    "each_state",
    "end_step",
    "fill_states",
    "held_in_chunks",
    "room_of_states",
    "states_in_chunks",
]

StateFields = dict[int, tuple[dict[str, torch.dtype], dict[str, Any]]]
"""By the identity of a parameter: dtypes of the states that rest in chunks, by name, and the values of other states."""


def states_in_chunks(optimizer: Streamed) -> StateFields:
    """The states that an optimizer has."""
    optimizer._steps.finish()
    optimizer._steps.require_whole("save")
    found: StateFields = {}
    for cut in _cuts(optimizer):
        dtypes, others = found.setdefault(id(cut.parameter), ({}, {}))
        dtypes |= {name: dtype for name, (dtype, _) in cut.fields.items() if name in cut.present}
        others |= cut.resident
        for name, value in cut.resident.items():
            if isinstance(value, Tensor) and value.numel() > 1:
                raise CheckpointError(
                    f"The state {name!r} of a streamed optimizer came after its first step, and lies in memory in pieces.",
                    fix="build the optimizer with it from the start, or stream it anew after a step: zf.streamed(...)",
                )
    return found


def room_of_states(optimizer: Streamed) -> dict[int, dict[str, torch.dtype]]:
    """The states that chunks have room for: their dtypes, by the identity of the parameter and by name."""
    found: dict[int, dict[str, torch.dtype]] = {}
    for cut in _cuts(optimizer):
        found.setdefault(id(cut.parameter), {}).update({name: dtype for name, (dtype, _) in cut.fields.items()})
    return found


def end_step(optimizer: Streamed) -> None:
    """Finishes a pending step; errors are ignored, because loading overwrites what it leaves."""
    with suppress(StorageError, StateError):
        optimizer._steps.finish()
    optimizer._steps.waiting = None


def each_state(optimizer: Streamed, take: Callable[[Tensor, str, int, Tensor], None]) -> None:
    """Calls `take(parameter, name, first, values)` for each piece of each state, in the order of the elements of each.

    `first` is the number of the first element in what this rank holds; `values` are flat, on the host, and valid during the
    call only.
    """
    states = optimizer.states

    def visit(chunk: Chunk, buffer: Tensor) -> None:
        for cut in chunk.cuts:
            for name, value in cut.states(buffer).items():
                if name in cut.present:
                    _require_in_order(cut)
                    take(cut.parameter, name, cut.piece.start, value.reshape(-1).cpu())

    ChunkPipeline([states], [chunk for chunk in states.chunks if chunk.is_stored], visit, writes=False).run()


def fill_states(
    optimizer: Streamed,
    kept: StateFields,
    fill: Callable[[Tensor, str, int, Tensor], None],
) -> None:
    """Puts states into the chunks of an optimizer; `fill(parameter, name, first, values)` fills flat values."""
    states, steps = optimizer.states, optimizer._steps
    steps.failed = "states could not be loaded"

    def visit(chunk: Chunk, buffer: Tensor) -> None:
        for cut in chunk.cuts:
            dtypes, others = kept.get(id(cut.parameter), ({}, {}))
            # Each piece counts its steps by itself.
            values = {name: each.clone() if isinstance(each, Tensor) else each for name, each in others.items()}
            for name, dtype in dtypes.items():
                _require_in_order(cut)
                flat = torch.empty(cut.piece.numel, dtype=dtype)
                fill(cut.parameter, name, cut.piece.start, flat)
                values[name] = flat.view(cut.shape).to(buffer.device)
            cut.keep(buffer, values)

    ChunkPipeline([states], states.chunks, visit).run()
    steps.failed = None


def _cuts(optimizer: Streamed) -> list[ParameterPiece]:
    return [cut for chunk in optimizer.states.chunks for cut in chunk.cuts]


def _require_in_order(cut: ParameterPiece) -> None:
    if not cut.piece.is_whole and not local_of(cut.parameter).is_contiguous():
        raise CheckpointError(
            "A state passes through buffers in pieces, and not in the order of its elements.",
            parameter=f"{list(cut.parameter.shape)} with strides {cut.parameter.stride()}",
            fix="a larger buffer, so that it passes whole: zf.streamed(optimizer, tier, buffer='1GiB')",
        )


def held_in_chunks(own: HeldTensor, parameter: Tensor, name: str, dtype: torch.dtype) -> HeldTensor:
    """A state that rests in chunks; `own` is its parameter."""
    return HeldTensor(f"{own.name}/{name}", dtype, own.place, None, in_chunks=(id(parameter), name))
