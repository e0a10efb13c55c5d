"""Which states an optimizer keeps per element, found out by stepping a parameter of seven elements."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_fn.errors import PlacementError
from zero_fn.runtime.attributes import attributes_of
from zero_fn.streamed.trial import step_alone

__all__ = ["Schema", "refusal", "schema_of", "schema_of_states", "states_like"]

Schema = tuple[tuple[str, torch.dtype], ...]
"""Names and dtypes of the states that have an element for each element of the parameter."""

_NUMEL = 7


def schema_of(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    parameter: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    ndim: int,
) -> Schema:
    """The states that a first step in this group makes for a parameter of this dtype, with so many dims.

    An optimizer that makes them before (Adagrad in torch 2.11) is given such as it made for `parameter`.

    Raises:
        PlacementError: The optimizer keeps states that belong to no parameter, or cannot step one parameter alone.
    """
    probe = torch.zeros(*[1] * (ndim - 1), _NUMEL, dtype=dtype, device=device)
    vars(probe).update(attributes_of(parameter))
    born = optimizer.state.get(parameter, {})
    try:
        try:
            (stepped,), state = step_alone(optimizer, group, [(probe, [probe], {})])
        except KeyError:  # it looks for states that it made when it was made
            (stepped,), state = step_alone(optimizer, group, [(probe, [probe], states_like(born, parameter, probe))])
    except Exception as error:  # whatever an optimizer raises that wants a closure, sparse gradients, ...
        raise refusal(optimizer, f"it cannot step one parameter alone: {type(error).__name__}: {error}") from error
    if any(key is not stepped for key in state):
        raise refusal(optimizer, "it keeps states that belong to no parameter")
    return schema_of_states(state[stepped], stepped)


def states_like(states: Mapping[str, Any], parameter: Tensor, probe: Tensor) -> dict[str, Any]:
    """First states for a probe, such as an optimizer made for a parameter when it was made."""
    dtypes = dict(schema_of_states(states, parameter))
    return {
        name: torch.zeros_like(probe, dtype=dtypes[name]) if name in dtypes else copy.deepcopy(value)
        for name, value in states.items()
    }


def schema_of_states(states: Mapping[str, Any], parameter: Tensor) -> Schema:
    """The states of a parameter that have its shape."""
    return tuple(
        (name, value.dtype)
        for name, value in states.items()
        if isinstance(value, Tensor) and value.shape == parameter.shape and name != "step"
    )


def refusal(optimizer: Optimizer, why: str) -> PlacementError:
    """Of an optimizer whose states no tier can hold."""
    return PlacementError(
        f"The states of {type(optimizer).__name__} cannot be streamed.",
        optimizer=f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        why=why,
        fix="stream an optimizer that treats every element alone (AdamW, Adam, SGD, Adagrad, ...)",
    )
