"""`plan(model)`: predicts bytes that a real step can be measured against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import nn
from torch.optim import Optimizer

from zero_fn.errors import StateError
from zero_fn.looking.counted import add_moved, at_rest, device_type_of, sent_nbytes
from zero_fn.looking.held import Held, padding_nbytes
from zero_fn.looking.walked import walk
from zero_fn.runtime.entry import runs_of, units_of
from zero_fn.runtime.unit import Unit
from zero_fn.streamed import NO_LINK, Footprint, Link, Streamed, footprint

__all__ = ["Moved", "Plan", "plan"]


class Moved(NamedTuple):
    """Bytes per step, in whole pages.

    Attributes:
        read: Bytes read from the tier.
        written: Bytes written to the tier.
    """

    read: int
    written: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What `plan` predicts for this rank: bytes held, in flight, sent and moved. Printable as a table.

    Attributes:
        device_type: Type of the device that computes, such as "cuda".
        held: Bytes at rest between backward and `zero_grad`, in memory and in other tiers (formulas:
            `zero_fn.looking.counted`).
        padding: Bytes that uneven shards and alignment add to `held`.
        sent_nbytes: Bytes sent per step, from the second step on (the first records the schedule).
        sent_by_axis: Bytes sent per step, by the name of the data axis.
        moved: Bytes read and written per step, by tier; see `Moved`. Optimizer states are counted if an optimizer was given,
            as the mean of two steps in a row, since a step begins with the chunks that the last step left in buffers.
        link: Bytes per step that cross the link between the host and an accelerator.
        in_flight_nbytes: The most bytes of gathered parameters and whole gradients at one moment of a step, on top of
            `held`; or of gradients that a stock optimizer gets in another dtype than they rest in.
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
        """Most bytes of device memory that training state takes at one moment of a step: held, padding and in flight. If the
        device is the host, buffers are included."""
        return self.held.by_memory(self.device_type)[0] + self.padding.total + self.in_flight_nbytes

    @property
    def host_nbytes(self) -> int:
        """Beside an accelerator, bytes of host memory that training state takes: offloaded states, and buffers."""
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
        module: A transformed module, also on `meta`. The device is that of its mesh; without a mesh, the CPU.
        optimizer: The optimizer of its parameters: its states, and the buffers of a streamed one, are counted. If a state
            of a parameter is offloaded, a stock optimizer is counted as `zf.streamed(optimizer)` would be.
        optimizer_nbytes_per_element: Without an optimizer, bytes of its state per element: 8 (the default) for Adam in
            float32, 4 for SGD with momentum. Buffers are then not counted.
        backwards: Number of backwards inside `accumulate` per step.

    Returns:
        A `Plan`. The schedule is the one that was recorded in a forward; before the first forward, units run in registration
        order. Inputs of the module are taken to need no gradients, and every parameter that requires a gradient to get one.
        Bytes that `clip_grad_norm_`, `state_dict` and other reads beside the step move are not counted.

    Raises:
        StateError: `module` was not transformed, or both an optimizer and its bytes per element were given.
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
    groups = [group for unit in units for group in unit.groups]
    per_element = 8 if optimizer_nbytes_per_element is None else optimizer_nbytes_per_element
    rest = at_rest(groups, optimizer_nbytes_per_element=per_element if optimizer is None else 0)
    found, sent, in_flight_nbytes = footprint(optimizer) if optimizer is not None else Footprint(), Counter[str](), 0
    for run in runs:
        gathers, uses, peak = walk(run, backwards=backwards)
        in_flight_nbytes, pads = max(in_flight_nbytes, peak), run.transport.pads
        for unit in run.module.live_units():
            times = gathers[unit.index]
            # Gradients of several uses or backwards are summed before they travel, in the dtype of the sum.
            is_exact = backwards > 1 or uses[unit.index] > 1 or pads
            for group in unit.groups:
                add_moved(group, times, found)
                sent += sent_nbytes(group, times_gathered=times, is_exact=is_exact, pads=pads)
    if not isinstance(optimizer, Streamed):
        in_flight_nbytes = max(in_flight_nbytes, _widened_nbytes(units, optimizer))
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


def _widened_nbytes(units: Sequence[Unit], optimizer: Optimizer | None) -> int:
    """Bytes of the gradients of a group that a step of a stock optimizer gets in the dtype of their parameters, if they rest
    in another one."""
    slots = [slot for unit in units for slot in unit.slots]
    if any(slot.kind.must_be_streamed for slot in slots):
        return 0  # it is counted as streamed
    nbytes = {
        id(slot.parameter): slot.path.local_numel * slot.dtype.itemsize
        for slot in slots
        if slot.kind.gradient_dtype != slot.dtype and slot.parameter.requires_grad
    }
    groups = [nbytes] if optimizer is None else [map(id, group["params"]) for group in optimizer.param_groups]
    return max((sum(nbytes.get(each, 0) for each in group) for group in groups), default=0)
