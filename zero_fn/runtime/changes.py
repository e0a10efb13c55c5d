"""Values that a forward changes in its parameters: an embedding with `max_norm`, a clamp, a codebook with running means.

A forward computes with copies of its parameters, which are dropped. So a change of one is refused, at every stage, when the
forward ends: torch counts changes in place. It counts none through `.data`, which are lost (docs/limits.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zero_fn.errors import PlacementError
from zero_fn.runtime.shown import Shown
from zero_fn.runtime.slot import Slot
from zero_fn.runtime.uncompiled import uncompiled

__all__ = ["require_unchanged"]


@uncompiled
def require_unchanged(unit: str, slots: Sequence[Slot], shown: Shown, tensors: Sequence[Tensor]) -> None:
    """Refuses changes of what modules see under the names of parameters.

    Tensors of the user may be changed: those of `functional_call`, and whole parameters that are registered for a while.

    Args:
        unit: Whose forward or backward has ended.
        slots: Its parameters.
        shown: What stands under their names.
        tensors: What was seen, new or of version 0 when it began.

    Raises:
        PlacementError: One was changed in place.
    """
    is_registered = shown.unsharded_values is not None or shown.leaves is not None
    for number, tensor in enumerate(tensors):
        if number in shown.swapped or (is_registered and tensor.is_inference()) or not tensor._version:
            continue
        slot = slots[number]
        if is_registered and slot.kind.compute_dtype == slot.dtype:
            continue
        raise PlacementError(
            f"The forward changed {slot.fqn!r} in place.",
            parameter=slot,
            unit=unit or "root",
            why="a forward computes with copies of what rests, and each rank with its own",
            fix="change it between steps: with torch.no_grad(): parameter.clamp_(...); keep running means in a buffer; "
            "instead of max_norm: with zf.unsharded(model, writeback=True), torch.no_grad(): weight.renorm_(2, 0, 1.0)",
        )
