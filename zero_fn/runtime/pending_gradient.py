"""What `.grad` shows inside `accumulate`, while a gradient is summed on
each rank and not reduced yet.

[Note: a pending gradient is part of .grad] A local sum that nobody sees would survive `zero_grad()`
and leak into the next step. So a marker stands as `.grad` from the first local gradient to the end
of the block. Setting `.grad` to None drops the sum, zeroing `.grad` zeroes the sum, a resting
gradient that is added is remembered, and whatever would read `.grad` raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from zero_fn.errors import StateError
from zero_fn.runtime.slot import Slot
from zero_fn.values.dtensors import local_of

__all__ = ["PendingGradient"]

_aten = torch.ops.aten


class PendingGradient(Tensor):
    """Stands as `.grad` of a parameter; it has the form of the gradient at rest, and no values."""

    # The resting gradient that was there before, to which the reduced one will be added.
    earlier: Tensor | None
    zero_sum: Callable[[], None]  # of the gradients on this rank
    parameter_name: str  # for messages

    @staticmethod
    def __new__(cls, slot: Slot, zero_sum: Callable[[], None]) -> PendingGradient:
        parameter = slot.parameter
        marker: PendingGradient = torch.Tensor._make_wrapper_subclass(
            cls,
            parameter.shape,
            strides=parameter.stride(),
            dtype=slot.kind.gradient_dtype,
            device=parameter.device,
        )
        marker.earlier, marker.zero_sum, marker.parameter_name = None, zero_sum, str(slot)
        return marker

    def __init__(self, *_: object) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PendingGradient({self.parameter_name})"

    @property
    def full_tensor(self) -> NoReturn:
        """Raises, as all methods of a resting gradient do."""
        self._raise("full_tensor")

    to_local = redistribute = placements = device_mesh = full_tensor

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        if func is torch._foreach_zero_:
            for gradient in args[0]:
                gradient.zero_()
            return None
        if any(isinstance(leaf, DTensor) for leaf in leaves) and func not in (
            Tensor.add_,
            Tensor.__iadd__,
        ):
            next(leaf for leaf in leaves if isinstance(leaf, PendingGradient))._raise(func)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        leaves = tree_leaves((args, kwargs or {}))
        marker: PendingGradient = next(leaf for leaf in leaves if isinstance(leaf, PendingGradient))
        if func is _aten.zero_.default:
            marker.zero_sum()
            if marker.earlier is not None:
                local_of(marker.earlier).zero_()
        elif (
            func is _aten.add_.Tensor
            and args[0] is marker
            and isinstance(args[1], DTensor)
            and not kwargs
        ):
            # A gradient that does not pass the unit, such as that of a
            # penalty on the resting parameter.
            marker._add(args[1])
        else:
            marker._raise(func)
        return marker

    def _add(self, grad: DTensor) -> None:
        self.earlier = grad.clone() if self.earlier is None else self.earlier + grad

    def _raise(self, func: object) -> NoReturn:
        raise StateError(
            "A gradient was read inside accumulate(): it is not reduced yet.",
            parameter=self.parameter_name,
            read_by=getattr(func, "__name__", str(func)),
            why="each rank has the sum of its own microbatches; "
            "the mean over ranks exists when the block ends",
            fix="read gradients, clip and unscale after the `with zf.accumulate(model):` block",
        )
