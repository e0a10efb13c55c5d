"""The fixture `simulated`: runs a function on N ranks of this process.

    def test_ranks_agree(simulated):
        first, second = simulated(2, schedule=[1, 0, 2]).run(mean_of_ranks, 3.0)

Threads, groups and meshes of a number of ranks are kept from case to case. Everything that a case changes in them is made
anew for each (turns, messages, traces), so no failing case can poison the next. Threads are never replaced either: a mesh
knows its thread by a number that the system gives out again.
"""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.simulation.group import SimulatedGroup
from tests.simulation.traces import Recorded, Traces
from tests.simulation.turns import RankKilled, Turns
from tests.simulation.wires import Fault, Timing, Wires
from tests.simulation.world import own_world, worlds_by_thread
from tests.support.seeds import seed_generator
from tests.support.watchdog import leave
from zero_fn.transport import line
from zero_fn.transport.direct_exchange import Exchange
from zero_fn.transport.links import BY_BACKEND
from zero_fn.transport.native import Native

__all__ = ["Case", "Desync", "Outcome", "Report", "Simulated", "axis"]

R = TypeVar("R")

_here = threading.local()
_LEAVING_S = 20.0


def axis() -> DeviceMesh:
    """The axis "dp" of the rank that calls: over all ranks, or one row of the grid."""
    mesh: DeviceMesh = _here.mesh
    return mesh


class Desync(AssertionError):
    """Ranks called different collectives, or left messages, though nothing went wrong."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[R]):
    """How one rank ended: with a value, with an error, or killed."""

    value: R | None = None
    error: BaseException | None = None
    was_killed: bool = False


@dataclass(frozen=True, slots=True)
class Report(Generic[R]):
    """How a case ended, by rank."""

    outcomes: list[Outcome[R]]
    deadlock: list[str] | None  # what each rank waited for when none could go on; None if that never was so
    happened: list[Fault]  # a program may be over before its fault is due
    events: list[list[str]]  # the last communication events, as text
    counts: list[int]  # how many events there were
    desync: str | None  # where the collectives of two ranks differ
    left_over: list[str]  # messages that nobody received

    def __str__(self) -> str:
        lines = list(self.deadlock or [])
        for rank, (outcome, events) in enumerate(zip(self.outcomes, self.events, strict=True)):
            ended = "was killed" if outcome.was_killed else repr(outcome.error) if outcome.error else "returned"
            lines += [f"rank {rank} {ended}; its last events:", *(f"    {event}" for event in events)]
        left = [f"nobody received {message}" for message in self.left_over]
        return "\n".join([*lines, *([self.desync] if self.desync else []), *left])


@dataclass(frozen=True, slots=True)
class Case:
    """A number of ranks and what happens to them."""

    simulated: Simulated
    ranks: _Ranks
    schedule: Sequence[int]
    faults: Sequence[Fault]
    timing: Timing
    transport: Literal["exchange", "native"]

    def run(self, fn: Callable[..., R], *args: Any, may_leave_messages: bool = False, **kwargs: Any) -> list[R]:
        """Runs `fn(*args, **kwargs)` on every rank; returns the value of each.

        Raises what the first rank that raised has raised, with the report as a note; or `Desync`, if ranks called different
        collectives, or left messages and were not in the middle of something.
        """
        report = self.report(fn, *args, **kwargs)
        for outcome in report.outcomes:
            if outcome.error is not None:
                outcome.error.add_note(str(report))
                raise outcome.error
        if report.desync is not None or (report.left_over and not may_leave_messages):
            raise Desync(str(report))
        return [outcome.value for outcome in report.outcomes]  # type: ignore[misc]

    def report(self, fn: Callable[..., R], *args: Any, **kwargs: Any) -> Report[R]:
        """As `run`, but returns how every rank ended, whatever that is."""
        self.simulated.executed += 1
        return self.ranks.run(self, lambda: fn(*args, **kwargs))


class Simulated:
    """Ranks of this process, by number."""

    def __init__(self) -> None:
        self.executed = 0  # cases so far
        self._ranks: dict[tuple[int, ...], _Ranks] = {}

    def __call__(
        self,
        n: int | tuple[int, int],
        *,
        schedule: Sequence[int] = (),
        faults: Sequence[Fault] = (),
        timing: Timing = "early",
        transport: Literal["exchange", "native"] = "exchange",
    ) -> Case:
        """A case. A pair of ranks is a grid with the axes "outer" and "dp", of which programs use "dp".

        `schedule` says which rank is next (`turns`), `timing` when messages are read and written (`wires`), and `transport`
        what zero_fn sends: its own direct exchange, or the collectives of the group.
        """
        shape = (n,) if isinstance(n, int) else n
        if shape not in self._ranks:
            self._ranks[shape] = _Ranks(shape)
        return Case(self, self._ranks[shape], schedule, faults, timing, transport)

    def close(self) -> None:
        """Ends all threads."""
        while self._ranks:
            _, ranks = self._ranks.popitem()
            ranks.close()


@dataclass
class _Room:
    """What the groups of a set of ranks look at: the case that runs now."""

    wires: Wires = None  # type: ignore[assignment]
    traces: Traces = field(default_factory=Traces)
    transport: str = "exchange"
    members: dict[str, Sequence[int]] = field(default_factory=dict)


class _Ranks:
    """Threads, groups and meshes of one shape of mesh."""

    def __init__(self, shape):
        self._shape = shape
        self._n = n = shape[0] if len(shape) == 1 else shape[0] * shape[1]
        self._room = _Room()
        self._store = dist.HashStore()
        self._locks = [_held() for _ in range(n)]
        self._done = _held()
        self._job = self._prepare
        self._outcomes = [Outcome()] * n
        self._threads = [threading.Thread(target=self._live, args=(rank,), daemon=True) for rank in range(n)]
        for thread in self._threads:
            thread.start()
        self._run(self._prepare, Case(None, self, (), (), "early", "exchange"))
        for outcome in self._outcomes:
            if outcome.error is not None:
                raise outcome.error

    def run(self, case, job):
        """Runs a job on every rank."""
        turns = self._run(lambda: (seed_generator(0), job())[1], case)  # as if it were the first of its process
        wires, traces = self._room.wires, self._room.traces
        outcomes, self._outcomes = self._outcomes, [Outcome()] * self._n
        return Report(
            outcomes,
            turns.deadlock,
            wires.happened,
            [[str(event) for event in events] for events in wires.events],
            wires.counts,
            traces.difference(self._room.members),
            wires.left_over(),
        )

    def close(self):
        """Ends the threads."""
        self._job = None
        for lock, thread in zip(self._locks, self._threads, strict=True):
            lock.release()
            thread.join()

    def _run(self, job, case):
        self._job = job
        self._turns = turns = Turns(self._locks, self._done, case.schedule)
        room = self._room
        room.wires, room.traces = Wires(turns, self._n, case.faults, case.timing), Traces()
        room.transport = case.transport
        line._groups.clear()  # a group that was lost in an earlier case is as good as new
        with worlds_by_thread(), _generator_kept():
            turns.begin()
            try:
                self._done.acquire()
            except BaseException:  # a test that ran out of time, or Ctrl-C: no rank may go on in the next test
                turns.abandon()
                if not self._done.acquire(timeout=_LEAVING_S):
                    leave("simulated ranks compute on after their test has ended")
                raise
            finally:
                self._job = None
        return turns

    def _live(self, rank):
        _here.rank, _here.room = rank, self._room
        own_world()
        while True:
            self._locks[rank].acquire()
            job = self._job
            if job is None:
                return
            try:
                self._outcomes[rank] = Outcome(job())
            except RankKilled:
                self._outcomes[rank] = Outcome(was_killed=True)
            except BaseException as error:
                killed = self._room.wires.is_dead[rank]
                self._outcomes[rank] = Outcome(was_killed=True) if killed else Outcome(error=error)
            del job
            self._turns.end(rank)

    def _prepare(self):
        """Makes the groups and the mesh of the calling rank."""
        dist.init_process_group("simulated", store=self._store, rank=_here.rank, world_size=self._n)
        names = ("dp",) if len(self._shape) == 1 else ("outer", "dp")
        mesh = init_device_mesh("cpu", self._shape, mesh_dim_names=names)
        _here.mesh = mesh["dp"]


def _held():
    lock = threading.Lock()
    lock.acquire()
    return lock


@contextmanager
def _generator_kept():
    numbers = random.getstate()
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(numbers)


def _create_group(options, _backend_options):
    members = list(options.global_ranks_in_group) or list(range(options.group_size))
    _here.room.members[options.group_id] = members
    return SimulatedGroup(_here.room, options.group_id, options.group_rank, members)


def _transport(group, rank, size):
    assert isinstance(group, SimulatedGroup)
    room = _here.room
    own = group.members[rank]
    chosen = Native if room.transport == "native" else Exchange
    return Recorded(chosen(group, rank, size), lambda entry: room.traces.note(group.pg_name, own, entry))


if "simulated" not in dist.Backend.backend_list:
    dist.Backend.register_backend("simulated", _create_group, extended_api=True, devices=["cpu"])
BY_BACKEND["simulated"] = _transport
