"""Whole values for files that anybody reads, and the states of a run, each saved by the ranks that own it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import zero_fn as zf

__all__ = ["load_states", "model_of", "save_states", "whole_state"]


@torch.no_grad()
def whole_state(module: nn.Module, *, keep: bool, names: Collection[str] | None = None) -> dict[str, Any]:
    """The state dict of a module with whole values in host memory. Tied entries stay one tensor.

    Communicates an all-gather for each parameter, one after the other: no rank but those that keep it holds two of them.

    Args:
        module: A transformed module, or one that holds such modules. All ranks call it.
        keep: Whether this rank wants the values; the others get an empty dict.
        names: Entries to take; None takes all.
    """
    wholes: dict[int, Tensor] = {}
    state: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if names is not None and name not in names:
            continue
        if isinstance(value, Tensor) and id(value) not in wholes:
            whole = value.full_tensor() if isinstance(value, DTensor) else value.detach()
            wholes[id(value)] = whole.cpu() if keep else whole.new_empty(0)
        if keep:
            state[name] = wholes[id(value)] if isinstance(value, Tensor) else value
    return state


def save_states(folder: Path, models: Sequence[nn.Module], optimizers: Sequence[tuple[nn.Module, Optimizer]]) -> None:
    """Saves models, and optimizers with the model of each. Every rank calls it and writes what it owns."""
    save(_states(models, optimizers), checkpoint_id=folder)


def load_states(folder: Path, models: Sequence[nn.Module], optimizers: Sequence[tuple[nn.Module, Optimizer]]) -> None:
    """Loads what `save_states` saved, on any number of ranks and at any stage. Every rank calls it.

    Raises:
        CheckpointError: The folder does not hold such states.
    """
    if not (folder / ".metadata").is_file():
        raise zf.CheckpointError(
            "The checkpoint holds no states of a transformed model.",
            folder=folder,
            why="it was saved without them (save_only_model=True), by replicas, or not to its end",
            fix="begin another run from its weights: from_pretrained(checkpoint), and train() without resuming",
        )
    states = _states(models, optimizers)
    load(states, checkpoint_id=folder)
    for number, model in enumerate(models):
        set_model_state_dict(model, states[f"model_{number}"])
    for number, (model, optimizer) in enumerate(optimizers):
        set_optimizer_state_dict(model, optimizer, states[f"optimizer_{number}"])


def _states(models: Sequence[nn.Module], optimizers: Sequence[tuple[nn.Module, Optimizer]]) -> dict[str, Any]:
    """States in groups, not flattened: torch cannot load a flattened one with an empty group, which Trainers make."""
    states: dict[str, Any] = {}
    for number, model in enumerate(models):
        states[f"model_{number}"] = get_model_state_dict(model)
    for number, (model, optimizer) in enumerate(optimizers):
        states[f"optimizer_{number}"] = get_optimizer_state_dict(model, optimizer)
    return states


def model_of(optimizer: Optimizer, models: Sequence[nn.Module]) -> nn.Module | None:
    """The transformed model whose parameters an optimizer holds; None if it holds none of any.

    Raises:
        StateError: It holds parameters of several.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found = [model for model in models if any(id(parameter) in held for parameter in model.parameters())]
    if len(found) > 1:
        raise zf.StateError(
            "The states of an optimizer that steps several models cannot be saved by the names of one.",
            models=", ".join(type(model).__name__ for model in found),
            fix="an optimizer for each model; or one module of both: nn.ModuleDict({'actor': actor, 'critic': critic})",
        )
    return found[0] if found else None
