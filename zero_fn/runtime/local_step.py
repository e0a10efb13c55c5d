"""Elementwise optimizers update resting shards as plain tensors.

A DTensor costs 14 to 200 us of dispatch per parameter and operation, for nothing: an elementwise update of a shard needs only
the shard. So the lists that a torch optimizer collects before its arithmetic (`_init_group`) are filled with the local
tensors of parameters, gradients and states. These are the same memory; `param_groups`, `state` and `state_dict()` keep
DTensors.

[Note: not in a graph] While it traces a step the compiler runs `_init_group`, and looks up the tensors of the lists among
parameters, gradients and states. One that is none of them it takes for a state that stays where it is: the local gradients
of the first step would be those of every step. So it gets the DTensors.

[Note: momentum of SGD] SGD alone writes its states after the arithmetic, under the parameters of those lists. The first hook
after its step moves them to the resting parameters, as DTensors, before a hook of the user can look.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch._guards import TracingContext
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer

from zero_fn.resting import local_of, on_spec
from zero_fn.runtime.elementwise import TORCH_ELEMENTWISE

__all__ = ["steps_locally"]


def steps_locally(optimizer: Optimizer) -> None:
    """From now on this optimizer steps on local tensors, if it is one of torch's elementwise ones. May be called again."""
    if type(optimizer) in TORCH_ELEMENTWISE and "_init_group" not in optimizer.__dict__:
        optimizer.__dict__["_init_group"] = _LocalGroups(optimizer)
        if type(optimizer) is SGD:
            hooks: Any = optimizer._optimizer_step_post_hooks
            hooks.move_to_end(optimizer.register_step_post_hook(_restate).id, last=False)


class _LocalGroups:
    """Stands for `_init_group` of one optimizer.

    Attributes:
        replaced: Resting parameters that local tensors stand for in the running step of SGD, by identity.
    """

    __slots__ = ("_optimizer", "replaced")

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)  # which holds this: without a cycle it is freed at once
        self.replaced: dict[int, DTensor] = {}

    def __call__(self, group: dict[str, Any], parameters: list[Any], *lists: list[Any]) -> Any:
        optimizer: Any = self._optimizer()
        found = type(optimizer)._init_group(optimizer, group, parameters, *lists)
        rows = [parameters, *(tensors for tensors in lists if len(tensors) == len(parameters))]
        if TracingContext.try_get() is not None or group["differentiable"]:  # [Note: not in a graph]
            return found
        if all(map(_alike, zip(*rows, strict=True))):
            if type(optimizer) is SGD and group["momentum"]:
                self.replaced.update((id(p), p) for p in parameters if isinstance(p, DTensor))
            for tensors in rows:
                tensors[:] = [local_of(t) if isinstance(t, DTensor) else t for t in tensors]
        return found


def _restate(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    """Moves the states of SGD to the resting parameters. [Note: momentum of SGD]"""
    groups: _LocalGroups | None = optimizer.__dict__.get("_init_group")
    if groups is None:
        return  # a streamed one: it shares the hooks of the optimizer inside, and steps over local tensors anyway
    for parameter in groups.replaced.values():
        written = optimizer.state.pop(parameter._local_tensor, {}).get("momentum_buffer")
        if written is None:  # a step before this one raised
            continue
        state = optimizer.state[parameter]
        if not isinstance(known := state.get("momentum_buffer"), DTensor) or known._local_tensor is not written:
            state["momentum_buffer"] = on_spec(written, parameter._spec)
    groups.replaced = {}


def _alike(tensors: tuple[Any, ...]) -> bool:
    """Whether all that belongs to one parameter is cut as the parameter is."""
    parameter = tensors[0]
    if not isinstance(parameter, DTensor):
        return not any(isinstance(t, DTensor) for t in tensors)
    spec = parameter._spec
    return all(
        t._spec is spec or (t._spec.placements == spec.placements and t._spec.mesh == spec.mesh)
        for t in tensors
        if isinstance(t, DTensor)
    )
