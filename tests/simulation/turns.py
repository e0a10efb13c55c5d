"""Whose turn it is: one rank runs at a time, and a list of integers says which one is next.

A rank gives the baton up at communication only, so a case is a pure function of its program, its schedule and its faults.
An entry of the schedule picks one of the ranks that can run, counted from the one that runs now: 0 lets it go on. The list is
read round and round, and only where there is a choice; the empty list is all zeros, so that schedules shrink towards few
switches.

No wait needs a timeout: when every unfinished rank waits and no message is on its way, that is a deadlock, and at once
each of these waits raises what gloo raises when its time is over.
"""

import torch

__all__ = ["RankKilled", "Turns"]


class RankKilled(BaseException):
    """Ends a rank in the middle of its program. Not an `Exception`: no program catches it."""


class Turns:
    """The baton of one case. It lies with the caller until `begin`.

    There is a held lock for each rank: releasing it lets the rank run; and `done`, released when all ranks have ended.
    """

    def __init__(self, locks, done, schedule):
        self._locks, self._done, self._schedule = locks, done, tuple(schedule)
        self._cursor = 0
        self.turn = 0  # how often the baton was offered
        self.deadlock = None  # the first one, as a line for each rank that waited
        self._waits = [None] * len(locks)
        self._ended = [False] * len(locks)
        self._is_abandoned = False
        self._timed_out = [False] * len(locks)

    def begin(self):
        """Gives the baton to the first rank."""
        first = self._next(0)
        assert first is not None
        self._locks[first].release()

    def abandon(self):
        """The caller waits no longer: each rank is killed at its next communication."""
        self._is_abandoned = True

    def has_ended(self, rank):
        """Whether the program of a rank is over: it returned, raised, or was killed."""
        return self._ended[rank]

    def offer(self, rank):
        """`rank` could go on; another may be let run before."""
        if self._is_abandoned:
            raise RankKilled
        following = self._next(rank)
        if following is None or following == rank:
            return
        # The default generator is one per process; here every rank has its own.
        generator = torch.default_generator.get_state()
        self._locks[following].release()
        self._locks[rank].acquire()
        if self._is_abandoned:
            raise RankKilled
        torch.default_generator.set_state(generator)

    def wait(self, rank, wait):
        """`rank` goes on when `wait` is over. Returns False if it never will: every rank waits.

        `wait.is_over(turn)` says whether the rank can go on, with what it waited for or without; `wait.ripens_at()` gives the
        turn from which a message that is on its way can be seen, or None if none is.
        """
        self._waits[rank] = wait
        self.offer(rank)
        self._waits[rank] = None
        timed_out, self._timed_out[rank] = self._timed_out[rank], False
        return not timed_out

    def end(self, rank):
        """The program of `rank` is over."""
        self._ended[rank] = True
        following = self._next(rank)
        (self._done if following is None else self._locks[following]).release()

    def _next(self, current):
        n = len(self._locks)
        order = [*range(current, n), *range(current)]
        unfinished = [rank for rank in order if not self._ended[rank]]
        if not unfinished:
            return None
        self.turn += 1
        while not (able := [rank for rank in unfinished if self._is_able(rank)]):
            waits = [wait for rank in unfinished if (wait := self._waits[rank]) is not None]
            ripe = [at for wait in waits if (at := wait.ripens_at()) is not None]
            if ripe:
                self.turn = max(self.turn, min(ripe))
                continue
            lines = [f"rank {rank} waits for {self._waits[rank]}" for rank in sorted(unfinished)]
            self.deadlock = self.deadlock or lines
            for rank in unfinished:
                self._timed_out[rank] = True
        if len(able) == 1 or not self._schedule:
            return able[0]
        choice = self._schedule[self._cursor % len(self._schedule)]
        self._cursor += 1
        return able[choice % len(able)]

    def _is_able(self, rank):
        wait = self._waits[rank]
        return self._is_abandoned or wait is None or self._timed_out[rank] or wait.is_over(self.turn)
