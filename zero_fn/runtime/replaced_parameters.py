"""Remembers which parameter a transform has put in place of another.

References are weak: they keep no parameter alive. Nothing is written on the tensors of the user.

[Note: no weak references to DTensors] `Module.to` swaps parameters that are DTensors, and torch
does not swap a tensor that has weak references. So the slot stands for a new parameter, and the
local tensor for one that was replaced.
"""

from __future__ import annotations

import traceback
import weakref
from pathlib import Path

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zero_fn.runtime.slot import Slot, slot_of

__all__ = ["Replacement", "call_site", "note_replacement", "replacement_of"]


class Replacement:
    """The replacement of a parameter by a transform."""

    def __init__(self, fqn: str, parameter: nn.Parameter, site: str) -> None:
        self.fqn = fqn
        self.site = site  # the transform, and the place from which it was called
        self._successor: weakref.ref[Slot | nn.Parameter] = weakref.ref(
            slot_of(parameter) or parameter
        )

    def parameter(self) -> nn.Parameter | None:
        """The parameter that took its place; None if that is gone."""
        successor = self._successor()
        if successor is None or isinstance(successor, Tensor):
            return successor
        return successor.parameter


_PACKAGE_FOLDER = str(Path(__file__).resolve().parents[1])

_replaced: dict[int, tuple[weakref.ref[Tensor], Replacement]] = {}


def note_replacement(old: nn.Parameter, replacement: Replacement) -> None:
    key = id(old)
    _replaced[key] = (weakref.ref(_anchor(old), lambda _: _replaced.pop(key, None)), replacement)


def replacement_of(parameter: object) -> Replacement | None:
    """The replacement of a parameter; None if it was not replaced."""
    entry = _replaced.get(id(parameter))
    if entry is not None and isinstance(parameter, Tensor) and entry[0]() is _anchor(parameter):
        return entry[1]
    return None


def _anchor(parameter: Tensor) -> Tensor:
    """A tensor that lives as long as a parameter does. [Note: no weak references to DTensors]"""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def call_site(verb: str) -> str:
    """The verb, and where the user called it: the innermost frame outside this package."""
    for frame in reversed(traceback.extract_stack(limit=12)):
        if not frame.filename.startswith(_PACKAGE_FOLDER):
            return f"{verb} at {frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
    return verb
