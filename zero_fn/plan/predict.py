"""`plan(model)`: the prediction a step can be checked against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from zero_fn.held import Held
from zero_fn.plan.in_flight import in_flight_nbytes
from zero_fn.plan.memory import at_rest
from zero_fn.plan.sent import gathers, nested_trace, sent_nbytes
from zero_fn.runtime.entry import steps_of, units_of
from zero_fn.runtime.step import Step
from zero_fn.runtime.unit import Unit
from zero_fn.schedule import Enter, Trace

__all__ = ["Plan", "plan"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What this rank will hold and send.

    Attributes:
        held: Bytes at rest between backward and `zero_grad`, by the formulas of `zero_fn.plan.memory`: in memory, and in
            other tiers.
        padding: Bytes that uneven cuts and alignment add to them.
        sent_nbytes: Bytes sent per step, from the second step on (the first records the schedule).
        sent_by_axis: The same by the name of the data axis they are sent along.
        in_flight_nbytes: The most bytes of gathered parameters and whole gradients at one moment of a step, beyond what is
            held: of units that run, are prefetched, stay from forward to backward, or are being reduced.
    """

    held: Held
    padding: Held
    sent_nbytes: int
    sent_by_axis: Mapping[str, int]
    in_flight_nbytes: int

    def __str__(self) -> str:
        rows = [
            (name, getattr(self.held, name), getattr(self.padding, name))
            for name in ("parameters", "gradients", "optimizer", "total")
        ]
        lines = [f"{name:<10} {nbytes / 1e6:10.3f} MB  + {pad / 1e6:.3f} MB padding" for name, nbytes, pad in rows]
        if self.held.buffers:
            lines.append(f"{'buffers':<10} {self.held.buffers / 1e6:10.3f} MB of host memory")
        lines += [f"{'  there':<10} {nbytes / 1e6:10.3f} MB in {tier}" for tier, nbytes in self.held.tiers.items()]
        lines.append(f"{'in flight':<10} {self.in_flight_nbytes / 1e6:10.3f} MB at most, gathered and being reduced")
        lines.append(f"{'sent':<10} {self.sent_nbytes / 1e6:10.3f} MB per step")
        if len(self.sent_by_axis) > 1:
            lines += [f"{'  along':<10} {nbytes / 1e6:10.3f} MB {name!r}" for name, nbytes in self.sent_by_axis.items()]
        return "\n".join(lines)


def plan(module: nn.Module, *, optimizer_nbytes_per_element: int = 8, backwards: int = 1) -> Plan:
    """Predicts the bytes that this rank holds at rest and sends per step. Communicates nothing.

    Args:
        module: A transformed module; on `meta` too.
        optimizer_nbytes_per_element: Bytes of optimizer state per element: 8 for Adam in float32, 4 for SGD with momentum.
        backwards: Backwards inside `accumulate` per step.

    Returns:
        A `Plan`. The schedule is the one recorded in the last forward, or, before the first, units in registration order.
        Inputs of the module are taken to need no gradients.

    Raises:
        StateError: `module` was not transformed.
    """
    steps = steps_of(module, verb="plan")
    units = units_of(module)
    sent = sum((_sent(step, backwards) for step in steps), Counter[str]())
    return Plan(
        at_rest(units, optimizer_nbytes_per_element=optimizer_nbytes_per_element),
        _padding(units),
        sent.total(),
        dict(sent),
        max(in_flight_nbytes(step, _trace(step), backwards=backwards) for step in steps),
    )


def _sent(step: Step, backwards: int) -> Counter[str]:
    units = step.live_units()
    trace = _trace(step)
    times = gathers(
        trace,
        is_transient=lambda index: step.unit(index).is_transient,
        stays=lambda index: step.unit(index).reshards_after_backward,
        is_trained=lambda index: step.unit(index).requires_grad,
        backwards=backwards,
    )
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


def _trace(step: Step) -> Trace:
    return step.recorded_trace() or nested_trace({unit.index: unit.name for unit in step.live_units()})


def _padding(units: list[Unit]) -> Held:
    parameters = gradients = 0
    for unit in units:
        resting, gradient = unit.padding_nbytes()
        parameters += resting
        gradients += gradient
    return Held(parameters, gradients, 0)
