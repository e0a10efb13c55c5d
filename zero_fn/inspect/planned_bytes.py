"""`plan(model)`: predicts bytes that a real step can be measured against.

With Ψ elements, n ranks, and per element b bytes at rest, c bytes in compute and k bytes of
optimizer states, a rank holds:

    home       parameters                     gradients    optimizer
    NOTHING    Ψ b          (+ Ψ c if cast)   Ψ b          Ψ k
    OPTIMIZER  Ψ c          (+ Ψ/n b if cast) Ψ b          Ψ/n k
    GRADS      Ψ c          (+ Ψ/n b if cast) Ψ/n b        Ψ/n k
    PARAMS     Ψ/n b                          Ψ/n b        Ψ/n k

In plain float32 with Adam (b = 4, k = 8) the rows are 16 Ψ, 8 Ψ + 8 Ψ/n, 4 Ψ + 12 Ψ/n and 16 Ψ/n.
An all-gather sends this rank's shard to n - 1 peers, a reduce-scatter sends each peer its piece:
each sends (n - 1)/n Ψ b bytes.

State that rests in another tier takes no memory of the device, and whole pages of the tier for each
unit. For each disk there is a staging buffer of host memory for parameters and one for gradients,
as large as the largest unit; beside an accelerator there are two of each. Gathered parameters that
stay in memory between uses are not in flight: they count as held.

Source: ZeRO, Rajbhandari et al. 2020, section 5 and figure 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import compress
from typing import NamedTuple

from torch import nn
from torch.optim import Optimizer

from zero_fn.errors import StateError
from zero_fn.inspect.memory import MemoryUse, padding_nbytes
from zero_fn.owners import ByOwner
from zero_fn.owners.footprint import footprint_of
from zero_fn.runtime.bfloat16_step import kept_beside
from zero_fn.runtime.group import Group
from zero_fn.runtime.holding import holding_of
from zero_fn.runtime.leg import Leg, Spot
from zero_fn.runtime.passes import Script
from zero_fn.runtime.path import Hop
from zero_fn.runtime.registry import runs_of, units_of
from zero_fn.runtime.run import Run
from zero_fn.runtime.slot import Slot
from zero_fn.runtime.unit import Unit
from zero_fn.runtime.wire_gather import require_held
from zero_fn.storage import stagings_for
from zero_fn.storage.stored_files import StoredFiles
from zero_fn.streamed import NO_LINK, Footprint, Link, Streamed, footprint
from zero_fn.streamed.pieces import Planner
from zero_fn.tiers.parcels import planned_parcels, record_nbytes, staged_nbytes
from zero_fn.values.chained_optimizer import Optimizers, members_of
from zero_fn.values.schedule import (
    Enter,
    Exit,
    Fetch,
    Reshard,
    Settle,
    Trace,
    Unshard,
    Use,
    forward_schedule,
)
from zero_fn.values.tiers import Cpu, Shelved, is_accelerator
from zero_fn.values.wire import Wire

__all__ = ["Moved", "Plan", "plan"]


class Moved(NamedTuple):
    """Bytes read from a tier and written to it per step, in whole pages."""

    read: int
    written: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What `plan` predicts for this rank: bytes held, in flight, sent and moved.

    Printable as a table.

    Attributes:
        device_type: Type of the device that computes, such as "cuda".
        memory: Bytes at rest between backward and `zero_grad`, in memory and in other tiers
            (formulas: `zero_fn.inspect.planned_bytes`).
        padding: Bytes that uneven shards and alignment add to `memory`.
        sent_nbytes: Bytes sent per step, from the second step on (the first records the schedule).
        sent_by_axis: Bytes sent per step, by the name of the data axis.
        moved: Bytes read and written per step, by tier; see `Moved`. Optimizer states are counted
            if an optimizer was given, as the mean of two steps in a row, since a step begins with
            the chunks that the last step left in buffers.
        link: Bytes per step that cross the link between the host and an accelerator.
        collectives: Collectives of parameters and gradients per step, by the name of the data axis:
            one for each unit and move, where all parameters of a unit travel together.
        in_flight_nbytes: The most bytes of gathered parameters and whole gradients at one moment of
            a step, on top of `memory`; or of gradients that a stock optimizer gets in another dtype
            than they rest in.
        memory_copies_nbytes: With `memory_copies=True`, bytes that this rank writes into shared
            memory for a copy (`zf.checkpoint.memory_copies`). While one is made, the one before it
            is there, too. With several hosts as many go to the next one for each copy, and as many
            come from another.
    """

    device_type: str
    memory: MemoryUse
    padding: MemoryUse
    sent_nbytes: int
    sent_by_axis: Mapping[str, int]
    in_flight_nbytes: int
    moved: Mapping[str, Moved]
    link: Link
    collectives: Mapping[str, int]
    memory_copies_nbytes: int = 0

    @property
    def peak_nbytes(self) -> int:
        """Most bytes of device memory that training state takes at one moment of a step:
        held, padding and in flight.

        If the device is the host, buffers are included.
        """
        return (
            self.memory.by_memory(self.device_type)[0] + self.padding.total + self.in_flight_nbytes
        )

    @property
    def host_nbytes(self) -> int:
        """Beside an accelerator, bytes of host memory that training state takes:
        offloaded states, and buffers."""
        return self.memory.by_memory(self.device_type)[1]

    def __str__(self) -> str:
        rows = [
            (name, getattr(self.memory, name), f"  + {_mb(getattr(self.padding, name))} padding")
            for name in ("parameters", "gradients", "optimizer", "total")
        ]
        if self.memory.buffers:
            rows.append(("buffers", self.memory.buffers, " of memory of the host"))
        rows += [("  there", nbytes, f" in {tier}") for tier, nbytes in self.memory.tiers.items()]
        rows.append(("in flight", self.in_flight_nbytes, " at most, gathered and being reduced"))
        rows.append(("peak", self.peak_nbytes, " of memory at most, beside activations"))
        if self.host_nbytes:
            rows.append(("host", self.host_nbytes, " of memory of the host, with buffers"))
        rows.append(("sent", self.sent_nbytes, " per step"))
        if len(self.sent_by_axis) > 1:
            rows += [
                ("  along", nbytes, f" {name!r}") for name, nbytes in self.sent_by_axis.items()
            ]
        rows += [
            ("moved", read, f" read, {_mb(written)} written per step, {tier}")
            for tier, (read, written) in self.moved.items()
        ]
        if self.link != NO_LINK:
            there, back = self.link
            rows.append(("link", there, f" to the device, {_mb(back)} from it per step"))
        if self.memory_copies_nbytes:
            rows.append(
                (
                    "memory copies",
                    self.memory_copies_nbytes,
                    " a copy in shared memory, and to the next host",
                )
            )
        return "\n".join(f"{name:<10} {_mb(nbytes):>13}{more}" for name, nbytes, more in rows)


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.3f} MB"


def plan(
    module: nn.Module,
    optimizer: Optimizers | Planner | None = None,
    *,
    optimizer_nbytes_per_element: int | None = None,
    backwards: int = 1,
    memory_copies: bool = False,
) -> Plan:
    """Predicts the bytes that this rank holds, sends, and moves from and to other tiers.

    Communicates nothing.

    Args:
        module: A transformed module, also on `meta`. The device is that of its mesh;
            without a mesh, the CPU.
        optimizer: The optimizer of its parameters, or a sequence of them: its states, and the
            buffers of a streamed one, are counted. If a state of a parameter is offloaded, a stock
            one is counted as `zf.streamed(optimizer)` would be.
        optimizer_nbytes_per_element: Without an optimizer, bytes of its state per element: 8 (the
            default) for Adam in float32, 4 for SGD with momentum. Buffers are then not counted.
        backwards: Number of backwards inside `accumulate` per step.
        memory_copies: Whether copies are kept in shared memory (`zf.checkpoint.memory_copies`).

    Returns:
        A `Plan`. The schedule is the one that was recorded in a forward; before the first forward,
        units run in registration order. Inputs of the module are taken to need no gradients, and
        every parameter that requires a gradient to get one. Bytes that `clip_grad_norm_`,
        `state_dict` and other reads beside the step move are not counted.

    Raises:
        StateError: `module` was not transformed, or both an optimizer and its
            bytes per element were given.
        LayoutError: Parameters would travel as differences (`zf.wire.delta4`), and no rank keeps
            any.
        TierError: The optimizer has to be streamed, and no tier for its states was given.
    """
    runs, units = runs_of(module, verb="plan"), units_of(module)
    if optimizer is not None and optimizer_nbytes_per_element is not None:
        raise StateError(
            "plan() was given an optimizer and bytes per element of another one.",
            optimizer=type(optimizer).__name__,
            optimizer_nbytes_per_element=optimizer_nbytes_per_element,
            fix="leave one of them out: plan(model, optimizer)",
        )
    groups = [group for unit in units for group in unit.memory.groups]
    for group in groups:
        require_held(group)
    device_type = next(
        (group.kind.device_type for group in groups if group.kind.device_type != "meta"), "cpu"
    )
    per_element = 8 if optimizer_nbytes_per_element is None else optimizer_nbytes_per_element
    found, sent, collectives, in_flight_nbytes = Footprint(), Counter[str](), Counter[str](), 0
    optimizers = (optimizer,) if isinstance(optimizer, Planner) else members_of(optimizer)
    for each in optimizers:
        found += footprint_of(each) if isinstance(each, ByOwner) else footprint(each)
    held = _at_rest(groups, device_type, per_element if optimizer is None else None, found)
    sent += found.sent
    for run in runs:
        gathers, uses, peak = _walk(run, backwards=backwards)
        in_flight_nbytes, pads = max(in_flight_nbytes, peak), run.transport.pads
        for unit in run.live_units():
            times = gathers[unit.index]
            # Gradients of several uses or backwards are summed before they travel,
            # in the dtype of the sum.
            is_exact = backwards > 1 or uses[unit.index] > 1 or pads
            # All parameters of a unit travel together.
            together = dict[tuple[str, Spot], int]()
            for slot in unit.slots:
                for axis, to, count, nbytes in _moves(slot, times, is_exact=is_exact, pads=pads):
                    sent[axis] += count * nbytes
                    together[axis, to] = max(count, together.get((axis, to), 0))
            for (axis, _), count in together.items():
                collectives[axis] += count
            for group in unit.memory.groups:
                _add_moved(group, times, found)
    stock = [each for each in optimizers if not isinstance(each, Streamed | ByOwner | Planner)]
    if stock or optimizer is None:
        in_flight_nbytes = max(in_flight_nbytes, _widened_nbytes(units, stock))
    paddings = [padding_nbytes(unit) for unit in units]
    return Plan(
        device_type,
        held,
        padding=MemoryUse(
            sum(parameters for parameters, _ in paddings),
            sum(gradients for _, gradients in paddings),
            0,
        ),
        sent_nbytes=sent.total(),
        sent_by_axis=dict(+sent),
        in_flight_nbytes=in_flight_nbytes,
        moved={
            str(tier): Moved(found.read[tier], found.written[tier])
            for tier in found.read | found.written
        },
        link=found.link,
        collectives=dict(+collectives),
        memory_copies_nbytes=_copied_nbytes(
            groups,
            None if optimizer is None else found.states_nbytes + found.tiers.total(),
            per_element,
        )
        if memory_copies
        else 0,
    )


def _copied_nbytes(groups: Sequence[Group], states_nbytes: int | None, per_element: int) -> int:
    """Bytes of parameters and states of which this rank makes a copy:
    each element is copied by one of those that hold it.

    `states_nbytes` are those of the optimizer on this rank; None: `per_element` counts.
    """
    copied = trained = trained_own = 0
    for ordinal, slot in enumerate(slot for group in groups for slot in group.slots):
        itemsize, holding = slot.parameter.dtype.itemsize, holding_of(slot.parameter)
        box = None if holding is None else holding.own(ordinal, itemsize, (0, 1))
        own = 0 if box is None else box.numel
        copied += own * itemsize
        if slot.parameter.requires_grad:
            trained += slot.path.local_numel
            trained_own += own
    if states_nbytes is None:
        return copied + per_element * trained_own
    return copied + states_nbytes * trained_own // max(trained, 1)


def _widened_nbytes(units: Sequence[Unit], optimizers: Sequence[Optimizer]) -> int:
    """Bytes of the gradients of a group that a step of stock optimizers (none: of any) gets in the
    dtype of their parameters, if they rest in another one."""
    slots = [slot for unit in units for slot in unit.slots]
    if any(slot.kind.must_be_streamed or slot.kind.rounding is not None for slot in slots):
        return 0  # it is counted as streamed
    nbytes = {
        id(slot.parameter): slot.path.local_numel * slot.dtype.itemsize
        for slot in slots
        if slot.kind.gradient_dtype != slot.dtype and slot.parameter.requires_grad
    }
    groups = [
        map(id, group["params"]) for optimizer in optimizers for group in optimizer.param_groups
    ]
    groups = groups if optimizers else [map(int, nbytes)]
    return max((sum(nbytes.get(each, 0) for each in group) for group in groups), default=0)


def _at_rest(
    groups: Sequence[Group], device_type: str, per_element: int | None, stepped: Footprint
) -> MemoryUse:
    """Bytes that this rank holds between backward and `zero_grad`, without padding.

    States are those of the optimizers, or take so many bytes an element.
    """
    parameters = gradients = 0
    optimizer = stepped.states_nbytes
    tiers = Counter({str(tier): nbytes for tier, nbytes in stepped.tiers.items()})
    largest = dict[Shelved, int]()
    for group in groups:
        kind = group.kind
        for (what, tier), forms in (*group.forms_away(), *group.codes_away()):
            in_files = _in_files(group) if what == "parameters" else None
            if in_files is not None:
                tiers[str(in_files[0])] += in_files[1]
                continue
            tiers[str(tier)] += record_nbytes(forms)
            if not isinstance(tier, Cpu):
                largest[what, tier] = max(staged_nbytes(forms), largest.get((what, tier), 0))
        for slot in group.slots:
            parameters += kind.resting_nbytes(slot.path)
            if not slot.parameter.requires_grad:
                continue
            if not kind.is_gradient_away:
                gradients += slot.path.gradient_numel * kind.gradient_dtype.itemsize
            if per_element is not None:
                beside = sum(dtype.itemsize for _, dtype in kept_beside(slot.parameter))
                states = slot.path.local_numel * (per_element + beside)
                away = kind.states_away_nbytes(states)
                optimizer += states - away
                tiers[str(kind.home.tiers.optim)] += away
    buffers = stepped.buffers_nbytes + sum(largest.values()) * stagings_for(device_type)
    return MemoryUse(parameters, gradients, optimizer, buffers, dict(+tiers))


def _in_files(group: Group) -> tuple[StoredFiles, int] | None:
    """The files of others in which parameters rest, and the bytes that are read there;
    None if they rest elsewhere."""
    record = group.record
    if record is not None and isinstance(record.shelf, StoredFiles):
        return (record.shelf, record.nbytes)
    return None


class _Move(NamedTuple):
    """Collectives of one kind for a parameter in a step."""

    axis: str  # its name
    to: Spot  # whole parameters, a sum, or gradients at rest
    times: int
    nbytes: int  # that this rank sends in each


def _moves(slot: Slot, times_gathered: int, *, is_exact: bool, pads: bool) -> Iterator[_Move]:
    """What moves a parameter and its gradient along axes.

    Of two axes the first carries as many bytes as one axis alone would;
    the second carries this rank's piece on the first.
    """
    kind = slot.kind
    extension = slot.extension if kind.by_extension else None
    for leg, hop, cut in _along(slot, kind.up):
        nbytes = _nbytes(leg, slot, (cut.piece if pads else cut.own) * (hop.axis.size - 1))
        if extension is not None and extension.sent_nbytes is not None:
            nbytes = extension.sent_nbytes // slot.path.size * (slot.path.size - 1)
        times = 1 if leg.is_kept else times_gathered
        yield _Move(hop.axis.name, Spot.WHOLE, times, nbytes)
    for leg, hop, cut in _along(slot, kind.down) if slot.parameter.requires_grad else ():
        is_gathered = leg.source is Spot.GRADIENT
        sent = cut.numel - cut.own
        if pads and kind.scatter is None:
            sent = cut.piece * (hop.axis.size - 1)
        elif is_gathered:
            sent = cut.own * (hop.axis.size - 1)
        if is_exact and leg.source is Spot.LOCAL and not isinstance(leg.form, Wire):
            leg = replace(leg, form=kind.sum_dtype)
        to = Spot.GRADIENT if is_gathered else Spot.SUM
        yield _Move(hop.axis.name, to, 1, _nbytes(leg, slot, sent))


class _Cut(NamedTuple):
    """How the hop of a leg cuts a parameter, in elements."""

    numel: int  # of what it cuts
    own: int  # of that this rank has
    piece: int  # the largest that a rank has


def _along(slot: Slot, legs: Sequence[Leg]) -> Iterator[tuple[Leg, Hop, _Cut]]:
    """The legs along axes of a parameter with elements."""
    numel, cuts = slot.path.numel, list[_Cut]()
    # No part of a row is alone on a rank.
    row = slot.path.row_numel if slot.kind.scatter is not None else 1
    for hop in slot.path.hops if numel else ():
        piece = hop.piece_of(numel, row)
        own = min(piece, numel - min(hop.axis.rank * piece, numel))
        cuts.append(_Cut(numel, own, piece))
        numel = own
    for leg in legs if cuts else ():
        if leg.hop is not None:
            yield leg, slot.path.hops[leg.hop], cuts[leg.hop]


def _nbytes(leg: Leg, slot: Slot, numel: int) -> int:
    """Bytes of so many elements on a leg."""
    if isinstance(leg.form, Wire):
        return leg.form.records(slot.path.row_numel).nbytes_of(numel)
    return numel * leg.form.itemsize


def _add_moved(group: Group, times_gathered: int, found: Footprint) -> None:
    """Adds what forward and backward move from and to tiers: for each gather parameters, or their
    compute copies; gradients once.

    Beside an accelerator both cross the link to the host.
    """
    kind, away = group.kind, dict(group.forms_away())
    codes = group.codes_away()
    for (_, tier), forms in codes:
        found.read[tier] += times_gathered * record_nbytes(forms)
    trained = [slot.parameter.requires_grad for slot in group.slots]
    has_copies = any(what == "compute copies" for what, _ in away)
    for (what, tier), forms in away.items():
        if what == "gradients":
            for parcel in planned_parcels(tuple(forms)):
                some = [trained[piece.parameter] for piece in parcel.pieces]
                if any(some):
                    found.written[tier] += parcel.nbytes
                    # Gradients of frozen parameters lie in the same pages.
                    found.read[tier] += 0 if all(some) else parcel.nbytes
        elif not codes and (what == "compute copies" or not has_copies):
            place, nbytes = _in_files(group) or (tier, record_nbytes(forms))
            found.read[place] += times_gathered * nbytes
    if is_accelerator(kind.device_type):
        there = back = 0
        if kind.is_away:
            dtype = kind.compute_dtype if has_copies else kind.dtype
            coded = sum(form.numel for _, forms in codes for form in forms)  # bytes
            whole = sum(slot.path.local_numel for slot in group.slots) * dtype.itemsize
            there = times_gathered * (coded or whole)
        if kind.is_gradient_away:
            numels = (slot.path.local_numel for slot in group.slots)
            back = sum(compress(numels, trained)) * kind.gradient_dtype.itemsize
        found.link = Link(found.link[0] + there, found.link[1] + back)


class _Walk(NamedTuple):
    """What a step does with the units of a module, by their numbers."""

    gathers: Counter[int]
    uses: Counter[int]  # in a forward
    # Most of gathered parameters and whole gradients on this rank at one moment.
    in_flight_nbytes: int


def _walk(run: Run, *, backwards: int) -> _Walk:
    """Counts along the schedule of the longest forward that was recorded and of its backward.

    Before the first forward it is the schedule of units that run in registration order. Of several
    backwards, gradients stay whole until the last.
    """
    units = {unit.index: unit for unit in run.live_units()}
    trained = frozenset(index for index, unit in units.items() if unit.gradients.are_wanted)
    recorded = (trace for (_, grad), (trace, _) in run.recorded.items() if grad)
    trace = max(recorded, key=len, default=None) or _nested_trace(
        {index: unit.name for index, unit in units.items()}
    )
    forward = run.ahead(forward_schedule(trace, keeps_last=True))
    reduced = trained if backwards == 1 else frozenset()
    backward = Script(_way_back(trace, trained), reduced, ahead=run.ahead).events
    uses = Counter(bracket.use.unit for bracket in trace if isinstance(bracket, Enter))
    gathers = Counter({index: 1 for index in uses if not units[index].memory.is_transient})
    gathered: set[int] = set()
    landing: set[int] = set()  # those that a disk is being read into
    pending: set[int] = set()
    peak = 0
    gathered_nbytes = {
        index: sum(map(_gathered_nbytes, unit.memory.groups)) for index, unit in units.items()
    }
    gradient_nbytes = {index: _gradient_nbytes(unit) for index, unit in units.items()}
    for events, in_forward in ((forward, True), (backward, False)) * backwards:
        for event in events:
            if isinstance(event, Unshard):
                gathers[event.unit] += (
                    units[event.unit].memory.is_transient and event.unit not in gathered
                )
                gathered.add(event.unit)
                landing.discard(event.unit)
            elif isinstance(event, Fetch) and units[event.unit].memory.landing_nbytes:
                landing.add(event.unit)
            elif isinstance(event, Reshard) and not (
                in_forward and units[event.unit].memory.reshards_after_backward
            ):
                gathered.discard(event.unit)
            elif isinstance(event, Enter) and not in_forward:
                pending.add(event.use.unit)
            elif isinstance(event, Settle):
                pending.discard(event.unit)
            whole = sum(map(gathered_nbytes.__getitem__, gathered | landing))
            peak = max(peak, whole + sum(map(gradient_nbytes.__getitem__, pending)))
        if not in_forward:
            gathered.clear()  # a backward ends with every transient unit at rest
    return _Walk(gathers, uses, peak)


def _gathered_nbytes(group: Group) -> int:
    """Bytes of a buffer that has memory during a use only, and of codes."""
    whole = 0 if group.kind.is_kept or group.whole is None else group.whole.nbytes
    return whole + sum(group.kind.records_nbytes(slot.path) for slot in group.slots)


def _gradient_nbytes(unit: Unit) -> int:
    """Bytes of the whole gradients of a unit, from the backward that makes them until they are
    reduced; of those that travel in a format, also of the records that this rank sends, and of as
    many that come."""
    total = 0
    for slot in unit.slots:
        if slot.parameter.requires_grad:
            numel, scatter = slot.path.numel, slot.kind.scatter
            total += numel * slot.kind.compute_dtype.itemsize
            if scatter is not None:
                total += 2 * scatter.records(slot.path.row_numel).nbytes_of(numel)
    return total


def _way_back(trace: Trace, trained: Set[int]) -> Trace:
    """The part of a forward that its backward runs through:
    the uses that end after the first trained unit has begun."""
    begun = False
    uses: set[Use] = set()
    for bracket in trace:
        begun |= bracket.use.unit in trained
        if begun and isinstance(bracket, Exit):
            uses.add(bracket.use)
    return tuple(bracket for bracket in trace if bracket.use in uses)


def _nested_trace(units: Mapping[int, str]) -> Trace:
    """The trace of a model whose units run in order, the root first,
    each inside the unit whose name begins its own."""
    trace: list[Enter | Exit] = []
    around: list[int] = []
    for unit, name in units.items():
        while around and units[around[-1]] and not name.startswith(f"{units[around[-1]]}."):
            trace.append(Exit(Use(around.pop())))
        trace.append(Enter(Use(unit)))
        around.append(unit)
    return (*trace, *(Exit(Use(unit)) for unit in reversed(around)))
