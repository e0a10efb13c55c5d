"""One step of each rank as bars along time: for the page (SVG) and as a picture (PNG)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from statistics import median
from typing import NamedTuple

from zero_fn.profiling.clock import Collective
from zero_fn.profiling.record import RankRecord
from zero_fn.profiling.spans import Span

__all__ = ["COLOURS", "Bar", "bars_of", "draw", "in_lanes", "name_of", "svg_of"]

COLOURS = {
    "compute": "#4477aa",
    "communication": "#ee6677",
    "waiting": "#ccbb44",
    "copies": "#aa3377",
    "idle": "#dddddd",
    "data": "#66ccee",
    "optimizer": "#228833",
    "other": "#bbbbbb",
    "collective": "#f4a6b0",
}
"""Of parts, to be told apart with any eyes; and of collectives under way."""

_ROW, _LEFT, _WIDTH = 22, 90, 1000


class Bar(NamedTuple):
    """What one rank does in a range of milliseconds from the beginning of the step."""

    row: str
    begin_ms: float
    end_ms: float
    kind: str  # a key of `COLOURS`
    name: str


def name_of(span: Span) -> str:
    """A span in words."""
    if span.collective is not None:
        return (
            f"{'wait for a slower rank: ' if span.part == 'waiting' else ''}{span.collective.name}"
        )
    where = f"{span.phase} of {span.unit}" if span.unit else span.phase
    return {
        "compute": where,
        "copies": f"wait for {span.tier}",
        "other": "outside of the model",
    }.get(span.part, span.part)


def in_lanes(collectives: Iterable[Collective]) -> list[tuple[int, Collective]]:
    """Collectives that were waited for, each with the first lane that is free when it begins."""
    ends, found = list[int](), list[tuple[int, Collective]]()
    ended = (each for each in collectives if each.end_ns)
    for each in sorted(ended, key=lambda each: each.begin_ns):
        lane = next((lane for lane, end in enumerate(ends) if end <= each.begin_ns), len(ends))
        ends[lane : lane + 1] = [each.end_ns]
        found.append((lane, each))
    return found


def bars_of(records: Sequence[RankRecord]) -> list[Bar]:
    """The bars of the step whose length is nearest to the median."""
    lengths = [steps[-1].end_ns - steps[0].begin_ns for steps in records[0].steps]
    chosen = min(range(len(lengths)), key=lambda at: abs(lengths[at] - median(lengths)))
    chosen = min(chosen, *(len(record.steps) - 1 for record in records))
    begin = min(record.steps[chosen][0].begin_ns for record in records)
    found = []
    for record in records:
        row, spans = f"rank {record.rank}", record.steps[chosen]
        for span in spans:
            kind = "idle" if span.idle_ns > span.ns / 2 else span.part
            found.append(
                Bar(
                    row,
                    (span.begin_ns - begin) / 1e6,
                    (span.end_ns - begin) / 1e6,
                    kind,
                    name_of(span),
                )
            )
        for lane, each in in_lanes(
            {id(s.collective): s.collective for s in spans if s.collective is not None}.values()
        ):
            ends = (each.begin_ns - begin) / 1e6, (each.end_ns - begin) / 1e6
            found.append(Bar(f"{row} wire {lane}", *ends, "collective", each.name))
    return found


def svg_of(bars: Sequence[Bar]) -> str:
    """A picture for a page; each bar says what it is under the mouse."""
    rows = {row: at for at, row in enumerate(dict.fromkeys(bar.row for bar in bars))}
    longest = max(bar.end_ms for bar in bars)
    scale, height = _WIDTH / longest, _ROW * (len(rows) + 1)
    lines = [
        f'<svg viewBox="0 0 {_LEFT + _WIDTH} {height}" role="img" '
        'aria-label="timeline of one step">'
    ]
    for row, at in rows.items():
        lines.append(f'<text x="0" y="{at * _ROW + 15}">{escape(row)}</text>')
    for bar in bars:
        x = _LEFT + max(0.0, bar.begin_ms) * scale
        width = max(0.2, (bar.end_ms - max(0.0, bar.begin_ms)) * scale)
        y, title = rows[bar.row] * _ROW, f"{bar.name}, {bar.end_ms - bar.begin_ms:.2f} ms"
        rect = (
            f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW - 5}" '
            f'fill="{COLOURS[bar.kind]}">'
        )
        lines.append(f"{rect}<title>{escape(title)}</title></rect>")
    for tenth in range(0, 11, 2):
        x = _LEFT + _WIDTH * tenth / 10
        lines.append(
            f'<text x="{x:.0f}" y="{height - 5}" '
            f'text-anchor="end">{longest * tenth / 10:.1f} ms</text>'
        )
    return "\n".join([*lines, "</svg>"])


def draw(bars: Sequence[Bar], path: str) -> None:
    """Writes the picture as PNG, by matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = {row: at for at, row in enumerate(dict.fromkeys(bar.row for bar in bars))}
    figure = Figure(figsize=(12, 1.2 + 0.3 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for kind in COLOURS:
        for row, at in rows.items():
            ranges = [
                (b.begin_ms, b.end_ms - b.begin_ms) for b in bars if b.kind == kind and b.row == row
            ]
            axes.broken_barh(ranges, (at - 0.4, 0.8), facecolors=COLOURS[kind])
    axes.set_yticks(list(rows.values()), list(rows))
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of one step")
    kinds = [kind for kind in COLOURS if any(bar.kind == kind for bar in bars)]
    figure.legend(
        handles=[Patch(color=COLOURS[kind], label=kind) for kind in kinds],
        ncols=5,
        loc="outside upper center",
    )
    figure.savefig(path, dpi=120)
