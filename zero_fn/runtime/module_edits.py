"""Functions of torch that edit modules: `module.to(dtype)` and parametrizations in a
forward of a unit, and pruning.

Modules see gathered parameters then, under names that hide the resting ones
(visible_parameters.py). Routers of transformers cast their classifier in each forward (Switch,
NLLB-MoE), and PEFT adds its factors to experts by a parametrization that it removes after the call
(`target_parameters`). Both are done to what the modules see, until the forward ends; what rests
stays as it is.

[Note: a parametrization for one call] torch takes the parameter out of the module, keeps it in a
list as `original`, and sets it to itself, which counts as a change. So it gets another tensor on
the same memory, and the list gets the seen one after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from zero_fn.errors import PlacementError, StateError
from zero_fn.runtime.slot import slot_of
from zero_fn.runtime.unit import unit_of
from zero_fn.runtime.unwritten_memory import mark_emptied_buffers, meta_buffers_of

__all__ = ["watch_modules"]

# In the `__dict__` of a list of parametrizations: the resting parameters of the module, in order.
_HIDDEN = "_zero_fn_hidden"

_apply: Callable[..., nn.Module] = nn.Module._apply
_register: Callable[..., nn.Module] = parametrize.register_parametrization
_remove: Callable[..., nn.Module] = parametrize.remove_parametrizations
_prune: Callable[..., Any] = prune.BasePruningMethod.__dict__["apply"].__func__
_prune_globally: Callable[..., None] = prune.global_unstructured


def watch_modules() -> None:
    """Puts the functions of this file in the place of torch's, once."""
    if nn.Module._apply is _apply:
        nn.Module._apply = _apply_to_seen  # type: ignore[method-assign]
        parametrize.register_parametrization = _register_on_seen
        parametrize.remove_parametrizations = _remove_from_seen
        prune.BasePruningMethod.apply = classmethod(_prune_plain)  # type: ignore[assignment]
        prune.global_unstructured = _prune_plain_globally


def _apply_to_seen(
    self: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Stands in for `Module._apply`, which `to`, `float`, `half`, `cuda` and others call."""
    parameters, seen = self._parameters, self.__dict__
    hidden = [name for name in parameters if name in seen]
    emptied = meta_buffers_of(self)
    if not hidden:
        _apply(self, function, recurse)
        mark_emptied_buffers(self, emptied)
        return self
    resting = dict(parameters)
    for name in hidden:
        del parameters[name]
    try:
        _apply(self, function, recurse)
    finally:
        resting.update(parameters)
        _put_back(parameters, resting)
    for name in hidden:
        seen[name] = function(seen[name])
    return self


def _register_on_seen(
    module: nn.Module, tensor_name: str, parametrization: nn.Module, *, unsafe: bool = False
) -> nn.Module:
    """Stands in for `register_parametrization`. [Note: a parametrization for one call]"""
    parameters, seen = module._parameters, module.__dict__
    if tensor_name not in parameters or tensor_name not in seen:
        return _register(module, tensor_name, parametrization, unsafe=unsafe)
    if hasattr(parametrization, "right_inverse"):
        raise StateError(
            f"A parametrization of {tensor_name!r} was registered in a forward, "
            "and has a right_inverse.",
            parametrization=type(parametrization).__name__,
            why="it would change the values of a parameter, and a forward computes with a copy",
            fix="register it before the transform",
        )
    resting, tensor = dict(parameters), seen.pop(tensor_name)
    parameters[tensor_name] = tensor.data
    try:
        _register(module, tensor_name, parametrization, unsafe=unsafe)
    except BaseException:
        _put_back(parameters, resting)
        seen[tensor_name] = tensor
        raise
    registered: Any = module.parametrizations[tensor_name]  # type: ignore[index]
    registered._buffers["original"] = tensor
    registered.__dict__[_HIDDEN] = resting
    return module


def _remove_from_seen(
    module: nn.Module, tensor_name: str, leave_parametrized: bool = True
) -> nn.Module:
    """Stands in for `remove_parametrizations`."""
    registered: Any = None
    if parametrize.is_parametrized(module, tensor_name):
        registered = module.parametrizations[tensor_name]  # type: ignore[index]
    _remove(module, tensor_name, leave_parametrized)
    resting = registered.__dict__.get(_HIDDEN)
    if resting is not None:
        tensor = module._buffers.pop(tensor_name)
        _put_back(module._parameters, {**resting, **module._parameters})
        unit = unit_of(slot_of(resting[tensor_name]))
        if unit is not None and (unit.running or unit.visible.in_backward is not None):
            module.__dict__[tensor_name] = tensor
    return module


def _prune_plain(cls: Any, module: nn.Module, name: str, *args: Any, **options: Any) -> Any:
    """Stands in for `BasePruningMethod.apply`, which makes two names of a parameter."""
    _require_plain(module, name)
    return _prune(cls, module, name, *args, **options)


def _prune_plain_globally(
    parameters: Iterable[tuple[nn.Module, str]], *args: Any, **options: Any
) -> None:
    """Stands in for `prune.global_unstructured`, which looks at all values first."""
    parameters = [*parameters]
    for module, name in parameters:
        _require_plain(module, name)
    _prune_globally(parameters, *args, **options)


def _require_plain(module: nn.Module, name: str) -> None:
    for each in (name, f"{name}_orig"):
        slot = slot_of(module._parameters.get(each))
        if slot is not None:
            raise PlacementError(
                f"{slot.fqn!r} was to be pruned after the transform.",
                parameter=slot,
                why="pruning looks at whole values, and takes the parameter out of its place; "
                "nothing was changed",
                fix="prune before: prune.l1_unstructured(module, 'weight', 0.5); model = "
                "zf.shard_params(model, axis). Or mask after each step: with torch.no_grad(): "
                "p.mul_(distribute_tensor(mask, p.device_mesh, p.placements))",
            )


def _put_back(parameters: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Gives a module these parameters again, in their order: who holds the dict sees them."""
    parameters.clear()
    parameters.update(wanted)
