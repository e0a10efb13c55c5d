"""The optimizer that is streamed: which classes may be, the states that it keeps, and its step,
called for other parameters.

Optimizers of torch that treat every element alone are known by their class. For another class the
user vouches by `elementwise=True`, and one step of seven elements is tried.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_fn.errors import PlacementError, StateError
from zero_fn.runtime.attributes import attributes_of
from zero_fn.runtime.bfloat16_step import as_kept, step_dtype_of
from zero_fn.runtime.elementwise import TORCH_ELEMENTWISE, looks_at_whole_tensors
from zero_fn.values.dtensors import at_same_address, local_of

__all__ = [
    "Schema",
    "hand_over",
    "kept_by",
    "raw_step",
    "require_not_streamed",
    "require_streamable",
    "schema_of",
    "stand_in",
    "stepped",
]

O = TypeVar("O", bound=Optimizer)  # noqa: E741

Schema = tuple[tuple[str, torch.dtype], ...]
"""Names and dtypes of the states that have an element for each element of the parameter."""

_NUMEL = 7


def require_streamable(optimizer: Optimizer, *, elementwise: bool) -> None:
    """Refuses an optimizer that may not step pieces of parameters."""
    if looks_at_whole_tensors(optimizer):
        raise _refusal(
            optimizer,
            "it looks at whole tensors, and states pass through buffers in pieces of parameters",
        )
    if type(optimizer) not in TORCH_ELEMENTWISE and not elementwise:
        raise _refusal(
            optimizer,
            "nobody has said that it treats every element alone; "
            "states pass through buffers in pieces of parameters",
            fix="zf.streamed(optimizer, tier, elementwise=True), if it does all that the "
            "documentation of `elementwise` asks for; or an elementwise optimizer of torch.optim "
            "(AdamW, Adam, SGD, Adagrad, ...)",
        )


def _refusal(
    optimizer: Optimizer,
    why: str,
    fix: str = "an elementwise optimizer of torch.optim (AdamW, Adam, SGD, Adagrad, ...)",
) -> PlacementError:
    return PlacementError(
        f"The states of {type(optimizer).__name__} cannot be streamed.",
        optimizer=f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        why=why,
        fix=fix,
    )


# -- its step, for other parameters ----------------------------------------------------------------


def stand_in(optimizer: O, groups: list[dict[str, Any]], state: Mapping[Any, Any]) -> O:
    """The same optimizer with other groups and states.

    The one that was given stays as it is, whatever a step interrupts.
    """
    other = object.__new__(type(optimizer))
    # To those who watch optimizers a step of `super()` in its own is one of the streamed optimizer.
    vars(other).update(
        {**vars(optimizer), "param_groups": groups, "state": state, "takes_from_tiers": True}
    )
    # That of the one that was given: it steps over local tensors anyway. (elementwise.py)
    vars(other).pop("_init_group", None)
    return other


def raw_step(optimizer: Optimizer) -> None:
    """Steps an optimizer without its hooks, which are for steps of the user."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    step(optimizer)


# -- its states ------------------------------------------------------------------------------------


def kept_by(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    parameter: Tensor,
    device: torch.device,
    *,
    in_pieces: bool,
) -> Schema:
    """The states that a first step makes for a parameter,
    found by a step of a trial parameter of seven elements."""
    local = local_of(parameter)
    probe = nn.Parameter(
        torch.zeros(*[1] * (local.dim() - 1), _NUMEL, dtype=step_dtype_of(parameter), device=device)
    )
    vars(probe).update(attributes_of(parameter))
    probe.grad = torch.zeros_like(probe)
    born = {
        name: torch.zeros_like(probe, dtype=value.dtype)
        if _is_moment(value, name, parameter)
        else copy.deepcopy(value)
        for name, value in as_kept(parameter, optimizer.state.get(parameter, {})).items()
    }
    try:
        try:
            states = stepped(optimizer, group, {probe: {}})
        except KeyError:
            # The optimizer looks for states that it made at first; they may be in their tier.
            born = born or dict(type(optimizer)([probe], **optimizer.defaults).state[probe])
            states = stepped(optimizer, group, {probe: born})
    except Exception as error:
        # Anything that an optimizer raises which wants a closure, sparse gradients, ...
        raise _refusal(
            optimizer, f"it cannot step one parameter alone: {type(error).__name__}: {error}"
        ) from error
    if any(key is not probe for key in states):
        raise _refusal(optimizer, "it keeps states that belong to no parameter")
    tensors = {name: value for name, value in states[probe].items() if isinstance(value, Tensor)}
    shared = [list(tensors)[later] for _, later in at_same_address(tensors.values())]
    if in_pieces and shared and type(optimizer) not in TORCH_ELEMENTWISE:
        raise _refusal(
            optimizer,
            f"its states {', '.join(shared)} lie in memory of other states; "
            "each will have its own in a buffer",
            fix="keep one of them, and view it in step(): "
            "flat = self.state[p]['momentum'].view(-1)",
        )
    return schema_of(states[probe], probe)


def schema_of(states: Mapping[str, Any], parameter: Tensor) -> Schema:
    """Names and dtypes of the states that have the shape of their parameter."""
    return tuple(
        (name, value.dtype) for name, value in states.items() if _is_moment(value, name, parameter)
    )


def _is_moment(value: object, name: str, parameter: Tensor) -> TypeGuard[Tensor]:
    """Whether a state has an element for each element of the parameter.

    The count of steps never does, also of a scalar.
    """
    return name != "step" and isinstance(value, Tensor) and value.shape == parameter.shape


def stepped(
    optimizer: Optimizer, group: Mapping[str, Any], states: Mapping[nn.Parameter, Any]
) -> Mapping[Any, Any]:
    """All states after a step of some parameters with these states.

    Nothing else of the optimizer changes, nor the numbers that the host draws next.
    """
    state: defaultdict[Any, Any] = defaultdict(
        dict, {probe: own for probe, own in states.items() if own}
    )
    trial = {**group, "params": [*states]}
    optimizer = stand_in(optimizer, [trial], state)
    for own in (vars(optimizer), trial):  # what a step changes in place is a copy
        lists = {
            n: copy.copy(v)
            for n, v in own.items()
            if isinstance(v, list | dict | set) and v is not state
        }
        own |= lists | {
            name: value.detach().clone() for name, value in own.items() if isinstance(value, Tensor)
        }
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        raw_step(optimizer)
    return state


# -- after it was given to streamed() --------------------------------------------------------------


class _Elsewhere(dict[Any, Any]):
    """The empty states of an optimizer that was given to `streamed` or `by_owner`."""

    verb = "streamed"


def hand_over(inner: Optimizer, verb: str = "streamed") -> None:
    """Takes the states of an optimizer.

    From now on it refuses to be stepped, saved or loaded: it would begin without states,
    save none, and drop what it loads.
    """
    inner.state = _Elsewhere()  # type: ignore[assignment]
    inner.state.verb = verb  # type: ignore[attr-defined]
    inner.register_step_pre_hook(_require_own)
    inner.register_state_dict_pre_hook(_require_own)
    inner.register_load_state_dict_pre_hook(_require_own)


def require_not_streamed(inner: Optimizer) -> None:
    """Refuses to use an optimizer that was given to `streamed` or `by_owner`."""
    # Not `inner.state`: a streamed optimizer, which has the same hooks,
    # would finish its step first.
    if isinstance(state := vars(inner).get("state"), _Elsewhere):
        raise StateError(
            f"This {type(inner).__name__} was given to {state.verb}(), "
            "and its states are no longer in it.",
            why="a step would begin without them, and a state_dict would have none",
            fix=f"optimizer = zf.{state.verb}(optimizer, ...): step, "
            "save and load what it returned",
        )


def _require_own(optimizer: Optimizer, *_: object) -> None:
    require_not_streamed(optimizer)
