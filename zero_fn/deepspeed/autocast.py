"""torch.autocast around the forwards of a model, by hooks: a copy of the model has them, too."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import nn

__all__ = ["run_under_autocast"]


class AutocastHooks:
    """Opens a block before each forward, and closes it after, also after an error."""

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self.device_type = device_type
        self.dtype = dtype
        self.open: list[ExitStack] = []

    def before(self, *_: object) -> None:
        """Begins a forward."""
        self.open.append(ExitStack())
        self.open[-1].enter_context(torch.autocast(self.device_type, self.dtype))

    def after(self, *_: object) -> None:
        """Ends it."""
        self.open.pop().close()


def run_under_autocast(model: nn.Module, device_type: str, dtype: torch.dtype) -> None:
    """Makes each call of a model run under torch.autocast, unless it does already."""
    hooks = AutocastHooks(device_type, dtype)
    if not any(
        isinstance(getattr(hook, "__self__", None), AutocastHooks) for hook in model._forward_pre_hooks.values()
    ):
        model.register_forward_pre_hook(hooks.before, prepend=True)
        model.register_forward_hook(hooks.after, always_call=True)
