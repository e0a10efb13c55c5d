"""Notices when any torch optimizer steps: the only moment at which resting parameters change behind our back.

The hooks are torch's public ones for all optimizers and are installed by the first transform, not by importing. They
cost a dictionary look-up per parameter, and refuse steps that would be silently wrong:

    a step while gradients are still local (inside `accumulate`)
    a step of an optimizer whose parameters a transform replaced
    a step of an optimizer that looks at whole tensors over shards (`elementwise.py`)
    a step with states of another dtype than a parameter that `.to()` has cast since
    a step with states that another rank had written (`loaded.py`)
    a step after a compiled graph changed buffers that should be those of rank 0
    a step of an optimizer that is not streamed over parameters in another tier
    a step in a backward, by a hook on the node that accumulates a gradient
    a backward, after the step, of a forward before it (through `Unit.generation`)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zero_fn.errors import StaleError, StateError
from zero_fn.runtime.advice import say_if_rounded
from zero_fn.runtime.elementwise import require_elementwise
from zero_fn.runtime.loaded import settle_states
from zero_fn.runtime.local_step import steps_locally
from zero_fn.runtime.registry import replacement_of, slot_of
from zero_fn.runtime.run import run_of
from zero_fn.runtime.slot import Slot
from zero_fn.runtime.uncompiled import uncompiled
from zero_fn.runtime.unit import Unit, unit_of

__all__ = ["watch_optimizers"]

_LOADS = "_zero_fn_loads"  # in the `__dict__` of an optimizer that has stepped: its hook for states that are loaded
_STEPS_IN_BACKWARD = (
    "_in_backward_optimizers"  # where `_apply_optimizer_in_backward` of torch puts those of a parameter
)

_installed: list[Any] = []


def watch_optimizers() -> None:
    """Installs the hooks, once."""
    if not _installed:
        _installed.append(register_optimizer_step_pre_hook(_before_step))
        _installed.append(register_optimizer_step_post_hook(_after_step))


@uncompiled
def _before_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    require_elementwise(optimizer)
    steps_locally(optimizer)
    is_streamed = getattr(optimizer, "takes_from_tiers", False)  # it settles what it loads itself
    if _LOADS not in optimizer.__dict__ and not is_streamed:
        say_if_rounded(optimizer)
        settle_states(optimizer)  # loaded before the first step
        optimizer.__dict__[_LOADS] = optimizer.register_load_state_dict_post_hook(settle_states)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            slot = slot_of(parameter)
            unit = unit_of(slot) if slot is not None else None
            if slot is not None and hasattr(parameter, _STEPS_IN_BACKWARD):
                raise _on_node(slot)
            if slot is not None and slot.kind.must_be_streamed and not is_streamed:
                raise _not_streamed(optimizer, slot)
            if slot is not None and (slot.is_recast or slot.dtype != parameter.dtype):
                _require_states_alike(optimizer, slot, parameter)
            if unit is not None and run_of(unit).module.accumulating and _has_local_gradients(unit):
                raise StateError(
                    "optimizer.step() was called inside accumulate(): gradients are not reduced yet.",
                    parameter=slot,
                    why="each rank would update its shard with the gradient of its own microbatches",
                    fix="call step() after the `with zf.accumulate(model):` block",
                )
            replacement = replacement_of(parameter) if slot is None and parameter.grad is None else None
            successor = replacement.parameter() if replacement is not None else None
            if replacement is not None and successor is not None and successor.grad is not None:
                raise StaleError(
                    "The optimizer holds parameters that the model does not have.",
                    first=f"{replacement.fqn}, replaced by {replacement.site}",
                    why="a transform returns a new module; step() updates the old one and the loss would not move",
                    fix="build the optimizer after the last transform: AdamW(model.parameters()); where parameters rest in "
                    "another tier and the model was copied or moved since, after its next forward",
                )


def _has_local_gradients(unit: Unit) -> bool:
    return unit.shown.leaves is not None or unit.gradients.has_pending()


def _on_node(slot: Slot) -> StateError:
    return StateError(
        "An optimizer steps in backward by a hook on the node that accumulates a gradient.",
        parameter=slot,
        why="the node runs before the gradient is reduced: the step would take that of the backward before",
        fix="step in p.register_post_accumulate_grad_hook(...), which is called with the reduced gradient",
    )


def _not_streamed(optimizer: Optimizer, slot: Slot) -> StateError:
    return StateError(
        f"{type(optimizer).__name__} was to step parameters that have a state in another tier.",
        parameter=slot,
        tiers=slot.home.tiers,
        why="a disk that fails in the middle would leave ranks in different states; nothing was updated",
        fix="optimizer = zf.streamed(optimizer, zf.nvme('/local_nvme')), or, with its states in memory, zf.cpu()",
    )


def _require_states_alike(optimizer: Optimizer, slot: Slot, parameter: Tensor) -> None:
    for name, value in optimizer.state.get(parameter, {}).items():
        if not isinstance(value, Tensor):
            continue
        is_alike = isinstance(value, DTensor) if isinstance(parameter, DTensor) else name != "step"
        if is_alike and value.shape == parameter.shape and value.dtype != parameter.dtype:
            raise StateError(
                "The optimizer's states have another dtype than their parameters.",
                parameter=f"{slot.fqn} is {_name(parameter.dtype)}, its {name} is {_name(value.dtype)}",
                why="the module was cast after the optimizer had stepped; nothing was updated",
                fix="cast before the first step, or carry the states over: "
                "saved = optimizer.state_dict(); model.to(dtype); optimizer = AdamW(model.parameters()); "
                "optimizer.load_state_dict(saved)",
            )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@uncompiled
def _after_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    units: dict[int, Unit] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            slot = slot_of(parameter)
            unit = unit_of(slot) if slot is not None else None
            if unit is not None:
                units[id(unit)] = unit
    for unit in units.values():
        unit.generation += 1
    for run in {run_of(unit) for unit in units.values()}:
        run.note_optimizer_step()
