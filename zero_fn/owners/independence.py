"""Whether an optimizer steps each parameter as if there were no others, as ranks that own some of them must.

It is tried on two small parameters, together and each alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_fn.errors import PlacementError
from zero_fn.runtime.attributes import attributes_of
from zero_fn.streamed.inner import stepped

__all__ = ["require_independent"]

_STEPS, _MOST = 2, 6
"""Steps that are tried, and the most elements of a side."""


def require_independent(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuses an optimizer that computes a step of one parameter from others, or that cannot step one alone.

    Raises:
        PlacementError: It does. Nothing was updated.
    """
    for group in groups:
        like = [parameter for parameter in group["params"] if parameter.requires_grad][:2]
        if not like:
            continue
        like = like if len(like) == 2 else [*like, *like]
        try:
            together, *alone = (_trial(optimizer, group, like, numbers) for numbers in ([0, 1], [0], [1]))
        except Exception as error:  # whatever an optimizer raises that wants a closure, sparse gradients, ...
            raise _refusal(optimizer, f"it cannot step one parameter alone: {type(error).__name__}: {error}") from error
        if not all(map(torch.equal, together, [own for (own,) in alone])):
            raise _refusal(
                optimizer, "it steps a parameter differently if others, or numbers drawn for them, come before it"
            )


def _refusal(optimizer: Optimizer, why: str) -> PlacementError:
    return PlacementError(
        f"The parameters of {type(optimizer).__name__} cannot be stepped by their owners.",
        optimizer=f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        why=f"{why}; nothing was updated",
        fix="an option of it that does without: timm's Lamb(max_grad_norm=None), with torch.nn.utils.clip_grad_norm_ before "
        "the step; or keep these parameters whole by zf.replicate, and step them on every rank",
    )


def _trial(
    optimizer: Optimizer, group: Mapping[str, Any], like: Sequence[Tensor], numbers: Sequence[int]
) -> list[Tensor]:
    """Some of two small parameters after a few steps."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drawn = [torch.randn(2, *(min(size, _MOST) for size in each.shape)).to(each.dtype) for each in like]
        probes = {number: nn.Parameter(drawn[number][0].clone()) for number in numbers}
        for number, probe in probes.items():
            vars(probe).update(attributes_of(like[number]))
        made = type(optimizer)([*probes.values()], **optimizer.defaults) if _has_born(optimizer) else None
        states: Mapping[Any, Any] = made.state if made is not None else {}
        for step in range(_STEPS):
            for number, probe in probes.items():
                probe.grad = drawn[number][1] * 10 ** (2 - step)  # far from what a clipping inside it lets pass
            states = stepped(optimizer, group, {probe: states.get(probe, {}) for probe in probes.values()})
    return [probe.detach() for probe in probes.values()]


def _has_born(optimizer: Optimizer) -> bool:
    """Whether an optimizer makes states when it is made."""
    return type(optimizer) is torch.optim.Adagrad
