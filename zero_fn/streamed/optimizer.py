"""`streamed(optimizer, tier)`: any elementwise optimizer, with its states in another tier.

A step visits the parameters chunk by chunk. The states of a chunk are views of a buffer; the optimizer's own `step` runs
on the pieces of the parameters in it, plain tensors over their memory; the buffer goes back. So the arithmetic is the
optimizer's own, and each element meets the same operations as without streaming.

[Note: a step that failed half-way] The chunks before the failure are stepped, those after it are not, and nothing can say
so to the rest of a training loop. Such an optimizer refuses to go on until states are loaded. On several ranks all are told.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zero_fn.chunks import Piece, chunks_of
from zero_fn.errors import CheckpointError, PlacementError, StateError, TierError
from zero_fn.resting import local_of, resting_tensor
from zero_fn.runtime.elementwise import looks_at_whole_tensors, require_elementwise
from zero_fn.runtime.everywhere import everywhere, is_shared
from zero_fn.runtime.record import Record
from zero_fn.runtime.registry import slot_of
from zero_fn.runtime.tier_tensor import TierTensor
from zero_fn.streamed.chunk import Chunk, Cut, is_dense, states_nbytes
from zero_fn.streamed.one_pass import arithmetic_of, steps_in_one_pass
from zero_fn.streamed.parcels import Gradients, Values, follow, place_of, rings_for
from zero_fn.streamed.pipeline import StoreLane, each_chunk
from zero_fn.streamed.schema import Schema, raw_step, replaced, schema_of, schema_of_states
from zero_fn.streamed.store import Ring, Store, store_of
from zero_fn.tiers import IN_MEMORY, Cpu, Tier, bytes_text, nbytes_of_text

__all__ = ["Streamed", "streamed"]

_BUFFER = "64MiB"
_LEAST_PART_NBYTES = 64 << 10
_NOWHERE = store_of(None, "")  # of a chunk that has no room yet

_Prepared = tuple[dict[Tier | None, Store], list[Chunk], list[Tensor], tuple[Ring, Ring]]


def streamed(
    optimizer: Optimizer, tier: Tier | None = None, *, fraction: float = 1.0, buffer: int | str = _BUFFER
) -> Streamed:
    """Moves the states of an optimizer to a tier and returns an optimizer that steps them from there.

        optimizer = zf.streamed(torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True), zf.nvme("/local_nvme"))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)

    The updates are those of `optimizer`, to the bit. On `nvme` the states pass through at most four buffers, read ahead
    and written back while others are computed, and never are in memory together; on `cpu` they rest in one range of memory
    of exact size. Where the model computes on the CPU, that is the device's own memory, and nothing is copied.

    Adam and AdamW with `fused=True` are stepped in one pass by a kernel in C, compiled at first use, whose bits are those of
    torch's; it also takes gradients in bfloat16 (`parameter.grad_dtype`), as if cast before. `print(optimizer)` says whether
    it is used, and if not, why: torch then does the same step.

    Communicates, over sharded or replicated parameters: a byte per rank at the end of a step, by which all ranks learn that
    one has failed.

    Args:
        optimizer: A stock optimizer, or one of yours, that treats every element alone. States that it has are moved.
        tier: `zf.nvme(path)` or `zf.cpu()`. None: for each parameter the tier that `zf.offload(model, optim=tier)` said; the
            states of others stay on the device.
        fraction: How much of the states, in bytes and to a buffer, is in the tier; the rest stays on the device. Buffers of
            both kinds take turns, so that transfers run beside the steps of what stays (twin-flow).
        buffer: Bytes of a buffer, as a number or as text. Larger parameters pass through it in pieces.

    Returns:
        An optimizer over the same `param_groups`; step this one. `optimizer` must no longer be stepped. `state_dict()` reads
        all states into memory, in the format of `optimizer`.

    Raises:
        PlacementError: The optimizer does not treat every element alone.
        TierError: The tier, or the memory for its buffers, is too small; or no tier was given. Nothing was moved.
        StorageError: The path takes no files, or the disk failed. The optimizer has its states.

    Source:
        ZeRO-Infinity, Rajbhandari et al. 2021, 5.2.2; the split of states over two tiers: ZeRO-Offload++ (twin-flow), 2023.
    """
    if not 0 < fraction <= 1:
        raise TierError(
            "fraction is not a part of the states.", got=fraction, fix="fraction=0.5: half of them, in bytes"
        )
    return Streamed(optimizer, tier, fraction, nbytes_of_text(buffer, "buffer"))


class Streamed(Optimizer):
    """An optimizer whose states are in a tier; made by `streamed`.

    Attributes:
        inner: The optimizer whose arithmetic it is.
        tier: Where the states rest; None: where `zf.offload` said, for each parameter.
    """

    inner: Optimizer
    tier: Tier | None
    takes_from_tiers = True  # parameters that rest there

    def __init__(self, inner: Optimizer, tier: Tier | None, fraction: float, buffer_nbytes: int) -> None:
        shared = {name: value for name, value in vars(inner).items() if name.startswith("_optimizer_")}
        self.__setstate__({"inner": inner, "tier": tier, "defaults": inner.defaults, **shared})
        self._fraction, self._buffer_nbytes = fraction, buffer_nbytes
        self._stores: dict[Tier | None, Store] = {}
        self._torn: str | None = None
        self._is_backwards = False  # the direction of the next step
        self._known: list[Tensor] = []  # the parameters that chunks were made for, by number
        self._chunks: list[Chunk] = []
        self._rings = Ring(0, 0, ""), Ring(0, 0, "")  # parameters and gradients in other tiers pass through them
        self._begin()

    # -- what looks like any optimizer ----------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the optimizer inside."""
        groups: list[dict[str, Any]] = self.inner.param_groups
        return groups

    @property
    def state(self) -> Mapping[Tensor, Mapping[str, Any]]:  # type: ignore[override]
        """What is kept in memory of the state of each parameter: step counts and the like. See `state_dict`."""
        found: dict[Tensor, Mapping[str, Any]] = {}
        for cut in self._cuts():
            if cut.resident or cut.present:
                found.setdefault(self._known[cut.piece.parameter], cut.resident)
        return found

    @property
    def resident_nbytes(self) -> int:
        """Bytes of host memory that it takes: buffers, and on `cpu` all states."""
        return sum(store.nbytes for store in self._stores.values()) + sum(ring.nbytes for ring in self._rings)

    def tier_nbytes(self) -> dict[Tier | None, int]:
        """Bytes of the room for states in each tier, in whole pages on a disk; None is the device."""
        return {tier: store.room_nbytes for tier, store in self._stores.items()}

    def __repr__(self) -> str:
        where = " and ".join(map(str, self._stores.values()))
        if any(isinstance(tier, Cpu) for tier in self._stores) and all(c.device.type == "cpu" for c in self._chunks):
            where += ", the device's own: nothing is copied"
        for kind, ring in zip(("parameters", "gradients"), self._rings, strict=True):
            if ring.count:
                where += f"; {kind} from their tier through {ring}"
        kind, how = type(self.inner).__name__, arithmetic_of(self.inner)
        return f"Streamed ({kind}, {len(self._chunks)} chunks: {where}; stepped by {how})\n{self.inner!r}"

    def __getstate__(self) -> dict[str, Any]:
        raise StateError(
            "An optimizer whose states are in a tier cannot be copied or pickled.",
            tier=self.tier,
            why="its states are in a file, or in memory, of this process",
            fix="save optimizer.state_dict(); load it into zf.streamed(AdamW(model.parameters()), tier)",
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as on the optimizer inside, and makes room for its states."""
        self.inner.add_param_group(param_group)
        self._plan_for_new()

    def state_dict(self) -> dict[str, Any]:
        """All states and groups in the format of the optimizer inside, read into memory of their own.

        Raises:
            StateError: A step has failed half-way.
            StorageError: The disk failed, or does not hold what was written to it.
        """
        self._require_whole("state_dict")
        with replaced(self.inner, self.param_groups, self._joined()):
            return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over states and groups, as on the optimizer inside. Mends an optimizer whose step failed.

        Raises:
            CheckpointError: A state does not fit its parameter.
            TierError: The tier has no room.
            StorageError: The disk failed.
        """
        self._torn = "states could not be loaded"
        self.inner.load_state_dict(state_dict)
        self._begin()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the optimizer inside, chunk by chunk.

        Args:
            closure: Evaluated first, with gradients enabled; its value is returned.

        Raises:
            StorageError: The disk failed on this rank or another, or does not hold what was written to it.
            StateError: An earlier step failed half-way.
            PlacementError: A gradient is sparse or does not rest as its parameter does.
        """
        self._require_whole("step")
        for parameter in self._known:
            follow(parameter)
        require_elementwise(self.inner)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._plan_for_new()
        self.inner._opt_called = True  # type: ignore[attr-defined]  # a scheduler built on the inner one looks for it
        parameters = self._all_parameters()
        try:
            everywhere(parameters, self._step_chunks, "A step of a streamed optimizer")
        except Exception:
            if is_shared(parameters):
                self._torn = self._torn or "it failed on one rank, and others have stepped"
            raise
        return loss

    # -- a step ---------------------------------------------------------------------------------------------------

    def _step_chunks(self) -> None:
        stepped = _Stepped(self)
        chunks = [
            chunk for chunk in self._chunks if any(self._known[c.piece.parameter].grad is not None for c in chunk.cuts)
        ]
        for chunk in chunks:
            self._require_as_planned(chunk)
        try:
            each_chunk([StoreLane(chunks), *self._parcels()], chunks, stepped.step, backwards=self._is_backwards)
            self._is_backwards = not self._is_backwards
        except BaseException:
            if stepped.count:
                self._torn = f"the step failed after {stepped.count} of {len(chunks)} chunks"
            raise
        stepped.finish()

    def _require_as_planned(self, chunk: Chunk) -> None:
        for cut in chunk.cuts:
            parameter = self._known[cut.piece.parameter]
            local, grad = local_of(parameter), parameter.grad
            if grad is None:
                continue
            if chunk.parcel is not None:
                self._require_same_parcel(parameter, cut, chunk.parcel)
            if grad.layout is not torch.strided:
                raise PlacementError(
                    "Sparse gradients cannot be streamed.",
                    parameter=_name(parameter),
                    fix="compute it with sparse=False: F.embedding(tokens, weight)",
                )
            if isinstance(parameter, DTensor) and (
                not isinstance(grad, DTensor) or grad.placements != parameter.placements
            ):
                raise PlacementError(
                    "A gradient does not rest as its parameter does.",
                    parameter=_name(parameter),
                    gradient=grad.placements if isinstance(grad, DTensor) else "a plain tensor",
                    fix="let backward compute it, or distribute_tensor(grad, p.device_mesh, p.placements)",
                )
            shape = tuple(local.shape) if cut.piece.is_whole else None
            whole = self._numels[cut.piece.parameter], self._dtypes[cut.piece.parameter]
            if (local.numel(), local.dtype) != whole or (shape is not None and shape != cut.shape):
                raise self._has_changed(parameter, cut)

    def _require_same_parcel(self, parameter: Tensor, cut: Cut, index: int) -> None:
        place = place_of(parameter)
        parcel = place.record.parcels[index] if place is not None and index < len(place.record.parcels) else None
        pieces = zip(parcel.pieces, parcel.offsets, strict=True) if parcel is not None else ()
        span = place.number if place is not None else None, cut.piece.start, cut.piece.stop, cut.in_parcel
        if not any((p.parameter, p.start, p.stop, offset) == span for p, offset in pieces):
            raise self._has_changed(parameter, cut)

    def _has_changed(self, parameter: Tensor, cut: Cut) -> StateError:
        numel, dtype = self._numels[cut.piece.parameter], self._dtypes[cut.piece.parameter]
        return StateError(
            "A parameter has changed since its optimizer was streamed.",
            parameter=_name(parameter),
            expected=f"{numel} elements of {str(dtype).removeprefix('torch.')} on this rank",
            why="its states have the shape and dtype it had; nothing was updated",
            fix="cast or replace parameters before the optimizer is built",
        )

    def _require_whole(self, verb: str) -> None:
        if self._torn is not None:
            raise StateError(
                f"{verb} of an optimizer whose step failed half-way.",
                failed=self._torn,
                why="some parameters are one step ahead of the others",
                fix="load the last checkpoint: model.load_state_dict(...); optimizer.load_state_dict(...)",
            )

    def _parcels(self) -> tuple[Values, Gradients]:
        values, gradients = self._rings
        return Values(values, self._known), Gradients(gradients, self._known)

    # -- where everything is --------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Makes room for all parameters, and moves the states that the optimizer inside has.

        It keeps them until all ranks have theirs in the tier.
        """
        prepared: list[_Prepared] = []
        everywhere(
            self._all_parameters(), lambda: prepared.append(self._prepared()), "Moving the states of an optimizer"
        )
        self._stores, self._chunks, self._known, self._rings = prepared[0]
        self._numels = [local_of(parameter).numel() for parameter in self._known]
        self._dtypes = [parameter.dtype for parameter in self._known]
        self.inner.state = defaultdict(dict)
        self._torn = None

    def _prepared(self) -> _Prepared:
        """Stores with a copy of all states, the chunks in them, their parameters, and what those pass through."""
        stores: dict[Tier | None, Store] = {}
        chunks, known = self._planned(self._all_parameters(), 0, stores)
        states = {parameter: states for parameter, states in self.inner.state.items() if states}
        filled = [c for c in chunks if any(known[cut.piece.parameter] in states for cut in c.cuts)]

        def fill(chunk: Chunk, buffer: Tensor) -> None:
            for cut in chunk.cuts:
                parameter = known[cut.piece.parameter]
                if parameter in states:
                    cut.keep(buffer, dict(_pieces_of(states[parameter], parameter, cut)))

        each_chunk([StoreLane(filled)], filled, fill)
        return stores, chunks, known, rings_for(known)

    def _plan_for_new(self) -> None:
        """Makes room for parameters that were added to a group since."""
        count = sum(len(group["params"]) for group in self.param_groups)
        if count == len(self._known):
            return
        known = {id(parameter) for parameter in self._known}
        new = [parameter for parameter in self._all_parameters() if id(parameter) not in known]
        chunks, parameters = self._planned(new, len(self._known), self._stores)
        self._chunks += chunks
        self._known += parameters
        self._rings = rings_for(self._known)
        self._numels += [local_of(parameter).numel() for parameter in parameters]
        self._dtypes += [parameter.dtype for parameter in parameters]

    def _planned(
        self, parameters: list[Tensor], first: int, stores: dict[Tier | None, Store]
    ) -> tuple[list[Chunk], list[Tensor]]:
        """Chunks for these parameters, which get the numbers from `first` on, and room for them in stores."""
        for parameter in parameters:
            follow(parameter)
        group_of = {id(p): number for number, group in enumerate(self.param_groups) for p in group["params"]}
        groups = [group_of[id(parameter)] for parameter in parameters]
        locals_ = [local_of(parameter) for parameter in parameters]
        schemas = self._schemas(parameters, groups, locals_)
        wanted = self._tiers_of(parameters)
        here = [number for number, parameter in enumerate(parameters) if place_of(parameter) is None]
        packed = chunks_of(
            [locals_[number].numel() for number in here],
            [(locals_[number].device, wanted[number]) for number in here],
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
            chunks.append(Chunk(cuts, nbytes, locals_[here[pieces[0].parameter]].device, _NOWHERE))
        chunks += self._chunks_away(parameters, first, groups, schemas)
        # A parcel that mixes tiers goes where the states of its first parameter go.
        self._find_room(chunks, [wanted[chunk.cuts[0].piece.parameter - first] for chunk in chunks], stores)
        return chunks, parameters

    def _chunk_nbytes(self, nbytes: list[int], wanted: list[tuple[Tier | None, float]]) -> int:
        """The most that a chunk may take: a buffer, or where a part stays on the device, so little that the part is met."""
        if all(fraction == 1 for _, fraction in wanted):
            return self._buffer_nbytes
        return min(self._buffer_nbytes, max(sum(nbytes) // 32, _LEAST_PART_NBYTES))

    def _tiers_of(self, parameters: list[Tensor]) -> list[tuple[Tier | None, float]]:
        """Where the states of each parameter are to rest, and which part of them.

        Raises:
            TierError: Nobody said.
        """
        if self.tier is not None:
            return [(self.tier, self._fraction)] * len(parameters)
        slots = [slot_of(parameter) for parameter in parameters]
        asked = [slot.home.tiers if slot is not None else IN_MEMORY for slot in slots]
        if parameters and all(tiers.optim is None for tiers in asked):
            raise TierError(
                "streamed() was given no tier.",
                optimizer=type(self.inner).__name__,
                fix="zf.streamed(optimizer, zf.nvme('/local_nvme')), or zf.offload(model, optim=...) before the optimizer",
            )
        return [(tiers.optim, tiers.fraction) for tiers in asked]

    def _find_room(
        self, chunks: list[Chunk], wanted: list[tuple[Tier | None, float]], stores: dict[Tier | None, Store]
    ) -> None:
        """Gives each chunk a store and a place in it: so many of them in its tier as its fraction says, taking turns."""
        total: Counter[Tier | None] = Counter()
        there: Counter[Tier | None] = Counter()
        chosen: dict[tuple[Tier | None, torch.device], list[Chunk]] = {}
        for chunk, (tier, fraction) in zip(chunks, wanted, strict=True):
            total[tier] += chunk.nbytes
            is_there = there[tier] + chunk.nbytes / 2 <= fraction * total[tier]
            there[tier] += chunk.nbytes * is_there
            chosen.setdefault((tier if is_there else None, chunk.device), []).append(chunk)
        for (tier, device), members in chosen.items():
            if tier not in stores:
                stores[tier] = store_of(tier, f"states of {type(self.inner).__name__}")
            places = stores[tier].reserve([chunk.nbytes for chunk in members], device)
            for chunk, place in zip(members, places, strict=True):
                chunk.store, chunk.place = stores[tier], place

    def _chunks_away(
        self, parameters: list[Tensor], first: int, groups: list[int], schemas: list[Schema]
    ) -> list[Chunk]:
        """Chunks of parameters that rest, or whose gradients rest, in another tier: one for each parcel."""
        records: dict[Record, dict[int, int]] = {}
        for number, parameter in enumerate(parameters):
            place = place_of(parameter)
            if place is not None:
                records.setdefault(place.record, {})[place.number] = number
        chunks = []
        for record, number_of in records.items():
            for index, parcel in enumerate(record.parcels):
                cuts, nbytes = [], 0
                inside = [
                    (number_of[piece.parameter], piece, offset)
                    for piece, offset in zip(parcel.pieces, parcel.offsets, strict=True)
                    if piece.parameter in number_of
                ]
                for number, piece, offset in sorted(inside, key=lambda found: groups[found[0]]):
                    if not piece.is_whole:
                        self._require_cuttable_away(parameters[number])
                    numbered = Piece(first + number, piece.start, piece.stop, piece.is_whole)
                    local = local_of(parameters[number])
                    cuts.append(Cut(numbered, groups[number], local, schemas[number], nbytes, offset))
                    nbytes += states_nbytes(schemas[number], piece.numel)
                if nbytes > self._buffer_nbytes:
                    raise TierError(
                        f"A buffer of {bytes_text(self._buffer_nbytes)} is too small for the states of a parcel.",
                        needs=bytes_text(nbytes),
                        why="parameters that rest in another tier are stepped in the parcels in which they rest",
                        fix=f"buffer={nbytes} or more; 64 MiB is a good size",
                    )
                if cuts:
                    chunks.append(Chunk(cuts, nbytes, record.device, _NOWHERE, index))
        return chunks

    def _require_cuttable_away(self, parameter: Tensor) -> None:
        if looks_at_whole_tensors(type(self.inner)):
            raise PlacementError(
                f"{_name(parameter)} rests in another tier in several parcels, and cannot be stepped in pieces.",
                optimizer=type(self.inner).__name__,
                why="it looks at whole matrices or tensors",
                fix="leave it in memory: zf.offload(model, params=tier, where=...), or use AdamW",
            )

    def _schemas(self, parameters: list[Tensor], groups: list[int], locals_: list[Tensor]) -> list[Schema]:
        """The states of each parameter: those that one like it has, else those that a first step would make."""
        kinds = [(group, local.dtype, local.device) for group, local in zip(groups, locals_, strict=True)]
        ndims = {kind: local.dim() for kind, local in zip(kinds, locals_, strict=True)}
        found: dict[object, Schema] = {}
        for kind, parameter in zip(kinds, parameters, strict=True):
            schema = schema_of_states(self.inner.state.get(parameter, {}), parameter) if self.inner.state else ()
            if parameter.numel() > 1 and len(schema) > len(found.get(kind, ())):
                found[kind] = schema
        for kind in kinds:
            if kind not in found:
                group, dtype, device = kind
                if not (dtype.is_floating_point or dtype.is_complex):
                    found[kind] = ()  # never trained
                    continue
                found[kind] = schema_of(self.inner, self.param_groups[group], dtype, device, ndims[kind])
        return [found[kind] for kind in kinds]

    def _require_cuttable(self, parameter: Tensor, local: Tensor) -> None:
        if looks_at_whole_tensors(type(self.inner)) or not is_dense(local):
            raise PlacementError(
                f"The states of {_name(parameter)} do not fit a buffer, and cannot be cut.",
                optimizer=type(self.inner).__name__,
                why="it looks at whole matrices or tensors" if is_dense(local) else "its elements have gaps in memory",
                fix="a larger buffer: zf.streamed(optimizer, tier, buffer='1GiB')",
            )

    def _all_parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _cuts(self) -> Iterator[Cut]:
        for chunk in self._chunks:
            yield from chunk.cuts

    def _joined(self) -> defaultdict[Tensor, dict[str, Any]]:
        """The states of whole parameters, in memory of their own."""
        joined: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)

        def join(chunk: Chunk, buffer: Tensor) -> None:
            for cut in chunk.cuts:
                parameter = self._known[cut.piece.parameter]
                for name, value in cut.states(buffer).items():
                    _join(joined[parameter], name, value, parameter, cut)

        stored = [chunk for chunk in self._chunks if chunk.is_stored]
        each_chunk([StoreLane(stored)], stored, join, writes=False)
        return defaultdict(dict, {parameter: joined[parameter] for parameter in self._known if parameter in joined})


class _Stepped:
    """One step under way.

    Attributes:
        count: Chunks whose parameters were, at least in part, updated.
    """

    def __init__(self, optimizer: Streamed) -> None:
        self.count = 0
        self._inner = optimizer.inner
        self._known = optimizer._known
        self._groups = optimizer.param_groups  # every chunk begins with what is there now
        self._scalars = _scalars(vars(optimizer.inner))
        self._after: dict[int, dict[str, Any]] = {}
        self._grads: dict[int, Tensor] = {}

    def step(self, chunk: Chunk, buffer: Tensor, parcel: Tensor, gradients: Tensor) -> None:
        """Steps the parameters of one chunk.

        Args:
            chunk: Which.
            buffer: Their states.
            parcel: Themselves, if they rest in another tier.
            gradients: Their gradients, if these do.
        """
        self.count += 1
        states, values, grads = (memory.to(chunk.device) for memory in (buffer, parcel, gradients))
        state: defaultdict[Any, Any] = defaultdict(dict)
        groups: list[dict[str, Any]] = []
        pairs = []
        for number, cuts in groupby(chunk.cuts, key=lambda cut: cut.group):
            stand_ins = []
            for cut in cuts:
                parameter = self._known[cut.piece.parameter]
                if parameter.grad is None:
                    continue
                is_fetched = grads.numel() > 0 and isinstance(local_of(parameter.grad), TierTensor)
                stand_in = cut.stand_in(
                    cut.of_parcel(values, parameter.dtype) if values.numel() else cut.of(local_of(parameter)),
                    cut.of_parcel(grads, parameter.dtype) if is_fetched else cut.of(self._grad(parameter, cut)),
                    requires_grad=parameter.requires_grad,
                )
                own = cut.states(states)
                if own:
                    state[stand_in] = own
                stand_ins.append(stand_in)
                pairs.append((cut, stand_in))
            if stand_ins:
                groups.append({**self._groups[number], "params": stand_ins})
                self._after[number] = groups[-1]
        vars(self._inner).update(self._scalars)
        with replaced(self._inner, groups, state):
            if not steps_in_one_pass(self._inner):
                raw_step(self._inner)
        for cut, stand_in in pairs:
            cut.keep(states, state.get(stand_in, {}))
        if states is not buffer:
            buffer.copy_(states)
        if values is not parcel:
            parcel.copy_(values)

    def finish(self) -> None:
        """Takes over what the optimizer wrote into its groups."""
        for number, after in self._after.items():
            own = self._groups[number]
            own.update({name: value for name, value in after.items() if name != "params"})

    def _grad(self, parameter: Tensor, cut: Cut) -> Tensor:
        assert parameter.grad is not None
        grad, local = local_of(parameter.grad), local_of(parameter)
        if cut.piece.is_whole or grad.stride() == local.stride():
            return grad
        number = cut.piece.parameter
        if number not in self._grads:  # the gradient lies in another order: once for all pieces
            laid = torch.empty_strided(local.shape, local.stride(), dtype=grad.dtype, device=grad.device)
            self._grads = {number: laid.copy_(grad)}
        return self._grads[number]


def _scalars(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if isinstance(value, int | float)}


def _pieces_of(states: Mapping[str, Any], parameter: Tensor, cut: Cut) -> Iterator[tuple[str, Any]]:
    """The states of a piece, cut from those of its parameter."""
    local = local_of(parameter)
    for name, value in states.items():
        if not isinstance(value, Tensor):
            yield name, value
            continue
        own = local_of(value)
        if own.shape != local.shape or (name not in cut.fields and own.numel() <= 1):
            if name in cut.fields:
                raise CheckpointError(
                    f"The state {name!r} does not fit its parameter.",
                    parameter=f"{_name(parameter)}, {list(local.shape)} of it on this rank",
                    state=list(own.shape),
                    fix="load states that were saved with this layout, or through torch.distributed.checkpoint",
                )
            yield name, own.clone()
            continue
        if not cut.piece.is_whole and own.stride() != local.stride():
            own = torch.empty_strided(local.shape, local.stride(), dtype=own.dtype, device=own.device).copy_(own)
        yield name, cut.of(own)


def _join(states: dict[str, Any], name: str, value: Any, parameter: Tensor, cut: Cut) -> None:
    """Puts the state of a piece where it belongs in that of its parameter."""
    local = local_of(parameter)
    if not isinstance(value, Tensor):
        states[name] = value
    elif value.shape != cut.shape or (name not in cut.fields and local.numel() <= 1):
        states[name] = value.clone()
    else:
        if name not in states:
            whole = torch.empty_strided(
                local.shape, cut.stride if cut.piece.is_whole else local.stride(), dtype=value.dtype
            )
            whole = whole.to(local.device)
            states[name] = (
                resting_tensor(whole, _spec(parameter, value.dtype)) if isinstance(parameter, DTensor) else whole
            )
        cut.of(local_of(states[name])).copy_(value)


def _spec(parameter: DTensor, dtype: torch.dtype) -> Any:
    spec = parameter._spec
    if dtype == parameter.dtype:
        return spec
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    assert spec.tensor_meta is not None
    return DTensorSpec(
        spec.mesh, spec.placements, tensor_meta=TensorMeta(spec.tensor_meta.shape, spec.tensor_meta.stride, dtype)
    )


def _name(parameter: Tensor) -> str:
    slot = slot_of(parameter)
    return str(slot) if slot is not None else f"{str(parameter.dtype).removeprefix('torch.')}{list(parameter.shape)}"
