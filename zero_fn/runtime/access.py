"""A resting shard used in a forward as if it were the whole tensor.

torch refuses operations on a DTensor and a plain tensor with a message about DTensors. Inside the forward of a
transformed module the mistake is known, and a note with the fix is added: the weight of a module was read outside the
forward of its unit. Outside every forward torch's message stands alone: 2.13 raises it in C++, where nothing can be told
apart.

[Note: whole tensors in a forward] `weight.full_tensor()` gives the whole tensor, and a gradient of it counts as the same on
every rank. That of what a forward computes is not: each rank has other inputs. torch raises nothing, so we do, also where
`module.forward(x)` was called in place of `module(x)`: then no unit was entered.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zero_fn.errors import ShardedAccessError
from zero_fn.runtime.registry import slot_of
from zero_fn.runtime.run import run_of
from zero_fn.runtime.unit import Unit, unit_of

__all__ = ["MEMBER", "explain", "watch_redistribution"]

MEMBER = "_zero_fn_name"  # in the `__dict__` of every module of a transformed model: its name there; survives deepcopy

_stock = DTensor.redistribute


def explain(error: BaseException | None, unit: Unit) -> None:
    """Adds a note to an error about a resting shard that passed through the forward of a unit."""
    if not isinstance(error, RuntimeError) or "mixed torch.Tensor and DTensor" not in str(error):
        return
    if hasattr(error, "__notes__") or any(other.has_model_axes for other in run_of(unit).module.live_units()):
        return  # under tensor parallelism torch's own words fit: activations are DTensors too
    error.add_note(
        "A resting parameter was used outside the forward of its unit, where this rank holds only its shard.\n"
        f"  inside : the forward of {unit}\n"
        "  fix    : call the module that owns the weight, put both modules in one unit (units=), or read it inside "
        "`with zf.unsharded(module):`"
    )


def watch_redistribution() -> None:
    """From now on `redistribute` and `full_tensor` of resting parameters ask whether a forward runs."""
    DTensor.redistribute = _redistribute  # type: ignore[method-assign]


def _redistribute(self: DTensor, *args: Any, **kwargs: Any) -> DTensor:
    """[Note: whole tensors in a forward]"""
    slot = slot_of(self) if torch.is_grad_enabled() and self.requires_grad else None
    unit = unit_of(slot)
    if slot is not None and unit is not None and (run_of(unit).forwards.are_open or _is_past_call()):
        raise ShardedAccessError(
            f"{slot.fqn!r} was made whole by hand in a forward, where its gradient would be that of one rank.",
            parameter=slot,
            unit=unit.name or "root",
            fix="read it under its name, where it is whole while its unit runs: call the module that owns it, as module(x) "
            "and not as module.forward(x), or put both modules in one unit (units=); or with torch.no_grad() if no gradient "
            "is wanted",
        )
    return _stock(self, *args, **kwargs)


def _is_past_call() -> bool:
    """Whether the forward of a module of a transformed model is on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        module = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(module, nn.Module) and MEMBER in module.__dict__:
            forward: object = module.forward
            if getattr(getattr(forward, "__func__", forward), "__code__", None) is code:
                return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
