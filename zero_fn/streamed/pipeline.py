"""Fetches chunks ahead, hands each to a function, and writes it back, in a few buffers: all at
once, or as they are needed.

    chunk        0      1      2      3      4         with four buffers
    fetch        ====   ====   ====   ....   ....      two ahead of the one that is computed
    compute             ####   ####   ####
    write back                 ====   ====   ====

Reads, writes and the computation run beside each other;
the slowest of them decides how long a pass takes.

[Note: back and forth] The chunks that were computed last are still in the buffers. A pass that
visits them in the other direction begins with those: it reads four buffers less, and has work from
its first moment, while the disk fetches the rest. So a step does not wait for the disk, even where
the disk could not be asked before (the norm of all gradients decides by how much they are clipped).

[Note: a pass that waits] A step may be taken piece by piece,
each piece before whatever would read or write what it steps.

    step()       gradients, rates and options are those of now; nothing is computed yet
    forward      unit 0 is about to be read: its chunks are stepped, and it is read
                 unit 1 ...           meanwhile the device computes unit 0,
                                      and the disk brings the next chunks

So updated weights return unit by unit, and the next forward begins when its first units are there.
Whatever the loop does in between (a norm of gradients, an average of parameters, `state_dict()`, an
edit) finds the stepped values: tensors in a tier are read and written through their `Record`, and a
record first takes the part of the step that waits for it. Parameters and gradients in memory can be
read by anybody, so they are stepped at once.

If the disk fails in a step that waits, the error is raised where the step is finished: in a
forward, on every rank, like a disk that fails there. Such a step stays half taken, and its
optimizer refuses to go on.

The one-step delayed update of ZeRO-Offload (Ren et al. 2021) overlaps more,
and changes the numbers; this does not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, Protocol

import torch

from zero_fn.errors import StateError, StorageError
from zero_fn.runtime.call import still_runs
from zero_fn.runtime.uncompiled import uncompiled
from zero_fn.storage import BUFFERS, Waited, wait_all
from zero_fn.tiers.record import Record

__all__ = ["ChunkPipeline", "ChunkSource", "Waiting"]


class ChunkSource(Protocol):
    """How one part of each chunk comes into memory and goes back.

    The part is its states, or its parameters and gradients.
    """

    def fetch(self, chunk: Any) -> Waited:
        """The part in memory, or on its way. Called once for each chunk of a pass, in order.

        The memory of the chunk that came four before may be taken: it has been written back.
        """

    def keep(self, chunk: Any, part: Any) -> Waited:
        """Begins to put the part back."""

    def forget(self) -> None:
        """A pass failed: nothing that buffers hold may be used again."""


class ChunkPipeline:
    """Brings chunks into memory in order, computes with each,
    and puts it back, as far as it is asked to."""

    def __init__(
        self,
        sources: Sequence[ChunkSource],
        order: Sequence[Any],
        compute: Callable[..., None],
        *,
        writes: bool = True,
    ) -> None:
        """A pass that has not begun."""
        self.count = len(order)
        self.done = 0
        self._sources = sources
        self._order = order
        self._compute = compute
        self._writes = writes
        # Parts of chunks on their way into memory, and back, in the order of the sources.
        self._fetches: dict[int, list[Waited]] = {}
        self._puts: dict[int, list[Waited]] = {}

    def run(self) -> None:
        """Visits all chunks."""
        try:
            self.reach(self.count)
            self.wait()
        finally:
            self.close()

    def fetch(self) -> None:
        """Begins to bring the next chunks."""
        turn = self.done
        for later in range(turn + len(self._fetches), min(turn + BUFFERS // 2 + 1, self.count)):
            wait_all(self._puts.pop(later - BUFFERS, ()))
            self._fetches[later] = []
            for source in self._sources:
                self._fetches[later].append(source.fetch(self._order[later]))

    def reach(self, count: int) -> None:
        """Computes until so many chunks are done."""
        for turn in range(self.done, count):
            chunk = self._order[turn]
            self.fetch()
            wait_all(self._fetches[turn])
            parts = self._fetches.pop(turn)
            self._compute(chunk, *parts)
            if self._writes:
                self._puts[turn] = []
                for source, part in zip(self._sources, parts, strict=True):
                    self._puts[turn].append(source.keep(chunk, part))
            self.done += 1

    def wait(self, only: ChunkSource | None = None) -> None:
        """Waits until the chunks that were computed are written back:
        all parts, or those of one source."""
        for turn in sorted(self._puts):
            if only is None:
                wait_all(self._puts.pop(turn))
            else:
                self._puts[turn][self._sources.index(only)].wait()

    def close(self) -> None:
        """Waits for all transfers. Chunks that were not computed stay as they were."""
        is_whole = self.done == self.count and not self._puts
        for parts in (*self._fetches.values(), *self._puts.values()):
            with suppress(StorageError):  # the first failure is the one that is told
                wait_all(parts)
        self._fetches = {}
        self._puts = {}
        if not is_whole:
            for source in self._sources:
                source.forget()


class Waiting(ChunkPipeline):
    """A pass of a step that is taken only as far as somebody needs it. [Note: a pass that waits]

    The records that the pass reads and writes keep it alive until then,
    so parameters may outlive their optimizer.
    """

    def __init__(
        self,
        sources: Sequence[ChunkSource],
        order: Sequence[Any],
        compute: Callable[..., None],
        records: Sequence[Sequence[Record]],
    ) -> None:
        """Lets a pass wait. The maker has to call `finish` or `abandon`."""
        super().__init__(sources, order, compute)
        # The error for which the rest of the step cannot be taken; None if there is none.
        self.failure: Exception | None = None
        self._stepping: FrameType | None = None  # the call in which the step goes on
        self._counts = {
            record: number for number, each in enumerate(records, start=1) for record in each
        }
        for record in self._counts:
            record.drop()  # fetched before the step
            record.shelf.may_fail = True
        try:
            self.fetch()
            for record, count in self._counts.items():
                record.waited_for = self.reach, count
        except BaseException:
            self.close()
            self._let_go(self.count)
            raise

    @uncompiled
    def reach(self, count: int) -> None:
        """Steps until so many chunks are done, and what they have stepped is back."""
        if self._stepping is not None and still_runs(self._stepping):
            return  # what the step itself reads
        if self.failure is not None:
            raise self.failure
        if count <= self.done:
            return
        try:
            self._stepping = sys._getframe()
            # Whoever reads may be in the midst of anything; what is stepped
            # here is to be stepped again.
            with torch.inference_mode(False), torch.no_grad():
                super().reach(count)
                self.wait(self._sources[-1])  # states may still be on their way
                if count < self.count:
                    self.fetch()
        except BaseException as error:
            self.failure = (
                error if isinstance(error, Exception) else _interrupted(error, self.progress)
            )
            self.close()
            count = self.count  # nothing waits any more
            raise
        finally:
            self._stepping = None
            self._let_go(count)

    def finish(self) -> None:
        """Takes the rest of the step."""
        self.reach(self.count)
        try:
            self.wait()
        except Exception as error:
            self.failure = error
            raise
        finally:
            self.close()

    def abandon(self) -> None:
        """The optimizer is gone.

        The pass ends, unless the model of any of its parameters is alive, whose records keep it.
        """
        if all(record.owner() is None for record in self._counts):
            self._let_go(self.count)

    @property
    def progress(self) -> str:
        """How many chunks were stepped, of how many."""
        return f"{self.done} of {self.count} chunks"

    def _let_go(self, count: int) -> None:
        """Lets records go that no chunk after the first `count` steps."""
        for record, last in self._counts.items():
            # The record may be that of a later step, which is left.
            if last <= count and record.waited_for == (self.reach, last):
                record.waited_for = None


def _interrupted(error: BaseException, progress: str) -> StateError:
    return StateError(
        'A step with finish="forward" was interrupted half-way.',
        by=type(error).__name__,
        stepped=progress,
        fix="load the last checkpoint: model.load_state_dict(...); optimizer.load_state_dict(...)",
    )
