"""Whole parameters under the names of resting ones."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from zero_fn.resting import on_spec
from zero_fn.runtime.unit import Unit

__all__ = ["register_resting", "register_wholes"]


def register_wholes(unit: Unit, wholes: Sequence[Tensor]) -> list[nn.Parameter]:
    """Registers whole values in place of the resting parameters: plain, or on the model axes where they were placed."""
    parameters = []
    for slot, whole in zip(unit.slots, wholes, strict=True):
        value = whole.data  # its version counts changes from here on
        value = value if slot.model is None else on_spec(value, slot.model)
        parameter = nn.Parameter(value, requires_grad=slot.parameter.requires_grad)
        for place in slot.places:
            place.register(parameter)
        parameters.append(parameter)
    return parameters


def register_resting(unit: Unit) -> None:
    """Registers the resting parameters again."""
    for slot in unit.slots:
        for place in slot.places:
            place.register(slot.parameter)
