"""Headers of messages between two ranks of one host, through shared memory.

In its arena each rank has a box for each peer, into which only this rank writes: a ring of headers, the number of headers
written, and how many of the peer's it has read. A rank that waits for a header sleeps in the kernel until the peer's number
changes.

[Note: no thread] gloo receives a header in a thread of its own, which polls while the peer is late. With as many ranks as
cores, polling takes processor time from the very rank that is waited for: an eighth of a step. Waiting here takes none, and a
header takes 3 us instead of 100.

[Note: lost at once] Every `_SLICE_S` seconds a wait looks whether the process of the peer has ended (by its pidfd), and
whether the peer has given up. Headers that the peer wrote before are still read. A rank that gives up writes which rank it
lost, or which ranks are at different collectives, and ranks that read it give up with the same: so all blame the same rank.

[Note: interrupts] Ctrl-C may come between any two calls. So what was read is told before it is forgotten, and may be told
twice: a message that is never told would keep the block of every later one in the arena of the peer.
"""

from __future__ import annotations

import ctypes
import os
import select
import time
import weakref

from zero_fn.one_host.arena import WORD_NBYTES, Mapped
from zero_fn.one_host.futex import fence, has_futexes, wait, wake
from zero_fn.transport.waiting import Failure, OutOfStep, PeerLost, deadline
from zero_fn.values.layout import ALIGNMENT_NBYTES

__all__ = ["CHANNELS", "Mailbox", "are_mailboxes_available", "box_nbytes"]

CHANNELS = 3  # messages of one channel may be read before earlier messages of another
_SLOTS = 256  # headers in a ring: so many may be written before the peer takes the first
_SLICE_S = 0.05
_LINE = ALIGNMENT_NBYTES // WORD_NBYTES
_WRITTEN, _GONE, _TAKEN, _SLOTS_START = 0, 1, _LINE, 2 * _LINE  # words of a box; after _TAKEN messages read, by channel
_BOX = _SLOTS_START + 2 * _SLOTS


def are_mailboxes_available() -> bool:
    """Whether this system has what mailboxes need."""
    return has_futexes() and hasattr(os, "pidfd_open")


def box_nbytes(size: int) -> int:
    """Bytes of the boxes of a rank for `size` ranks. They begin at byte `ALIGNMENT_NBYTES` of its arena."""
    return size * _BOX * WORD_NBYTES


class Mailbox:
    """Headers, of two numbers each, to and from one peer. Both ranks count theirs from 0, and header k answers header k."""

    def __init__(self, own: Mapped, rank: int, peer: Mapped, source: int, pid: int) -> None:
        """Opens the boxes of this rank (`own`, `rank`) and of a peer (`peer`, `source`, `pid`) for each other.

        Raises:
            OSError: The process of the peer cannot be watched.
        """
        self._source = source
        self._own = own.words
        self._out = _LINE + source * _BOX
        self._theirs = peer.words
        self._in = _LINE + rank * _BOX
        self._bell = ctypes.c_void_p(own.address + self._out * WORD_NBYTES)
        self._rung = peer.address + self._in * WORD_NBYTES
        self._mapped = own, peer  # kept alive: the addresses above are theirs
        self._written = self._taken = 0
        self._arrived: dict[int, tuple[int, int]] = {}  # headers by number, not asked for yet
        self._unwanted: set[int] = set()  # not to be asked for, and not arrived yet
        self._read_early: list[set[int]] = [set() for _ in range(CHANNELS)]
        process = os.pidfd_open(pid)
        weakref.finalize(self, os.close, process)
        self._death = select.poll()
        self._death.register(process, select.POLLIN)

    def send(self, mark: int, start: int) -> None:
        """Writes the next header.

        Raises:
            PeerLost: The ring is full, and the peer takes no headers.
        """
        if self._written - self._theirs[self._in + _TAKEN] >= _SLOTS:
            self._make_room()
        slot = self._out + _SLOTS_START + self._written % _SLOTS * 2
        self._own[slot], self._own[slot + 1] = mark, start
        self._written += 1
        fence(self._bell)
        self._own[self._out + _WRITTEN] = self._written
        wake(self._bell)

    def has(self, number: int) -> bool:
        """Whether the peer's header of this number has come, and was not taken yet."""
        return self._receive(number) and number in self._arrived

    def take(self, number: int) -> tuple[int, int]:
        """Takes the peer's header of this number. Waits for it.

        Raises:
            PeerLost, OutOfStep: It will not come.
        """
        if number not in self._arrived:
            self._await(number)
        return self._arrived.pop(number)

    def acknowledge(self, channel: int, number: int) -> None:
        """Tells the peer that its message of this number in a channel was read. May be called again, and out of order."""
        early, place = self._read_early[channel], self._out + _TAKEN + 1 + channel
        fence(self._bell)
        if number >= self._own[place]:
            early.add(number)
        while (count := self._own[place]) in early:
            self._own[place] = count + 1  # [Note: interrupts]
            early.discard(count)

    def drop(self, number: int, channel: int, number_in_channel: int) -> None:
        """Counts a message as read that this rank will never ask for. The peer need not have written it yet."""
        self.acknowledge(channel, number_in_channel)
        if number >= self._taken:
            self._unwanted.add(number)
        self._arrived.pop(number, None)

    def read_by_peer(self, channel: int) -> int:
        """How many messages of this rank in a channel the peer has read, without gaps."""
        return self._theirs[self._in + _TAKEN + 1 + channel]

    def leave(self, failure: Failure | None = None) -> None:
        """Tells the peer that this rank sends nothing more, and why. [Note: lost at once]"""
        if not self._own[self._out + _GONE]:
            self._own[self._out + _GONE] = _code_of(failure)
            wake(self._bell)

    def _receive(self, number: int) -> bool:
        """Takes the headers that have come. Returns whether the one of this number has come, now or before."""
        written = self._theirs[self._in + _WRITTEN]
        if self._own[self._out + _TAKEN] < written:
            fence(self._bell)
            slots = self._in + _SLOTS_START
            while self._taken < written:
                slot = slots + self._taken % _SLOTS * 2
                if self._taken in self._unwanted:
                    self._unwanted.remove(self._taken)
                else:
                    self._arrived[self._taken] = self._theirs[slot], self._theirs[slot + 1]
                self._taken += 1
            fence(self._bell)
            self._own[self._out + _TAKEN] = written
        return number < written

    def _await(self, number: int) -> None:
        end_s = time.monotonic() + deadline()
        while not self._receive(number):
            wait(self._rung, self._taken, min(_SLICE_S, max(end_s - time.monotonic(), 0)))
            loss = self._loss(end_s)
            if loss is not None and not self._receive(number):  # the peer may have written the header before it left
                raise loss

    def _make_room(self) -> None:
        """Waits until the peer has taken a header. The peer may wait for the same, so this rank takes those that came."""
        end_s = time.monotonic() + deadline()
        while self._written - self._theirs[self._in + _TAKEN] >= _SLOTS:
            self._receive(self._taken)
            loss = self._loss(end_s)
            if loss is not None:
                raise loss
            time.sleep(0.0005)

    def _loss(self, end_s: float) -> Failure | None:
        """Why the peer will send nothing more; None if it may. [Note: lost at once]"""
        gone = self._theirs[self._in + _GONE]
        if gone:
            return _failure_of(gone, self._source)
        if self._death.poll(0):
            return PeerLost(self._source, is_late=False, text="the process of the peer has ended")
        if time.monotonic() >= end_s:
            return PeerLost(self._source, is_late=True, text=f"timed out after {deadline():g} s")
        return None


# The reason for which a rank gave up, as a number other than 0: a kind in the low 3 bits, above it one or two ranks.
_UNTOLD, _CLOSED, _LATE, _OUT_OF_STEP = 1, 2, 3, 4
_RANK_BITS = 24


def _code_of(failure: Failure | None) -> int:
    if failure is None or failure.peer is None:
        return _UNTOLD
    if isinstance(failure, PeerLost):
        return failure.peer << 3 | (_LATE if failure.is_late else _CLOSED)
    return (failure.seen_by << _RANK_BITS | failure.peer) << 3 | _OUT_OF_STEP


def _failure_of(code: int, source: int) -> Failure:
    """The reason that a peer which gave up has written."""
    kind, ranks = code & 7, code >> 3
    if kind == _OUT_OF_STEP:
        return OutOfStep(ranks & (1 << _RANK_BITS) - 1, seen_by=ranks >> _RANK_BITS)
    if kind == _UNTOLD:
        return PeerLost(source, is_late=False, text="the peer has given up")
    return PeerLost(ranks, is_late=kind == _LATE, text=f"rank {source} has lost rank {ranks}")
