"""`load_state_dict` accepts whole tensors: each rank keeps its part."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zero_fn.resting import resting_tensor
from zero_fn.runtime.registry import slot_of

__all__ = ["accept_whole_entries"]


def accept_whole_entries(module: nn.Module) -> None:
    """Lets `load_state_dict` of this module take whole tensors beside DTensors. No communication."""
    hooks = module._load_state_dict_pre_hooks.values()
    if not any(getattr(hook, "hook", hook) is _shard_whole_entries for hook in hooks):
        module.register_load_state_dict_pre_hook(_shard_whole_entries)  # type: ignore[no-untyped-call]


def _shard_whole_entries(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    for attribute, parameter in module._parameters.items():
        slot = slot_of(parameter)
        entry = state_dict.get(f"{prefix}{attribute}")
        if slot is None or not isinstance(entry, Tensor):
            continue
        slot.initial = None
        if slot.spec is None or isinstance(entry, DTensor):
            continue
        if tuple(entry.shape) == slot.shape:  # another shape is reported by load_state_dict itself
            state_dict[f"{prefix}{attribute}"] = resting_tensor(slot.owned(entry.detach()), slot.spec)
