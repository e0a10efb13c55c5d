"""How the runtime learns that a backward has ended, or raised.

[Note: threads of the engine] The backward of an accelerator runs in a thread of autograd, while the
calling thread waits. If it raises, the calling thread goes on at once, and the engine drops the
backward a little later, in its own thread. The program may be doing anything by then, so the
engine's thread only lets names show resting parameters again. The calling thread recovers the rest
before its next forward or backward: once it is no longer inside backward, the backward has ended.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch.autograd import Variable

from zero_fn.errors import LostRankError
from zero_fn.runtime.uncompiled import uncompiled

__all__ = ["Ending", "current_graph_task"]

T = TypeVar("T")

current_graph_task = torch._C._current_graph_task_id  # -1 outside backward


class Ending:
    """Tells an owner when the running backward ends, or raises."""

    __slots__ = ("_callback", "_caller", "_thread")

    def __init__(
        self,
        owner: T,
        caller: int,
        finish: Callable[[T, Ending], None],
        give_up: Callable[[T, Ending], None],
        show_resting: Callable[[T, Ending], None],
    ) -> None:
        """Queues a callback in the engine.

        Of the owner, held weakly, it calls `finish` when all nodes have run. When the engine drops
        the backward, whether or not it raised, it calls `give_up` in the thread `caller`, or
        `show_resting` in another. [Note: threads of the engine]
        """
        self._caller = caller
        self._thread = get_ident()
        held = weakref.ref(owner)
        callback = _Callback(held, finish, self)

        def on_death(_: object) -> None:
            found = held()
            if found is not None and get_ident() == caller:
                # The error is the one that ended the backward, again: its caller gets it anyway.
                with suppress(LostRankError):
                    give_up(found, self)
            elif found is not None:
                show_resting(found, self)

        self._callback = weakref.ref(callback, on_death)
        Variable._execution_engine.queue_callback(callback)

    @property
    def is_to_come(self) -> bool:
        """Whether the backward may still be running.

        If it raised, the engine has dropped the callback by now.
        """
        if self._callback() is None:
            return False
        # [Note: threads of the engine]
        has_returned = self._thread != self._caller == get_ident() and current_graph_task() == -1
        return not has_returned

    @property
    def is_elsewhere(self) -> bool:
        """Whether the backward runs in another thread, and was called there."""
        return self.is_to_come and get_ident() not in (self._caller, self._thread)


class _Callback:
    """Held by the engine alone, so that its death tells of a backward that raised."""

    __slots__ = ("__weakref__", "_ending", "_finish", "_held")

    def __init__(
        self, held: Callable[[], Any], finish: Callable[[Any, Ending], None], ending: Ending
    ) -> None:
        self._held = held
        self._finish = finish
        self._ending = ending

    @uncompiled
    def __call__(self) -> None:
        owner = self._held()
        if owner is not None:
            self._finish(owner, self._ending)
