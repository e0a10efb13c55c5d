"""The optimizer that was given to `streamed` is for the streamed one alone: whoever steps, saves or loads it is told.

It has no states any more. A step would begin with none, a `state_dict` would have none, and one that is loaded would be lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import Optimizer

from zero_fn.errors import StateError
from zero_fn.streamed.trial import is_replaced

__all__ = ["HandedOver"]

_MARK = "_zero_fn_is_streamed"  # in the `__dict__` of the optimizer


class HandedOver:
    """Guards an optimizer. Holds no reference to it, so that both are freed together."""

    def __init__(self, inner: Optimizer) -> None:
        inner.__dict__[_MARK] = True
        self._id, self._loads = id(inner), False
        inner.register_step_pre_hook(self._refuse)
        inner.register_state_dict_pre_hook(self._refuse)
        inner.register_load_state_dict_pre_hook(self._refuse)

    @staticmethod
    def require_own(inner: Optimizer) -> None:
        """For an optimizer that is to be streamed.

        Raises:
            StateError: It is streamed already.
        """
        if _MARK in inner.__dict__:
            raise _is_streamed(inner)

    @contextmanager
    def loads(self) -> Iterator[None]:
        """Inside, the streamed one loads it."""
        self._loads = True
        try:
            yield
        finally:
            self._loads = False

    def _refuse(self, optimizer: Optimizer, *_: object) -> None:
        # The streamed one shares its hooks. And what it steps may step the class above it: `super().step()`.
        if id(optimizer) == self._id and not self._loads and not is_replaced(optimizer):
            raise _is_streamed(optimizer)


def _is_streamed(inner: Optimizer) -> StateError:
    return StateError(
        f"This {type(inner).__name__} was given to streamed(), and its states are no longer in it.",
        why="a step would begin without them, and a state_dict would have none",
        fix="optimizer = zf.streamed(optimizer, tier): step, save and load what it returned",
    )
