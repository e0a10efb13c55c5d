"""Which chunks an optimizer is stepped in, and in which tier the states of each are to rest: no memory is taken yet.

parameters in memory         packed into chunks of at most a buffer
parameters in another tier   a chunk for each parcel in which they, or their gradients, rest
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_fn.chunks import Piece, chunks_of
from zero_fn.errors import PlacementError, TierError
from zero_fn.resting import is_dense, local_of
from zero_fn.runtime.elementwise import require_whole
from zero_fn.runtime.registry import slot_of
from zero_fn.streamed.chunk import Chunk, Cut, name_of, states_nbytes
from zero_fn.streamed.grain import looks_at_whole
from zero_fn.streamed.parcels import Place, device_of, follow, place_of
from zero_fn.streamed.schema import Schema, schema_of, schema_of_states
from zero_fn.tiers import IN_MEMORY, Tier, bytes_text, is_away

__all__ = ["BUFFER_NBYTES", "Planned", "Planner"]

BUFFER_NBYTES = 64 << 20
_LEAST_PART_NBYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Planned:
    """Chunks, and where their states will be.

    Attributes:
        chunks: They have no store and no place yet.
        rooms: The same chunks by the tier and the device of their store; a tier of None is the device.
    """

    chunks: list[Chunk]
    rooms: dict[tuple[Tier | None, torch.device], list[Chunk]]


class Planner:
    """Cuts the parameters of an optimizer into chunks.

    Attributes:
        inner: The optimizer.
        tier: Where all states are to rest; None: where `zf.offload` said, for each parameter.
        fraction: How much of them, in bytes; the rest stays on the device.
        buffer_nbytes: The most that a chunk may take.
    """

    def __init__(self, inner: Optimizer, tier: Tier | None, fraction: float, buffer_nbytes: int) -> None:
        self.inner, self.tier, self.fraction, self.buffer_nbytes = inner, tier, fraction, buffer_nbytes
        self._looks_at_whole = False

    def planned(self, parameters: Sequence[Tensor], first: int) -> Planned:
        """Chunks for these parameters, which get the numbers from `first` on.

        Raises:
            TierError: Nobody said where, or a buffer is too small for what cannot be cut.
            PlacementError: The optimizer does not treat every element alone.
        """
        for parameter in parameters:
            follow(parameter)
        groups = self._groups_of(parameters)
        locals_ = [local_of(parameter) for parameter in parameters]
        devices = [device_of(parameter) for parameter in parameters]
        schemas = self.schemas(parameters)
        self._look_at_grain(parameters)
        wanted = self._tiers_of(parameters)
        places = [place_of(parameter) for parameter in parameters]
        here = [number for number, place in enumerate(places) if place is None]
        packed = chunks_of(
            [locals_[number].numel() for number in here],
            [(devices[number], wanted[number]) for number in here],
            lambda at, numel: states_nbytes(schemas[here[at]], numel),
            self._chunk_nbytes([states_nbytes(schemas[n], locals_[n].numel()) for n in here], wanted),
        )
        chunks = []
        for pieces in packed:
            cuts, nbytes = [], 0
            for piece in pieces:
                number = here[piece.parameter]
                if not piece.is_whole:
                    self._require_cuttable(parameters[number], locals_[number])
                numbered = Piece(first + number, piece.start, piece.stop, piece.is_whole)
                cuts.append(Cut(numbered, groups[number], locals_[number], schemas[number], nbytes))
                nbytes += states_nbytes(schemas[number], piece.numel)
            chunks.append(Chunk(cuts, nbytes, devices[here[pieces[0].parameter]]))
        chunks += self._chunks_away(parameters, places, first, groups, schemas)
        # A parcel that mixes tiers goes where the states of its first parameter go.
        wishes = [wanted[chunk.cuts[0].piece.parameter - first] for chunk in chunks]
        return Planned(chunks, _in_turns(chunks, wishes))

    def _chunk_nbytes(self, nbytes: list[int], wanted: list[tuple[Tier | None, float]]) -> int:
        """The most that a chunk may take: a buffer, or where a part stays on the device, so little that the part is met."""
        if all(fraction == 1 for _, fraction in wanted):
            return self.buffer_nbytes
        return min(self.buffer_nbytes, max(sum(nbytes) // 32, _LEAST_PART_NBYTES))

    def _tiers_of(self, parameters: Sequence[Tensor]) -> list[tuple[Tier | None, float]]:
        """Where the states of each parameter are to rest, and which part of them.

        Raises:
            TierError: Nobody said.
        """
        asked = self._asked(parameters)
        if parameters and all(tier is None for tier, _ in asked):
            raise TierError(
                "streamed() was given no tier.",
                optimizer=type(self.inner).__name__,
                fix="zf.streamed(optimizer, zf.nvme('/local_nvme')), or zf.offload(model, optim=...) before the optimizer",
            )
        return asked

    def _asked(self, parameters: Sequence[Tensor]) -> list[tuple[Tier | None, float]]:
        if self.tier is not None:
            return [(self.tier, self.fraction)] * len(parameters)
        slots = [slot_of(parameter) for parameter in parameters]
        tiers = [slot.home.tiers if slot is not None else IN_MEMORY for slot in slots]
        return [(each.optim, each.fraction) for each in tiers]

    def _chunks_away(
        self,
        parameters: Sequence[Tensor],
        places: Sequence[Place | None],
        first: int,
        groups: list[int],
        schemas: list[Schema],
    ) -> list[Chunk]:
        """Chunks of parameters that rest, or whose gradients rest, in another tier: one for each parcel."""
        number_of: dict[Hashable, dict[int, int]] = {}
        records: dict[Hashable, Place] = {}
        for number, place in enumerate(places):
            if place is not None:
                records.setdefault(place.record, place)
                number_of.setdefault(place.record, {})[place.number] = number
        chunks, needed = [], 0
        for key, record in records.items():
            for index, parcel in enumerate(record.parcels):
                cuts, nbytes = [], 0
                inside = [
                    (number_of[key][piece.parameter], piece, offset)
                    for piece, offset in zip(parcel.pieces, parcel.offsets, strict=True)
                    if piece.parameter in number_of[key]
                ]
                for number, piece, offset in sorted(inside, key=lambda found: groups[found[0]]):
                    if not piece.is_whole:
                        self._require_cuttable_away(parameters[number])
                    numbered = Piece(first + number, piece.start, piece.stop, piece.is_whole)
                    local = local_of(parameters[number])
                    cuts.append(Cut(numbered, groups[number], local, schemas[number], nbytes, offset))
                    nbytes += states_nbytes(schemas[number], piece.numel)
                needed = max(needed, nbytes)
                if cuts:
                    chunks.append(Chunk(cuts, nbytes, record.device, index))
        self.require_buffer(needed)
        return chunks

    def require_buffer(self, nbytes: int) -> None:
        """For the states of a parcel, which are stepped as one.

        Raises:
            TierError: They do not fit a buffer.
        """
        if nbytes > self.buffer_nbytes:
            raise TierError(
                f"A buffer of {bytes_text(self.buffer_nbytes)} is too small for the states of a parcel.",
                needs=bytes_text(nbytes),
                why="parameters that rest in another tier are stepped in the parcels in which they rest",
                fix=f"buffer={nbytes} or more; 64 MiB is a good size",
            )

    def _step_devices(self, parameters: Sequence[Tensor]) -> list[torch.device]:
        """Where each is stepped, or most of it: on the host if its states rest in another tier than memory of its device,
        or if it has no device yet."""
        host = torch.device("cpu")
        locals_ = [local_of(parameter) for parameter in parameters]
        is_here = [
            not local.is_meta and (fraction == 0 or not is_away(tier, local.device.type))
            for (tier, fraction), local in zip(self._asked(parameters), locals_, strict=True)
        ]
        return [local.device if here else host for local, here in zip(locals_, is_here, strict=True)]

    def _groups_of(self, parameters: Sequence[Tensor]) -> list[int]:
        group_of = {id(p): number for number, group in enumerate(self.inner.param_groups) for p in group["params"]}
        return [group_of[id(parameter)] for parameter in parameters]

    def schemas(self, parameters: Sequence[Tensor]) -> list[Schema]:
        """The states of each parameter: those that one like it has, else those that a first step would make."""
        groups, locals_ = self._groups_of(parameters), [local_of(parameter) for parameter in parameters]
        devices = self._step_devices(parameters)
        kinds = [(group, local.dtype, device) for group, local, device in zip(groups, locals_, devices, strict=True)]
        ndims = {kind: local.dim() for kind, local in zip(kinds, locals_, strict=True)}
        found: dict[object, Schema] = {}
        for kind, parameter in zip(kinds, parameters, strict=True):
            schema = schema_of_states(self.inner.state.get(parameter, {}), parameter) if self.inner.state else ()
            if parameter.numel() > 1 and len(schema) > len(found.get(kind, ())):
                found[kind] = schema
        for kind, parameter in zip(kinds, parameters, strict=True):
            if kind not in found:
                group, dtype, device = kind
                if not (dtype.is_floating_point or dtype.is_complex):
                    found[kind] = ()  # never trained
                    continue
                own = self.inner.param_groups[group]
                found[kind] = schema_of(self.inner, own, parameter, dtype, device, ndims[kind])
        return [found[kind] for kind in kinds]

    def _look_at_grain(self, parameters: Sequence[Tensor]) -> None:
        """What the optimizer looks at, for each group and kind of parameter.

        Raises:
            PlacementError: At several tensors at once; or at whole tensors, and a parameter is sharded.
        """
        seen: set[object] = set()
        devices = self._step_devices(parameters)
        for group, parameter, device in zip(self._groups_of(parameters), parameters, devices, strict=True):
            local = local_of(parameter)
            kind = group, local.dtype, device, local.ndim > 1
            if kind in seen or not parameter.requires_grad or not (local.is_floating_point() or local.is_complex()):
                continue
            seen.add(kind)
            if looks_at_whole(self.inner, self.inner.param_groups[group], parameter, device):
                self._looks_at_whole = True
        if self._looks_at_whole:
            require_whole(self.inner)

    def _require_cuttable(self, parameter: Tensor, local: Tensor) -> None:
        if self._looks_at_whole or not is_dense(local):
            raise PlacementError(
                f"The states of {name_of(parameter)} do not fit a buffer, and cannot be cut.",
                optimizer=type(self.inner).__name__,
                why="it looks at whole matrices or tensors" if is_dense(local) else "its elements have gaps in memory",
                fix="a larger buffer: zf.streamed(optimizer, tier, buffer='1GiB')",
            )

    def _require_cuttable_away(self, parameter: Tensor) -> None:
        if self._looks_at_whole:
            raise PlacementError(
                f"{name_of(parameter)} rests in another tier in several parcels, and cannot be stepped in pieces.",
                optimizer=type(self.inner).__name__,
                why="it looks at whole matrices or tensors",
                fix="leave it in memory: zf.offload(model, params=tier, where=...), or use AdamW",
            )


def _in_turns(
    chunks: Sequence[Chunk], wanted: Sequence[tuple[Tier | None, float]]
) -> dict[tuple[Tier | None, torch.device], list[Chunk]]:
    """So many chunks in their tier as its fraction says, taking turns with those that stay on the device."""
    total: Counter[Tier | None] = Counter()
    there: Counter[Tier | None] = Counter()
    chosen: dict[tuple[Tier | None, torch.device], list[Chunk]] = {}
    for chunk, (tier, fraction) in zip(chunks, wanted, strict=True):
        total[tier] += chunk.nbytes
        is_there = there[tier] + chunk.nbytes / 2 <= fraction * total[tier]
        there[tier] += chunk.nbytes * is_there
        chosen.setdefault((tier if is_there else None, chunk.device), []).append(chunk)
    return chosen
