"""`zf.distributed.preemption()`: a run that is told to leave (SIGTERM) saves first,
and ends with a status that asks to be started again.

[Note: a signal while a rank waits] Python runs a handler only once the main thread is back from C.
A rank that waits in a collective for another that will not come is not. So a thread listens, to the
descriptor that Python's handler in C writes to (`signal.set_wakeup_fd`).

[Note: children] A process that is forked from a rank has that descriptor, too, until it has
forgotten it. So signals are held back while it is forked; then they do in the child what
they did before.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from zero_fn.errors import LayoutError, StateError
from zero_fn.transport.agree import Flag

__all__ = ["REQUEUE", "Preemption", "preemption"]

REQUEUE = 75
"""The exit status EX_TEMPFAIL of sysexits.h: try again.

Slurm's `RequeueExit` and a Job's `podFailurePolicy` can name it.
"""

_CLOSED = b"\0"  # no signal has this number


def _ignore(number: int, frame: FrameType | None) -> None:
    """Python's handler: the thread hears the signal."""


class Preemption:
    """Listens for signals; `zf.distributed.preemption` makes it."""

    def __init__(self, signals: Sequence[signal.Signals], within_s: float | None) -> None:
        self._flag = Flag()
        self._within_s = within_s
        self._told = threading.Event()
        self._closed = threading.Event()
        self._mask = threading.local()  # of the thread that forks
        self._heard, self._tell = os.pipe()
        os.set_blocking(self._tell, False)
        self._before = {each: signal.signal(each, _ignore) for each in signals}
        self._wakeup_before = signal.set_wakeup_fd(self._tell, warn_on_full_buffer=False)
        os.register_at_fork(
            before=self._hold, after_in_parent=self._let_go, after_in_child=self._forget
        )
        threading.Thread(target=self._listen, name="zero_fn.preemption", daemon=True).start()

    @property
    def is_told(self) -> bool:
        """Whether this rank has got a signal.

        Other ranks may not have; `is_due` is what they all know.
        """
        return self._told.is_set()

    def is_due(self) -> bool:
        """Whether to save and leave: any rank had got a signal when it
        called this in the step before.

        The same answer on every rank. All ranks call it, once a step; a collective of 1 byte,
        for which the next call waits.

        Raises:
            LostRankError: A rank has ended, or did not call.
        """
        return self._flag.is_raised(self.is_told)

    def leave(self) -> NoReturn:
        """Ends this process with status 75, as `sys.exit` does."""
        self.close()
        sys.exit(REQUEUE)

    def close(self) -> None:
        """Stops listening; signals do again what they did before."""
        if not self._closed.is_set():
            self._closed.set()
            self._restore(self._wakeup_before)
            os.write(self._tell, _CLOSED)

    def _restore(self, descriptor: int) -> None:
        signal.set_wakeup_fd(descriptor)
        for each, before in self._before.items():
            signal.signal(each, before)

    def _hold(self) -> None:
        """Before a fork. [Note: children]"""
        self._mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, self._before)

    def _let_go(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask.before)

    def _forget(self) -> None:
        """In the child."""
        if not self._closed.is_set():
            self._closed.set()
            self._restore(-1)
        self._let_go()

    def _listen(self) -> None:
        while not self._told.is_set():
            number = os.read(self._heard, 1)
            if number == _CLOSED:
                return
            if self._wakeup_before != -1:
                os.write(self._wakeup_before, number)  # who listened before still does
            if number[0] in self._before:
                self._told.set()
        if self._within_s is not None and not self._closed.wait(self._within_s):
            text = f"zero_fn: told to leave {self._within_s:g} s ago, and not done: ends now\n"
            os.write(2, text.encode())
            os._exit(REQUEUE)


def preemption(*signals: signal.Signals, within_s: float | None = None) -> Preemption:
    """Listens for the signal by which a system takes a machine back,
    so that the run saves and leaves.

    All ranks call it.

        preemption = zf.distributed.preemption(within_s=25)
        for step in range(step, steps):
            ...
            if preemption.is_due():  # on all ranks, or on none
                zf.save(f"runs/a/step-{step:06d}", model, optimizer)
                preemption.leave()  # exit status 75: start me again

    One rank that gets the signal is enough. Ranks learn of it one step later, at the same step.
    Slurm (`--signal=TERM@120`: 120 s before the limit), Kubernetes and clouds send SIGTERM first
    and kill later; torchrun passes it on, kills ranks 30 s later, and ends with status 1, whatever
    they ended with.

    Communicates: makes a process group of all ranks.

    Args:
        *signals: Those to listen for; SIGTERM if none is given.
        within_s: Seconds after which a rank that was told ends with status 75, wherever it is. The
            checkpoint is then the one before. None: it may take as long as the system lets it.

    Raises:
        StateError: This is not the main thread, to which Python gives signals.
        LayoutError: `within_s` is not positive.
    """
    if threading.current_thread() is not threading.main_thread():
        fix = (
            "call it in the main thread of each rank (a function of Ray Train runs in another; "
            "Ray restarts lost workers)"
        )
        raise StateError(
            "Signals come to the main thread only.", here=threading.current_thread().name, fix=fix
        )
    if within_s is not None and not within_s > 0:
        raise LayoutError(
            "No rank can save in no time.", within_s=within_s, fix="seconds, or None: within_s=25"
        )
    return Preemption(signals or (signal.SIGTERM,), within_s)
