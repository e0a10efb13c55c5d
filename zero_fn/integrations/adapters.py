"""Adapters and prompts of PEFT, which is not imported here: who made such a model has done so."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

from torch import nn

import zero_fn as zf
from zero_fn.runtime.slot import slot_of

__all__ = ["adapter_names", "is_adapted", "let_adapters_be_whole", "whole_prompts"]


def is_adapted(model: Any) -> bool:
    """Whether a model is one of PEFT."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def let_adapters_be_whole() -> None:
    """Tells PEFT, once it is imported, that a module whose weight rests in shards
    computes with the whole weight.

    PEFT takes a DTensor for tensor parallelism, and makes adapters for its local shape,
    unless the axis is called "fsdp".
    """
    name = "_get_in_out_features"
    theirs = getattr(sys.modules.get("peft.tuners.tuners_utils"), name, None)
    if theirs is None or hasattr(theirs, "__wrapped__"):
        return

    @wraps(theirs)
    def sizes(module: nn.Module) -> Any:
        slot = slot_of(module.weight) if isinstance(module, nn.Linear) else None
        if slot is None or slot.model:
            return theirs(module)
        return (module.in_features, module.out_features)

    for path, other in list(sys.modules.items()):
        if path.startswith("peft.") and vars(other).get(name) is theirs:
            setattr(other, name, sizes)


def whole_prompts(model: Any) -> AbstractContextManager[object]:
    """Gathers trained prompts while they are saved: PEFT computes them then,
    on one rank, which cannot gather alone."""
    configs: Any = model.peft_config.values() if is_adapted(model) else ()
    if any(config.is_prompt_learning for config in configs):
        return zf.unsharded(model.prompt_encoder)
    return nullcontext()


def adapter_names(model: Any) -> set[str] | None:
    """Names of the entries that `save_pretrained` of a PEFT model reads: those of its adapters.

    None means all entries.
    """
    if not is_adapted(model):
        return None
    entries, read = model.state_dict(), sys.modules["peft"].get_peft_model_state_dict
    names = {id(value): name for name, value in entries.items()}
    saved = [
        names.get(id(value))
        for adapter in model.peft_config
        for value in read(model, state_dict=entries, adapter_name=adapter).values()
    ]
    # What has no name PEFT computes from other entries.
    return None if None in saved else {name for name in saved if name is not None}
