"""A step of a parameter that rests in bfloat16 and has no master:
widened to float32, stepped, and rounded back.

    "stochastic"   rounded up or down by chance, so that small steps are taken as often as they are
                   worth. The random number of an element is a hash of its number in the whole
                   tensor, of how often the parameter was stepped, and of the seed and its name: the
                   same on every rank and device, and in whichever piece it is stepped.
    "kahan"        what rounding has cut off is kept beside the parameter, in bfloat16 too,
                   and added before the next step

What rounding keeps (the count, or what was cut off) is saved and loaded with the states of the
optimizer, which does not see it.

Source: Kahan 1965; of optimizers in bfloat16 Zamirai et al. 2020, arXiv:2010.06192.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zero_fn.errors import StateError
from zero_fn.kernels.stochastic_rounding import key_of, round_randomly, round_to_two, widen
from zero_fn.runtime.slot import slot_of
from zero_fn.values.numbering import Numbering
from zero_fn.values.rounding_mode import ParameterRounding
from zero_fn.values.strides import as_flat, dense_stride

__all__ = ["COMPENSATION", "Widened", "as_kept", "kept_beside", "rounding_of", "step_dtype_of"]

COMPENSATION, ROUNDINGS = "compensation", "roundings"
"""Names of states: what was cut off, a tensor; and how often a parameter was rounded, a number."""

_BLOCK_NUMEL = 1 << 22  # rounded at once: what numbers and hashes of elements take is bounded


def rounding_of(parameter: Tensor) -> ParameterRounding | None:
    """How results are rounded into a parameter; None if it is stepped in
    the dtype in which it rests."""
    slot = slot_of(parameter)
    return slot.kind.rounding if slot is not None else None


def step_dtype_of(parameter: Tensor) -> torch.dtype:
    """The dtype in which an optimizer sees a parameter, and makes states for it."""
    return parameter.dtype if rounding_of(parameter) is None else torch.float32


def kept_beside(parameter: Tensor) -> tuple[tuple[str, torch.dtype], ...]:
    """Names and dtypes of the states that rounding adds,
    with an element for each of the parameter."""
    rounding = rounding_of(parameter)
    if rounding is not None and rounding.mode == "kahan":
        return ((COMPENSATION, torch.bfloat16),)
    return ()


def as_kept(parameter: Tensor, states: Mapping[str, Any]) -> Mapping[str, Any]:
    """States that were made or loaded for a parameter, in the dtypes in which they are kept.

    Raises:
        StateError: A stock optimizer was given the states that such a parameter had,
            and has rounded them.
    """
    if rounding_of(parameter) is None:
        return states
    found = dict(states)
    for name, value in states.items():
        if not isinstance(value, Tensor) or not value.is_floating_point() or name == "step":
            continue
        if (
            value.dtype == torch.bfloat16
            and name != COMPENSATION
            and {COMPENSATION, ROUNDINGS} & states.keys()
        ):
            raise StateError(
                "The states of the optimizer were loaded before it was streamed, "
                "which has rounded them.",
                parameter=slot_of(parameter),
                state=name,
                why="torch loads states in the dtype of their parameter, "
                "which rests in bfloat16; they were float32",
                fix="optimizer = zf.streamed(optimizer) first, then optimizer.load_state_dict(...)",
            )
        found[name] = value.to(torch.bfloat16 if name == COMPENSATION else torch.float32)
    return found


class Widened:
    """Elements of a parameter that rests in bfloat16, in float32 while they are stepped."""

    def __init__(
        self,
        parameter: Tensor,
        value: Tensor,
        states: dict[str, Any],
        numbering: Numbering,
        start: int = 0,
        room: Tensor | None = None,
    ) -> None:
        """`value`: the elements where they rest, from the number `start` in memory on.

        What rounding keeps is taken out of `states`. `room`:
        flat memory for them in float32; None: new memory.
        """
        slot = slot_of(parameter)
        assert slot is not None and slot.kind.rounding is not None
        self._name = slot.fqn.replace("_orig_mod.", "")  # what `torch.compile` puts before it
        self._rounding = slot.kind.rounding
        self._value = value
        self._numbering = numbering
        self._start = start
        self._count: int = states.pop(ROUNDINGS, 0)
        self._stride = dense_stride(value)
        self._lost = self._laid(states.pop(COMPENSATION)) if COMPENSATION in states else None
        # What the optimizer steps.
        self.values = (
            self._like(torch.float32)
            if room is None
            else room.as_strided(value.shape, self._stride)
        )
        widen(
            as_flat(self._laid(value)),
            None if self._lost is None else as_flat(self._lost),
            as_flat(self.values),
        )

    def _like(self, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(
            self._value.shape, self._stride, dtype=dtype, device=self._value.device
        )

    def _laid(self, tensor: Tensor) -> Tensor:
        """A tensor, or a copy of one that lies in memory otherwise, or in a tier."""
        is_alike = type(tensor) is Tensor and tensor.stride() == self._stride
        return tensor if is_alike else self._like(tensor.dtype).copy_(tensor)

    def round(self, result: Tensor, into: Tensor) -> dict[str, Any]:
        """Rounds what a step has made of the values to where they rest.

        Returns what rounding keeps.
        """
        rounded = self._laid(self._value)
        source, target = as_flat(self._laid(result.detach())), as_flat(rounded)
        if self._rounding.mode == "kahan":
            lost = self._like(torch.bfloat16) if self._lost is None else self._lost
            round_to_two(source, target, as_flat(lost))
            kept: dict[str, Any] = {COMPENSATION: lost}
        else:
            key = key_of(self._rounding.seed, self._name, self._count)
            for at in range(0, source.numel(), _BLOCK_NUMEL):
                to = min(at + _BLOCK_NUMEL, source.numel())
                runs = self._numbering.runs(self._start + at, self._start + to)
                round_randomly(source[at:to], target[at:to], *runs, key)
            kept = {ROUNDINGS: self._count + 1}
        if rounded is not into:
            into.copy_(rounded)
        return kept
