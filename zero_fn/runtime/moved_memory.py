"""Follows resting parameters that users move elsewhere or replace."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zero_fn.errors import PlacementError, StateError
from zero_fn.runtime.memory import Memory
from zero_fn.runtime.replaced_parameters import Replacement, note_replacement
from zero_fn.runtime.slot import Slot
from zero_fn.tiers.tier_tensor import TierTensor, same_place
from zero_fn.values.dtensors import as_plain, local_of, resting_parameter, set_local

__all__ = ["follow", "is_current", "require_in_memory"]


def is_current(memory: Memory) -> bool:
    """Whether modules still hold the same parameters, on the same memory."""
    with as_plain():
        return memory.moving is None and all(map(Slot.is_current, memory.slots))


def require_in_memory(memory: Memory, unit: str) -> None:
    """Raises where the parameters were evicted."""
    if memory.is_evicted:
        raise StateError(
            "The model is evicted: its parameters are not in memory.",
            unit=unit or "root",
            fix="bring it back first: evicted = zf.offload_states(model, optimizer, "
            "to=...); ...; evicted.restore()",
        )


def follow(memory: Memory) -> None:
    """Takes over parameters that `.to`, `to_empty`, `deepcopy` or
    `load_state_dict(assign=True)` moved elsewhere.

    Raises:
        PlacementError: A parameter was replaced by one that is not sharded as the unit is.
    """
    # Memory made in inference mode could never be trained.
    with torch.inference_mode(False), torch.no_grad():
        if memory.moving is None:
            memory.moving = [
                (parameter, local_of(parameter)) for parameter in map(_successor, memory.slots)
            ]
        memory.form(
            [local.dtype for _, local in memory.moving],
            [local.device for _, local in memory.moving],
        )
        memory.lay_out()
        values: dict[Slot, Tensor] = {}
        for slot, (parameter, local) in zip(memory.slots, memory.moving, strict=True):
            if not same_place(local, slot.flat):
                values[slot] = local
                parameter = _on_other_memory(parameter, slot.resting_local(), slot)
            slot.adopt(parameter, slot.flat)
            slot.register(parameter)
        memory.write(values)
    memory.is_moved = False


def _successor(slot: Slot) -> nn.Parameter:
    """The parameter that is registered now in the place of a slot's.

    Raises:
        PlacementError: It is not sharded as the parameter was.
    """
    parameter = slot.places[0].registered
    if (
        parameter is None
        or isinstance(parameter, DTensor) != (slot.spec is not None)
        or tuple(parameter.shape) != slot.full_shape
        or local_of(parameter).shape != slot.path.local_shape
    ):
        found = (
            "nothing"
            if parameter is None
            else f"{type(parameter.data).__name__} of {list(parameter.shape)}"
        )
        raise PlacementError(
            f"{slot.fqn!r} was replaced after the transform.",
            expected=f"{slot}, {list(slot.path.local_shape)} of it on this rank",
            got=found,
            why="it would be trained on this rank alone and never reduced",
            fix="replace parameters before the transform, "
            "or edit values in `with zf.unsharded(model, writeback=True):`",
        )
    return parameter


def _on_other_memory(parameter: nn.Parameter, view: Tensor, slot: Slot) -> nn.Parameter:
    """A resting parameter on other memory: the same object where torch allows that.

    A plain one cannot lose its memory to a tier, and no tensor can change its device, so another
    parameter takes their place.
    """
    is_plain = not isinstance(parameter, DTensor | TierTensor)
    if parameter.device != view.device or (is_plain and isinstance(view, TierTensor)):
        successor = resting_parameter(view, slot.spec, requires_grad=parameter.requires_grad)
        note_replacement(
            parameter, Replacement(slot.fqn, successor, "a cast or a move of the module")
        )
        return successor
    set_local(parameter, view)
    return parameter
