"""`state_dict` of a transformed module: refused where it would lack values that were assigned to `.data`.

torch keeps the old shard in a DTensor whose `.data` is assigned. The next forward says so; a file is often written before.
Communicates nothing.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from zero_fn.runtime.registry import slot_of

__all__ = ["check_entries_saved"]


def check_entries_saved(module: nn.Module) -> None:
    """Lets `state_dict` of this module refuse parameters whose assigned values are lost. Does nothing the second time."""
    hooks = module._state_dict_pre_hooks.values()
    if _before_save not in hooks:
        module.register_state_dict_pre_hook(_before_save)  # type: ignore[no-untyped-call]


def _before_save(module: nn.Module, *_: Any) -> None:
    for parameter in module._parameters.values():
        slot = slot_of(parameter) if parameter is not None else None
        if slot is not None:
            slot.refuse_assignment()
