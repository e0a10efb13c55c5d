"""Steps of an optimizer on other parameters than its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_fn.streamed.scratch import Scratch, begun, taken_over

__all__ = ["Given", "is_replaced", "raw_step", "replaced", "step_alone", "step_in_turns"]

Given = tuple[Tensor, Sequence[Tensor], dict[str, Any]]
"""Values, gradients and first states of a parameter. The attributes of the values are those of the parameter."""


_REPLACED = "_zero_fn_is_replaced"  # in the `__dict__` of an optimizer


@contextmanager
def replaced(optimizer: Any, groups: list[dict[str, Any]], state: Mapping[Any, Any]) -> Iterator[None]:
    """Inside, the optimizer has these groups and states; after, its own again."""
    own = optimizer.param_groups, optimizer.state
    optimizer.param_groups, optimizer.state = groups, state
    optimizer.__dict__[_REPLACED] = True
    try:
        yield
    finally:
        optimizer.param_groups, optimizer.state = own
        optimizer.__dict__.pop(_REPLACED, None)


def is_replaced(optimizer: Optimizer) -> bool:
    """Whether it has other groups and states now."""
    return _REPLACED in optimizer.__dict__


def raw_step(optimizer: Optimizer) -> None:
    """Steps without the hooks of optimizers, which are for steps of the user."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    step(optimizer)


def step_alone(
    optimizer: Optimizer, group: Mapping[str, Any], given: Sequence[Given]
) -> tuple[list[nn.Parameter], Mapping[Any, Any]]:
    """Parameters made for it that took a step with each gradient, and all states after it. It keeps its own parameters,
    states and attributes.

    Args:
        optimizer: Whose step it is.
        group: The options to step with.
        given: One for each parameter.
    """
    parameters = [_parameter(values, values) for values, _, _ in given]
    state: defaultdict[Any, Any] = defaultdict(dict)
    state.update({parameter: states for parameter, (_, _, states) in zip(parameters, given, strict=True) if states})
    scratch = Scratch(optimizer)
    scratch.begin()
    try:
        with replaced(optimizer, [{**group, **begun(group), "params": parameters}], state), torch.no_grad():
            for grads in zip(*(grads for _, grads, _ in given), strict=True):
                for parameter, grad in zip(parameters, grads, strict=True):
                    parameter.grad = grad.clone()
                raw_step(optimizer)
    finally:
        scratch.drop()
    return parameters, state


def step_in_turns(optimizer: Optimizer, group: Mapping[str, Any], given: Sequence[Given]) -> list[Tensor]:
    """What `step_alone` steps, as streaming does: in each step one parameter after the other, and each is another one, with
    the values and the states of the step before."""
    group = {**group, **begun(group)}
    values = [value for value, _, _ in given]
    states = [states for _, _, states in given]
    trial = Scratch(optimizer)
    trial.begin()
    try:
        for grads in zip(*(grads for _, grads, _ in given), strict=True):
            scratch = Scratch(optimizer)
            after = group
            for at, grad in enumerate(grads):
                scratch.begin()
                parameter = _parameter(values[at], given[at][0])
                parameter.grad = grad.clone()
                own = {
                    name: value.clone() if isinstance(value, Tensor) else value for name, value in states[at].items()
                }
                state: defaultdict[Any, Any] = defaultdict(dict, {parameter: own} if own else {})
                after = {**group, **begun(group), "params": [parameter]}
                with replaced(optimizer, [after], state), torch.no_grad():
                    raw_step(optimizer)
                values[at], states[at] = parameter.detach(), state.get(parameter, {})
            scratch.finish()
            taken_over(group, after)
    finally:
        trial.drop()
    return values


def _parameter(values: Tensor, like: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(values.clone())
    vars(parameter).update(vars(like))
    return parameter
