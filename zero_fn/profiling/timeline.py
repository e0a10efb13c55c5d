"""One step of each rank as bars along time: a picture (PNG), by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from zero_fn.profiling.record import RankRecord
from zero_fn.profiling.trace import Bar, bars_of

__all__ = ["draw"]

_COLOURS = {
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


def draw(records: Sequence[RankRecord], path: str) -> None:
    """Writes the step whose length is nearest to the median."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    begin_ns, end_ns = _usual_step(records[0])
    rows: dict[str, list[Bar]] = {}
    for record in records:
        for bar in bars_of(record):
            is_computation = bar.track == "computation"
            if (is_computation or bar.track.startswith("axis")) and (
                begin_ns < bar.end_ns and bar.begin_ns < end_ns
            ):
                row = f"rank {record.rank}" + ("" if is_computation else f" {bar.track}")
                rows.setdefault(row, []).append(bar)
    figure = Figure(figsize=(12, 1.2 + 0.3 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for at, bars in enumerate(rows.values()):
        axes.broken_barh(
            [((b.begin_ns - begin_ns) / 1e6, (b.end_ns - b.begin_ns) / 1e6) for b in bars],
            (at - 0.4, 0.8),
            facecolors=[_COLOURS[_kind_of(bar)] for bar in bars],
        )
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_xlim(0, (end_ns - begin_ns) / 1e6)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of one step")
    seen = {_kind_of(bar) for bars in rows.values() for bar in bars}
    figure.legend(
        handles=[Patch(color=_COLOURS[kind], label=kind) for kind in _COLOURS if kind in seen],
        ncols=5,
        loc="outside upper center",
    )
    figure.savefig(path, dpi=120)


def _usual_step(record: RankRecord) -> tuple[int, int]:
    steps = [(spans[0].begin_ns, spans[-1].end_ns) for spans in record.steps]
    usual = median(end - begin for begin, end in steps)
    return min(steps, key=lambda step: abs(step[1] - step[0] - usual))


def _kind_of(bar: Bar) -> str:
    """A key of `_COLOURS`."""
    if bar.track != "computation":
        return "collective"
    length_us = (bar.end_ns - bar.begin_ns) / 1e3
    return "idle" if bar.more["idle_us"] > length_us / 2 else bar.kind
