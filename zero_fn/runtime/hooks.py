"""Hooks that users put on resting parameters: each is called once in a backward, with the reduced gradient.

[Note: autograd calls hooks with None] In a deferred backward autograd is given no gradients, and yet it calls the hooks of
each parameter it passes. So the user's hooks are wrapped, in the dicts where torch keeps them, so that handles still
remove them. What autograd calls is then ignored, and `settle` calls the user's hook when the gradient is reduced.

[Note: hooks on the node] Some put hooks on the node that accumulates the gradient: `_apply_optimizer_in_backward` of torch,
and whoever writes `p.expand_as(p).grad_fn.next_functions[0][0].register_hook`. That node lives only as long as somebody holds
it, and tells nobody which hooks it has. But all that are registered from Python share one dict, that of the first: so ours is
the first, it is taken away again, and the node is held.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from zero_fn.runtime.slot import Slot, slot_of

__all__ = ["defer_hooks", "gradient_hooks", "node_hooks", "parameter_hooks", "watch_nodes"]

_current_graph_task = torch._C._current_graph_task_id


def gradient_hooks(parameter: Tensor) -> list[Callable[[Tensor], Tensor | None]]:
    """What users gave to `register_hook`."""
    hooks = parameter._backward_hooks
    return [hook.users if isinstance(hook, _OfGradient) else hook for hook in hooks.values()] if hooks else []


def parameter_hooks(parameter: Tensor) -> list[Callable[[Tensor], None]]:
    """What users gave to `register_post_accumulate_grad_hook`."""
    hooks = parameter._post_accumulate_grad_hooks
    return [hook.users if isinstance(hook, _OfParameter) else hook for hook in hooks.values()] if hooks else []


def node_hooks(slot: Slot) -> list[Callable[..., object]]:
    """What users have registered on the node that accumulates its gradient."""
    hooks = slot.node_hooks
    return [hook.users if isinstance(hook, _OfNode) else hook for hook in hooks.values()] if hooks else []


def watch_nodes(slots: Sequence[Slot], gather: Node) -> None:
    """Finds the nodes that accumulate the gradients of a unit's parameters, and what is registered on them from now on.

    Args:
        slots: Of the unit, whose resting parameters are new, or were frozen or freed.
        gather: The node between these and what a forward sees.
    """
    for slot, (node, _) in zip(slots, gather.next_functions[-len(slots) :], strict=True):
        if node is not None and node is not slot.node:
            handle = node.register_hook(_nothing)
            slot.node, slot.node_hooks = node, handle.hooks_dict_ref()
            handle.remove()


def _nothing(_inputs: object, _outputs: object) -> None:
    """The first hook of a node."""


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
        if slot.node_hooks:
            _wrap(slot.node_hooks, partial(_OfNode, slot))


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


class _OfNode(_Wrapped):
    """A hook on the node that accumulates, which autograd may call before the gradient is reduced."""

    __slots__ = ("_slot",)

    def __init__(self, slot: Slot, users: Callable[..., Any]) -> None:
        super().__init__(users)
        self._slot = weakref.ref(slot)

    def __call__(self, inputs: object, outputs: object) -> object:
        slot = self._slot()
        if slot is None or slot.deferred_in != _current_graph_task():
            return self.users(inputs, outputs)
        return None
