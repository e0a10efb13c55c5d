"""`streamed(optimizer, tier)`: any elementwise optimizer, with its states in another tier.

A step visits the parameters chunk by chunk. The states of a chunk are views of a buffer; the optimizer's own `step` runs
on the pieces of the parameters in it, plain tensors over their memory; the buffer goes back. So the arithmetic is the
optimizer's own, and each element meets the same operations as without streaming.

[Note: a step that failed half-way] The chunks before the failure are stepped, those after it are not, and nothing can say
so to the rest of a training loop. Such an optimizer refuses to go on until states are loaded. On several ranks all are told.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zero_fn.errors import LayoutError, PlacementError, StateError, StorageError, TierError
from zero_fn.mesh import axes_text
from zero_fn.resting import local_of, rest_gradient
from zero_fn.runtime.advice import say_if_rounded, say_if_slow
from zero_fn.runtime.elementwise import require_elementwise
from zero_fn.runtime.everywhere import everywhere, is_cut, is_shared
from zero_fn.runtime.loaded import settle_states
from zero_fn.runtime.uncompiled import uncompiled
from zero_fn.streamed.chunk import Chunk, Cut, name_of
from zero_fn.streamed.grown import grow
from zero_fn.streamed.handed_over import HandedOver
from zero_fn.streamed.host_load import load_on_host
from zero_fn.streamed.joined import join, pieces_of
from zero_fn.streamed.kept_states import KeptStates, refuse_edit
from zero_fn.streamed.one_pass import arithmetic_of
from zero_fn.streamed.parcels import (
    KINDS,
    Copies,
    Gradients,
    Values,
    follow,
    is_in_tiers,
    place_of,
    records_of,
    rings_for,
)
from zero_fn.streamed.pipeline import Lane, Pass, StoreLane, each_chunk
from zero_fn.streamed.planned import BUFFER_NBYTES, Planned, Planner
from zero_fn.streamed.stepped import Stepped
from zero_fn.streamed.store import Ring, Store, store_of
from zero_fn.streamed.trial import replaced
from zero_fn.streamed.visits import Visits, ring_of_visits
from zero_fn.streamed.waiting import Waiting
from zero_fn.tiers import Cpu, Tier, nbytes_of_text

__all__ = ["Streamed", "streamed"]

_STOCK = (optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad, optim.RMSprop, optim.Adadelta, optim.Adamax, optim.NAdam)
_PASSING = (*(f"{kind} from their tier" for kind in KINDS), "what is on the device")
_Prepared = tuple[dict[Tier | None, Store], list[Chunk], list[Tensor], list[Ring]]


def streamed(
    optimizer: Optimizer,
    tier: Tier | None = None,
    *,
    fraction: float = 1.0,
    buffer: int | str = BUFFER_NBYTES,
    finish: Literal["step", "forward"] = "step",
) -> Streamed:
    """Moves the states of an optimizer to a tier and returns an optimizer that steps them from there.

        optimizer = zf.streamed(torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True), zf.nvme("/local_nvme"))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)

    The updates are those of `optimizer`, to the bit. On `nvme` the states pass through at most four buffers, read ahead
    and written back while others are computed, and never are in memory together; on `cpu` they rest in one range of memory
    of exact size. Where the model computes on the CPU, that is the device's own memory, and nothing is copied.

    Adam and AdamW with `fused=True` are stepped in one pass by a kernel in C, compiled at first use, whose bits are those of
    torch's; it also takes gradients in bfloat16 (`parameter.grad_dtype`), as if cast before. `print(optimizer)` says whether
    it is used, and if not, why: torch then does the same step. Without `fused` a step takes several times as long, which a
    warning says once; `fused=False` says that it is meant.

    With `finish="forward"`, a step of what rests in tiers (parameters and gradients, by `zf.offload`) is taken unit by unit,
    each before it is read next: while the device computes a unit, the host steps the next ones, and a disk reads and writes
    beside it. Whatever reads or writes parameters, gradients or states before finds them stepped. Rates and options are those
    of the moment of `step()`, and so are the numbers.

    Communicates, over sharded or replicated parameters: a byte per rank at the end of a step, by which all ranks learn that
    one has failed; with `finish="forward"` one more at its beginning, for the step before.

    Args:
        optimizer: A stock optimizer, or one of yours, that treats every element alone. States that it has are moved.
        tier: `zf.nvme(path)` or `zf.cpu()`. None: for each parameter the tier that `zf.offload(model, optim=tier)` said; the
            states of others stay on the device.
        fraction: How much of the states, in bytes and to a buffer, is in the tier; the rest stays on the device. Buffers of
            both kinds take turns, so that transfers run beside the steps of what stays (twin-flow).
        buffer: Bytes of a buffer, as a number or as text. Larger parameters pass through it in pieces.
        finish: When a step is finished: "step", when `step()` returns; or "forward", before what it steps is used next.

    Returns:
        An optimizer over the same `param_groups`; step this one. `state_dict()` reads all states into memory, in the format
        of `optimizer`. To step, save or load `optimizer` itself raises.

    Raises:
        PlacementError: The optimizer does not treat every element alone, or keeps something of parameters beside `state`; or
            `finish="forward"` of one that is not torch's, which might read what has changed since `step()`.
        LayoutError: `finish` names no moment.
        StateError: It is streamed already.
        TierError: The tier, or the memory for its buffers, is too small; or no tier was given. Nothing was moved.
        StorageError: The path takes no files, or the disk failed. The optimizer has its states.

    Source:
        ZeRO-Infinity, Rajbhandari et al. 2021, 5.2.2; the split of states over two tiers: ZeRO-Offload++ (twin-flow), 2023.
    """
    if not 0 < fraction <= 1:
        raise TierError(
            "fraction is not a part of the states.", got=fraction, fix="fraction=0.5: half of them, in bytes"
        )
    HandedOver.require_own(optimizer.inner if isinstance(optimizer, Streamed) else optimizer)
    if finish not in ("step", "forward"):
        raise LayoutError("finish names no moment.", got=finish, fix='finish="step", or finish="forward"')
    if finish == "forward" and type(optimizer) not in _STOCK:
        raise PlacementError(
            f"{type(optimizer).__name__} has to finish its steps at once.",
            why="it may look at what changes between step() and the next forward; those of torch.optim do not",
            fix='finish="step"; or torch.optim.AdamW',
        )
    found = Streamed(optimizer, tier, fraction, nbytes_of_text(buffer, "buffer"), waits=finish == "forward")
    say_if_slow(optimizer)
    say_if_rounded(optimizer)
    return found


class Streamed(Optimizer):
    """An optimizer whose states are in a tier; made by `streamed`.

    Attributes:
        inner: The optimizer whose arithmetic it is.
        tier: Where the states rest; None: where `zf.offload` said, for each parameter.
    """

    inner: Optimizer
    tier: Tier | None
    takes_from_tiers = True  # parameters that rest there

    def __init__(
        self, inner: Optimizer, tier: Tier | None, fraction: float, buffer_nbytes: int, *, waits: bool = False
    ) -> None:
        shared = {name: value for name, value in vars(inner).items() if name.startswith("_optimizer_")}
        self.__setstate__({"inner": inner, "tier": tier, "defaults": inner.defaults, **shared})
        self._planner = Planner(inner, tier, fraction, buffer_nbytes)
        self._stores: dict[Tier | None, Store] = {}
        self._torn: str | None = None
        self._waits = waits
        self._waiting: Waiting | None = None  # what is left of the last step
        self._is_backwards = False  # the direction of the next step
        self._known: list[Tensor] = []  # the parameters that chunks were made for, by number
        self._chunks: list[Chunk] = []
        self._rings = [Ring(0, 0, "") for _ in _PASSING]  # what is not where it is stepped passes through them
        self._begin("Moving the states of an optimizer")
        self._handed_over = HandedOver(inner)

    # -- what looks like any optimizer ----------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the optimizer inside."""
        groups: list[dict[str, Any]] = self.inner.param_groups
        return groups

    @property  # type: ignore[override]
    def state(self) -> Mapping[Tensor, Mapping[str, Any]]:
        """What is kept in memory of the state of each parameter, to read: step counts and the like. See `state_dict`."""
        self._finish()
        found: dict[Tensor, Mapping[str, Any]] = {}
        for cut in self._cuts():
            if cut.resident or cut.present:
                found.setdefault(self._known[cut.piece.parameter], KeptStates(cut.resident))
        return KeptStates(found)

    @state.setter
    def state(self, _states: object) -> None:
        refuse_edit()

    @property
    def buffers_nbytes(self) -> int:
        """Bytes of host memory that states, parameters and gradients pass through."""
        return sum(store.buffers_nbytes for store in self._stores.values()) + sum(ring.nbytes for ring in self._rings)

    def rooms(self) -> dict[tuple[Tier | None, torch.device], list[Chunk]]:
        """Its chunks by the tier and the device of their states; None is the device."""
        tier_of = {id(store): tier for tier, store in self._stores.items()}
        found: dict[tuple[Tier | None, torch.device], list[Chunk]] = {}
        for chunk in self._chunks:
            found.setdefault((tier_of[id(chunk.store)], chunk.device), []).append(chunk)
        return found

    def tier_nbytes(self) -> dict[Tier | None, int]:
        """Bytes of the room for states in each tier, in whole pages but for the device, which is None."""
        return {tier: store.nbytes for tier, store in self._stores.items()}

    def __repr__(self) -> str:
        where = " and ".join(map(str, self._stores.values()))
        if any(isinstance(tier, Cpu) for tier in self._stores) and all(c.device.type == "cpu" for c in self._chunks):
            where += ", the device's own: nothing is copied"
        for kind, ring in zip(_PASSING, self._rings, strict=True):
            if ring.count:
                where += f"; {kind} through {ring}"
        kind, how = type(self.inner).__name__, arithmetic_of(self.inner)
        how += ", before the next forward" if self._waits else ""
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
        self._finish_everywhere()
        self.inner.add_param_group(param_group)
        self._plan_for_new()

    def state_dict(self) -> dict[str, Any]:
        """All states and groups in the format of the optimizer inside, read into memory of their own.

        Communicates, over sharded parameters, of which every rank has a part to save: a byte per rank. Over parameters
        that every rank has whole, one rank may save alone.

        Raises:
            StateError: A step has failed half-way.
            StorageError: The disk failed on this rank or, of sharded parameters, on another, or does not hold what was
                written to it.
        """
        self._require_whole("state_dict")
        joined: list[defaultdict[Tensor, dict[str, Any]]] = []
        cut = [parameter for parameter in self._known if is_cut(parameter)]

        def read() -> None:
            self._finish()
            joined.append(self._joined())

        everywhere(cut, read, "Reading the states of an optimizer")
        with replaced(self.inner, self.param_groups, joined[0]):
            return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over states and groups, as on the optimizer inside. Mends an optimizer whose step failed.

        Raises:
            CheckpointError: A state does not fit its parameter, or is the shard of another rank.
            TierError: The tier has no room.
            StorageError: The disk failed.
        """
        with suppress(StorageError, StateError):  # what is loaded mends it
            self._finish()
        self._waiting = None
        self._torn = "states could not be loaded"
        doing = "Loading the states of an optimizer"
        with self._handed_over.loads():
            everywhere(self._all_parameters(), lambda: load_on_host(self.inner, state_dict), doing)
        self._begin(doing)

    @torch.no_grad()
    @uncompiled  # [Note: what is compiled]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the optimizer inside, chunk by chunk.

        Args:
            closure: Evaluated first, with gradients enabled; its value is returned.

        Raises:
            StorageError: The disk failed on this rank or another, or does not hold what was written to it.
            StateError: An earlier step failed half-way.
            PlacementError: A gradient is sparse, plain where its parameter is not, or on another mesh.
        """
        self._finish_everywhere()
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
        for parameter in self._all_parameters():
            rest_gradient(parameter)
        self._everywhere(self._step_chunks)
        return loss

    # -- a step ---------------------------------------------------------------------------------------------------

    def _step_chunks(self) -> None:
        grads = {number: p.grad for number, p in enumerate(self._known) if p.grad is not None}
        own, of_copies, of_gradients, of_visits = self._rings
        values, copies = Values(own, self._known), Copies(of_copies, self._known)
        gradients, visits = Gradients(of_gradients, self._known, grads), Visits(of_visits, self._known, grads)
        stepped = Stepped(self.inner, self._known, grads, copies, visits)
        chunks = [chunk for chunk in self._chunks if any(cut.piece.parameter in grads for cut in chunk.cuts)]
        for chunk in chunks:
            self._require_as_planned(chunk)
        records = [records_of(chunk, self._known, grads) for chunk in chunks]
        for record in chain.from_iterable(records):
            record.settle()  # two steps of one parcel at once would each write back what the other has changed
        can_wait = [self._waits and is_in_tiers(chunk, self._known, grads) for chunk in chunks]
        now = [chunk for chunk, waits in zip(chunks, can_wait, strict=True) if not waits]
        later = [(chunk, each) for chunk, each, waits in zip(chunks, records, can_wait, strict=True) if waits]
        try:
            lanes: list[Lane[Chunk]] = [StoreLane(now), values, copies, gradients, visits]
            each_chunk(lanes, now, stepped.step, backwards=self._is_backwards)
            self._is_backwards = not self._is_backwards
            if later:
                waiting = [chunk for chunk, _ in later]
                lanes = [StoreLane(waiting), values, copies, gradients, visits]
                alone = Stepped(self.inner, self._known, grads, copies, visits, notes=False)  # stock ones keep none
                self._waiting = Waiting(Pass(lanes, waiting, alone.step), [each for _, each in later], lanes[1:])
        except BaseException:
            if stepped.count:
                self._torn = f"the step failed after {stepped.count} of {len(chunks)} chunks"
            raise
        stepped.finish()

    def _finish(self) -> None:
        """Finishes the last step, on this rank.

        Raises:
            StorageError: The disk failed, now or in what asked for it before.
        """
        if self._waiting is None:
            return
        try:
            self._waiting.finish()
        except BaseException:
            self._torn = self._torn or f"the step failed after {self._waiting.progress}"
            raise
        self._waiting = None

    def _finish_everywhere(self) -> None:
        """The same on all ranks, which are told if it fails on one."""
        if self._waits:
            self._everywhere(self._finish)

    def _everywhere(self, act: Callable[[], None]) -> None:
        """A part of a step on all ranks. If it fails on one, no rank may go on."""
        parameters = self._all_parameters()
        try:
            everywhere(parameters, act, "A step of a streamed optimizer")
        except Exception:
            if is_shared(parameters):
                self._torn = self._torn or "it failed on one rank, and others have stepped"
            raise

    def __del__(self) -> None:
        """Parameters outlive their optimizer. Nothing is stepped here: the garbage collector may call it at any moment."""
        waiting: Waiting | None = self.__dict__.get("_waiting")
        if waiting is not None and waiting.is_wanted:
            waiting.outlive()

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
                    parameter=name_of(parameter),
                    fix="compute it with sparse=False: F.embedding(tokens, weight)",
                )
            if isinstance(parameter, DTensor) and (
                not isinstance(grad, DTensor) or grad.device_mesh != parameter.device_mesh
            ):
                raise PlacementError(
                    "A gradient does not rest as its parameter does.",
                    parameter=name_of(parameter),
                    gradient=f"over {axes_text(grad.device_mesh)}" if isinstance(grad, DTensor) else "a plain tensor",
                    fix="let backward compute it, or distribute_tensor(grad, p.device_mesh, p.placements)",
                )
            shape = tuple(local.shape) if cut.piece.is_whole else None
            whole = self._numels[cut.piece.parameter], self._dtypes[cut.piece.parameter]
            if (local.numel(), local.dtype) != whole or (shape is not None and shape != cut.shape):
                raise self._has_changed(parameter, cut)

    def _require_same_parcel(self, parameter: Tensor, cut: Cut, index: int) -> None:
        place = place_of(parameter)
        parcel = place.parcels[index] if place is not None and index < len(place.parcels) else None
        pieces = zip(parcel.pieces, parcel.offsets, strict=True) if parcel is not None else ()
        span = place.number if place is not None else None, cut.piece.start, cut.piece.stop, cut.in_parcel
        if not any((p.parameter, p.start, p.stop, offset) == span for p, offset in pieces):
            raise self._has_changed(parameter, cut)

    def _has_changed(self, parameter: Tensor, cut: Cut) -> StateError:
        numel, dtype = self._numels[cut.piece.parameter], self._dtypes[cut.piece.parameter]
        return StateError(
            "A parameter has changed since its optimizer was streamed.",
            parameter=name_of(parameter),
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

    # -- where everything is --------------------------------------------------------------------------------------

    def _begin(self, doing: str) -> None:
        """Makes room for all parameters, and moves the states that the optimizer inside has.

        It keeps them until all ranks have theirs in the tier.
        """
        prepared: list[_Prepared] = []
        everywhere(self._all_parameters(), lambda: prepared.append(self._prepared()), doing)
        self._stores, self._chunks, self._known, self._rings = prepared[0]
        self._numels = [local_of(parameter).numel() for parameter in self._known]
        self._dtypes = [parameter.dtype for parameter in self._known]
        self.inner.state = defaultdict(dict)
        self._torn = None

    def _prepared(self) -> _Prepared:
        """Stores with a copy of all states, the chunks in them, their parameters, and what those pass through."""
        stores: dict[Tier | None, Store] = {}
        settle_states(self.inner)
        known = self._all_parameters()
        chunks = self._with_room(self._planner.planned(known, 0), stores)
        states = {parameter: states for parameter, states in self.inner.state.items() if states}
        filled = [c for c in chunks if any(known[cut.piece.parameter] in states for cut in c.cuts)]

        def fill(chunk: Chunk, buffer: Tensor) -> None:
            for cut in chunk.cuts:
                parameter = known[cut.piece.parameter]
                if parameter in states:
                    cut.keep(buffer, dict(pieces_of(states[parameter], parameter, cut)))

        each_chunk([StoreLane(filled)], filled, fill)
        return stores, chunks, known, [*rings_for(known), ring_of_visits(chunks, known)]

    def _plan_for_new(self) -> None:
        """Makes room for parameters that were added to a group since."""
        count = sum(len(group["params"]) for group in self.param_groups)
        if count == len(self._known):
            return
        known = {id(parameter) for parameter in self._known}
        new = [parameter for parameter in self._all_parameters() if id(parameter) not in known]
        planned = self._planner.planned(new, len(self._known))
        grow(self._chunks, planned, [*self._known, *new], self._planner)
        self._chunks += self._with_room(planned, self._stores)
        self._known += new
        self._rings = [*rings_for(self._known), ring_of_visits(self._chunks, self._known)]
        self._numels += [local_of(parameter).numel() for parameter in new]
        self._dtypes += [parameter.dtype for parameter in new]

    def _with_room(self, planned: Planned, stores: dict[Tier | None, Store]) -> list[Chunk]:
        """The chunks that are planned, with room in stores."""
        for (tier, device), members in planned.rooms.items():
            if tier not in stores:
                stores[tier] = store_of(tier, f"states of {type(self.inner).__name__}")
            places = stores[tier].reserve([chunk.nbytes for chunk in members], device)
            for chunk, place in zip(members, places, strict=True):
                chunk.store, chunk.place = stores[tier], place
        return planned.chunks

    def _all_parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _cuts(self) -> Iterator[Cut]:
        for chunk in self._chunks:
            yield from chunk.cuts

    def _joined(self) -> defaultdict[Tensor, dict[str, Any]]:
        """The states of whole parameters, in memory of their own."""
        joined: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)

        def visit(chunk: Chunk, buffer: Tensor) -> None:
            for cut in chunk.cuts:
                parameter = self._known[cut.piece.parameter]
                for name, value in cut.states(buffer).items():
                    join(joined[parameter], name, value, parameter, cut)

        stored = [chunk for chunk in self._chunks if chunk.is_stored]
        each_chunk([StoreLane(stored)], stored, visit, writes=False)
        return defaultdict(dict, {parameter: joined[parameter] for parameter in self._known if parameter in joined})
