"""What trials of an optimizer tell: which states a first step makes, and whether it steps each
parameter as if there were no others, as ranks that own some of them must.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from zero_fn.errors import PlacementError
from zero_fn.runtime.attributes import attributes_of
from zero_fn.runtime.bfloat16_step import kept_beside, step_dtype_of
from zero_fn.streamed.inner_optimizer import stepped

__all__ = ["kept_of", "require_independent"]

_STEPS, _MOST = 2, 6
"""Steps that are tried, and the most elements of a side."""


def require_independent(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuses an optimizer that computes a step of one parameter from others,
    or that cannot step one alone.

    Raises:
        PlacementError: It does. Nothing was updated.
    """
    for group in groups:
        like = [parameter for parameter in group["params"] if parameter.requires_grad][:2]
        if not like:
            continue
        like = like if len(like) == 2 else [*like, *like]
        try:
            together, *alone = (
                _trial(optimizer, group, like, numbers) for numbers in ([0, 1], [0], [1])
            )
        except Exception as error:
            # Whatever an optimizer raises that wants a closure, sparse gradients, ...
            raise _refusal(
                optimizer, f"it cannot step one parameter alone: {type(error).__name__}: {error}"
            ) from error
        if not all(map(torch.equal, together, [own for (own,) in alone])):
            raise _refusal(
                optimizer,
                "it steps a parameter differently if others, "
                "or numbers drawn for them, come before it",
            )


def _refusal(optimizer: Optimizer, why: str) -> PlacementError:
    return PlacementError(
        f"The parameters of {type(optimizer).__name__} cannot be stepped by their owners.",
        optimizer=f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        why=f"{why}; nothing was updated",
        fix="an option of it that does without: timm's Lamb(max_grad_norm=None), with "
        "torch.nn.utils.clip_grad_norm_ before the step; or keep these parameters whole by "
        "zf.replicate, and step them on every rank",
    )


def _trial(
    optimizer: Optimizer, group: Mapping[str, Any], like: Sequence[Tensor], numbers: Sequence[int]
) -> list[Tensor]:
    """Some of two small parameters after a few steps."""
    generator = torch.Generator().manual_seed(0)
    drawn = [
        torch.randn(
            2, *(min(size, _MOST) for size in each.shape), generator=generator, device="cpu"
        ).to(each.dtype)
        for each in like
    ]
    probes = {number: nn.Parameter(drawn[number][0].clone()) for number in numbers}
    for number, probe in probes.items():
        vars(probe).update(attributes_of(like[number]))
    states: Mapping[Any, Any] = {}
    if isinstance(optimizer, torch.optim.Adagrad):  # it makes its states when it is made
        states = type(optimizer)([*probes.values()], **optimizer.defaults).state
    for step in range(_STEPS):
        for number, probe in probes.items():
            # Gradients far from those that a clipping inside the optimizer lets pass.
            probe.grad = drawn[number][1] * 10 ** (2 - step)
        states = stepped(
            optimizer, group, {probe: states.get(probe, {}) for probe in probes.values()}
        )
    return [probe.detach() for probe in probes.values()]


def kept_of(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> Mapping[str, Any]:
    """The states that a first step makes of a whole parameter, without values."""
    beside = {
        n: torch.empty(parameter.shape, dtype=dtype, device="meta")
        for n, dtype in kept_beside(parameter)
    }
    try:
        with FakeTensorMode():
            dtype = step_dtype_of(parameter)
            probe = nn.Parameter(
                torch.empty_strided(parameter.shape, parameter.stride(), dtype=dtype)
            )
            probe.grad = torch.zeros_like(probe)
            return {**stepped(optimizer, group, {probe: {}})[probe], **beside}
    except Exception:
        # The optimizer reads values, as Adafactor of torch does:
        # the sides of a small tensor tell the form.
        return {**_of_sides(optimizer, group, parameter), **beside}


_SIDES = (3, 5, 7, 11, 13, 17)
"""Sides of a small parameter, by which a state says which sides it has."""


def _of_sides(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor
) -> dict[str, Tensor]:
    """The states of a parameter, on `meta`, from those of a small one of as many dims."""
    side_of = dict(zip(_SIDES, parameter.shape, strict=False))
    probe = nn.Parameter(torch.zeros(_SIDES[: parameter.dim()], dtype=step_dtype_of(parameter)))
    probe.grad = torch.zeros_like(probe)
    states = stepped(optimizer, group, {probe: {}})[probe]
    return {
        name: torch.empty(
            [side_of.get(side, side) for side in value.shape], dtype=value.dtype, device="meta"
        )
        for name, value in states.items()
        if isinstance(value, Tensor)
    }
