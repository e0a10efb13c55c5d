"""Blocks of the user, in which parameters are whole or gradients are summed up.

[Note: interrupted blocks] A KeyboardInterrupt may come while a block closes, between any two lines.
So the module knows a block before it touches anything, and until everything is back. The generator
that is its body tells whether it still runs; if not, whatever comes next closes what is left.
(Run.leave_blocks)
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager

from zero_fn.runtime.unit import Unit

__all__ = ["Body", "UserBlock", "opened"]

Body = Generator[None, None, None]
"""What a block does, up to `yield`, and after it."""


class UserBlock:
    """One block."""

    def __init__(self, *, accumulates: bool) -> None:
        self.accumulates = accumulates  # whether gradients are summed up inside
        self.units: Sequence[Unit] = ()  # those whose parameters are whole inside
        self.body: Callable[[], Body | None] = lambda: None

    @property
    def is_open(self) -> bool:
        """Whether the block has not ended."""
        body = self.body()
        return body is not None and inspect.getgeneratorstate(body) != inspect.GEN_CLOSED


def opened(
    body: Callable[..., Body], *args: object, accumulates: bool = False, **kwargs: object
) -> AbstractContextManager[None]:
    """The context manager of a block. `body` is called with the block, and with the arguments."""
    block = UserBlock(accumulates=accumulates)
    context = contextmanager(body)(block, *args, **kwargs)
    block.body = weakref.ref(context.gen)
    return context
