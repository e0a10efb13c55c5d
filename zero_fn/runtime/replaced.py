"""Resting parameters that `.to`, `load_state_dict(assign=True)` or a user put in place of those of a unit."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zero_fn.errors import PlacementError
from zero_fn.resting import local_of, set_local
from zero_fn.runtime.registry import Replacement, note_replacement
from zero_fn.runtime.slot import Slot
from zero_fn.runtime.tier_tensor import TierTensor

__all__ = ["on_other_memory", "resting_successor"]


def resting_successor(slot: Slot) -> nn.Parameter:
    """What is registered now where the resting parameter of a slot was.

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
        found = "nothing" if parameter is None else f"{type(parameter.data).__name__} of {list(parameter.shape)}"
        raise PlacementError(
            f"{slot.fqn!r} was replaced after the transform.",
            expected=f"{slot}, {list(slot.path.local_shape)} of it on this rank",
            got=found,
            why="it would be trained on this rank alone and never reduced",
            fix="replace parameters before the transform, or edit values in `with zf.unsharded(model, writeback=True):`",
        )
    return parameter


def on_other_memory(parameter: nn.Parameter, view: Tensor, slot: Slot) -> nn.Parameter:
    """A resting parameter on other memory. A plain one cannot lose its memory: another one takes its place."""
    if isinstance(view, TierTensor) and not isinstance(parameter, DTensor | TierTensor):
        successor = nn.Parameter(view, requires_grad=parameter.requires_grad)
        note_replacement(parameter, Replacement(slot.fqn, successor, "a cast or a move of the module"))
        return successor
    set_local(parameter, view)
    return parameter
