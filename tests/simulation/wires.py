"""Messages between ranks, and the faults that befall them.

A channel goes from one rank to another under one tag; its messages arrive in the order they were sent. The memory of a
message may be read from `send` until its work was waited for, and the memory of a receiver written from `recv` until
then. When exactly is up to the case:

    early    both at the first possible moment, as over an idle network
    late     both at the last one; until then the receiver's memory holds NaN (0xAA where there is none)

So a buffer that is changed while a message is under way, or read before its wait, gives wrong numbers in one of the two.

Faults happen to a rank at its k-th event; a send or the wait for a message is one event:

    delay    its next message cannot be seen for `turns` turns
    drop     its next message is lost; those after it are not taken for it
    nan      its next message of floating point numbers arrives as NaN
    kill     it ends there
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from tests.simulation.turns import RankKilled
from zero_fn.transport.direct_exchange import MARK_BITS

__all__ = ["Address", "Event", "Fault", "Timing", "Wires"]

Timing = Literal["early", "late"]
Address = tuple[str, int, int, object]
"""Group, source, target (both counted in the whole world), tag."""

_REMEMBERED_EVENTS = 12


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens to `rank` at its event number `at`; for `turns` turns if it is a delay.

    With `tag`, at its first event from there on that has this tag.
    """

    kind: Literal["delay", "drop", "kill", "nan"]
    rank: int
    at: int
    turns: int = 0
    tag: int | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """One communication event of a rank, as reports print it."""

    kind: str
    peer: int
    tag: object
    numel: int
    dtype: torch.dtype

    def __str__(self):
        dtype = str(self.dtype).removeprefix("torch.")
        tag = f"{self.tag:#x}" if isinstance(self.tag, int) else str(self.tag)
        return f"{self.kind} rank {self.peer} {self.numel} {dtype} tag {tag}"


@dataclass(slots=True)
class _Message:
    payload: Tensor
    visible_at: int
    is_copied: bool = False
    is_lost: bool = False

    def copy(self):
        if not self.is_copied:
            self.payload, self.is_copied = self.payload.detach().clone(), True


@dataclass(slots=True)
class _Channel:
    messages: dict[int, _Message] = field(default_factory=dict)
    sent: int = 0
    posted: int = 0


class Sent:
    """The work of a send."""

    def __init__(self, message):
        self._message = message

    def wait(self, timeout=None):
        """From here on the sender may write its memory again."""
        self._message.copy()
        return True


class Received:
    """The work of a receive, and what its rank waits for."""

    def __init__(self, wires, address, channel, into):
        self._wires, self._address, self._channel, self._into = wires, address, channel, into
        self._number = channel.posted
        channel.posted += 1
        self._is_done = False

    def wait(self, timeout=None):
        """Waits for the message; the memory of the receiver then holds it.

        Raises:
            RuntimeError: The sender has ended, or every rank waits, or the message is another than the one expected.
        """
        _, source, target, tag = self._address
        wires = self._wires
        wires.note(target, "receive from", source, tag, self._into)
        is_over = wires.turns.wait(target, self)
        wires.refuse_the_dead(target)
        if self._is_done:
            return True
        message = self._message()
        if message is None:
            if not is_over:
                raise RuntimeError(f"Timed out waiting 0ms for recv operation to complete: no rank can go on, {self}")
            raise RuntimeError(f"Connection closed by peer [rank {source}]")
        self._take(message)
        return True

    def take_early(self):
        """Takes the message if it is there."""
        message = self._message()
        if message is not None and message.visible_at <= self._wires.turns.turn and not self._is_done:
            self._take(message)

    def poison(self):
        """Makes sure that nobody finds the message here before the wait."""
        if self._into.is_floating_point() or self._into.is_complex():
            self._into.fill_(float("nan"))
        elif self._into.dtype is not torch.bool:
            self._into.fill_(0x2A)

    def is_over(self, turn):
        if self._is_done:
            return True
        message = self._message()
        if message is None:
            return self._wires.turns.has_ended(self._address[1])
        return message.visible_at <= turn

    def ripens_at(self):
        message = self._message()
        return message.visible_at if message is not None else None

    def _message(self):
        message = self._channel.messages.get(self._number)
        return None if message is None or message.is_lost else message

    def _take(self, message):
        self._is_done = True
        del self._channel.messages[self._number]
        message.copy()
        payload = message.payload
        if payload.numel() != self._into.numel() or payload.dtype != self._into.dtype:
            raise RuntimeError(
                f"Rank {self._address[2]} expected {_text(self._into)} from rank {self._address[1]}, got {_text(payload)}"
            )
        self._into.copy_(payload.view(self._into.shape))

    def __str__(self):
        return f"{_text(self._into)} from rank {self._address[1]} in group {self._address[0]!r}"


class Wires:
    """All messages of one case."""

    def __init__(self, turns, n, faults, timing):
        self.turns, self.timing = turns, timing
        self.events = [deque(maxlen=_REMEMBERED_EVENTS) for _ in range(n)]  # the last ones of each rank
        self.counts = [0] * n  # how many events each rank has had
        self.happened = []
        self._faults = [[fault for fault in faults if fault.rank == rank] for rank in range(n)]
        self.is_dead = [False] * n  # which ranks were killed
        self._channels = defaultdict(_Channel)
        self._expected = {}

    def send(self, address, tensor):
        """Sends a tensor."""
        _, source, target, tag = address
        self.refuse_the_dead(source)
        self.note(source, "send to", target, tag, tensor)
        message = _Message(tensor.detach(), self.turns.turn)
        self._spoil(source, message, tag)
        if self.timing == "early":
            message.copy()
        channel = self._channels[address]
        channel.messages[channel.sent] = message
        expected = self._expected.pop((address, channel.sent), None)
        channel.sent += 1
        if expected is not None and self.timing == "early":
            expected.take_early()
        self.turns.offer(source)
        self.refuse_the_dead(source)
        return Sent(message)

    def receive(self, address, into):
        """Expects a tensor."""
        self.refuse_the_dead(address[2])
        channel = self._channels[address]
        number = channel.posted
        received = Received(self, address, channel, into)
        if self.timing == "late":
            received.poison()
        elif number < channel.sent:
            received.take_early()
        else:
            self._expected[address, number] = received
        return received

    def note(self, rank, kind, peer, tag, tensor):
        """Remembers an event, and kills the rank if that is its fate."""
        self.refuse_the_dead(rank)
        self.events[rank].append(Event(kind, peer, tag, tensor.numel(), tensor.dtype))
        self.counts[rank] += 1
        if self._fault(rank, "kill", tag) is not None:
            self.is_dead[rank] = True
            raise RankKilled(f"rank {rank} was killed at event {self.counts[rank] - 1}")

    def refuse_the_dead(self, rank):
        """A killed rank that still runs (a `finally` of its program) says nothing more."""
        if self.is_dead[rank]:
            raise RankKilled

    def left_over(self):
        """Messages that nobody received."""
        return [
            f"{len(channel.messages)} from rank {source} to rank {target}, tag {tag}, in group {group!r}"
            for (group, source, target, tag), channel in self._channels.items()
            if channel.messages
        ]

    def _spoil(self, rank, message, tag):
        delay = self._fault(rank, "delay", tag)
        if delay is not None:
            message.visible_at += delay.turns
        if self._fault(rank, "drop", tag) is not None:
            message.is_lost = True
        if message.payload.is_floating_point() and self._fault(rank, "nan", tag) is not None:
            message.payload, message.is_copied = torch.full_like(message.payload, float("nan")), True

    def _fault(self, rank, kind, tag):
        for fault in self._faults[rank]:
            is_due = self.counts[rank] > fault.at and (fault.tag is None or _is_of(tag, fault.tag))
            if fault.kind == kind and is_due:
                self._faults[rank].remove(fault)
                self.happened.append(fault)
                return fault
        return None


def _is_of(tag, direction):
    """Whether a tag is of this direction, whatever the mark of its operation."""
    return tag == direction or (isinstance(tag, int) and tag & ~MARK_BITS == direction)


def _text(tensor):
    return f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"
