"""The files of a profile: data, a trace for Perfetto, a picture,
and one page that needs no network."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zero_fn.errors import warn_once
from zero_fn.profiling.analysis import Findings
from zero_fn.profiling.record import RankRecord
from zero_fn.profiling.text import Table, headline, tables_of
from zero_fn.profiling.timeline import COLOURS, bars_of, draw, in_lanes, name_of, svg_of

__all__ = ["trace_of", "write"]


def write(profile: Findings, records: Sequence[RankRecord], out: str) -> None:
    """Writes `profile.json`, `trace.json`, `profile.html` and `timeline.png` into a folder,
    which is made if need be."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    data = {name: getattr(profile, name) for name in ("overlap", "memory", "numbers")}
    data |= {
        name: [asdict(row) for row in getattr(profile, name)]
        for name in ("steps", "units", "collectives", "slow")
    }
    (folder / "profile.json").write_text(json.dumps(data))
    (folder / "trace.json").write_text(
        json.dumps({"traceEvents": list(trace_of(records)), "displayTimeUnit": "ms"})
    )
    bars = bars_of(records)
    (folder / "profile.html").write_text(_page(profile, svg_of(bars)))
    if find_spec("matplotlib") is None:
        warn_once(
            "A profile has no timeline.png.",
            why="matplotlib is not installed",
            fix="pip install matplotlib",
        )
    else:
        draw(bars, str(folder / "timeline.png"))


def trace_of(records: Sequence[RankRecord]) -> Iterator[dict[str, Any]]:
    """Events in the format of Chrome's traces: a process for each rank; in it a track of what
    computes, one for the waits for each tier, and for each data axis as many as it has
    collectives at once.

    Times are microseconds of the first step.
    """
    begin = min(record.steps[0][0].begin_ns for record in records)
    for record in records:
        tracks: dict[str, int] = {}
        events = []

        def event(
            track: str, name: str, kind: str, begin_ns: int, end_ns: int, **args: Any
        ) -> None:
            # The function is called in this iteration alone.
            tid = tracks.setdefault(track, len(tracks))  # noqa: B023
            times = {"ts": (begin_ns - begin) / 1e3, "dur": (end_ns - begin_ns) / 1e3}
            head = {"ph": "X", "pid": record.rank, "tid": tid, "name": name, "cat": kind}  # noqa: B023
            events.append({**head, **times, "args": args})  # noqa: B023

        for number, step in enumerate(record.steps):
            event("steps", f"step {number}", "step", step[0].begin_ns, step[-1].end_ns)
            for span in step:
                event(
                    "computation",
                    name_of(span),
                    span.part,
                    span.begin_ns,
                    span.end_ns,
                    idle_us=span.idle_ns / 1e3,
                )
                if span.part == "copies":
                    event(f"tier {span.tier}", name_of(span), span.part, span.begin_ns, span.end_ns)
        axes = dict.fromkeys(each.axis for each in record.collectives)
        for axis in axes:
            for lane, each in in_lanes(each for each in record.collectives if each.axis == axis):
                track = f"axis {axis}" + (f", {lane + 1}" if lane else "")
                event(
                    track,
                    each.name,
                    each.kind,
                    each.begin_ns,
                    each.end_ns,
                    nbytes=each.nbytes,
                    group=each.group,
                )
        yield {
            "ph": "M",
            "pid": record.rank,
            "name": "process_name",
            "args": {"name": f"rank {record.rank}"},
        }
        for track, tid in tracks.items():
            yield {
                "ph": "M",
                "pid": record.rank,
                "tid": tid,
                "name": "thread_name",
                "args": {"name": track},
            }
        yield from events


_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; max-width: 1200px; color: #222; background: #fff }
table { border-collapse: collapse; margin: 0.5em 0 2em } td, th { padding: 2px 10px; text-align: right }
td:first-child, th:first-child { text-align: left } tr:nth-child(even) { background: #f4f4f4 }
svg { width: 100%; font-size: 11px } .key { display: inline-block; width: 1em; height: 1em; margin: 0 4px 0 12px }
"""  # noqa: E501


def _page(profile: Findings, picture: str) -> str:
    lines = ['<!doctype html><html lang="en"><meta charset="utf-8"><title>zero_fn profile</title>']
    lines += [f"<style>{_STYLE}</style><h1>Where the time of a step goes</h1>"]
    lines += [f"<p>{escape(line)}</p>" for line in headline(profile)]
    lines += ["<h2>One step</h2><p>"]
    lines += [
        f'<span class="key" style="background:{colour}"></span>{kind}'
        for kind, colour in COLOURS.items()
    ]
    lines += ["</p>", picture]
    for table in tables_of(profile, few=False):
        lines += _table(table)
    return "\n".join([*lines, "</html>\n"])


def _table(table: Table) -> list[str]:
    title, (names, *rows) = table
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return [f"<h2>{escape(title)}</h2><table><tr>{head}</tr>", *body, "</table>"]
