"""Collectives that do not hang: every wait has a deadline, and every failure is an error that names ranks and the collective.

What can go wrong between ranks, and the error that every rank raises:

    a rank ended, was stopped or is busy elsewhere    `LostRankError`: which rank, in which collective
    ranks are at different collectives                where ranks share memory, `DisagreementError` before any byte is used;
                                                      with `TORCH_DISTRIBUTED_DEBUG=DETAIL`, where the backend compares;
                                                      elsewhere `LostRankError` at the deadline

Where ranks share memory, a rank that gives up tells the others which rank it blames, and these blame the same. Elsewhere a
rank blames the one that it waited for; if the backend's own collective failed, it can blame none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from zero_fn.errors import DisagreementError, LayoutError, LostRankError, ZeroError, warn_once
from zero_fn.transport.segment import Pending, Transport
from zero_fn.transport.traffic import PAYLOAD, count, open_counts
from zero_fn.transport.waiting import Failure, OutOfStep, PeerLost, deadline, set_deadline
from zero_fn.values.mesh import Axis

__all__ = ["Guarded", "Watched", "guard"]

MISMATCH = "Detected mismatch between collectives"
"""How torch begins the error of a backend that compares: TORCH_DISTRIBUTED_DEBUG=DETAIL."""

_is_deadline_asked = "ZERO_FN_DEADLINE_S" in os.environ
# By the group of each axis of an accelerator: the axis in words, and the timeouts that its backends had. They take seconds
# for what is issued from then on: the watchdog of NCCL keeps them, and gloo itself.
_on_device: WeakKeyDictionary[Any, tuple[str, list[tuple[Any, timedelta]]]] = WeakKeyDictionary()


def _require_no_comparison(name: str, value: object) -> None:
    if value is not None:
        raise LayoutError(
            f"{name} is gone.",
            got=repr(value),
            why="torch compares collectives itself; ranks that share memory are always compared",
            fix="leave it out, and set TORCH_DISTRIBUTED_DEBUG=DETAIL before the process starts; the last collectives of "
            "each rank on NCCL are in torch's flight recorder: TORCH_FR_BUFFER_SIZE=2000",
        )


_require_no_comparison("ZERO_FN_COMPARE", os.environ.get("ZERO_FN_COMPARE"))


@contextmanager
def guard(*, deadline_s: float | None = None, compare: None = None) -> Iterator[None]:
    """Sets, for the block, how long a collective may wait.

        with zf.guard(deadline_s=30):
            train(model)

    Communicates nothing. The environment variable `ZERO_FN_DEADLINE_S` sets the same for a whole program.

    Args:
        deadline_s: Seconds that a collective may wait for a peer, 300 unless set. Where the host waits, `LostRankError` is
            raised. On NCCL the device waits: there it becomes the timeout of the process groups, whose watchdog **ends the
            process** with an error of torch that names the collective. It counts from when the host issues a collective,
            so what the device has to compute before counts, too; and torch takes up to a minute more to end the process,
            unless `TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC=100`. Left out, `init_process_group(timeout=)` holds there.
            A backend that takes no timeout is warned about once.
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


def _limit_devices() -> None:
    """Gives the groups of accelerators the deadline that was asked for as their timeout, else the one that they had."""
    for group, (axis, backends) in list(_on_device.items()):
        if group not in c10d._world.pg_map:
            continue  # it was destroyed, and is still alive as an object
        for backend, own in backends:
            backend._set_default_timeout(timedelta(seconds=deadline()) if _is_deadline_asked else own)
        if _is_deadline_asked and not backends:
            warn_once(
                "The deadline of guard does not act on this accelerator.",
                axis=axis,
                why="there the device waits for a collective, not the host, and the backend takes no other timeout",
                fix="init_process_group(timeout=timedelta(seconds=60))",
            )


def _limited(group: Any) -> list[tuple[Any, timedelta]]:
    """The backends of a group that take a timeout, each with the one that it has."""
    backends = dict.fromkeys(group._get_backend(device) for device in group._device_types)
    return [(each, each.options._timeout) for each in backends if hasattr(each, "_set_default_timeout")]


class _Marks(dict[str, int]):
    """For the text of a collective a number, by which ranks tell collectives apart. It is the same on every rank."""

    def __missing__(self, text: str) -> int:
        mark = self[text] = crc32(text.encode())
        return mark


class _Group:
    """Shared by all models on a process group: how many collectives were issued, and the error of the one that failed."""

    __slots__ = ("count", "failure")

    def __init__(self) -> None:
        self.count = 0
        self.failure: ZeroError | None = None


_groups: WeakKeyDictionary[Any, _Group] = WeakKeyDictionary()


class Watched:
    """A collective under way, whose failure is raised as an error for the user."""

    __slots__ = ("_check", "_line", "_number", "_numel", "_pending", "_text")

    def __init__(self, line: Guarded, text: str, numel: int, check: str) -> None:
        self._line, self._text, self._numel, self._check = line, text, numel, check
        self._number = line.group.count
        self._pending: Pending | None = None

    def begin(self, operation: Callable[[Any, int], Pending], payload: object, mark: int) -> Pending:
        """Issues the collective. Raises as `wait`."""
        try:
            self._pending = pending = operation(payload, mark)
        except (PeerLost, OutOfStep) as lost:
            raise self._line.broken(lost, str(self)) from lost
        except RuntimeError as error:
            if MISMATCH not in str(error):
                raise
            raise self._line.broken(PeerLost(None, is_late=False, text=str(error)), str(self)) from error
        return pending

    def wait(self) -> None:
        """Waits until the result may be used. May be called again.

        Raises:
            LostRankError: A rank has ended, or did not answer before the deadline.
            DisagreementError: A rank is at another collective.
        """
        failure = self._line.group.failure
        if failure is not None:
            raise failure
        assert self._pending is not None, "it was not begun"
        try:
            self._pending.wait()
        except (PeerLost, OutOfStep) as lost:
            raise self._line.broken(lost, str(self)) from lost

    def __str__(self) -> str:
        check = f", {self._check}" if self._check else ""
        return f"#{self._number} {self._text} ({self._numel} elements{check})"


class Guarded:
    """A transport along one axis whose failures name ranks, units and collectives.

    After a failure every collective on the same process group raises it again: peers and this rank are out of step.

    Attributes:
        raw: The transport.
        rank, size: This rank's position on the axis, and the number of ranks.
        group: What all models on the process group share.
    """

    def __init__(self, raw: Transport, axis: Axis | None) -> None:
        self.raw, self._axis = raw, axis
        self.rank, self.size = (axis.rank, axis.size) if axis is not None else (0, 1)
        self._name, self._device_type = (axis.name, axis.device_type) if axis is not None else ("", "cpu")
        self._marks = _Marks()
        self.group = _Group() if axis is None else _groups.setdefault(axis.group, _Group())
        if axis is not None and axis.size > 1 and axis.device_type != "cpu":
            if axis.group not in _on_device:
                _on_device[axis.group] = f"{axis} of {axis.device_type}, backend {axis.backend}", _limited(axis.group)
            if _is_deadline_asked:
                _limit_devices()

    def issue(
        self, operation: Callable[[Any, int], Pending], payload: object, text: str, numel: int, check: str = ""
    ) -> Watched:
        """Begins a collective.

        Args:
            operation: A method of `raw`.
            payload: Its first argument.
            text: The collective in the words of an error: "all-gather of parameters of unit layers.0".
            numel, check: The number of elements, and a text, that must be the same on every rank.
        """
        group = self.group
        if group.failure is not None:
            raise group.failure
        watched = Watched(self, text, numel, check)
        group.count += 1
        mark = self._marks[text] ^ numel * 0x9E3779B1
        pending = watched.begin(operation, payload, (mark ^ crc32(check.encode()) if check else mark) & 0x7FFFFFFF)
        if open_counts and self.size > 1:
            collective = text.partition(" ")[0]
            count(collective if collective in PAYLOAD else "control", pending.nbytes, self._name)
        return watched

    def exchange(self, message: Tensor, what: str) -> Tensor:
        """The messages of all ranks, one row each, on the host. Waits. A message is uint8, of one length on all ranks."""
        rows = torch.empty(self.size, message.numel(), dtype=torch.uint8, device=self._device_type)
        rows[self.rank] = message
        self.issue(self.raw.exchange, rows, "exchange of " + what, message.numel()).wait()
        return rows.cpu()

    def broken(self, failure: Failure, collective: str) -> ZeroError:
        """The error for a failed collective."""
        if self.group.failure is None:
            assert self._axis is not None, "one rank alone lost a peer"
            self.raw.give_up(failure)
            self.group.failure = _explained(failure, collective, self._axis)
        return self.group.failure


def _explained(failure: Failure, collective: str, axis: Axis) -> ZeroError:
    """The error for the user."""
    here = f"rank {axis.rank}, waiting in {collective}"
    if isinstance(failure, OutOfStep):
        first, second = sorted((failure.seen_by, failure.peer))
        return DisagreementError(
            f"Ranks {first} and {second} of axis {axis} are at different collectives.",
            here=here,
            why="the ranks did not run the same forwards and backwards, or one of them raised and went on, or left out "
            "optimizer.step()",
            fix="run the same program on every rank (config.layerdrop = 0.0, encoder_layerdrop, decoder_layerdrop: models of "
            "transformers skip layers at random)",
        )
    if MISMATCH in str(failure):
        return DisagreementError(
            f"Ranks of axis {axis} are at different collectives.",
            here=here,
            why=str(failure),
            fix="run the same forwards, backwards and steps of optimizers on every rank",
        )
    who = f"A rank of axis {axis}" if failure.peer is None else f"Rank {failure.peer} of axis {axis}"
    if failure.is_late:
        return LostRankError(
            f"{who} did not answer within {deadline():g} s.",
            here=here,
            why="it is stopped, or busy outside the collectives, or waits for something else",
            fix="see where it is (py-spy dump --pid); if it only needs longer: zf.guard(deadline_s=...)",
        )
    return LostRankError(
        f"{who} closed the connection.",
        here=here,
        why="the process ended, was killed (often because memory ran out: see dmesg), or gave up",
        fix="look for the first error on that rank; start all ranks again from the last checkpoint",
    )
