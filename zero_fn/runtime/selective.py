"""Hides what a unit itself does from a selective checkpoint around it.

`create_selective_checkpoint_contexts` counts the operations of a forward, saves those that its policy asks for, and expects
the same operations when the forward runs again. A unit that is gathered ahead, or is still gathered, does other operations
then; and a saved gather would be memory that has been freed since. So the modes of the checkpoint are set aside while a unit
is entered and left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch
from torch.utils import _python_dispatch as modes
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

__all__ = ["outside_selection"]

P = ParamSpec("P")
R = TypeVar("R")

_SELECTIVE = (_CachedTorchDispatchMode, _CachingTorchDispatchMode)
_depth = torch._C._len_torch_dispatch_stack


def outside_selection(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls a function whose operations no selective checkpoint sees."""
    if not _depth():
        return function(*args, **kwargs)
    with _set_aside():
        return function(*args, **kwargs)


@contextmanager
def _set_aside() -> Iterator[None]:
    stack = modes._get_current_dispatch_mode_stack()
    if not any(isinstance(mode, _SELECTIVE) for mode in stack):
        yield
        return
    others = [mode for mode in stack if not isinstance(mode, _SELECTIVE)]
    _replace(stack, others)
    try:
        yield
    finally:
        _replace(others, stack)


def _replace(stack: list[modes.TorchDispatchMode], by: list[modes.TorchDispatchMode]) -> None:
    for _ in stack:
        modes._pop_mode()
    for mode in by:
        modes._push_mode(mode)
