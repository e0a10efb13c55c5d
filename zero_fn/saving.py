"""What `state_dict` of a transformed module gives can be copied and pickled, as that of a plain one.

Resting parameters of a unit share memory, so most begin somewhere inside it. A DTensor takes over the storage offset of its
local tensor, and one that has an offset passes for a tensor with a storage of its own: `copy.deepcopy` and `torch.save` look
for its bytes and raise (torch 2.13). `state_dict` detaches parameters, which makes such DTensors; they are made anew.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from zero_fn.resting import resting_tensor

__all__ = ["give_entries_that_can_be_copied"]


def give_entries_that_can_be_copied(module: nn.Module) -> None:
    """Lets `state_dict` of this module give DTensors on the same memory that can be copied and pickled."""
    if _after_save not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(_after_save)  # type: ignore[no-untyped-call]


def _after_save(module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: dict[str, Any]) -> None:
    for name in module._parameters:
        entry = state_dict.get(f"{prefix}{name}")
        if isinstance(entry, DTensor) and not isinstance(entry, nn.Parameter) and entry.storage_offset():
            state_dict[f"{prefix}{name}"] = resting_tensor(entry._local_tensor, entry._spec)
