"""The trace of a profile, for Perfetto and chrome://tracing: bars on tracks of each rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from zero_fn.profiling.clock import Collective
from zero_fn.profiling.record import RankRecord
from zero_fn.profiling.spans import Span

__all__ = ["Bar", "bars_of", "events_of"]


class Bar(NamedTuple):
    """What one rank does in a range of nanoseconds."""

    track: str
    name: str
    kind: str
    begin_ns: int
    end_ns: int
    more: dict[str, Any]


def bars_of(record: RankRecord) -> Iterator[Bar]:
    """A track of what one rank computes, one for the waits for each tier, and for each data axis
    as many as it has collectives at once."""
    for number, step in enumerate(record.steps):
        yield Bar("steps", f"step {number}", "step", step[0].begin_ns, step[-1].end_ns, {})
        for span in step:
            rest = _name_of(span), span.part, span.begin_ns, span.end_ns
            yield Bar("computation", *rest, {"idle_us": span.idle_ns / 1e3})
            if span.part == "copies":
                yield Bar(f"tier {span.tier}", *rest, {})
    for track, each in _in_lanes(record.collectives):
        more = {"nbytes": each.nbytes, "group": each.group}
        yield Bar(track, each.name, each.kind, each.begin_ns, each.end_ns, more)


def events_of(records: Sequence[RankRecord]) -> Iterator[dict[str, Any]]:
    """Events in the format of Chrome's traces: a process for each rank.

    Times are microseconds of the first step.
    """
    first_ns = min(record.steps[0][0].begin_ns for record in records)
    for record in records:
        tracks: dict[str, int] = {}
        for bar in bars_of(record):
            yield {
                "ph": "X",
                "pid": record.rank,
                "tid": tracks.setdefault(bar.track, len(tracks)),
                "name": bar.name,
                "cat": bar.kind,
                "ts": (bar.begin_ns - first_ns) / 1e3,
                "dur": (bar.end_ns - bar.begin_ns) / 1e3,
                "args": bar.more,
            }
        names = [("process_name", 0, f"rank {record.rank}")]
        names += [("thread_name", tid, track) for track, tid in tracks.items()]
        for name, tid, text in names:
            yield {"ph": "M", "pid": record.rank, "tid": tid, "name": name, "args": {"name": text}}


def _name_of(span: Span) -> str:
    """A span in words."""
    if span.collective is not None:
        waits = "wait for a slower rank: " if span.part == "waiting" else ""
        return waits + span.collective.name
    if span.part == "compute":
        return f"{span.phase} of {span.unit}" if span.unit else span.phase
    words = {"copies": f"wait for {span.tier}", "other": "outside of the model"}
    return words.get(span.part, span.part)


def _in_lanes(collectives: Iterable[Collective]) -> Iterator[tuple[str, Collective]]:
    """Collectives that were waited for, each with the first track of its axis that is free when it
    begins."""
    ends: dict[str, int] = {}
    for each in sorted(collectives, key=lambda each: each.begin_ns):
        lane, track = 1, f"axis {each.axis}"
        while ends.get(track, each.begin_ns) > each.begin_ns:
            lane += 1
            track = f"axis {each.axis}, {lane}"
        if each.end_ns:
            ends[track] = each.end_ns
            yield track, each
