"""What one rank notes while it trains: moments with their times, collectives, bytes that tiers move.

On a CPU a moment has the time of the host, and the processor time that the process has used so far: where time passes and
none is used, the process did not run. On an accelerator each moment is also an event on the stream that computes, whose time
is read later. Nothing waits for the device while a step runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from time import monotonic, perf_counter_ns, process_time_ns
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import dataloader

from zero_fn.values import watching
from zero_fn.values.tiers import is_accelerator
from zero_fn.values.watching import WITHIN, Moment, Watch

__all__ = ["Clock", "Collective", "Mark", "Taken", "resident_nbytes"]


@dataclass(slots=True)
class Collective:
    """One collective of this rank. Times are nanoseconds."""

    name: str  # "all-gather of parameters of unit layers.0"
    kind: str
    group: str  # its axis, the first rank along it, and the count of the process group: one text on all ranks that take part
    axis: str
    size: int  # ranks
    nbytes: int  # that this rank sends
    begin_ns: int
    end_ns: int = 0  # when it was seen to be complete; 0 if nobody waited for it
    slowest_peer: int = -1  # the rank of the axis whose message this one waited for longest
    peer_ns: int = 0


class Mark(NamedTuple):
    """A moment. Times are nanoseconds; `device_ns` is the time at which the device came there, by the clock of the host."""

    at_ns: int
    cpu_ns: int
    moment: Moment
    what: str
    collective: Collective | None
    device_ns: int


@dataclass(slots=True)
class Taken:
    """What was noted since the last time."""

    marks: list[Mark] = field(default_factory=list)
    # Bytes that began to move: after how many marks, of which tier, how many, and whether they were read.
    moved: list[tuple[int, str, int, bool]] = field(default_factory=list)
    resident_nbytes: list[int] = field(default_factory=list)  # of the process, at each mark; 0 where it was not asked
    # On CUDA, at the beginning of each phase: the moment, the peak since the one before, and bytes now.
    allocated: list[tuple[Moment, int, int]] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)  # on an accelerator, one for each mark

    @property
    def is_done(self) -> bool:
        """Whether the device has come to the last mark."""
        return not self.events or self.events[-1].query()

    def resolve(self, before: tuple[Any, int]) -> tuple[Any, int]:
        """Waits until the device has come to the last mark, and sets the times at which it came to each. `before`: an
        event, and when it was; returns the last such."""
        events, self.events = self.events, []
        if events:
            events[-1].synchronize()
        event, at_ns = before
        for number, after in enumerate(events):  # one after the other: torch gives milliseconds in single precision
            at_ns += round(event.elapsed_time(after) * 1e6)
            mark = self.marks[number] = self.marks[number]._replace(device_ns=at_ns)
            if mark.collective is not None and mark.moment is Moment.ISSUED:
                mark.collective.begin_ns = at_ns
            elif mark.collective is not None and mark.moment is Moment.WAITED:
                mark.collective.end_ns = at_ns
            event = after
        return event, at_ns


_new = tuple.__new__  # half of what `Mark(...)` costs

_PHASES = frozenset((Moment.BACKWARD, Moment.OPTIMIZER, Moment.STEPPED))
_UNITS = frozenset((Moment.ENTER, Moment.LEAVE, Moment.NEED, Moment.ARRIVED))
_RESIDENT = frozenset((Moment.BACKWARD, Moment.ARRIVED, Moment.OPTIMIZER, Moment.STEPPED))


class Clock(Watch):
    """Notes the moments of one rank, from `open` to `close`."""

    def __init__(self, device_type: str, optimizer: Optimizer | None) -> None:
        self.device_type, self._optimizer = device_type, optimizer
        self._taken = Taken()
        self._stream: Any = None  # of an accelerator: the one that computes
        self.anchor: tuple[Any, int] = None, 0  # on an accelerator, an event whose time is known, and that time
        self._thread = get_ident()
        self._undo: list[Callable[[], object]] = []
        self.saved_at = monotonic()  # when a checkpoint was complete last, or when it began to look on
        self._groups: dict[Any, str] = {}  # how collectives on a line are called
        self._working: list[tuple[Collective, list[Any]]] = []  # under way, with the works of the backend

    def open(self) -> None:
        """Looks on from now."""
        self._thread = get_ident()
        if is_accelerator(self.device_type):
            self._stream = torch.accelerator.current_stream()
            self._event().synchronize()  # the first one takes longer
            before_ns = perf_counter_ns()  # as in `note`: what it takes to issue an event is in both
            self.anchor = self._event(), before_ns
            self.anchor[0].synchronize()
        watching.look(self)
        self._undo.append(lambda: watching.look_away(self))
        self._undo.append(_on_batches(self))
        if self._optimizer is not None:
            before = self._optimizer.register_step_pre_hook(lambda *_: self.note(Moment.OPTIMIZER))
            after = self._optimizer.register_step_post_hook(lambda *_: self.note(Moment.STEPPED))
            self._undo += [before.remove, after.remove]

    def close(self) -> None:
        """Looks on no more."""
        undo, self._undo = self._undo, []
        for each in undo:
            each()

    # -- what the core tells ----------------------------------------------------------------------------------------

    def note(self, moment: Moment, what: str = "", collective: Collective | None = None) -> None:
        """A moment, now. Those of other threads are left out: of saves in the background, say."""
        if get_ident() != self._thread and torch._C._current_graph_task_id() == -1:
            return
        taken, now = self._taken, perf_counter_ns()
        if self.anchor[0] is None:
            used = process_time_ns()
            if self._working and moment in _UNITS:
                self._working = [each for each in self._working if not _has_ended(*each, now)]
        else:
            used = 0
            if moment not in WITHIN:  # collectives are issued on streams of their own
                self._stream = torch.accelerator.current_stream()
            taken.events.append(self._event())
            if moment in _PHASES and self.device_type == "cuda":
                taken.allocated.append((moment, torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()))
                torch.cuda.reset_peak_memory_stats()
        taken.marks.append(_new(Mark, (now, used, moment, what, collective, now)))
        taken.resident_nbytes.append(resident_nbytes() if moment in _RESIDENT else 0)

    def issued(self, work: Any, kind: str) -> None:
        """A collective has begun: `work` will note when it is waited for."""
        if get_ident() != self._thread and torch._C._current_graph_task_id() == -1:
            return
        taken, line = self._taken, work.line
        if line.size == 1:
            self.note(Moment.ISSUED, kind)
            return
        count, text, *_ = work.name
        name = line.axes[0].name
        if line not in self._groups:
            first = min(dist.get_process_group_ranks(line.axes[0].group))
            self._groups[line] = f"{name} from rank {first} #"
        begin_ns = taken.marks[-1].at_ns if taken.marks else perf_counter_ns()  # that of ISSUE
        collective = Collective(text, kind, f"{self._groups[line]}{count}", name, line.size, work.nbytes, begin_ns)
        self.note(Moment.ISSUED, kind, collective)
        finish = work.finish
        if work.works and not work.on_stream:
            works = [each for each, _ in work.works if not isinstance(each, _WaitNote)]  # of a clock beside this one
            self._working.append((collective, works))

        def finished(*kept: Any) -> None:
            if finish is not None:
                finish(*kept)
            collective.end_ns = collective.end_ns or perf_counter_ns()
            self.note(Moment.WAITED, kind, collective)

        waits = [(each if peer is None else _TimedWork(each, peer, collective), peer) for each, peer in work.works]
        work.works, work.finish = [(_WaitNote(self, kind, collective), None), *waits], finished

    def moving(self, tier: str, nbytes: int, *, is_read: bool) -> None:
        """Bytes begin to move."""
        self._taken.moved.append((len(self._taken.marks), tier, nbytes, is_read))

    def arrived(self, unit: str, grads: Sequence[Tensor | None]) -> None:
        """The gradients of a unit are there."""
        self.note(Moment.ARRIVED, unit)

    def saved(self) -> None:
        """A checkpoint is complete."""
        self.saved_at = monotonic()

    # -- what it has noted ------------------------------------------------------------------------------------------

    def take(self) -> Taken:
        """What was noted since the last time. On an accelerator the times of the device come with `resolve`."""
        taken, self._taken = self._taken, Taken()
        return taken

    def resolve(self, taken: Taken) -> Taken:
        """Waits until the device has come to the last of these marks, and gives them its times. In the order of `take`."""
        self.anchor = taken.resolve(self.anchor)
        return taken

    def _event(self) -> Any:
        event = torch.Event(self.device_type, enable_timing=True)
        event.record(self._stream)
        return event


class _WaitNote:
    """Stands before the works of a collective, and notes when the host begins to wait for them."""

    def __init__(self, clock: Clock, kind: str, collective: Collective) -> None:
        self._clock, self._kind, self._collective = clock, kind, collective

    def wait(self, *_: object) -> None:
        """Notes."""
        self._clock.note(Moment.WAIT, self._kind, self._collective)


class _TimedWork:
    """A work of the backend, which notes how long the host waits for it."""

    def __init__(self, work: Any, peer: int, collective: Collective) -> None:
        self._work, self._peer, self._collective = work, peer, collective

    def is_completed(self) -> bool:
        """Whether the work is complete."""
        return bool(self._work.is_completed())

    def wait(self, *timeout: Any) -> None:
        """Waits."""
        begin = perf_counter_ns()
        self._work.wait(*timeout)
        waited = perf_counter_ns() - begin
        if waited > self._collective.peer_ns:
            self._collective.slowest_peer, self._collective.peer_ns = self._peer, waited


def _has_ended(collective: Collective, works: list[Any], now: int) -> bool:
    """Whether a collective of the host is complete. Found at the next moment, so its end is known to a moment."""
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


def _on_batches(clock: Clock) -> Callable[[], None]:
    """Notes when loaders of torch are asked for a batch. Returns what undoes that."""
    iterator = dataloader._BaseDataLoaderIter
    before = iterator.__next__

    def noted(self: Any) -> Any:
        clock.note(Moment.LOAD)
        try:
            return before(self)
        finally:
            clock.note(Moment.LOADED)

    iterator.__next__ = noted  # type: ignore[method-assign]

    def undo() -> None:
        if iterator.__next__ is noted:
            iterator.__next__ = before  # type: ignore[method-assign]

    return undo
