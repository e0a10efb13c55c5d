"""Chunks that grow: parameters that come to an optimizer later may rest in the parcels of others that are there.

A parcel is read, stepped and written back as one, so its parameters are one chunk. Two chunks of a parcel under way at once
would each write back what the other had changed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor

from zero_fn.streamed.chunk import Chunk
from zero_fn.streamed.parcels import place_of
from zero_fn.streamed.pipeline import StoreLane, each_chunk
from zero_fn.streamed.planned import Planned, Planner

__all__ = ["grow"]


def grow(chunks: list[Chunk], planned: Planned, known: Sequence[Tensor], planner: Planner) -> None:
    """Moves what is planned for parcels that have a chunk to that chunk, with room for more states.

    Args:
        chunks: What there is. Those that grow are replaced.
        planned: What is to come; what has moved is taken out.
        known: All parameters, by number.
        planner: Knows how much a chunk may take.

    Raises:
        TierError: A buffer, or the tier, is too small. Before anything has moved if it is the buffer.
        StorageError: The disk failed.
    """
    at_parcel = {_parcel_of(chunk, known): at for at, chunk in enumerate(chunks) if chunk.parcel is not None}
    pairs = [(at_parcel[key], new) for new in planned.chunks if (key := _parcel_of(new, known)) in at_parcel]
    for at, new in pairs:
        planner.require_buffer(chunks[at].nbytes + new.nbytes)
    for at, new in pairs:
        planned.chunks.remove(new)
        for members in planned.rooms.values():
            if new in members:
                members.remove(new)
        chunks[at] = _grown(chunks[at], new)


def _parcel_of(chunk: Chunk, known: Sequence[Tensor]) -> Hashable:
    place = place_of(known[chunk.cuts[0].piece.parameter]) if chunk.parcel is not None else None
    return (place.record, chunk.parcel) if place is not None else None


def _grown(old: Chunk, new: Chunk) -> Chunk:
    states: list[Tensor] = []
    if old.is_stored:
        each_chunk([StoreLane([old])], [old], lambda _, memory: states.append(memory.clone()), writes=False)
    for cut in new.cuts:
        cut.shift(old.nbytes)
    cuts = sorted([*old.cuts, *new.cuts], key=lambda cut: cut.group)
    chunk = Chunk(cuts, old.nbytes + new.nbytes, old.device, old.parcel, old.store)
    (chunk.place,) = old.store.reserve([chunk.nbytes], chunk.device)
    if states:
        each_chunk([StoreLane([chunk])], [chunk], lambda _, memory: memory[: old.nbytes].copy_(states[0][: old.nbytes]))
    return chunk
