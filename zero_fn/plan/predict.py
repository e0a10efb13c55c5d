"""`plan(model)`: the prediction a step can be checked against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import nn
from torch.optim import Optimizer

from zero_fn.errors import StateError
from zero_fn.plan.counted import add_moved, at_rest, device_type_of, sent_nbytes
from zero_fn.plan.walked import walk
from zero_fn.runtime.entry import runs_of, units_of
from zero_fn.streamed import NO_LINK, Footprint, Link, footprint
from zero_fn.surface.held import Held, padding_nbytes

__all__ = ["Moved", "Plan", "plan"]


class Moved(NamedTuple):
    """Bytes per step, in whole pages.

    Attributes:
        read: From the tier.
        written: To it.
    """

    read: int
    written: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What this rank will hold and send.

    Attributes:
        device_type: Of the device that computes.
        held: Bytes at rest between backward and `zero_grad`, by the formulas of `zero_fn.plan.counted`: in memory, and in
            other tiers.
        padding: Bytes that uneven cuts and alignment add to them.
        sent_nbytes: Bytes sent per step, from the second step on (the first records the schedule).
        sent_by_axis: The same by the name of the data axis they are sent along.
        moved: Bytes read from and written to other tiers per step, by tier; see `Moved`. Of the states of an optimizer only
            if one was given; the mean of two steps in a row, since a step begins with what the last one left in buffers.
        link: Bytes of these, and of parameters and gradients that are stepped elsewhere than they rest, which cross the link
            between the host and an accelerator per step.
        in_flight_nbytes: The most bytes of gathered parameters and whole gradients at one moment of a step, beyond what is
            held: of units that run, are prefetched, stay from forward to backward, or are being reduced.
    """

    device_type: str
    held: Held
    padding: Held
    sent_nbytes: int
    sent_by_axis: Mapping[str, int]
    in_flight_nbytes: int
    moved: Mapping[str, Moved]
    link: Link

    @property
    def peak_nbytes(self) -> int:
        """The most memory of the device that training state takes at one moment of a step: what is held, its padding, and in
        flight. Where the host is the device, with buffers."""
        return self.held.by_memory(self.device_type)[0] + self.padding.total + self.in_flight_nbytes

    @property
    def host_nbytes(self) -> int:
        """Beside an accelerator, the memory of the host that training state takes: what rests there, and buffers."""
        return self.held.by_memory(self.device_type)[1]

    def __str__(self) -> str:
        rows = [
            (name, getattr(self.held, name), f"  + {getattr(self.padding, name) / 1e6:.3f} MB padding")
            for name in ("parameters", "gradients", "optimizer", "total")
        ]
        if self.held.buffers:
            rows.append(("buffers", self.held.buffers, " of memory of the host"))
        rows += [("  there", nbytes, f" in {tier}") for tier, nbytes in self.held.tiers.items()]
        rows.append(("in flight", self.in_flight_nbytes, " at most, gathered and being reduced"))
        rows.append(("peak", self.peak_nbytes, " of memory at most, beside activations"))
        if self.host_nbytes:
            rows.append(("host", self.host_nbytes, " of memory of the host, with buffers"))
        rows.append(("sent", self.sent_nbytes, " per step"))
        rows += [
            ("moved", read, f" read, {written / 1e6:.3f} MB written per step, {tier}")
            for tier, (read, written) in self.moved.items()
        ]
        if self.link != NO_LINK:
            there, back = self.link
            rows.append(("link", there, f" to the device, {back / 1e6:.3f} MB from it per step"))
        if len(self.sent_by_axis) > 1:
            rows += [("  along", nbytes, f" {name!r}") for name, nbytes in self.sent_by_axis.items()]
        return "\n".join(f"{name:<10} {nbytes / 1e6:10.3f} MB{more}" for name, nbytes, more in rows)


def plan(
    module: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    optimizer_nbytes_per_element: int | None = None,
    backwards: int = 1,
) -> Plan:
    """Predicts the bytes that this rank holds, sends, and moves from and to other tiers. Communicates nothing.

    Args:
        module: A transformed module; on `meta` too, where the device is that of its mesh, and without one the CPU.
        optimizer: Over its parameters, so that the states that it makes and the buffers of a streamed one are counted. A
            stock one is taken to be streamed, `zf.streamed(optimizer)`, if any state of a parameter is in another tier.
        optimizer_nbytes_per_element: Without an optimizer, bytes of its state per element: 8 (the default) for Adam in
            float32, 4 for SGD with momentum. Buffers are then not counted.
        backwards: Backwards inside `accumulate` per step.

    Returns:
        A `Plan`. The schedule is the one recorded in the last forward, or, before the first, units in registration order.
        Inputs of the module are taken to need no gradients, and all parameters that require gradients to get them. What
        `clip_grad_norm_`, `state_dict` and other reads of parameters beside the step move is not counted.

    Raises:
        StateError: `module` was not transformed, or both an optimizer and its bytes per element were given.
        TierError: The optimizer has to be streamed, and nobody said where its states are to be.
    """
    runs, units = runs_of(module, verb="plan"), units_of(module)
    if optimizer is not None and optimizer_nbytes_per_element is not None:
        raise StateError(
            "plan() was given an optimizer and bytes per element of another one.",
            optimizer=type(optimizer).__name__,
            optimizer_nbytes_per_element=optimizer_nbytes_per_element,
            fix="leave one of them out: plan(model, optimizer)",
        )
    groups = [group for unit in units for group in unit.groups]
    per_element = 8 if optimizer_nbytes_per_element is None else optimizer_nbytes_per_element
    rest = at_rest(groups, optimizer_nbytes_per_element=per_element if optimizer is None else 0)
    found, sent, in_flight_nbytes = footprint(optimizer) if optimizer is not None else Footprint(), Counter[str](), 0
    for run in runs:
        gathers, uses, peak = walk(run, backwards=backwards)
        in_flight_nbytes, pads = max(in_flight_nbytes, peak), run.transport.pads
        for unit in run.module.live_units():
            times = gathers[unit.index]
            # What several uses or backwards give is summed before it travels.
            is_exact = backwards > 1 or uses[unit.index] > 1 or pads
            for group in unit.groups:
                add_moved(group, times, found)
                sent += sent_nbytes(group, times_gathered=times, is_exact=is_exact, pads=pads)
    held = replace(
        rest,
        optimizer=rest.optimizer + found.states_nbytes,
        buffers=rest.buffers + found.buffers_nbytes,
        tiers=dict(Counter(rest.tiers) + Counter({str(tier): nbytes for tier, nbytes in found.tiers.items()})),
    )
    paddings = [padding_nbytes(unit) for unit in units]
    return Plan(
        device_type_of(groups),
        held,
        padding=Held(sum(parameters for parameters, _ in paddings), sum(gradients for _, gradients in paddings), 0),
        sent_nbytes=sent.total(),
        sent_by_axis=dict(sent),
        in_flight_nbytes=in_flight_nbytes,
        moved={str(tier): Moved(found.read[tier], found.written[tier]) for tier in found.read | found.written},
        link=found.link,
    )
