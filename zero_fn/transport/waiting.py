"""Waiting for peers, with a deadline.

A wait that fails raises one of two internal exceptions, which `zero_fn.transport.guarded` turns into errors for the user:

    PeerLost        a peer closed its connection, or did not answer before the deadline
    OutOfStep       a peer is at another collective
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from zero_fn.errors import LayoutError

__all__ = ["Failure", "OnStream", "OutOfStep", "PeerLost", "deadline", "set_deadline", "started", "wait_for"]

DEFAULT_DEADLINE_S, LONGEST_DEADLINE_S = 300.0, 1e9

_limit = timedelta(seconds=DEFAULT_DEADLINE_S)


class PeerLost(Exception):
    """A message cannot be sent or does not come.

    Attributes:
        peer: The rank along the axis at the other end; None for a collective of the backend, which does not tell.
        is_late: Whether the deadline has passed. Otherwise the connection is closed.
    """

    def __init__(self, peer: int | None, *, is_late: bool, text: str) -> None:
        super().__init__(text)
        self.peer, self.is_late = peer, is_late


class OutOfStep(Exception):
    """A message came that belongs to another collective.

    Attributes:
        peer: The rank that sent it.
        seen_by: The rank that received the message: this one, or one that told this one of it.
    """

    def __init__(self, peer: int, *, seen_by: int) -> None:
        super().__init__(f"rank {peer} is at another collective than rank {seen_by}")
        self.peer, self.seen_by = peer, seen_by


Failure = PeerLost | OutOfStep


def deadline() -> float:
    """Seconds that any wait may take."""
    return _limit.total_seconds()


def set_deadline(seconds: float | str, name: str = "deadline_s") -> None:
    """Sets the seconds that any wait may take; `name` is what the user has set them by.

    Raises:
        LayoutError: These are no seconds.
    """
    global _limit
    try:
        found = float(seconds)
    except (TypeError, ValueError):
        found = 0.0
    if not 0 < found <= LONGEST_DEADLINE_S:
        raise LayoutError(
            f"{name} must be positive, a number of seconds.",
            got=repr(seconds),
            fix=f"{DEFAULT_DEADLINE_S:g}, as without it; {LONGEST_DEADLINE_S:.0f} for no deadline",
        )
    _limit = timedelta(seconds=found)


if "ZERO_FN_DEADLINE_S" in os.environ:
    set_deadline(os.environ["ZERO_FN_DEADLINE_S"], "ZERO_FN_DEADLINE_S")


class OnStream:
    """A collective that a stream waits for, not the host. With a timeout the host would wait too, so none is passed on."""

    __slots__ = ("_work",)

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, _limit: timedelta) -> None:
        self._work.wait()


def wait_for(work: Any, peer: int | None) -> None:
    """Waits for one message or collective.

    Raises:
        PeerLost: The deadline has passed, or the connection is closed.
    """
    try:
        work.wait(_limit)
    except RuntimeError as error:
        raise _lost(error, peer) from error


def started(start: Callable[..., Any], tensors: list[Any], peer: int, tag: int) -> Any:
    """Starts to send or receive a message.

    If the connection is closed already, only waiting for the message raises: messages to other peers must still leave, or
    these would blame this rank.
    """
    try:
        return start(tensors, peer, tag)
    except RuntimeError as error:
        return _NotStarted(_lost(error, peer))


class _NotStarted:
    """A message that could not be started: waiting for it raises."""

    def __init__(self, failure: PeerLost) -> None:
        self._failure = failure

    def wait(self, _limit: timedelta) -> None:
        raise self._failure


def _lost(error: RuntimeError, peer: int | None) -> PeerLost:
    text = str(error)
    is_late = "timed out" in text.lower() or "timeout" in text.lower()
    return PeerLost(peer, is_late=is_late, text=text)
