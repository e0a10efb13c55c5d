"""Hooks of each step of an optimizer over resting parameters,
the only moment at which others change these.

The hooks are torch's public ones for all optimizers; the first transform installs them, not the
import. They cost a dictionary look-up per parameter, and refuse what would be silently wrong:

    a step while gradients are still local (inside `accumulate`)
    a step of an optimizer whose parameters a transform has replaced
    a step over shards of an optimizer that looks at whole tensors (`elementwise.py`)
    a step with states in another dtype than a parameter that `.to()` has cast since
    a step with states that another rank has written
    a step over parameters in another tier of an optimizer that is not streamed
    a step, over parameters that are rounded without a master, of an optimizer that would round
      by itself
    a step in a backward, by a hook on the node that accumulates a gradient
    a backward, after the step, of a forward before it (through `Unit.generation`)

[Note: loaded states] Whole states that are loaded are sharded as their parameters are. Shards of
another rank are refused: if one rank alone calls `torch.save` on a sharded state_dict, the file
holds the shards of that rank, and `torch.load` gives them to all ranks. Training would go on with
the first rows in place of the others. A DTensor from such a file lies on an equal mesh, but the
coordinate in its mesh is the one of the rank that wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.optim import Optimizer, Rprop
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from zero_fn.errors import CheckpointError, StaleError, StateError
from zero_fn.runtime.elementwise import TORCH_ELEMENTWISE, require_elementwise, steps_locally
from zero_fn.runtime.replaced_parameters import replacement_of
from zero_fn.runtime.run import run_of
from zero_fn.runtime.slot import Slot, slot_of
from zero_fn.runtime.uncompiled import uncompiled
from zero_fn.runtime.unit import Unit, unit_of
from zero_fn.values.dtensors import alone, on_spec, rest_gradient, spec_on

__all__ = [
    "require_own_shard",
    "sharded",
    "stepped_optimizers",
    "take_over_states",
    "watch_optimizers",
]

# Lies in the `__dict__` of an optimizer that has stepped: its hook for loaded states.
_LOADS = "_zero_fn_loads"
# Where `_apply_optimizer_in_backward` of torch puts the optimizers of a parameter.
_STEPS_IN_BACKWARD = "_in_backward_optimizers"

# Without Rprop, which makes its states in the dtype of gradients, before they are widened.
_WIDENED = TORCH_ELEMENTWISE - {Rprop}

_installed: list[Any] = []
_stepped: WeakSet[Optimizer] = WeakSet()  # all that have stepped, and are still there


def watch_optimizers(at_first_step: Callable[[Optimizer], None]) -> None:
    """Installs the hooks, once.

    `at_first_step` is called with each optimizer before its first step.
    """
    if not _installed:
        _installed.append(register_optimizer_step_pre_hook(partial(_before_step, at_first_step)))
        _installed.append(register_optimizer_step_post_hook(_after_step))


def stepped_optimizers() -> Iterable[Optimizer]:
    """All optimizers that have stepped, and are still there."""
    return list(_stepped)


@uncompiled
def _before_step(
    at_first_step: Callable[[Optimizer], None], optimizer: Optimizer, _args: object, _kwargs: object
) -> None:
    _stepped.add(optimizer)
    require_elementwise(optimizer)
    steps_locally(optimizer)
    is_streamed = getattr(optimizer, "takes_from_tiers", False)
    # Optimizers of ours take over loaded states themselves.
    is_ours = is_streamed or getattr(optimizer, "steps_wholes", False)
    if _LOADS not in optimizer.__dict__ and not is_ours:
        at_first_step(optimizer)
        take_over_states(optimizer)  # loaded before the first step
        optimizer.__dict__[_LOADS] = None
        if hasattr(
            optimizer, "_optimizer_load_state_dict_post_hooks"
        ):  # not without `Optimizer.__init__`: timm's Lookahead
            optimizer.__dict__[_LOADS] = optimizer.register_load_state_dict_post_hook(
                take_over_states
            )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            slot = slot_of(parameter)
            if slot is None:
                _require_not_replaced(parameter, optimizer)
                continue
            if type(optimizer) not in TORCH_ELEMENTWISE:  # these cut them as they collect them
                rest_gradient(parameter)
            if hasattr(parameter, _STEPS_IN_BACKWARD):
                raise _on_node(slot)
            if slot.kind.must_be_streamed and not is_streamed:
                raise _not_streamed(optimizer, slot)
            if slot.kind.rounding is not None and not is_ours:
                raise _rounds_by_itself(optimizer, slot)
            if slot.kind.gradient_dtype != slot.dtype and not (
                is_ours or type(optimizer) in _WIDENED
            ):
                raise _takes_no_other_dtype(optimizer, slot)
            if slot.kind.rounding is None and (slot.is_recast or slot.dtype != parameter.dtype):
                _require_states_alike(optimizer, slot, parameter)
            unit = unit_of(slot)
            is_open = (
                unit is not None and run_of(unit).accumulating and run_of(unit).is_accumulating
            )
            if unit is not None and is_open and _has_local_gradients(unit):
                raise StateError(
                    "optimizer.step() was called inside accumulate(): "
                    "gradients are not reduced yet.",
                    parameter=slot,
                    why="each rank would update its shard with the "
                    "gradient of its own microbatches",
                    fix="call step() after the `with zf.accumulate(model):` block",
                )


def _require_not_replaced(parameter: Tensor, optimizer: Optimizer) -> None:
    replacement = replacement_of(parameter)
    successor = replacement.parameter() if replacement is not None else None
    if replacement is None or successor is None:
        return
    if parameter.grad is None and successor.grad is not None:
        raise StaleError(
            "The optimizer holds parameters that the model does not have.",
            first=f"{replacement.fqn}, replaced by {replacement.site}",
            why="a transform returns a new module; step() updates the old one "
            "and the loss would not move",
            fix="build the optimizer after the last transform: AdamW(model.parameters()); if "
            "parameters are offloaded and the model was copied or moved, build it after the "
            "next forward",
        )
    # The optimizer trains it beside the parameter that took its place: the two were tied.
    if parameter.grad is not None and any(
        p is successor for group in optimizer.param_groups for p in group["params"]
    ):
        raise StaleError(
            "A tied parameter was transformed in one of the modules that hold it.",
            transformed=f"{replacement.fqn}, by {replacement.site}",
            why="its tie is cut: what the other modules hold would be trained as another "
            "parameter, and not reduced",
            fix="transform the module that holds both: model = zf.shard_params(model, axis, "
            "where=...); to train both apart, copy first: copy.deepcopy(module)",
        )


def _has_local_gradients(unit: Unit) -> bool:
    return unit.visible.leaves is not None or unit.gradients.has_pending()


def _on_node(slot: Slot) -> StateError:
    return StateError(
        "An optimizer steps in backward by a hook on the node that accumulates a gradient.",
        parameter=slot,
        why="the node runs before the gradient is reduced: "
        "the step would use the gradient of the previous backward",
        fix="step in p.register_post_accumulate_grad_hook(...), "
        "which is called with the reduced gradient",
    )


def _not_streamed(optimizer: Optimizer, slot: Slot) -> StateError:
    return StateError(
        f"{type(optimizer).__name__} was to step offloaded parameters.",
        parameter=slot,
        tiers=slot.home.tiers,
        why="a disk that fails in the middle would leave ranks in different states; "
        "nothing was updated",
        fix="optimizer = zf.streamed(optimizer, zf.nvme('/local_nvme')), or "
        "zf.streamed(optimizer, zf.cpu()); in a trainer ZeroTrainer(..., place=place, "
        "finish=zf.streamed)",
    )


def _rounds_by_itself(optimizer: Optimizer, slot: Slot) -> StateError:
    return StateError(
        f"{type(optimizer).__name__} was to step parameters whose results are rounded "
        "as precision(round=) says.",
        parameter=slot,
        round=slot.kind.rounding,
        why="a stock step computes in bfloat16, keeps its states in it, "
        "and rounds by itself; nothing was updated",
        fix="optimizer = zf.streamed(optimizer), which needs no tier; or zf.by_owner(optimizer)",
    )


def _takes_no_other_dtype(optimizer: Optimizer, slot: Slot) -> StateError:
    return StateError(
        f"{type(optimizer).__name__} was to step parameters whose gradients rest in another dtype.",
        parameter=slot,
        gradient=_name(slot.kind.gradient_dtype),
        why="only streamed optimizers and those of torch.optim, but for Rprop, "
        "get them widened; nothing was updated",
        fix="zf.streamed(optimizer, zf.cpu(), elementwise=True); or leave these parameters out of "
        "precision(grads=...) by where=",
    )


def _require_states_alike(optimizer: Optimizer, slot: Slot, parameter: Tensor) -> None:
    for name, value in optimizer.state.get(parameter, {}).items():
        if not isinstance(value, Tensor):
            continue
        is_alike = isinstance(value, DTensor) if isinstance(parameter, DTensor) else name != "step"
        if is_alike and value.shape == parameter.shape and value.dtype != parameter.dtype:
            raise StateError(
                "The optimizer's states have another dtype than their parameters.",
                parameter=f"{slot.fqn} is {_name(parameter.dtype)}, "
                f"its {name} is {_name(value.dtype)}",
                why="the module was cast after the optimizer had stepped; nothing was updated",
                fix="cast before the first step, or carry the states over: "
                "saved = optimizer.state_dict(); model.to(dtype); "
                "optimizer = AdamW(model.parameters()); optimizer.load_state_dict(saved)",
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


# -- loaded states ---------------------------------------------------------------------------------


def require_own_shard(what: str, entry: DTensor, mesh: DeviceMesh) -> None:
    """Checks a loaded tensor that is to take the place of one on `mesh`.

    Raises:
        CheckpointError: It holds the shard of another rank.
            Raised on the ranks that did not write the file.
    """
    if entry.device_mesh is mesh or entry.device_mesh != mesh:
        return
    theirs, ours = entry.device_mesh.get_coordinate(), mesh.get_coordinate()
    assert theirs is not None and ours is not None, "a mesh without this rank"
    placements = enumerate(entry.placements)
    if all(each.is_replicate() or theirs[i] == ours[i] for i, each in placements):
        return
    raise CheckpointError(
        f"{what} holds the shard of another rank.",
        written_by=f"the rank at {list(theirs)} of the mesh",
        read_by=f"the rank at {list(ours)}",
        why="one rank called torch.save on a sharded state_dict, "
        "so the file has the shards of that rank only",
        fix="save with torch.distributed.checkpoint, every rank its part; or whole tensors: sd = "
        "get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, "
        "cpu_offload=True)) on every rank, torch.save(sd) on rank 0",
    )


def sharded(whole: Tensor, slot: Slot, spec: DTensorSpec) -> DTensor:
    """This rank's part of a whole tensor, cut as the parameter of a slot is,
    in memory of its own."""
    own = slot.owned_of_full(whole)
    if own.dtype != slot.dtype:
        spec = spec_on(spec, slot.parameter.shape, slot.parameter.stride(), own.dtype)
    return on_spec(alone(own), spec)


@uncompiled
def take_over_states(optimizer: Optimizer) -> None:
    """Shards whole states that were loaded into an optimizer,
    and checks sharded ones. [Note: loaded states]

    Raises:
        CheckpointError: A state is the shard of another rank.
    """
    for parameter, states in optimizer.state.items():
        slot = slot_of(parameter)
        if slot is None or slot.spec is None or not isinstance(states, dict):
            continue
        for name, value in states.items():
            if isinstance(value, DTensor):
                require_own_shard(f"The optimizer's {name} of {slot.fqn!r}", value, slot.spec.mesh)
            elif (
                isinstance(value, Tensor)
                and name != "step"
                and tuple(value.shape) == slot.full_shape
            ):
                states[name] = sharded(value, slot, slot.spec)
