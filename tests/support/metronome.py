"""Time as this machine can give it: what other programs take away from everybody is not counted.

A test that wants something within a second means a second of a machine that has time for it. A thread that works a little
and sleeps a little, as ranks do, is slowed by others as they are: its beats are the clock of such a test.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

__all__ = ["Metronome"]

_WORK_S = 0.002
_REST_S = 0.008


class Metronome:
    """Beats 100 times a second on a quiet machine, and less often where others take turns.

    with Metronome() as metronome:
        ...
    assert metronome.seconds(begin_s, end_s) < 1
    """

    def __init__(self) -> None:
        self._beats: list[float] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._ends.set()
        self._thread.join()

    def seconds(self, begin_s: float, end_s: float) -> float:
        """Seconds from one moment of the monotonic clock to another, at most as many as the clock has counted."""
        beats = sum(begin_s < at_s <= end_s for at_s in self._beats)
        return min(max(end_s - begin_s, 0.0), beats * (_WORK_S + _REST_S))

    def slowness(self) -> float:
        """How many seconds of the clock make one of this machine, up to now: 1 where nothing else runs."""
        if len(self._beats) < 2:
            return 1.0
        first_s, last_s = self._beats[0], self._beats[-1]
        return max(1.0, (last_s - first_s) / self.seconds(first_s, last_s))

    def _beat(self) -> None:
        while not self._ends.wait(_REST_S):
            end_s = time.thread_time() + _WORK_S
            while time.thread_time() < end_s:
                pass
            self._beats.append(time.monotonic())
