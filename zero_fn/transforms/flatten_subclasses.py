"""Parameters of tensor subclasses as the plain tensors that they are made of:
quantized weights, float8 training.

A tensor subclass is rebuilt from its parts whenever its name is read, by torch's own
parametrization. The parts are ordinary parameters: every transform shards, offloads, counts and
saves them as any other.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zero_fn.errors import PlacementError, StateError
from zero_fn.runtime.extension import EXTENSION, Extension
from zero_fn.runtime.fsdp_extensions import is_product
from zero_fn.runtime.registry import units_of
from zero_fn.transforms.substitute import copied
from zero_fn.values.units import NamedParameter, distinct_parameters, subclass_of

__all__ = ["flatten_subclasses", "is_part"]

_PART = "_zero_fn_part"  # an attribute of a parameter

M = TypeVar("M", bound=nn.Module)


def flatten_subclasses(module: M) -> M:
    """Replaces each parameter of a tensor subclass (quantized, float8)
    by the plain tensors that it is made of.

        quantize_(model, Int8WeightOnlyConfig())  # of torchao: frozen weights,
                                                  below adapters that are trained
        model = zf.shard_params(zf.transforms.flatten_subclasses(model), mesh["dp"])

        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)  # or: trained
        convert_to_float8_training(model, config=config)
        model = zf.shard_params(zf.transforms.flatten_subclasses(model), mesh["dp"])

    Other transforms cut plain memory, and refuse tensor subclasses. The parts are plain: an int8
    weight rests as int8 values and their scales, 1/n of each on a rank, and they are gathered
    together. The old name still gives a tensor of the subclass, made by `__tensor_unflatten__` each
    time it is read. Numbers are those of `module`, to the bit. `precision` after it leaves the
    parts of frozen parameters in their dtypes.

    Names: the parts of `layer.weight` are `layer.parametrizations.weight.original0`, `original1`
    and so on, in the order of `__tensor_flatten__`: in `named_parameters`, `state_dict` and
    checkpoints. The class of a module with such a parameter becomes a subclass of what it was, as
    with `torch.nn.utils.parametrize`.

    A trained parameter must be made of one tensor of its own shape and dtype, which the optimizer
    updates. If its class has `fsdp_pre_all_gather` and `fsdp_post_all_gather`, the extensions of
    FSDP2, then `shard_params` over one axis sends what these say (float8 weights: one byte an
    element), where all ranks have as many rows and parameters rest in memory of the device.
    Otherwise, and in `plan` before the first gather, the plain tensor is sent.

    Communicates nothing.

    Args:
        module: A module that no other transform returned.

    Returns:
        A new module with the outputs of `module`, which is unchanged. The two share the memory
        of parameters until the next transform. Without parameters of subclasses the new module
        is a plain copy.

    Raises:
        PlacementError: A class does not say what it is made of,
            or a trained parameter is made of several tensors.
        StateError: A transform came first.
        LayoutError: The module cannot be copied; see `shard_params`.
    """
    if units_of(module):
        raise StateError(
            "flatten_subclasses comes before other transforms.",
            module=type(module).__name__,
            fix="model = zf.transforms.flatten_subclasses(model), then zf.shard_params(model, mesh['dp'])",
        )
    named = distinct_parameters(module, takes_subclasses=True)
    found = [each for each in named if subclass_of(each.parameter) is not None]
    rebuilt = [_Rebuilt(each) for each in found]
    twin, _ = copied(module, named)
    modules = dict(twin.named_modules())
    for each, made in zip(found, rebuilt, strict=True):
        parts: dict[str, nn.Parameter | None] | None = None
        for name, attribute in each.places:
            parametrize.register_parametrization(modules[name], attribute, made, unsafe=True)
            holders: Any = modules[name].parametrizations
            holder: parametrize.ParametrizationList = holders[attribute]
            if parts is None:
                parts = holder._parameters
            holder._parameters.update(parts)  # of a tie: both are made of the same parts
        for part in parts.values() if parts is not None else ():
            assert part is not None
            part.requires_grad_(made.extension is not None)
            setattr(part, _PART if made.extension is None else EXTENSION, made.extension)
    return twin


def is_part(parameter: Tensor) -> bool:
    """Whether a parameter is part of a frozen tensor of a subclass,
    which says what dtype it has."""
    return hasattr(parameter, _PART)


class _Rebuilt(nn.Module):
    """Makes a tensor of a subclass from its parts, whenever it is read."""

    def __init__(self, named: NamedParameter) -> None:
        """Looks at what a parameter is made of.

        Raises:
            PlacementError: Its class does not say what it is made of,
                or it is trained and made of several tensors.
        """
        super().__init__()
        whole: Any = named.parameter
        is_trained = whole.requires_grad
        kind = subclass_of(whole)
        if isinstance(whole, DTensor):
            raise _refused(named, kind, "placed on a mesh already, as tensor parallelism does")
        if not is_traceable_wrapper_subclass(whole):
            raise _refused(
                named,
                kind,
                "not of a class with __tensor_flatten__",
                "quantise with torchao: quantize_(model, Int8WeightOnlyConfig()), to_nf4(weight); "
                "or take plain values: nn.Parameter(weight.dequantize())",
            )
        self._kind: Any = type(whole)
        self._size = whole.size()
        self._stride = whole.stride()
        self._names, self._context = whole.__tensor_flatten__()
        for name in self._names:
            if type(getattr(whole, name)) not in (Tensor, nn.Parameter):
                raise _refused(named, kind, f"made of tensors that are not plain: {name}")
        self.extension: Extension | None = None
        if is_trained:
            first: Tensor = getattr(whole, self._names[0])
            if len(self._names) > 1 or (first.shape, first.dtype) != (
                named.parameter.shape,
                named.parameter.dtype,
            ):
                raise _refused(
                    named, kind, "trained, and not made of one tensor of its shape and dtype"
                )
            self.extension = Extension(self._kind, self._names[0], self._context)

    def right_inverse(self, whole: Any) -> tuple[Tensor, ...]:
        """The parts of a tensor."""
        return tuple(getattr(whole, name).detach() for name in self._names)

    def forward(self, *parts: Tensor) -> Tensor:
        """The tensor that is made of some parts; no memory is copied."""
        if self.extension is not None:
            if is_product(parts[0]):
                return parts[0]
            rebuilt: Tensor = _Rebuild.apply(parts[0], self.extension)  # type: ignore[no-untyped-call]
            return rebuilt
        inner = dict(zip(self._names, parts, strict=True))
        whole: Tensor = self._kind.__tensor_unflatten__(
            inner, self._context, self._size, self._stride
        )
        return whole


class _Rebuild(torch.autograd.Function):
    """Makes a trained tensor of a subclass from its part, differentiably."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, extension: Extension) -> Tensor:
        ctx.extension = extension
        whole: Tensor = extension.rebuilt(part.detach())
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,), extension = grads, ctx.extension
        return getattr(grad, extension.part) if isinstance(grad, extension.kind) else grad, None


_FREEZE = (
    "freeze it: parameter.requires_grad_(False); or train plain values: "
    "nn.Parameter(weight.dequantize())"
)


def _refused(
    named: NamedParameter, kind: type | None, reason: str, fix: str = _FREEZE
) -> PlacementError:
    return PlacementError(
        f"{named.fqn!r} cannot be kept as plain tensors: it is {reason}.",
        parameter=f"{kind.__qualname__ if kind is not None else None}  "
        f"{list(named.parameter.shape)}",
        fix=fix,
    )
