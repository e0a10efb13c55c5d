"""A step that is taken piece by piece, each piece before whatever would read or write what it steps.

    step()       gradients, rates and options are those of now; nothing is computed yet
    forward      unit 0 is about to be read: its chunks are stepped, and it is read
                 unit 1 ...                        meanwhile the device computes unit 0, and the disk brings the next chunks

So updated weights return unit by unit, and the next forward begins when its first units are there. What the loop does in
between (a norm of gradients, an average of parameters, `state_dict()`, an edit) finds what it would have found: everything in
a tier is read and written through its `Record`, and a record asks first whether a step waits for it. That holds for
parameters and gradients in tiers; what is in memory can be read by anybody, and is stepped at once.

A step whose disk fails meanwhile fails where it is asked for: in a forward, on every rank, as a disk does that fails there.
It stays half taken, and its optimizer remembers.

The one-step delayed update of ZeRO-Offload (Ren et al. 2021) overlaps more, and changes the numbers; this does not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch

from zero_fn.errors import StateError
from zero_fn.runtime.record import Record
from zero_fn.runtime.uncompiled import uncompiled
from zero_fn.streamed.pipeline import Pass
from zero_fn.streamed.windows import Windows

__all__ = ["Waiting"]


class Waiting:
    """The chunks of a step that were not needed yet.

    Attributes:
        failure: Why it cannot go on.
    """

    def __init__(self, visits: Pass, records: Sequence[Sequence[Record]], windows: Windows) -> None:
        """Lets a step wait. Whoever makes it keeps it, and finishes it: records know it weakly.

        Args:
            visits: Of its chunks.
            records: What each chunk reads and writes, but for states.
            windows: The lane of these.

        Raises:
            StorageError: The disk failed. Nothing waits.
        """
        self.failure: Exception | None = None
        self._visits, self._windows = visits, windows
        self._count, self._is_stepping = len(records), False
        last = {record: index for index, each in enumerate(records) for record in each}
        for record in last:
            record.drop()  # fetched before the step
        try:
            visits.fetch()
        except BaseException:
            visits.close()
            raise
        own = weakref.ref(self)

        def reached(index: int) -> None:
            waiting = own()
            if waiting is not None:
                waiting._reach_chunk(index)

        self._hooks: dict[Record, tuple[Callable[[int], None], int]] = {}
        self._hook(last, reached)

    def _hook(self, last: Mapping[Record, int], reached: Callable[[int], None]) -> None:
        for record, index in last.items():
            self._hooks[record] = record.waited_for = reached, index

    def _reach_chunk(self, index: int) -> None:
        self.reach(index + 1)

    def outlive(self) -> None:
        """Whoever kept it is gone: from now on records do, until it is finished."""
        last = {record: hook[1] for record, hook in self._hooks.items() if record.waited_for is hook}
        self._hook(last, self._reach_chunk)

    @uncompiled
    def reach(self, count: int) -> None:
        """Steps until so many chunks are done, and what they have stepped is back.

        Raises:
            StorageError: The disk failed, now or before.
        """
        if self._is_stepping:
            return  # what the step itself reads
        if self.failure is not None:
            raise self.failure
        if count <= self._visits.done:
            return
        self._is_stepping = True
        try:
            # Whoever reads may be in the midst of anything; what is stepped here is to be stepped again.
            with torch.inference_mode(False), torch.no_grad():
                self._visits.reach(count)
                self._visits.wait(self._windows)  # states may still be on their way
                if count < self._count:
                    self._visits.fetch()
        except BaseException as error:
            self.failure = error if isinstance(error, Exception) else _interrupted(error, self.progress)
            self._visits.close()
            count = self._count  # nothing waits any more
            raise
        finally:
            self._is_stepping = False
            for record, hook in self._hooks.items():
                if hook[1] < count and record.waited_for is hook:  # and not that of a later step
                    record.waited_for = None

    def finish(self) -> None:
        """Takes all of it.

        Raises:
            StorageError: The disk failed, now or before.
        """
        self.reach(self._count)
        try:
            self._visits.wait()
        except Exception as error:
            self.failure = error
            raise
        finally:
            self._visits.close()

    @property
    def is_wanted(self) -> bool:
        """Whether the model of any of its parameters is alive."""
        return any(record.owner() is not None for record in self._hooks)

    @property
    def progress(self) -> str:
        """How many chunks were stepped, of how many."""
        return f"{self._visits.done} of {self._count} chunks"


def _interrupted(error: BaseException, progress: str) -> StateError:
    return StateError(
        "A step that waited was interrupted half-way.",
        by=type(error).__name__,
        stepped=progress,
        fix="load the last checkpoint: model.load_state_dict(...); optimizer.load_state_dict(...)",
    )
