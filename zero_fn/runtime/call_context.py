"""Calls of a module that are no plain forward: in a backward, under torch.func,
in a dispatch mode, or while torch traces.

A call asks one question, `has_context`; only if the answer is yes, it asks which. `grad`, `vmap`
and `jvp` of torch.func wrap tensors, and know no saved-tensor hooks. Inside them nothing is packed,
and parameters are gathered outside the wrappers. A unit in all of whose places `functional_call`
has put whole tensors is left to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from zero_fn.errors import StateError
from zero_fn.runtime.ending import current_graph_task
from zero_fn.runtime.slot import Slot
from zero_fn.runtime.visible_parameters import VisibleParameters

__all__ = [
    "called_outside",
    "has_context",
    "in_compute_dtype",
    "is_swapped",
    "is_transforming",
    "partly_swapped",
    "require_run",
]

P = ParamSpec("P")
R = TypeVar("R")

_peek = torch._C._functorch.peek_interpreter_stack
_depth, _is_tracing = torch._C._len_torch_dispatch_stack, torch._C._is_tracing
_SELECTIVE = (_CachedTorchDispatchMode, _CachingTorchDispatchMode)
_EXPORT = (
    "export the plain module with the whole values: whole = get_model_state_dict(model, "
    "options=StateDictOptions(full_state_dict=True, cpu_offload=True)), of "
    "torch.distributed.checkpoint.state_dict, on every rank; plain.load_state_dict(whole) on rank "
    "0, which has them; or torch.compile the model"
)


def has_context() -> bool:
    """Whether a call runs in a backward, under torch.func, in a dispatch mode,
    or while torch.jit or torch.export traces."""
    return (
        current_graph_task() != -1
        or _peek() is not None
        or _depth() != 0
        or _is_tracing()
        or torch.compiler.is_exporting()
    )


def require_run(unit: str, module: nn.Module) -> None:
    """Raises inside torch.jit.trace and torch.export, which record a call rather than
    run it, and inside a selective checkpoint, which would count a gather among the
    operations of the forward."""
    modes = _get_current_dispatch_mode_stack() if _depth() else ()
    if modes and any(isinstance(mode, _SELECTIVE) for mode in modes):
        raise StateError(
            "A unit was called inside a selective checkpoint.",
            unit=unit or "root",
            why="its gather would be saved, or be missing among the "
            "operations that are computed again",
            fix="put the checkpoint inside the unit: "
            "call it in the forward of the module that units= names",
        )
    if _is_tracing() or torch.compiler.is_exporting():
        raise StateError(
            "A transformed module cannot be traced by torch.jit, or exported.",
            module=type(module).__name__,
            why="its forward gathers parameters from other ranks, which no file can hold",
            fix=_EXPORT,
        )


def is_transforming() -> bool:
    """Whether this runs inside a transform of torch.func, such as `grad` or `vmap`."""
    return _peek() is not None


def called_outside(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls a function outside the transforms of torch.func."""
    if _peek() is None:
        return function(*args, **kwargs)
    with temporarily_clear_interpreter_stack():
        return function(*args, **kwargs)


def is_swapped(visible: VisibleParameters, unit: str) -> bool:
    """Whether whole tensors stand in for all parameters of a unit at rest.

    Raises:
        StateError: They stand in for some only, or one of them rests in parts on several ranks.
    """
    are_swapped = are_at_rest = False
    for reference, names, slots in visible.by_module:
        module = reference()
        if module is None:
            continue
        for value, slot in zip(map(module._parameters.get, names), slots, strict=True):
            if value is slot.parameter:
                are_at_rest = True
            elif value is not None and not isinstance(value, nn.Parameter):
                are_swapped, are_at_rest = True, are_at_rest or _is_resting(value, slot)
    if are_swapped and are_at_rest:
        raise partly_swapped(unit)
    return are_swapped


def partly_swapped(unit: str) -> StateError:
    """The error for a model that would run on its own parameters and on others at once."""
    return StateError(
        "functional_call was given resting tensors, or tensors for some of the parameters.",
        unit=unit or "root",
        why="parameters at rest are gathered, whole tensors are taken as they are, "
        "and one forward does one of the two",
        fix="with zf.unsharded(model): functional_call(model, values, x), "
        "where parameters() are whole. Gradients of values are those of this rank",
    )


def in_compute_dtype(slot: Slot, value: Tensor) -> Tensor:
    """A whole value as a forward computes with it: one in the dtype at rest is cast."""
    return value.to(slot.kind.compute_dtype) if value.dtype == slot.dtype else value


def _is_resting(value: Tensor, slot: Slot) -> bool:
    """Whether a value is a DTensor, and not one on the model axes of the parameter,
    which a forward takes as it is."""
    while torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return isinstance(value, DTensor) and (
        slot.model is None or value.device_mesh != slot.model.mesh
    )
