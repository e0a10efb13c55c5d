"""Hooks that users put on resting parameters: each is called once in a backward, with the reduced gradient.

[Note: autograd calls hooks with None] In a deferred backward autograd is given no gradients, and yet it calls the hooks of
each parameter it passes. So the user's hooks are wrapped, in the dicts where torch keeps them, so that handles still
remove them. What autograd calls is then ignored, and `settle` calls the user's hook when the gradient is reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zero_fn.runtime.slot import Slot, slot_of

__all__ = ["defer_hooks", "gradient_hooks", "parameter_hooks"]

_current_graph_task = torch._C._current_graph_task_id


def gradient_hooks(parameter: Tensor) -> list[Callable[[Tensor], Tensor | None]]:
    """What users gave to `register_hook`."""
    hooks = parameter._backward_hooks
    return [hook.users if isinstance(hook, _OfGradient) else hook for hook in hooks.values()] if hooks else []


def parameter_hooks(parameter: Tensor) -> list[Callable[[Tensor], None]]:
    """What users gave to `register_post_accumulate_grad_hook`."""
    hooks = parameter._post_accumulate_grad_hooks
    return [hook.users if isinstance(hook, _OfParameter) else hook for hook in hooks.values()] if hooks else []


def defer_hooks(slots: Sequence[Slot]) -> None:
    """From now on the hooks of the parameters ignore that the running backward passes without a gradient."""
    now = _current_graph_task()
    for slot in slots:
        slot.deferred_in = now
        parameter = slot.parameter
        if parameter._backward_hooks:
            _wrap(parameter._backward_hooks, _OfGradient)
        if parameter._post_accumulate_grad_hooks:
            _wrap(parameter._post_accumulate_grad_hooks, _OfParameter)


def _wrap(hooks: dict[int, Any], wrapped: Callable[[Any], _Wrapped]) -> None:
    for key, hook in list(hooks.items()):
        if not isinstance(hook, _Wrapped):
            hooks[key] = wrapped(hook)


class _Wrapped:
    """A hook of a user.

    Attributes:
        users: It.
    """

    __slots__ = ("users",)

    def __init__(self, users: Callable[..., Any]) -> None:
        self.users = users


class _OfGradient(_Wrapped):
    """A hook on a gradient that autograd may call with None."""

    __slots__ = ()

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else self.users(grad)


class _OfParameter(_Wrapped):
    """A hook on a parameter that autograd may call before its gradient is reduced."""

    __slots__ = ()

    def __call__(self, parameter: nn.Parameter) -> None:
        slot = slot_of(parameter)
        if slot is None or slot.deferred_in != _current_graph_task():
            self.users(parameter)
