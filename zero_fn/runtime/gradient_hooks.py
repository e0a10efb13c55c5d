"""Hooks that users put on resting parameters: each is called once in a backward,
with the reduced gradient.

[Note: autograd calls hooks with None] A deferred backward gives autograd no gradients
(autograd_node.py), and yet autograd calls the hooks of each parameter that it passes. So the user's
hooks are wrapped, in the dicts where torch keeps them: their handles still remove them. The wrapper
ignores autograd's call, and `add_gradient` calls the user's hook once the gradient is reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_fn.runtime.slot import Slot, slot_of
from zero_fn.values.dtensors import as_plain

__all__ = ["defer_hooks", "gradient_hooks", "parameter_hooks"]

_current_graph_task = torch._C._current_graph_task_id


def gradient_hooks(parameter: Tensor) -> list[Callable[[Tensor], Tensor | None]]:
    """The functions that users gave to `register_hook`."""
    return _given(parameter._backward_hooks)


def parameter_hooks(parameter: Tensor) -> list[Callable[[Tensor], None]]:
    """The functions that users gave to `register_post_accumulate_grad_hook`."""
    return _given(parameter._post_accumulate_grad_hooks)


def _given(hooks: Mapping[int, Any] | None) -> list[Callable[[Tensor], Any]]:
    if hooks:
        return [hook.given if isinstance(hook, _Deferred) else hook for hook in hooks.values()]
    return []


def defer_hooks(slots: Sequence[Slot]) -> None:
    """From now on the hooks of the parameters ignore that the running
    backward passes without a gradient."""
    found: list[tuple[Slot, Any]] = []
    with as_plain():
        for slot in slots:
            parameter = slot.parameter
            if parameter._backward_hooks:
                found.append((slot, parameter._backward_hooks))
            if parameter._post_accumulate_grad_hooks:
                found.append((slot, parameter._post_accumulate_grad_hooks))
    for slot, hooks in found:
        slot.deferred_in = _current_graph_task()
        hooks.update(
            {k: _Deferred(hook) for k, hook in hooks.items() if not isinstance(hook, _Deferred)}
        )


class _Deferred:
    """A user's hook.

    Autograd calls it with a gradient, or with the parameter if it is a post-accumulate hook.
    """

    __slots__ = ("given",)

    def __init__(self, given: Callable[[Tensor], Any]) -> None:
        self.given = given

    def __call__(self, argument: Tensor | None) -> Any:
        slot = slot_of(argument)
        if argument is None or (slot is not None and slot.deferred_in == _current_graph_task()):
            return None
        return self.given(argument)
