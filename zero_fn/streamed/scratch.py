"""What an optimizer keeps beside the states of parameters, in its attributes and groups: counts, histories, averages.

A step in chunks is one step for them: each chunk begins with what was there before it, and what the last one left stays.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Scratch", "begun", "taken_over"]

_OF_EVERY_OPTIMIZER = frozenset(("params", "param_groups", "state", "defaults"))  # never what a step changes


class Scratch:
    """The attributes of an optimizer while it takes steps that are not, or only together, one step of the user.

    Those that are there are not touched: copies take their place.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._attributes = vars(optimizer)
        self._names = frozenset(self._attributes)
        self._own = {name: self._attributes[name] for name in begun(self._attributes)}

    def begin(self) -> None:
        """Before a part of the step: everything as before the first one."""
        self._forget_new()
        self._attributes.update(begun(self._own))

    def drop(self) -> None:
        """The steps were a trial."""
        self._forget_new()
        self._attributes.update(self._own)

    def finish(self) -> None:
        """What the last part has left is what the step leaves."""
        after = {name: self._attributes[name] for name in self._own if name in self._attributes}
        self._attributes.update(self._own)
        taken_over(self._attributes, after)

    def _forget_new(self) -> None:
        for name in [name for name in self._attributes if name not in self._names]:
            del self._attributes[name]


def begun(own: Mapping[str, Any]) -> dict[str, Any]:
    """What a step may change of these attributes, or of a group, to be changed in its place: numbers, also in tensors, and
    copies of containers."""
    return {name: _copied(value) for name, value in own.items() if _may_change(name, value)}


def taken_over(own: MutableMapping[str, Any], after: Mapping[str, Any]) -> None:
    """Puts what a step has left where it belongs. Tensors and containers stay the same objects: schedulers may hold them."""
    for name, value in after.items():
        if name in _OF_EVERY_OPTIMIZER:
            continue
        old = own.get(name)
        if isinstance(old, Tensor) and isinstance(value, Tensor) and _form(old) == _form(value):
            if not torch.equal(old, value):
                old.copy_(value)
        elif isinstance(old, list) and isinstance(value, list):
            old[:] = value
        elif isinstance(old, dict | set) and type(old) is type(value):
            after_it = copy.copy(value)
            old.clear()
            old.update(after_it)
        else:
            own[name] = value


def _may_change(name: str, value: object) -> bool:
    if name in _OF_EVERY_OPTIMIZER or name.startswith("_optimizer_"):  # hooks
        return False
    return isinstance(value, int | float | list | dict | set) or (isinstance(value, Tensor) and value.numel() == 1)


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)
