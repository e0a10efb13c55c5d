"""The deadline of every wait for peers, and the two ways in which a wait fails,
which `Work` turns into errors for the user.

PeerLost        a peer closed its connection, or did not answer before the deadline
OutOfStep       a peer is at another collective
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed.distributed_c10d as c10d

from zero_fn.errors import LayoutError, warn_once
from zero_fn.values.mesh import Axis

__all__ = [
    "Failure",
    "OutOfStep",
    "PeerLost",
    "deadline",
    "guard",
    "lost",
    "set_deadline",
    "set_timeout_of",
]

DEFAULT_DEADLINE_S, LONGEST_DEADLINE_S = 300.0, 1e9

limit = timedelta(seconds=DEFAULT_DEADLINE_S)
"""How long any wait may take."""

_is_deadline_asked = "ZERO_FN_DEADLINE_S" in os.environ
# By the group of each axis of an accelerator: the axis in words, and the timeouts that its
# backends had. They take seconds for what is issued from then on: the watchdog of NCCL keeps them,
# and gloo itself.
_on_device: WeakKeyDictionary[Any, tuple[str, list[tuple[Any, timedelta]]]] = WeakKeyDictionary()


class PeerLost(Exception):
    """A message cannot be sent or does not come."""

    def __init__(self, peer: int | None, *, is_late: bool, text: str) -> None:
        super().__init__(text)
        # Number along the axis; None for a collective of the backend, which does not tell.
        self.peer = peer
        self.is_late = is_late  # after the deadline; else the connection is closed


class OutOfStep(Exception):
    """A message came that belongs to another collective.

    `seen_by`: who received it, this rank or one that told this one.
    """

    def __init__(self, peer: int, *, seen_by: int) -> None:
        super().__init__(f"rank {peer} is at another collective than rank {seen_by}")
        self.peer = peer
        self.seen_by = seen_by


Failure = PeerLost | OutOfStep


def lost(error: RuntimeError, peer: int | None) -> PeerLost:
    """What an error of torch says of a message or a collective."""
    text = str(error)
    return PeerLost(
        peer, is_late="timed out" in text.lower() or "timeout" in text.lower(), text=text
    )


def deadline() -> float:
    """Seconds that any wait may take."""
    return limit.total_seconds()


def set_deadline(seconds: float | str, name: str = "deadline_s") -> None:
    """Sets the seconds that any wait may take; `name` is what the user has set them by.

    Raises:
        LayoutError: These are no seconds.
    """
    global limit
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
    limit = timedelta(seconds=found)


@contextmanager
def guard(*, deadline_s: float | None = None, compare: None = None) -> Iterator[None]:
    """Sets, for the block, how long a collective may wait.

        with zf.distributed.set_deadline(30):
            train(model)

    Communicates nothing. The environment variable `ZERO_FN_DEADLINE_S` sets
    the same for a whole program.

    Args:
        deadline_s: Seconds that a collective may wait for a peer, 300 unless set. Where the
            host waits, `LostRankError` is raised. On NCCL the device waits: there it becomes
            the timeout of the process groups, whose watchdog **ends the process** with an error
            of torch that names the collective. It counts from when the host issues a
            collective, so what the device has to compute before counts, too; and torch takes up
            to a minute more to end the process, unless
            `TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC=100`. Left out, `init_process_group(timeout=)`
            holds there. A backend that takes no timeout is warned about once.
        compare: Is gone: `TORCH_DISTRIBUTED_DEBUG=DETAIL` compares.

    Returns:
        A context manager.

    Raises:
        LayoutError: `deadline_s` is no number of seconds, or not positive; or `compare` is given.
    """
    global _is_deadline_asked
    _require_no_comparison("guard(compare=)", compare)
    before = deadline(), _is_deadline_asked
    set_deadline(before[0] if deadline_s is None else deadline_s)
    try:
        if deadline_s is not None:
            _is_deadline_asked = True
            _limit_devices()
        yield
    finally:
        set_deadline(before[0])
        _is_deadline_asked = before[1]
        if deadline_s is not None:
            _limit_devices()


def _require_no_comparison(name: str, value: object) -> None:
    if value is not None:
        raise LayoutError(
            f"{name} is gone.",
            got=repr(value),
            why="torch compares collectives itself; ranks that share memory are always compared",
            fix="leave it out, and set TORCH_DISTRIBUTED_DEBUG=DETAIL before the process starts; "
            "the last collectives of each rank on NCCL are in torch's flight recorder: "
            "TORCH_FR_BUFFER_SIZE=2000",
        )


def set_timeout_of(axis: Axis) -> None:
    """Gives the group of an axis of an accelerator the deadline as its timeout,
    if one was asked for, now and later."""
    if axis.size > 1 and axis.device_type != "cpu":
        if axis.group not in _on_device:
            _on_device[axis.group] = (
                f"{axis} of {axis.device_type}, backend {axis.backend}",
                _limited(axis.group),
            )
        if _is_deadline_asked:
            _limit_devices()


def _limit_devices() -> None:
    """Gives the groups of accelerators the deadline that was asked for as their timeout,
    else the one that they had."""
    for group, (axis, backends) in list(_on_device.items()):
        if group not in c10d._world.pg_map:
            continue  # it was destroyed, and is still alive as an object
        for backend, own in backends:
            backend._set_default_timeout(
                timedelta(seconds=deadline()) if _is_deadline_asked else own
            )
        if _is_deadline_asked and not backends:
            warn_once(
                "The deadline of guard does not act on this accelerator.",
                axis=axis,
                why="there the device waits for a collective, not the host, "
                "and the backend takes no other timeout",
                fix="init_process_group(timeout=timedelta(seconds=60))",
            )


def _limited(group: Any) -> list[tuple[Any, timedelta]]:
    """The backends of a group that take a timeout, each with the one that it has."""
    backends = dict.fromkeys(group._get_backend(device) for device in group._device_types)
    return [
        (each, each.options._timeout) for each in backends if hasattr(each, "_set_default_timeout")
    ]


if "ZERO_FN_DEADLINE_S" in os.environ:
    set_deadline(os.environ["ZERO_FN_DEADLINE_S"], "ZERO_FN_DEADLINE_S")
_require_no_comparison("ZERO_FN_COMPARE", os.environ.get("ZERO_FN_COMPARE"))
