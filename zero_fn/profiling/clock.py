"""What one rank notes while it trains: moments with their times,
collectives, bytes that tiers move.

A process has one clock, however many look on: it runs while somebody reads it, and each reader
(`zf.profile`, `zf.metrics`) has the marks since it began, and its own steps.

On a CPU a moment has the time of the host, and the processor time that the process has used so
far: where time passes and none is used, the process did not run. On an accelerator each moment is
also an event on the stream that computes, whose time is read later. Nothing waits for the device
while a step runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from threading import get_ident
from time import monotonic, perf_counter_ns, process_time_ns
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import dataloader

from zero_fn.runtime.registry import units_of
from zero_fn.values import watching
from zero_fn.values.tiers import is_accelerator
from zero_fn.values.watching import WITHIN, Moment, Watch

__all__ = ["Collective", "Mark", "Reader", "Taken", "resident_nbytes"]


@dataclass(slots=True)
class Collective:
    """One collective of this rank. Times are nanoseconds."""

    name: str  # "all-gather of parameters of unit layers.0"
    kind: str
    # Its axis, the first rank along it, and the count of the process group:
    # one text on all ranks that take part.
    group: str
    axis: str
    size: int  # ranks
    nbytes: int  # that this rank sends
    begin_ns: int
    end_ns: int = 0  # when it was seen to be complete; 0 if nobody waited for it


class Mark(NamedTuple):
    """A moment.

    Times are nanoseconds; `device_ns` is the time at which the device came there,
    by the clock of the host.
    """

    at_ns: int
    cpu_ns: int
    moment: Moment
    what: str
    collective: Collective | None
    device_ns: int
    resident_nbytes: int = 0  # of the process; 0 where it was not asked
    # Bytes in use on an accelerator where a phase begins, and the most so far.
    allocated: tuple[int, int] | None = None
    event: Any = None  # on an accelerator, until its time is known


class Taken(NamedTuple):
    """What a reader has seen since the last time."""

    marks: list[Mark]
    # Bytes that began to move: after how many marks, of which tier,
    # how many, and whether they were read.
    moved: list[tuple[int, str, int, bool]]


class Reader:
    """One who looks on, from its making to `close`. What it sees begins with a mark STEPPED."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        *,
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """`before` and `after` are called around each step of the optimizer."""
        groups = (group for unit in units_of(model) for group in unit.memory.groups)
        types = (group.kind.device_type for group in groups)
        self.device_type = next((each for each in types if each != "meta"), "cpu")
        self.on_device = is_accelerator(self.device_type)
        self.thread = get_ident()
        # The time when a checkpoint was complete last, or when this began to look on.
        self.saved_at = monotonic()
        self.marks: list[Mark] = []  # since the last `take`
        self.moved: list[tuple[int, str, int, bool]] = []
        # An event of the accelerator whose time is known, and that time.
        self._anchor: tuple[Any, int] = None, 0
        if self.on_device:
            stream = torch.accelerator.current_stream()
            _event(stream).synchronize()  # the first one takes longer
            # The time before the event, as in `note`: what it takes to issue one is in both.
            before_ns = perf_counter_ns()
            self._anchor = _event(stream), before_ns
            self._anchor[0].synchronize()
        _clock.tell((*_clock.readers, self))
        self._hooks: list[Any] = []
        if optimizer is not None:

            def begin(*_: Any) -> None:
                before()
                self.note(Moment.OPTIMIZER)

            def end(*_: Any) -> None:
                after()
                self.note(Moment.STEPPED)

            self._hooks = [
                optimizer.register_step_pre_hook(begin),
                optimizer.register_step_post_hook(end),
            ]
        self.note(Moment.STEPPED)

    def note(self, moment: Moment) -> None:
        """A moment of this reader alone, now: steps are those of its optimizer, or of its loop."""
        _clock.note(moment, readers=(self,))

    def take(self) -> Taken:
        """What was seen since the last time; its last mark is the first of the next time.

        On an accelerator the times of the device come with `resolve`.
        """
        taken = Taken(self.marks, self.moved)
        self.marks = taken.marks[-1:]
        self.moved = []
        return taken

    def is_done(self, taken: Taken) -> bool:
        """Whether the device has come to the last of these marks."""
        return not self.on_device or bool(taken.marks[-1].event.query())

    def resolve(self, taken: Taken) -> Taken:
        """Waits until the device has come to the last of these marks, and gives them its times.

        In the order of `take`.
        """
        if self.on_device:
            taken.marks[-1].event.synchronize()
            event, at_ns = self._anchor
            for number, mark in enumerate(taken.marks):
                # Time since the last mark: milliseconds in single precision.
                at_ns += round(event.elapsed_time(mark.event) * 1e6)
                event, collective = mark.event, mark.collective
                taken.marks[number] = mark._replace(device_ns=at_ns, event=None)
                if collective is not None and mark.moment is Moment.ISSUED:
                    collective.begin_ns = at_ns
                elif collective is not None and mark.moment is Moment.WAITED:
                    collective.end_ns = at_ns
            self._anchor = event, at_ns
        return taken

    def close(self) -> None:
        """Looks on no more; may be called again."""
        for hook in self._hooks:
            hook.remove()
        _clock.tell(tuple(each for each in _clock.readers if each is not self))


_new = tuple.__new__  # half of what `Mark(...)` costs

_PHASES = frozenset((Moment.BACKWARD, Moment.OPTIMIZER, Moment.STEPPED))
_UNITS = frozenset((Moment.ENTER, Moment.LEAVE, Moment.NEED, Moment.ARRIVED))
_RESIDENT = _PHASES | {Moment.ARRIVED}


class _Clock(Watch):
    """Makes the marks of this process, while it has readers."""

    def __init__(self) -> None:
        self.readers: tuple[Reader, ...] = ()
        self._thread = 0  # in which all readers began, if it is one
        self._on_device = self._on_host = False  # whether a reader is there
        self._stream: Any = None  # of an accelerator: the one that computes
        self._groups: dict[Any, str] = {}  # how collectives on a line are called
        # Collectives under way, with the works of the backend.
        self._working: list[tuple[Collective, list[Any]]] = []

    def tell(self, readers: tuple[Reader, ...]) -> None:
        """Has these readers from now on: the first starts it, and the last one ends it."""
        before, self.readers = self.readers, readers
        threads = {each.thread for each in readers}
        self._thread = threads.pop() if len(threads) == 1 else 0
        self._on_device = any(each.on_device for each in readers)
        self._on_host = not all(each.on_device for each in readers)
        if readers and not before:
            watching.look(self)
            _tell_of_batches()
        elif before and not readers:
            watching.look_away(self)
            self._groups.clear()
            self._working.clear()

    def _hearing(self, readers: tuple[Reader, ...]) -> tuple[Reader, ...]:
        """Those that hear this thread: in a backward all, else who began in it.

        Nobody hears saves in the background, say.
        """
        if torch._C._current_graph_task_id() != -1:
            return readers
        return tuple(each for each in readers if each.thread == get_ident())

    # -- what the core tells -----------------------------------------------------------------------

    def note(
        self,
        moment: Moment,
        what: str = "",
        collective: Collective | None = None,
        readers: tuple[Reader, ...] | None = None,
    ) -> None:
        """A moment, now, for these readers, or all."""
        if readers is None:
            readers = self.readers
        if get_ident() != self._thread:
            readers = self._hearing(readers)
            if not readers:
                return
        now, used, event, allocated = perf_counter_ns(), 0, None, None
        if self._on_host:
            used = process_time_ns()
            if self._working and moment in _UNITS:
                self._working = [each for each in self._working if not _has_ended(*each, now)]
        if self._on_device:
            if moment not in WITHIN:  # collectives are issued on streams of their own
                self._stream = torch.accelerator.current_stream()
            event = _event(self._stream)
            if moment in _PHASES:  # peaks are never reset: they are the program's
                found = torch.accelerator.memory_stats()
                allocated = (
                    found.get("allocated_bytes.all.current", 0),
                    found.get("allocated_bytes.all.peak", 0),
                )
        resident = resident_nbytes() if moment in _RESIDENT else 0
        mark = _new(Mark, (now, used, moment, what, collective, now, resident, allocated, event))
        for reader in readers:
            reader.marks.append(mark)

    def issued(self, work: Any, kind: str) -> None:
        """A collective has begun. Its readers of now will hear when it is waited for."""
        readers, line = self._hearing(self.readers), work.line
        if line.size == 1 or not readers:
            self.note(Moment.ISSUED, kind)
            return
        count, text, *_ = work.name
        name = line.axes[0].name
        if line not in self._groups:
            first = min(dist.get_process_group_ranks(line.axes[0].group))
            self._groups[line] = f"{name} from rank {first} #"
        begin_ns = readers[0].marks[-1].at_ns  # that of ISSUE
        collective = Collective(
            text, kind, f"{self._groups[line]}{count}", name, line.size, work.nbytes, begin_ns
        )
        self.note(Moment.ISSUED, kind, collective, readers)
        finish = work.finish
        if self._on_host and work.works and not work.on_stream:
            self._working.append((collective, [each for each, _ in work.works]))

        def finished(*kept: Any) -> None:
            if finish is not None:
                finish(*kept)
            collective.end_ns = collective.end_ns or perf_counter_ns()
            self.note(Moment.WAITED, kind, collective, readers)

        before = SimpleNamespace(wait=lambda *_: self.note(Moment.WAIT, kind, collective, readers))
        work.works, work.finish = [(before, None), *work.works], finished

    def moving(self, tier: str, nbytes: int, *, is_read: bool) -> None:
        """Bytes begin to move."""
        for reader in self.readers:
            reader.moved.append((len(reader.marks), tier, nbytes, is_read))

    def arrived(self, unit: str, grads: Sequence[Tensor | None]) -> None:
        """The gradients of a unit are there."""
        self.note(Moment.ARRIVED, unit)

    def saved(self) -> None:
        """A checkpoint is complete."""
        for reader in self.readers:
            reader.saved_at = monotonic()


_clock = _Clock()


def _event(stream: Any) -> Any:
    event = torch.Event(enable_timing=True)
    event.record(stream)
    return event


def _has_ended(collective: Collective, works: list[Any], now: int) -> bool:
    """Whether a collective of the host is complete.

    Found at the next moment, so its end is known to a moment.
    """
    if not collective.end_ns and all(work.is_completed() for work in works):
        collective.end_ns = now
    return collective.end_ns != 0


def resident_nbytes() -> int:
    """Bytes of memory of the host that this process uses; 0 where the system does not tell."""
    try:
        return int(os.pread(_statm(), 64, 0).split()[1]) * _PAGE_NBYTES
    except OSError:
        return 0


_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")
_statm_of: tuple[int, int] = (-1, -1)  # the process that opened it, and the file


def _statm() -> int:
    global _statm_of
    if _statm_of[0] != os.getpid():
        _statm_of = os.getpid(), os.open("/proc/self/statm", os.O_RDONLY)
    return _statm_of[1]


@cache
def _tell_of_batches() -> None:
    """Loaders of torch tell each watch when they are asked for a batch, from now on."""
    iterator: Any = dataloader._BaseDataLoaderIter
    before = iterator.__next__

    def told(self: Any) -> Any:
        for watch in watching.watchers:
            watch.note(Moment.LOAD)
        try:
            return before(self)
        finally:
            for watch in watching.watchers:
                watch.note(Moment.LOADED)

    iterator.__next__ = told
