"""Which pieces of parameters are stepped together, and in which tier their states will rest.

No memory is taken yet.

parameters in memory         packed into chunks of at most a buffer
parameters in another tier   a chunk for each parcel in which they, or their gradients, rest
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_fn.errors import PlacementError, TierError
from zero_fn.runtime.bfloat16_step import as_kept, kept_beside, rounding_of
from zero_fn.runtime.slot import slot_of
from zero_fn.storage import Stored, whole_pages
from zero_fn.storage.stored_files import StoredFiles
from zero_fn.streamed.inner_optimizer import Schema, kept_by, schema_of
from zero_fn.streamed.state_codes import Coded, Divided, coded_schema, note_largest
from zero_fn.streamed.tier_places import RestsAt, device_of, follow, passing_sizes, place_of
from zero_fn.tiers.parcels import Parcel, padded_nbytes
from zero_fn.tiers.record import Record
from zero_fn.values.chunks import Piece, chunks_of
from zero_fn.values.dtensors import local_of
from zero_fn.values.strides import flat_in, is_dense
from zero_fn.values.tiers import IN_MEMORY, Cpu, Tier, bytes_text, is_accelerator, is_away

__all__ = ["BUFFER_NBYTES", "Chunk", "ParameterPiece", "Planner", "name_of", "rooms_of"]

BUFFER_NBYTES = 64 << 20
_LEAST_PART_NBYTES = 64 << 10


def _states_nbytes(schema: Schema, numel: int) -> int:
    """Bytes that the states of so many elements take in a chunk, with padding."""
    return sum(padded_nbytes(numel, dtype.itemsize) for _, dtype in schema)


def name_of(parameter: Tensor) -> str:
    """A parameter as errors show it: with its name, if a transform made it."""
    slot = slot_of(parameter)
    if slot is not None:
        return str(slot)
    return f"{str(parameter.dtype).removeprefix('torch.')}{list(parameter.shape)}"


@dataclass(frozen=True, slots=True)
class _Stepped:
    """A parameter that is to be stepped."""

    group: int
    parameter: Tensor
    schema: Schema
    tier: Tier | None  # the tier of its states, and the part of the states that goes there
    fraction: float
    # The place of the parameter, or of its gradient, in another tier; None if both are in memory.
    place: RestsAt | None
    is_coded: bool = False  # whether states rest in 8 bits
    divided: Divided | None = None

    @property
    def widened_itemsize(self) -> int:
        """Bytes of an element that a chunk takes beside its states while it is stepped:
        of its value in float32."""
        return 4 if rounding_of(self.parameter) is not None else 0

    @property
    def numel(self) -> int:
        """Elements on this rank."""
        return local_of(self.parameter).numel()


class ParameterPiece:
    """One piece of a parameter in its chunk."""

    __slots__ = (
        "away",
        "coded",
        "dtype",
        "fields",
        "gradient_dtype",
        "group",
        "in_parcel",
        "numel",
        "parameter",
        "piece",
        "present",
        "resident",
        "shape",
        "stride",
    )

    def __init__(self, row: _Stepped, piece: Piece, in_parcel: int | None) -> None:
        local = local_of(row.parameter)
        if not piece.is_whole and not is_dense(local):
            raise PlacementError(
                f"The states of {name_of(row.parameter)} do not fit a buffer, and cannot be cut.",
                why="its elements have gaps in memory",
                fix="a larger buffer: zf.streamed(optimizer, tier, buffer='1GiB')",
            )
        self.parameter = row.parameter
        self.group = row.group
        self.piece = piece  # the elements of the parameter that are stepped here
        # The first byte of the piece in the parcel of the chunk;
        # None if the parameter is in memory.
        self.in_parcel = in_parcel
        self.numel = local.numel()  # of the whole parameter on this rank
        self.dtype = local.dtype
        # A row where it is cut: some decay matrices only, by `p.ndim`. The form that the optimizer
        # sees: that of the parameter, or of one row if the parameter is cut.
        self.shape = (
            tuple(local.shape) if piece.is_whole else (*[1] * (local.dim() - 1), piece.numel)
        )
        self.stride = tuple(local.stride())
        if not piece.is_whole or not is_dense(local):
            self.stride = tuple(
                prod(max(n, 1) for n in self.shape[dim + 1 :]) for dim in range(len(self.shape))
            )
        # By name of a state, its dtype and its first byte in the chunk.
        self.fields: dict[str, tuple[torch.dtype, int]] = {
            name: (dtype, 0) for name, dtype in row.schema
        }
        self.coded = (
            Coded(row.schema, piece.start, piece.stop, row.divided) if row.is_coded else None
        )
        slot = slot_of(row.parameter)
        self.gradient_dtype = slot.kind.gradient_dtype if slot is not None else local.dtype
        # Whether the parameter, and whether its gradient, rests in another tier
        # than the memory of its device.
        self.away = (
            (slot.kind.is_away, slot.kind.is_gradient_away) if slot is not None else (False, False)
        )
        self.present: set[str] = set()  # names of the states that the chunk holds now
        # States that stay in memory: step counts, flags, and states that came later than the plan.
        self.resident: dict[str, Any] = {}

    def lie(self, begin: int) -> int:
        """Lays out its states from this byte of the chunk on. Returns the byte after them."""
        for name, (dtype, _) in self.fields.items():
            self.fields[name] = dtype, begin
            if self.coded is None or self.coded.divided is None:
                begin += padded_nbytes(self.piece.numel, dtype.itemsize)
        return begin

    def of(self, local: Tensor) -> Tensor:
        """The elements of the piece in a tensor that lies as the parameter does."""
        if self.piece.is_whole:
            return local
        return local.as_strided(self.shape, self.stride, local.storage_offset() + self.piece.start)

    def at(self, memory: Tensor, offset: int, dtype: torch.dtype) -> Tensor:
        """The elements of the piece in memory, from a byte on,
        in the form that the optimizer sees."""
        return self.laid(memory[offset : offset + self.piece.numel * dtype.itemsize].view(dtype))

    def laid(self, flat: Tensor) -> Tensor:
        """Elements in order of memory, in the form that the optimizer sees."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset())

    def states(self, buffer: Tensor) -> dict[str, Any]:
        """The states by name, as the optimizer expects them: views of the buffer,
        decoded ones, and what stays in memory."""
        return {
            **self.resident,
            **{name: self.value(buffer, name) for name in self.fields if name in self.present},
        }

    def value(self, buffer: Tensor, name: str) -> Tensor:
        """A state, as the optimizer expects it."""
        codes = self.codes(buffer, name)
        return self.laid(
            codes
            if self.coded is None or name not in self.coded.names
            else self.coded.decoded(name, codes)
        )

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype in which the optimizer expects a state."""
        return torch.float32 if self._is_coded(name) else self.fields[name][0]

    def codes(self, buffer: Tensor, name: str) -> Tensor:
        """A state as it rests, in order of memory."""
        if self.coded is not None and name in self.coded.in_memory:
            return self.coded.in_memory[name]
        dtype, offset = self.fields[name]
        return buffer[offset : offset + self.piece.numel * dtype.itemsize].view(dtype)

    def keep(self, buffer: Tensor, states: Mapping[str, Any]) -> None:
        """Takes over the states after a step; one that the optimizer put elsewhere is
        copied to its place, or coded."""
        self.present.clear()
        self.resident = {}
        is_on_host = buffer.device.type == "cpu"
        strays: list[tuple[Tensor, Tensor]] = []
        for name, value in states.items():
            room = (
                self.laid(self.codes(buffer, name))
                if name in self.fields and isinstance(value, Tensor)
                else None
            )
            is_coded = self._is_coded(name)
            fits = (
                (torch.uint8, torch.float32) if is_coded else () if room is None else (room.dtype,)
            )
            if room is None or value.dtype not in fits or value.shape != room.shape:
                self.resident[name] = (
                    value.cpu() if is_on_host and isinstance(value, Tensor) else value
                )
                continue
            self.present.add(name)
            if is_coded and value.dtype != torch.uint8:
                self._encode(buffer, name, value)
            elif value.data_ptr() != room.data_ptr() or value.stride() != room.stride():
                strays.append((room, value))
        # One state may lie in the room of another: `state["a"],
        # state["b"] = state["b"], state["a"]`.
        if len(strays) > 1:
            strays = [(room, value.clone()) for room, value in strays]
        for room, value in strays:
            room.copy_(value)

    def note_largest(self, largest: dict[str, Tensor], states: Mapping[str, Any]) -> None:
        """Notes the largest value of each block of divided states."""
        assert self.coded is not None and self.coded.divided is not None
        divided = self.coded.divided
        blocks: Tensor | None = None  # the same of all states
        for name in sorted(self.coded.names & states.keys()):  # momentum may have become 0
            value = states[name]
            if blocks is None:
                blocks = divided.blocks(self.piece.start, self.piece.stop, value.device)
            if name not in largest:
                largest[name] = divided.coming[name] = value.new_zeros(divided.count)
            note_largest(largest[name], flat_in(value, self.stride), blocks)

    def _is_coded(self, name: str) -> bool:
        return self.coded is not None and name in self.coded.names

    def _encode(self, buffer: Tensor, name: str, value: Tensor) -> None:
        assert self.coded is not None
        self.coded.encode(name, flat_in(value, self.stride), self.codes(buffer, name))


class Chunk(Stored):
    """Pieces that are stepped together, because their states are one range of bytes."""

    tier: Tier | None = None  # the tier of the states; None is the memory of the device

    def __init__(
        self,
        cuts: Sequence[ParameterPiece],
        device: torch.device,
        parcel: int | None = None,
        parcels_nbytes: int = 0,
    ) -> None:
        self.cuts = cuts  # the pieces, in the order of their states
        self.device = device
        # The number of the parcel in which the parameters, or their gradients,
        # rest; None if both are in memory.
        self.parcel = parcel
        # Bytes of that parcel, of its compute copies and of its gradients,
        # of those that are on a disk.
        self.parcels_nbytes = parcels_nbytes
        self.nbytes = 0
        for cut in cuts:
            self.nbytes = cut.lie(self.nbytes)

    @property
    def beside_nbytes(self) -> int:
        """Bytes of memory beside the chunk: of the scales of states in 8 bits,
        and of the codes of divided ones."""
        return sum(cut.coded.nbytes for cut in self.cuts if cut.coded is not None)

    @property
    def is_stepped_on_host(self) -> bool:
        """Whether its states rest, or pass, beside an accelerator."""
        return self.tier is not None and is_accelerator(self.device.type)

    @property
    def window_nbytes(self) -> int:
        """Bytes of the buffer for parameters and gradients of the chunk that are not where it is
        stepped: its parcels from a disk, and copies of what is on an accelerator, if the states are
        on the host."""
        if not self.is_stepped_on_host:
            return self.parcels_nbytes
        copies = sum(
            padded_nbytes(cut.piece.numel, dtype.itemsize)
            for cut in self.cuts
            for dtype, is_there in zip((cut.dtype, cut.gradient_dtype), cut.away, strict=True)
            if not is_there
        )
        return self.parcels_nbytes + whole_pages(copies)


def rooms_of(chunks: Iterable[Chunk]) -> dict[tuple[Tier | None, torch.device], list[Chunk]]:
    """Chunks by the tier and the device of their states."""
    found: dict[tuple[Tier | None, torch.device], list[Chunk]] = {}
    for chunk in chunks:
        found.setdefault((chunk.tier, chunk.device), []).append(chunk)
    return found


@dataclass(frozen=True, slots=True)
class Planner:
    """Cuts the parameters of an optimizer into chunks."""

    inner: Optimizer
    # The tier of all states; None: for each parameter the one of `zf.offload(model, optim=tier)`.
    tier: Tier | None = None
    # The part of the states, in bytes, that goes there; the rest stays on the device.
    fraction: float = 1.0
    buffer_nbytes: int = BUFFER_NBYTES  # the most bytes that the states of a chunk may take
    codes: bool = False  # whether states rest in 8 bits

    def chunks(
        self,
        parameters: Sequence[Tensor],
        divided: Mapping[Tensor, Divided] = MappingProxyType({}),
        *,
        shares: bool = False,
    ) -> list[Chunk]:
        """Chunks for these parameters. Their states have no place yet."""
        for parameter in parameters:
            follow(parameter)
        schemas = self.kept(parameters, in_pieces=True)
        wanted, groups = [self._tier_of(p) for p in parameters], self._groups_of(parameters)
        slots = [slot for slot in map(slot_of, parameters) if slot is not None]
        # Buffer by buffer, without any tier.
        widens = any(
            slot.kind.gradient_dtype != slot.dtype or slot.kind.rounding is not None
            for slot in slots
        )
        if parameters and all(tier is None for tier, _ in wanted) and not widens and not self.codes:
            raise TierError(
                "streamed() was given no tier.",
                optimizer=type(self.inner).__name__,
                fix="zf.streamed(optimizer, zf.nvme('/local_nvme')), or zf.offload(model, "
                "optim=...) before the optimizer",
            )
        rows = [
            _Stepped(groups[number], p, schemas[number], *wanted[number], place_of(p))
            for number, p in enumerate(parameters)
        ]
        for record in [row.place.record for row in rows if row.place is not None]:
            if isinstance(record, Record) and isinstance(record.shelf, StoredFiles):
                raise record.shelf.unchanged(record.shelf)
        if self.codes:
            rows = [
                _coded(row, type(self.inner).__name__, divided.get(row.parameter)) for row in rows
            ]
        found = [
            *self._here([row for row in rows if row.place is None]),
            *self._away(rows, shares=shares and all(row.fraction == 1 for row in rows)),
        ]
        _choose_tiers(dict.fromkeys(found), {row.parameter: row for row in rows})
        return found

    def kept(self, parameters: Sequence[Tensor], *, in_pieces: bool) -> list[Schema]:
        """What the optimizer keeps of each parameter: what one like it has,
        or what a first step would make."""
        found: dict[object, Schema] = {}
        kinds = []
        for group, parameter in zip(self._groups_of(parameters), parameters, strict=True):
            local, device = local_of(parameter), self._step_device(parameter)
            kind = group, local.dtype, device, local.dim(), rounding_of(parameter)
            kinds.append(kind)
            if kind not in found:
                found[kind] = ()
                if local.is_floating_point() or local.is_complex():  # others are never trained
                    options = self.inner.param_groups[group]
                    found[kind] = kept_by(
                        self.inner, options, parameter, device, in_pieces=in_pieces
                    )
            states = (
                as_kept(parameter, self.inner.state.get(parameter, {})) if self.inner.state else {}
            )
            schema = schema_of(states, parameter)
            if parameter.numel() > 1 and len(schema) > len(found[kind]):
                found[kind] = schema
        schemas = zip((found[kind] for kind in kinds), map(kept_beside, parameters), strict=True)
        return [
            (*(each for each in schema if each not in beside), *beside)
            for schema, beside in schemas
        ]

    def _tier_of(self, parameter: Tensor) -> tuple[Tier | None, float]:
        """The tier of a parameter's states, and the fraction of them that is in it."""
        if self.tier is not None:
            return self.tier, self.fraction
        slot = slot_of(parameter)
        tiers = slot.home.tiers if slot is not None else IN_MEMORY
        return tiers.optim, tiers.fraction

    def _step_device(self, parameter: Tensor) -> torch.device:
        """Where it is stepped, or most of it: on the host if its states rest in another tier than
        memory of its device, or if it has no device yet."""
        local, (tier, _) = local_of(parameter), self._tier_of(parameter)
        if local.is_meta or is_away(tier, local.device.type):
            return torch.device("cpu")
        return local.device

    def _groups_of(self, parameters: Sequence[Tensor]) -> list[int]:
        group_of = {
            id(p): number
            for number, group in enumerate(self.inner.param_groups)
            for p in group["params"]
        }
        return [group_of[id(parameter)] for parameter in parameters]

    def _here(self, rows: Sequence[_Stepped]) -> list[Chunk]:
        """Chunks of parameters in memory."""
        limit = self.buffer_nbytes
        if self.codes and not all(group.get("fused") for group in self.inner.param_groups):
            limit //= 4  # they are decoded for their step
        if any(row.fraction != 1 for row in rows):  # so little that the part is met
            total = sum(_states_nbytes(row.schema, row.numel) for row in rows)
            limit = min(limit, max(total // 32, _LEAST_PART_NBYTES))
        packed = chunks_of(
            [row.numel for row in rows],
            [(device_of(row.parameter), row.tier, row.fraction) for row in rows],
            lambda at, numel: max(
                _states_nbytes(rows[at].schema, numel), rows[at].widened_itemsize * numel
            ),
            limit,
        )
        return [
            Chunk(
                [ParameterPiece(rows[piece.parameter], piece, None) for piece in pieces],
                device_of(rows[pieces[0].parameter].parameter),
            )
            for pieces in packed
        ]

    def _away(self, rows: Sequence[_Stepped], *, shares: bool) -> list[Chunk]:
        """Chunks of parameters that rest, or whose gradients rest,
        in another tier: one for each parcel."""
        parcels_of: dict[Hashable, Sequence[Parcel]] = {}
        by_record: dict[Hashable, dict[int, _Stepped]] = {}
        for row in rows:
            if row.place is not None:
                parcels_of.setdefault(row.place.record, row.place.parcels)
                by_record.setdefault(row.place.record, {})[row.place.number] = row
        found: list[Chunk] = []
        nbytes, alike = 0, dict[Hashable, list[Chunk]]()
        for record, row_of in by_record.items():
            key = _alike(row_of, parcels_of[record]) if shares else record
            if key in alike:
                found += alike[key]
                continue
            before, sizes = len(found), passing_sizes(next(iter(row_of.values())).parameter)
            for index, parcel in enumerate(parcels_of[record]):
                inside = zip(parcel.pieces, parcel.offsets, strict=True)
                mine = [
                    (row_of[piece.parameter], piece, offset)
                    for piece, offset in inside
                    if piece.parameter in row_of
                ]
                if mine:
                    cuts = [ParameterPiece(*each) for each in mine]
                    device = device_of(mine[0][0].parameter)
                    found.append(Chunk(cuts, device, index, sizes[index] if sizes else 0))
                    # Without sizes and on the host, no part of it passes through a buffer.
                    if sizes or not isinstance(mine[0][0].tier, Cpu):
                        nbytes = max(nbytes, found[-1].nbytes)
            alike[key] = found[before:]
        if nbytes > self.buffer_nbytes:
            raise TierError(
                f"A buffer of {bytes_text(self.buffer_nbytes)} is too small "
                "for the states of a parcel.",
                needs=bytes_text(nbytes),
                why="offloaded parameters are stored in parcels of up to 4 MiB, "
                "and each parcel is stepped at once",
                fix=f"buffer={nbytes} or more; 64 MiB is a good size",
            )
        return found


def _coded(row: _Stepped, optimizer: str, divided: Divided | None) -> _Stepped:
    schema = coded_schema(row.schema, row.parameter, optimizer)
    is_coded = schema != row.schema
    return replace(row, schema=schema, is_coded=is_coded, divided=divided if is_coded else None)


def _alike(row_of: Mapping[int, _Stepped], parcels: Sequence[Parcel]) -> Hashable:
    """What the chunks of a record follow from.

    Only records on `meta` have the same parcels as others.
    """
    rows = ((number, row.group, row.schema, row.parameter) for number, row in row_of.items())
    forms = [(*row, p.requires_grad, local_of(p).shape, local_of(p).stride()) for *row, p in rows]
    slot = slot_of(next(iter(row_of.values())).parameter)
    return slot and slot.kind, id(parcels), tuple(forms)


def _choose_tiers(chunks: Iterable[Chunk], row_of: Mapping[Tensor, _Stepped]) -> None:
    """So many chunks in their tier as its fraction says,
    taking turns with those that stay on the device.

    A parcel that mixes tiers goes where the states of its first parameter go.
    """
    total: Counter[Tier | None] = Counter()
    there: Counter[Tier | None] = Counter()
    for chunk in chunks:
        row = row_of[chunk.cuts[0].parameter]
        total[row.tier] += chunk.nbytes
        if there[row.tier] + chunk.nbytes / 2 <= row.fraction * total[row.tier]:
            there[row.tier] += chunk.nbytes
            chunk.tier = row.tier
