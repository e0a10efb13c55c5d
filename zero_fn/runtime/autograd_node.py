"""The autograd function of a unit: one node between the resting
parameters and what the forward sees.

Its forward hands out the gathered parameters; its backward receives their
gradients and reduces them. Two ways:

    deferred   `loss.backward()`: the reduction is issued and settles later;
               autograd is given nothing
    returned   `torch.autograd.grad`, `backward(inputs=...)`, `create_graph=True`: the reduced
               gradients are returned, so that autograd captures, accumulates or differentiates them
               as those of any leaf
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from zero_fn.errors import ShardedAccessError, StateError
from zero_fn.runtime.call_context import is_transforming
from zero_fn.runtime.gradient_hooks import defer_hooks
from zero_fn.runtime.gradients import Reduction
from zero_fn.runtime.memory import gather_wholes
from zero_fn.runtime.on_model_axes import arrived, placed
from zero_fn.runtime.slot import trained
from zero_fn.runtime.uncompiled import uncompiled
from zero_fn.runtime.unit import Unit, UnitUse, will_execute
from zero_fn.runtime.whole_buffers import Lent
from zero_fn.transport.agree import Bits
from zero_fn.values.dtensors import local_of

__all__ = ["gather", "gather_again", "returns_gradients"]

_is_batched = torch._C._functorch.is_legacy_batchedtensor

# A leaf that every node depends on and no user asks for:
# autograd visits it in a plain backward only.
_token = torch.zeros((), requires_grad=True)
_token_node = get_gradient_edge(_token).node


def returns_gradients() -> bool:
    """Whether the running backward wants its gradients returned through autograd."""
    return torch.is_grad_enabled() or not will_execute(_token_node)


@uncompiled
def gather_again(unit: Unit) -> list[Tensor]:
    """The gathered parameters of a unit for recomputations inside its backward,
    on an autograd node of their own.

    The same tensors serve every backward, as long as nobody could tell them from new ones.
    [Note: tensors that are lent]
    """
    whole = unit.gather.whole
    if whole is None or not whole.lends or unit.has_model_axes or is_transforming():
        with torch.enable_grad():
            return gather(UnitUse(unit, -1))
    now, lent = trained(unit.slots), whole.lent
    if lent is None or lent.trained != now or not lent.is_untouched():
        # A proxy: the unit holds these tensors, and their node holds this use.
        use = UnitUse(weakref.proxy(unit), -1)
        with torch.enable_grad():
            lent = Lent(gather(use), now, use)
        whole.lent = lent
    lent.use.generation, lent.use.has_arrived, lent.is_shown = unit.generation, False, True
    return lent.tensors


def gather(use: UnitUse) -> list[Tensor]:
    """The gathered parameters of a unit, connected to its resting ones if gradients are recorded.

    Sets `use.node`.
    """
    unit = use.unit
    whole = unit.gather.whole
    assert whole is not None, f"{unit} is not gathered"
    tensors = whole.tensors()
    flags = trained(unit.slots) if torch.is_grad_enabled() else []
    if True not in flags:
        return placed(unit.slots, tensors) if unit.has_model_axes else tensors
    # Not `_Gather.apply`, which asks of every argument whether torch.func has wrapped it:
    # this runs outside its transforms.
    outputs = _apply(_Gather, use, tensors, flags, _token, *[slot.parameter for slot in unit.slots])
    node = outputs[flags.index(True)].grad_fn
    assert node is not None
    use.node = weakref.ref(node)
    return placed(unit.slots, outputs) if unit.has_model_axes else list(outputs)


def _apply(function: type[torch.autograd.Function], *args: object) -> tuple[Tensor, ...]:
    outer: Any = super(torch.autograd.Function, function)
    outputs: tuple[Tensor, ...] = outer.apply(*args)
    return outputs


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        use: UnitUse,
        tensors: list[Tensor],
        trained: list[bool],
        token: Tensor,
        *resting: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.use = use
        ctx.set_materialize_grads(False)
        if False in trained:
            ctx.mark_non_differentiable(
                *(t for t, flag in zip(tensors, trained, strict=True) if not flag)
            )
        return tuple(tensors)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        use: UnitUse = ctx.use
        unit = use.unit
        if use.generation != unit.generation:
            raise StateError(
                f"The parameters of unit {unit.name or 'root'!r} changed "
                "between forward and backward.",
                why="an optimizer stepped; the gradient of the old forward would be "
                "computed with new parameters",
                fix="run every backward of a forward before optimizer.step()",
            )
        if unit.has_model_axes:
            grads = tuple(map(arrived, grads))
        kinds = set(map(type, grads))
        if DTensor in kinds:
            raise _in_shards(unit)
        if NoneType in kinds:
            grads = _with_assigned(unit, grads)
        nothing = (None, None, None, None)
        if not returns_gradients():
            defer_hooks(unit.slots)
            unit.run.gradients_arrived(use, grads)
            return nothing + (None,) * len(grads)
        _require_single(unit, grads)
        unit.run.gradients_arrived(use, None)
        return nothing + tuple(_ReturnReduced.apply(unit, *grads))  # type: ignore[no-untyped-call]


def _in_shards(unit: Unit) -> ShardedAccessError:
    return ShardedAccessError(
        "A plain loss was mixed with a resting parameter: its gradient came back in shards.",
        unit=unit.name or "root",
        why="DTensor gives a plain tensor beside one of its own such a gradient; "
        "nothing was summed",
        fix="bring the resting part together: loss * penalty.full_tensor()",
    )


def _require_single(unit: Unit, grads: Sequence[Tensor | None]) -> None:
    """Refuses batched gradients (`is_grads_batched=True`)
    before anything is sent: vmap knows no collectives."""
    if any(grad is not None and _is_batched(grad) for grad in grads):
        raise StateError(
            "Several gradients of a transformed module were asked for at once.",
            unit=unit.name or "root",
            why="is_grads_batched=True, and vectorize=True of torch.autograd.functional, "
            "would vectorize the collectives",
            fix="compute one after the other, or gradients of whole tensors: "
            "torch.func.functional_call(model, values, x)",
        )


def _with_assigned(unit: Unit, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients, with those that a custom function assigned (`layer.weight.grad = ...`) in
    place of returning them, as fused weight-gradient kernels do."""
    found = list(grads)
    for i, slot in enumerate(unit.slots):
        shown = slot.places[0].seen if found[i] is None and slot.parameter.requires_grad else None
        if shown is not None:
            with warnings.catch_warnings():
                # torch warns whoever reads `.grad` of a tensor that is no leaf.
                warnings.simplefilter("ignore")
                found[i], shown.grad = shown.grad, None
    return tuple(found)


class _ReturnReduced(torch.autograd.Function):
    """Makes whole gradients resting ones, differentiably: the transpose of the mean
    over ranks is an all-gather.

    The all-gather is not divided by the number of ranks: what a rank computes from whole tensors is
    averaged once more, when its gradient is reduced.
    """

    @staticmethod
    def forward(ctx: Any, unit: Unit, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.unit = unit
        reduction = Reduction(unit.gradients.memory(), grads, exact=True)
        what = f"who has gradients of {unit}"
        present = Bits(unit.run.transport, reduction.has_local, what).read()
        reduction.wait()
        work = reduction.regather()
        if work is not None:
            work.wait()
        return tuple(reduction.take(present))

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        unit: Unit = ctx.unit
        _require_single(unit, grads)
        present = [
            (slot, grad) for slot, grad in zip(unit.slots, grads, strict=True) if grad is not None
        ]
        slots = [slot for slot, _ in present]
        flats = [slot.path.flat_of(local_of(grad)) for slot, grad in present]
        wholes, pending = gather_wholes(
            slots, flats, unit.run.transport, f"second gradients of {unit}"
        )
        pending.wait()
        found = {
            slot: whole.to(slot.kind.compute_dtype)
            for slot, whole in zip(slots, wholes, strict=True)
        }
        return None, *map(found.get, unit.slots)
