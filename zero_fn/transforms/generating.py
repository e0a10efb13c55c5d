"""`generate` of transformers: ranks whose forwards send something to one another go
on until all of them are done.

A rank that needs no more tokens must still take part in the all-gathers of the others. transformers
has an option for that, `synced_gpus`, which it sets by itself only for FSDP and DeepSpeed. Here
each call sets it if forwards communicate now: inside `zf.unsharded` they do not. And only the ranks
of the module are asked whether they are done, as others may never generate.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from zero_fn.runtime.registry import units_of
from zero_fn.runtime.run import run_of
from zero_fn.transport.agree import Bits

__all__ = ["generate_together", "is_generative"]


def is_generative(module: nn.Module) -> bool:
    """Whether a module has a `generate` that can go on until all ranks are done."""
    own = getattr(type(module), "generate", None)
    return isinstance(own, FunctionType) and "synced_gpus" in inspect.signature(own).parameters


def generate_together(root: nn.Module) -> None:
    """Lets `generate` of a module, and of modules inside it, know when ranks must go on together.

    Calls that say `synced_gpus` themselves, and methods that the user put there, stay as they are.
    """
    for module in filter(is_generative, root.modules()):
        own: Any = type(module)
        module.__dict__.setdefault("generate", MethodType(_together(own.generate), module))
        if hasattr(own, "_has_unfinished_sequences"):
            module.__dict__["_has_unfinished_sequences"] = MethodType(_goes_on, module)


@cache
def _together(own: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(own)

    @wraps(own)
    def generate(self: nn.Module, *args: Any, **options: Any) -> Any:
        given = signature.bind_partial(self, *args, **options)
        if given.arguments.get("synced_gpus") is None:
            given.arguments["synced_gpus"] = _communicates(self)
        return own(*given.args, **given.kwargs)

    return generate


def _communicates(module: nn.Module) -> bool:
    """Whether forwards of a module may communicate, from the second one on.

    The same on every rank.
    """
    units = [
        unit
        for unit in units_of(module)
        if run_of(unit).transport.size > 1 and unit.visible.leaves is None
    ]
    if any(
        unit.memory.may_fail or group.kind.is_cut for unit in units for group in unit.memory.groups
    ):
        return True
    return any(not run.has_agreed or run.buffers.may_communicate for run in map(run_of, units))


def _goes_on(self: Any, this_peer_finished: bool, synced_gpus: bool, device: torch.device) -> bool:
    """Stands in for `_has_unfinished_sequences`.

    A decoder that is done waits here for the other ranks, and runs forwards of a token without a
    cache: its own cache may be full, and its next position beyond those that the model has.
    """
    runs = {id(run): run for run in map(run_of, units_of(self)) if run.transport.size > 1}
    if not synced_gpus or len(runs) != 1:  # of several parts, each transformed for itself
        return bool(
            type(self)._has_unfinished_sequences(self, this_peer_finished, synced_gpus, device)
        )
    (run,) = runs.values()
    while Bits(run.transport, [not this_peer_finished], "whether a rank still generates").read()[0]:
        if not this_peer_finished or self.config.is_encoder_decoder:
            return True
        self(input_ids=torch.zeros((1, 1), dtype=torch.long, device=device), use_cache=False)
    return False
