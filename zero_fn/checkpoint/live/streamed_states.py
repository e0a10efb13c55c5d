"""Reads and fills the states of streamed optimizers, a chunk at a time,
through the buffers of the optimizer itself."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor

from zero_fn.checkpoint.format.contents import Contents, Key
from zero_fn.checkpoint.live.tensors import HeldTensor
from zero_fn.errors import CheckpointError, StateError, StorageError
from zero_fn.kernels.codes import BLOCK_NUMEL
from zero_fn.storage import InMemory
from zero_fn.streamed import Streamed
from zero_fn.streamed.pieces import Chunk, ParameterPiece
from zero_fn.streamed.pipeline import ChunkPipeline
from zero_fn.streamed.state_codes import CODES, SCALES, blocks_of, note_largest, scales_shape
from zero_fn.values.box import Box, Holding, strides_of, whole_box
from zero_fn.values.dtensors import local_of

__all__ = [
    "StateFields",
    "cuts_of",
    "each_state",
    "end_step",
    "fill_states",
    "held_codes",
    "held_in_chunks",
    "note_scales",
    "room_of_states",
    "states_in_chunks",
]

StateFields = dict[int, tuple[dict[str, torch.dtype], dict[str, Any]]]
"""By the identity of a parameter: dtypes of the states that rest in chunks, by name,
and the values of other states."""


def states_in_chunks(optimizer: Streamed) -> StateFields:
    """The states that an optimizer has.

    Those in 8 bits have the dtype in which they are stepped.
    """
    optimizer._steps.finish()
    optimizer._steps.require_whole("save")
    found: StateFields = {}
    for cut in chain.from_iterable(cuts_of(optimizer).values()):
        dtypes, others = found.setdefault(id(cut.parameter), ({}, {}))
        dtypes |= {name: cut.dtype_of(name) for name in cut.fields if name in cut.present}
        others |= cut.resident
        for name, value in cut.resident.items():
            if isinstance(value, Tensor) and value.numel() > 1:
                raise CheckpointError(
                    f"The state {name!r} of a streamed optimizer came after its first step, "
                    "and lies in memory in pieces.",
                    fix="build the optimizer with it from the start, "
                    "or stream it anew after a step: zf.streamed(...)",
                )
    return found


def room_of_states(optimizer: Streamed) -> dict[int, dict[str, torch.dtype]]:
    """The states that chunks have room for: their dtypes,
    by the identity of the parameter and by name."""
    return {
        number: {name: cut.dtype_of(name) for cut in cuts for name in cut.fields}
        for number, cuts in cuts_of(optimizer).items()
    }


def end_step(optimizer: Streamed) -> None:
    """Finishes a pending step; errors are ignored, because loading overwrites what it leaves."""
    with suppress(StorageError, StateError):
        optimizer._steps.finish()
    optimizer._steps.waiting = None


def each_state(
    optimizer: Streamed,
    take: Callable[[Tensor, str, int, Tensor], None],
    wanted: Container[tuple[int, str]],
) -> None:
    """Calls `take(parameter, name, first, values)` for each piece of each wanted state, in the
    order of the elements of each.

    `wanted`: the identity of a parameter, and the name of its state,
    or of the codes of one in 8 bits.

    `first` is the number of the first element in what this rank holds; `values` are flat, on the
    host, and valid during the call only.
    """
    states = optimizer.states

    def visit(chunk: Chunk, room: InMemory) -> None:
        for cut in chunk.cuts:
            for name in cut.fields:
                if name not in cut.present:
                    continue
                _require_in_order(cut)
                if (id(cut.parameter), name) in wanted:
                    value = cut.value(room.memory, name)
                    take(cut.parameter, name, cut.piece.start, value.reshape(-1).cpu())
                if (id(cut.parameter), name + CODES) in wanted:
                    take(
                        cut.parameter,
                        name + CODES,
                        cut.piece.start,
                        cut.laid(cut.codes(room.memory, name)).reshape(-1).cpu(),
                    )

    ChunkPipeline(
        [states], [chunk for chunk in states.chunks if chunk.is_stored], visit, writes=False
    ).run()


def fill_states(
    optimizer: Streamed,
    kept: StateFields,
    fill: Callable[[Tensor, str, int, Tensor], None],
) -> None:
    """Puts states into the chunks of an optimizer; `fill(parameter, name, first, values)`
    fills flat values."""
    states, steps = optimizer.states, optimizer._steps
    steps.failed = "states could not be loaded"

    def visit(chunk: Chunk, room: InMemory) -> None:
        for cut in chunk.cuts:
            dtypes, others = kept.get(id(cut.parameter), ({}, {}))
            # Each piece counts its steps by itself.
            values = {
                name: each.clone() if isinstance(each, Tensor) else each
                for name, each in others.items()
            }
            for name, dtype in dtypes.items():
                _require_in_order(cut)
                flat = torch.empty(cut.piece.numel, dtype=dtype)
                fill(cut.parameter, name, cut.piece.start, flat)
                values[name] = flat.view(cut.shape).to(room.memory.device)
            cut.keep(room.memory, values)

    ChunkPipeline([states], states.chunks, visit).run()
    steps.failed = None


def cuts_of(optimizer: Streamed) -> dict[int, list[ParameterPiece]]:
    """The pieces by the identity of their parameter."""
    found: dict[int, list[ParameterPiece]] = {}
    for chunk in optimizer.states.chunks:
        for cut in chunk.cuts:
            found.setdefault(id(cut.parameter), []).append(cut)
    return found


def _require_in_order(cut: ParameterPiece) -> None:
    if not cut.piece.is_whole and not local_of(cut.parameter).is_contiguous():
        raise CheckpointError(
            "A state passes through buffers in pieces, and not in the order of its elements.",
            parameter=f"{list(cut.parameter.shape)} with strides {cut.parameter.stride()}",
            fix="a larger buffer, so that it passes whole: "
            "zf.streamed(optimizer, tier, buffer='1GiB')",
        )


def held_codes(own: HeldTensor, cuts: Sequence[ParameterPiece]) -> list[HeldTensor]:
    """States of a parameter in 8 bits as they rest: codes in chunks, and scales in memory.

    `own` is their parameter.
    """
    coded = [cut.coded for cut in cuts if cut.coded is not None]
    # Tiles of one tensor have blocks of their own: they are saved in float32.
    if not coded or own.place.shape != tuple(cuts[0].parameter.shape):
        return []
    divided, shape, parameter = coded[0].divided, scales_shape(own.place.shape), cuts[0].parameter
    dims = len(shape) - 1
    found = []
    for name in sorted(coded[0].names & cuts[0].present):
        found.append(held_in_chunks(own, parameter, name + CODES, torch.uint8))
        if divided is None:
            box, replica = own.place.box, own.place.replica
            first = sum(
                a * b
                for a, b in zip(box.starts[dims:], strides_of(own.place.shape[dims:]), strict=True)
            )
            place = Holding(
                shape,
                Box(
                    (*box.starts[:dims], first // BLOCK_NUMEL),
                    (*box.sizes[:dims], blocks_of(prod(box.sizes[dims:]))),
                ),
                replica,
            )
            local = torch.cat([each.scales[name] for each in coded]).view(place.box.sizes)
        else:
            place, local = Holding(shape, whole_box(shape)), coded[0].scales[name].view(shape)
        found.append(HeldTensor(f"{own.name}/{name}{SCALES}", torch.float32, place, local))
    return found


def note_scales(
    optimizer: Streamed, parameter: Tensor, own: HeldTensor, name: str, source: Contents, key: Key
) -> None:
    """Finds the scales of a state that is to be coded, of blocks that are divided among ranks,
    in the whole of it."""
    divided = next(
        (cut.coded.divided for cut, _ in optimizer.states.divided.get(parameter, ()) if cut.coded),
        None,
    )
    if divided is None:
        return
    mine, largest = divided.numbering, torch.zeros(divided.count)
    outer = tuple(
        start - inner for start, inner in zip(own.place.box.starts, mine.box.starts, strict=True)
    )  # of a tile
    for first, values in source.read(key, Box(outer, mine.shape)):
        note_largest(
            largest, values.float(), torch.arange(first, first + values.numel()) // BLOCK_NUMEL
        )
    divided.coming[name] = largest.masked_fill_(largest.isinf(), torch.nan)


def held_in_chunks(own: HeldTensor, parameter: Tensor, name: str, dtype: torch.dtype) -> HeldTensor:
    """A state that rests in chunks; `own` is its parameter."""
    return HeldTensor(f"{own.name}/{name}", dtype, own.place, None, in_chunks=(id(parameter), name))
