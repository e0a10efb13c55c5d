"""Who looks on while a model trains: `zf.profile`, `zf.metrics`.

Nobody, until one of them is opened.

The core tells each watch what happens, where it happens:

    for watch in watching.watchers:
        watch.note(Moment.ENTER, unit.name)

With no watch that is a loop over an empty tuple: no call.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, auto
from typing import Any

from torch import Tensor

__all__ = ["WITHIN", "Moment", "Watch", "look", "look_away", "watchers"]


class Moment(IntEnum):
    """What begins and ends in the thread that trains.

    Each pair brackets what happens between, and pairs nest.
    """

    ENTER = auto()  # the forward of a unit
    LEAVE = auto()
    BACKWARD = auto()
    BACKWARD_END = auto()
    NEED = auto()  # backward has reached a unit: no end, the next moment of a unit ends it
    ARRIVED = auto()  # the gradients of a unit are there
    ISSUE = auto()  # a collective
    ISSUED = auto()
    WAIT = auto()  # for a collective
    WAITED = auto()
    COPY = auto()  # a wait for a tier
    COPIED = auto()
    LOAD = auto()  # a batch
    LOADED = auto()
    OPTIMIZER = auto()  # a step
    STEPPED = auto()


WITHIN = frozenset(
    (Moment.ISSUE, Moment.ISSUED, Moment.WAIT, Moment.WAITED, Moment.COPY, Moment.COPIED)
)
"""Moments that change neither the unit nor the phase, nor come on the stream that computes."""


class Watch:
    """What is told; it does nothing with it. It must not raise, nor communicate."""

    def note(self, moment: Moment, what: str = "") -> None:
        """A moment, now; `what`: the name of the unit or of the tier."""

    def issued(self, work: Any, kind: str) -> None:
        """A collective has begun; `work` is the `Work` that will be waited for.

        Comes in place of `note(ISSUED)`.
        """

    def moving(self, tier: str, nbytes: int, *, is_read: bool) -> None:
        """Bytes begin to move from a tier (`is_read`) or to it."""

    def arrived(self, unit: str, grads: Sequence[Tensor | None]) -> None:
        """The gradients of one backward of a unit are there, whole,
        of this rank's data, not yet reduced."""

    def saved(self) -> None:
        """A checkpoint is complete. May come from a thread that saves in the background."""


watchers: tuple[Watch, ...] = ()
"""Those that look on now."""


def look(watch: Watch) -> None:
    """Tells this one, too, from now on."""
    global watchers
    watchers = (*watchers, watch)


def look_away(watch: Watch) -> None:
    """Tells it nothing more."""
    global watchers
    watchers = tuple(each for each in watchers if each is not watch)
