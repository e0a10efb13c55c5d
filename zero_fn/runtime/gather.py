"""The gathers of one unit: how far the moves from rest to whole parameters have come.

    at rest  --begin-->  the last move is under way  --wait-->  whole  --free-->  at rest

A gather makes the moves (moves.py) from `level` on: so many were made already. Freeing goes back to
what is kept (hpZ), a step of an optimizer to the beginning.

[Note: a disk may fail on one rank] Resting parameters in another tier are fetched before each
gather, copied into the gathered buffer, and let go. If they are on a disk, every rank sends a byte
before each gather that says whether its disk failed, and all ranks raise the same error. Memory of
the host does not fail, and the host waits for no answer. The byte comes first because the host
reads the answer: the communicator of an accelerator has one queue, so it would wait for the gather.
"""

from __future__ import annotations

from zero_fn.runtime.memory import Memory
from zero_fn.runtime.moves import Arrivals, Move, moves_of
from zero_fn.runtime.whole_buffers import WholeBuffers
from zero_fn.transport.agree import Outcome
from zero_fn.transport.line import Work

__all__ = ["Gather"]


class Gather:
    """The way up of the parameters of one unit."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        # How many of the moves were made, the last of them perhaps only begun (`pending`). Below
        # the top, which is how many there are, parameters are at rest.
        self.level = 0
        self.top = 1
        self._kept_level = 0  # as many are left when whole parameters are freed
        # The collectives of the last move, if it is under way.
        self.pending: list[Work] | None = None
        # Kept without memory for the next gather, unless somebody holds a part.
        self.whole: WholeBuffers | None = None
        # Known once the parameters are gathered: a tier could not be read on some rank (every rank
        # has it then), or a tensor subclass raised in `fsdp_post_all_gather`.
        self.failure: Exception | None = None
        # Whether all ranks hold the same of what travels as differences.
        # [Note: what the others hold] (wire_gather.py)
        self.reference_is_shared = False
        self._told: Outcome | None = None  # whether the fetch went well on each rank
        self._arrivals: Arrivals = {}

    @property
    def moves(self) -> list[Move]:
        """The moves of a gather, once buffers were cut."""
        return self.whole.moves[self.reference_is_shared] if self.whole is not None else []

    @property
    def is_at_rest(self) -> bool:
        """Whether the parameters are not gathered, and no gather is under way."""
        return self.level < self.top

    @property
    def is_whole(self) -> bool:
        """Whether the parameters are gathered."""
        return self.level == self.top and self.pending is None

    def fetch(self) -> None:
        """Begins to read resting parameters from their tier, for the next gather."""
        if self.is_at_rest:
            for record in self._memory.away:
                record.fetch_ahead()

    def begin(self, unit: object) -> None:
        """Makes the moves up to the last, and begins that; `wait` waits for it.

        `unit` gathers again when backward needs a freed buffer.
        """
        memory = self._memory
        if memory.away:
            self.failure = memory.arrived(exact=False)
        whole = self.whole
        if whole is None:
            whole = self._cut(unit)
        else:
            whole.renew()
        if memory.away and memory.may_fail:
            self._told = Outcome(memory.line, self.failure, f"Fetching {memory.unit}")
        for move in whole.moves[self.reference_is_shared][self.level :]:
            for fill in move.fill:
                fill(self._arrivals)
            works = self._send_beside(move) if self._arrivals else self._send(move)
            if self.level + 1 == self.top:
                self.pending = works
            self._kept_level += move.is_kept
            self.level += 1  # not before: a move that raises was not made
        if memory.away:
            memory.let_go()

    def _send(self, move: Move) -> list[Work]:
        """Codes this rank's own parts, and issues the all-gathers.

        Those of the last move are still to be waited for.
        """
        for encode in move.encode:
            encode()
        works = []
        for line, plan in move.sends:
            works.append(line.all_gather(plan, move.what))
        if self.level + 1 < self.top:
            for work in works:
                work.wait()
            for decode in move.decode:
                decode()
        return works

    def _send_beside(self, move: Move) -> list[Work]:
        """The same on the stream of copies from the host, which are waited for there: what computes
        waits in `wait`."""
        (stream,) = self._arrivals
        with stream.there:
            works = self._send(move)
            if move.encode:  # what was coded there is waited for with the copies
                self._arrivals[stream] = stream.there.record_event()
        return works

    def _cut(self, unit: object) -> WholeBuffers:
        """Cuts the whole buffers into parameters and into what moves."""
        memory = self._memory
        whole = WholeBuffers(unit, memory.slots, memory.groups)
        extended = [segment for each in whole.by_extension.values() for segment in each.segments]
        whole.moves = moves_of(whole.rooms, extended, memory.line, memory.unit)
        whole.note_references()
        self.top = len(whole.moves[0])
        self.whole = whole
        return whole

    def wait(self) -> None:
        """Waits for the move that is under way."""
        if self._told is not None:
            self.failure = self._told.failed_on_any_rank()
            self._told = None
        assert self.pending is not None and self.whole is not None, "no gather is under way"
        for work in self.pending:
            work.wait()
        while self._arrivals:
            stream, end = self._arrivals.popitem()
            stream.wait_for(end)
        for decode in self.whole.moves[self.reference_is_shared][-1].decode:
            decode()
        self.reference_is_shared = True
        if self.whole.by_extension:
            try:
                self.whole.make_products()
            except Exception as error:
                # An error of the user's tensor subclass; `Unit.await_gathered` raises it.
                self.failure = self.failure or error
        self.pending = None

    def free(self) -> None:
        """Frees the gathered parameters; kept buffers stay but count as out of date."""
        if self._memory.away:
            self._memory.let_go()
        if self.level < self.top:
            return
        if self.pending is not None:
            self.wait()
        self.failure = None
        if self.whole is not None and not self.whole.free():
            self.whole = None
        self.level = self._kept_level

    def outdate(self) -> None:
        """Resting parameters have changed: the next gather makes all moves."""
        self._kept_level = 0
        if self.level < self.top:
            self.level = 0

    def drop(self) -> None:
        """Drops the gathered parameters, and gives up a gather under way, wherever an interrupt has
        left it."""
        pending, told, self.pending, self._told = self.pending, self._told, None, None
        if told is not None:
            told.failed_on_any_rank()
        for work in pending or ():
            work.wait()  # the next message would be taken for it
        self._memory.let_go()
        self.forget()

    def forget(self) -> None:
        """Forgets the gathered parameters. To be called when they are to rest in other memory."""
        self.level = self._kept_level = 0
        self.pending = self.whole = self.failure = None
        self._arrivals = {}
        self.reference_is_shared = False
