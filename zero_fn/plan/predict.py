"""`plan(model)`: the prediction a step can be checked against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn
from torch.optim import Optimizer

from zero_fn.errors import StateError
from zero_fn.held import Held
from zero_fn.plan.in_flight import in_flight_nbytes
from zero_fn.plan.memory import at_rest, device_type_of
from zero_fn.plan.moved import Moved, add_units, link_of_units
from zero_fn.plan.sent import gathers, nested_trace, sent_nbytes
from zero_fn.runtime.entry import steps_of, units_of
from zero_fn.runtime.step import Step
from zero_fn.runtime.unit import Unit
from zero_fn.schedule import Enter, Trace
from zero_fn.streamed import NO_LINK, Footprint, Link, footprint

__all__ = ["Plan", "plan"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What this rank will hold and send.

    Attributes:
        device_type: Of the device that computes.
        held: Bytes at rest between backward and `zero_grad`, by the formulas of `zero_fn.plan.memory`: in memory, and in
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
            (name, getattr(self.held, name), getattr(self.padding, name))
            for name in ("parameters", "gradients", "optimizer", "total")
        ]
        lines = [f"{name:<10} {nbytes / 1e6:10.3f} MB  + {pad / 1e6:.3f} MB padding" for name, nbytes, pad in rows]
        if self.held.buffers:
            lines.append(f"{'buffers':<10} {self.held.buffers / 1e6:10.3f} MB of memory of the host")
        lines += [f"{'  there':<10} {nbytes / 1e6:10.3f} MB in {tier}" for tier, nbytes in self.held.tiers.items()]
        lines.append(f"{'in flight':<10} {self.in_flight_nbytes / 1e6:10.3f} MB at most, gathered and being reduced")
        lines.append(f"{'peak':<10} {self.peak_nbytes / 1e6:10.3f} MB of memory at most, beside activations")
        if self.host_nbytes:
            lines.append(f"{'host':<10} {self.host_nbytes / 1e6:10.3f} MB of memory of the host, with buffers")
        lines.append(f"{'sent':<10} {self.sent_nbytes / 1e6:10.3f} MB per step")
        lines += [
            f"{'moved':<10} {read / 1e6:10.3f} MB read, {written / 1e6:.3f} MB written per step, {tier}"
            for tier, (read, written) in self.moved.items()
        ]
        if self.link != NO_LINK:
            there, back = self.link
            lines.append(f"{'link':<10} {there / 1e6:10.3f} MB to the device, {back / 1e6:.3f} MB from it per step")
        if len(self.sent_by_axis) > 1:
            lines += [f"{'  along':<10} {nbytes / 1e6:10.3f} MB {name!r}" for name, nbytes in self.sent_by_axis.items()]
        return "\n".join(lines)


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
    steps = steps_of(module, verb="plan")
    units = units_of(module)
    if optimizer is not None and optimizer_nbytes_per_element is not None:
        raise StateError(
            "plan() was given an optimizer and bytes per element of another one.",
            optimizer=type(optimizer).__name__,
            optimizer_nbytes_per_element=optimizer_nbytes_per_element,
            fix="leave one of them out: plan(model, optimizer)",
        )
    per_element = optimizer_nbytes_per_element if optimizer_nbytes_per_element is not None else 8
    held = at_rest(units, optimizer_nbytes_per_element=per_element if optimizer is None else 0)
    states = footprint(optimizer) if optimizer is not None else Footprint()
    there, back = states.link
    for step in steps:
        times = _gathers(step, backwards)
        add_units(step.live_units(), times, states.read, states.written)
        to_device, from_device = link_of_units(step.live_units(), times)
        there, back = there + to_device, back + from_device
    sent = sum((_sent(step, backwards) for step in steps), Counter[str]())
    return Plan(
        device_type_of(units),
        _with_states(held, states),
        _padding(units),
        sent.total(),
        dict(sent),
        max(in_flight_nbytes(step, _trace(step), backwards=backwards) for step in steps),
        {str(tier): Moved(states.read[tier], states.written[tier]) for tier in states.read | states.written},
        Link(there, back),
    )


def _with_states(held: Held, states: Footprint) -> Held:
    tiers = Counter(held.tiers)
    for tier, nbytes in states.tiers.items():
        tiers[str(tier)] += nbytes
    return replace(
        held,
        optimizer=held.optimizer + states.states_nbytes,
        buffers=held.buffers + states.buffers_nbytes,
        tiers=dict(tiers),
    )


def _sent(step: Step, backwards: int) -> Counter[str]:
    units = step.live_units()
    trace, times = _trace(step), _gathers(step, backwards)
    uses = Counter(bracket.use.unit for bracket in trace if isinstance(bracket, Enter))
    total: Counter[str] = Counter()
    for unit in units:
        total += sent_nbytes(
            unit.slots,
            times_gathered=times[unit.index],
            # What several uses or backwards give is summed before it travels.
            is_exact=backwards > 1 or uses[unit.index] > 1 or step.transport.pads,
            pads=step.transport.pads,
        )
    return total


def _gathers(step: Step, backwards: int) -> Counter[int]:
    return gathers(
        _trace(step),
        is_transient=lambda index: step.unit(index).is_transient,
        stays=lambda index: step.unit(index).reshards_after_backward,
        is_trained=lambda index: step.unit(index).requires_grad,
        backwards=backwards,
    )


def _trace(step: Step) -> Trace:
    return step.recorded_trace() or nested_trace({unit.index: unit.name for unit in step.live_units()})


def _padding(units: list[Unit]) -> Held:
    parameters = gradients = 0
    for unit in units:
        resting, gradient = unit.padding_nbytes()
        parameters += resting
        gradients += gradient
    return Held(parameters, gradients, 0)
