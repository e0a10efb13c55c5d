"""Frozen parameters of tensor subclasses as the plain tensors that they are made of: quantized weights below adapters.

A tensor subclass is rebuilt from its parts whenever its name is read, by torch's own parametrization. The parts are ordinary
frozen parameters: every transform shards, offloads, counts and saves them as any other.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zero_fn.errors import PlacementError, StateError
from zero_fn.runtime.entry import units_of
from zero_fn.substitute import copied
from zero_fn.units import Shared, shared_parameters, subclass_of

__all__ = ["flatten_subclasses", "is_part"]

_PART = "_zero_fn_part"  # an attribute of a parameter

M = TypeVar("M", bound=nn.Module)


def flatten_subclasses(module: M) -> M:
    """Replaces each frozen parameter of a tensor subclass by the plain tensors that it is made of.

        quantize_(model, Int8WeightOnlyConfig())  # of torchao; then adapters, which are trained
        model = zf.flatten_subclasses(model)
        model = zf.shard_params(model, mesh["dp"])

    A transform cuts plain memory, and refuses what is more than that. Parts are plain: an int8 weight rests as int8 values
    and their scales, 1/n of each on a rank, and they are gathered together. Under the old name stands the tensor of
    the subclass, made of them by `__tensor_unflatten__` each time it is read. Numbers are those of `module`, to the bit.

    Names: the parts of `layer.weight` are `layer.parametrizations.weight.original0`, `original1` and so on, in the order of
    `__tensor_flatten__`: in `named_parameters`, `state_dict` and checkpoints. The class of a module with such a
    parameter is a subclass of what it was, as under `torch.nn.utils.parametrize`.

    `precision` after it leaves the parts in their dtypes.

    Communicates nothing.

    Args:
        module: A module that no transform returned.

    Returns:
        A new module with the outputs of `module`, which is unchanged. The two share the memory of parameters until the next
        transform; without such parameters it is a copy that changes nothing.

    Raises:
        PlacementError: A parameter of a subclass is trained, or its class does not say what it is made of.
        StateError: A transform came first.
        LayoutError: The module cannot be copied; see `shard_params`.
    """
    if units_of(module):
        raise StateError(
            "flatten_subclasses comes before other transforms.",
            module=type(module).__name__,
            fix="model = zf.flatten_subclasses(model), then zf.shard_params(model, mesh['dp'])",
        )
    shared = shared_parameters(module, takes_subclasses=True)
    found = [each for each in shared if subclass_of(each.parameter) is not None]
    rebuilt = [_Rebuilt(each) for each in found]
    twin, _ = copied(module, shared)
    modules = dict(twin.named_modules())
    for each, made in zip(found, rebuilt, strict=True):
        parts: dict[str, nn.Parameter | None] | None = None
        for name, attribute in each.places:
            holder = _parametrized(modules[name], attribute, made)
            if parts is None:
                parts = holder._parameters
            holder._parameters.update(parts)  # of a tie: both are made of the same parts
        for part in parts.values() if parts is not None else ():
            setattr(part, _PART, True)
    return twin


def is_part(parameter: Tensor) -> bool:
    """Whether a parameter is part of a tensor of a subclass, which says what dtype it has."""
    return hasattr(parameter, _PART)


def _parametrized(module: nn.Module, attribute: str, made: _Rebuilt) -> parametrize.ParametrizationList:
    parametrize.register_parametrization(module, attribute, made, unsafe=True)
    holders: Any = module.parametrizations
    found: parametrize.ParametrizationList = holders[attribute]
    return found


class _Rebuilt(nn.Module):
    """Makes a tensor of a subclass from its parts, whenever it is read."""

    def __init__(self, shared: Shared) -> None:
        """Looks at what a parameter is made of.

        Raises:
            PlacementError: It is trained, or its class does not say what it is made of.
        """
        super().__init__()
        whole: Any = shared.parameter
        kind = subclass_of(whole)
        if whole.requires_grad or not is_traceable_wrapper_subclass(whole) or isinstance(whole, DTensor):
            raise _refused(shared, kind, "trained" if whole.requires_grad else "not of a class with __tensor_flatten__")
        self._kind: Any = type(whole)
        self._size, self._stride = whole.size(), whole.stride()
        self._names, self._context = whole.__tensor_flatten__()
        for name in self._names:
            if type(getattr(whole, name)) not in (Tensor, nn.Parameter):
                raise _refused(shared, kind, f"made of tensors that are not plain: {name}")

    def right_inverse(self, whole: Any) -> tuple[Tensor, ...]:
        """The parts of a tensor."""
        return tuple(getattr(whole, name) for name in self._names)

    def forward(self, *parts: Tensor) -> Tensor:
        """The tensor that is made of some parts; no memory is copied."""
        inner = dict(zip(self._names, parts, strict=True))
        whole: Tensor = self._kind.__tensor_unflatten__(inner, self._context, self._size, self._stride)
        return whole


def _refused(shared: Shared, kind: type | None, reason: str) -> PlacementError:
    return PlacementError(
        f"{shared.fqn!r} cannot be kept as plain tensors: it is {reason}.",
        parameter=f"{kind.__qualname__ if kind is not None else None}  {list(shared.parameter.shape)}",
        fix="freeze it: parameter.requires_grad_(False); or train plain values: nn.Parameter(weight.dequantize())",
    )
