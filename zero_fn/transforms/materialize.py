"""From `meta` to memory, one unit at a time."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from zero_fn.agreement import content_digest
from zero_fn.errors import StateError
from zero_fn.grid import local_part
from zero_fn.runtime.entry import steps_of, units_of
from zero_fn.runtime.slot import Slot

__all__ = ["materialize"]

M = TypeVar("M", bound=nn.Module)


def materialize(module: M, device: torch.device | str) -> M:
    """Allocates a transformed `meta` module and initialises it, never holding more than one whole unit.

        with torch.device("meta"):
            model = GPT(config)
        model = zf.materialize(zf.shard_params(model, mesh["dp"]), "cpu")

    Each unit in turn is allocated whole, `reset_parameters()` of its modules runs on whole plain tensors, and this
    rank's shard is kept. With the same seed on every rank the values are those that one process gets from calling
    `reset_parameters()` in the same order, whatever the stage, the axes and the number of ranks. Buffers are allocated and
    must be set by `reset_parameters()` too.

    Communicates nothing; the next forward compares over ranks what was drawn, and raises `DisagreementError` if it differs.

    Args:
        module: A transformed module whose parameters are on `meta`. It is materialized in place and returned; parameters
            keep their names, and an optimizer built before holds other objects.
        device: Where to allocate, `"cpu"` or `"cuda"`.

    Returns:
        `module`.

    Raises:
        StateError: `module` was not transformed; or a module owns parameters or buffers on `meta` and has no
            `reset_parameters()`, so its values would be garbage.
    """
    for step in steps_of(module, verb="materialize"):
        step.note_loaded()
    owners = [
        (name, child)
        for name, child in module.named_modules()
        if any(t is not None and t.is_meta for t in (*child._parameters.values(), *child._buffers.values()))
    ]
    for name, child in owners:
        if not callable(getattr(child, "reset_parameters", None)):
            raise StateError(
                "A module on meta has no reset_parameters(): its values would be garbage.",
                module=f"{name}: {type(child).__name__}",
                fix="give it a reset_parameters() that sets its parameters and buffers, or use to_empty() and load values",
            )
    target = torch.empty(0, device=device).device  # with its index
    for unit in units_of(module):
        unit.reshard()
        unit.form_groups([slot.dtype for slot in unit.slots], [target] * len(unit.slots))
        unit.allocate([slot.parameter.requires_grad for slot in unit.slots])
    pending = {id(child) for _, child in owners}
    for unit in units_of(module):
        inside = unit.modules()
        wholes = [_empty(slot, target) for slot in unit.slots]
        for slot, whole in zip(unit.slots, wholes, strict=True):
            for place in slot.places:
                place.register(nn.Parameter(whole, requires_grad=slot.parameter.requires_grad))
        try:
            for child in inside:
                if id(child) in pending:
                    pending.discard(id(child))
                    _reset(child, target)
        finally:
            for slot in unit.slots:
                for place in slot.places:
                    place.register(slot.parameter)
        with torch.no_grad():
            parts = [local_part(whole, slot.model) for slot, whole in zip(unit.slots, wholes, strict=True)]
            unit.scatter_whole(dict(zip(unit.slots, parts, strict=True)))
        for slot, whole in zip(unit.slots, wholes, strict=True):
            slot.initial = content_digest(whole)
    for _, child in owners:
        if id(child) in pending:
            _reset(child, target)
    return module


def _empty(slot: Slot, device: torch.device) -> Tensor:
    """The parameter on all axes: on model axes too, so that its values do not depend on them."""
    if slot.model is not None:
        return torch.empty(slot.full_shape, dtype=slot.dtype, device=device)
    return torch.empty_strided(slot.path.shape, slot.path.stride, dtype=slot.dtype, device=device)


def _reset(module: nn.Module, device: torch.device) -> None:
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device=device)
    module.reset_parameters()  # type: ignore[operator]
