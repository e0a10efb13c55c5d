"""A profile in words: one screen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from zero_fn.inspect.table import table
from zero_fn.profiling.analysis import Findings, StepTimes
from zero_fn.profiling.spans import PARTS

__all__ = ["Table", "tables_of", "text_of"]

Table = tuple[str, list[Sequence[str]]]
"""What it is about, and rows of cells, of which the first has the names of columns."""

_FEW_RANKS = 8
_FEW_ROWS = 8
_FEW_SLOW = 3


def text_of(profile: Findings) -> str:
    """All of it."""
    if not profile.steps:
        return "profile: the block has not ended"
    lines = headline(profile)
    for title, rows in tables_of(profile, few=True):
        lines += ["", title, *table(rows, right=range(1, len(rows[0])))]
    return "\n".join(lines)


def headline(profile: Findings) -> list[str]:
    """The sentences above the tables."""
    numbers = profile.numbers
    first = (
        f"{numbers['steps']} steps on {numbers['ranks']} ranks, "
        f"{_ms(numbers['seconds'])} ms a step (median)"
    )
    if "tokens_per_second" in numbers:
        first += f", {numbers['tokens_per_second']:,.0f} tokens/s"
    if "utilisation" in numbers:
        rate = numbers["model_flops"] / numbers["seconds"] / 1e12
        peak = numbers["peak_flops_per_second"] / 1e12
        first += (
            f", {rate:,.3g} TFLOP/s a rank, {numbers['utilisation']:.1%} of the "
            f"{peak:,.3g} that the device can do"
        )
    lines = [first]
    if numbers["ranks"] > 1:
        lines += [str(each) for each in profile.slow[:_FEW_SLOW]] or [
            "no rank is slower than the others"
        ]
        known = [share for share in profile.overlap if share is not None]
        if known:
            lines.append(
                f"{min(known):.0%} to {max(known):.0%} of the communication runs beside computation"
            )
    about = {
        "sent": "sent along {!r}: {} a step and rank",
        "moved": "moved {}: {} a step and rank",
        "held": "held {}: {} a rank",
    }
    for name, words in about.items():
        for what, nbytes in numbers[name].items():
            planned = numbers["planned"] and numbers["planned"][name].get(what, 0)
            beside = "" if planned is None else f", planned {_mb(planned)}"
            if name == "sent":
                rate = (
                    f", at {numbers['carried'][what] / 1e9:,.3g} GB/s"
                    if what in numbers["carried"]
                    else ""
                )
                beside += (
                    f"{rate}; {numbers['exposed'][what] / numbers['seconds']:.0%} of a step "
                    "waits for it"
                )
            lines.append(words.format(what, _mb(nbytes)) + beside)
    return lines


def tables_of(profile: Findings, *, few: bool) -> list[Table]:
    """The tables; `few` for one screen: the rows that matter most."""
    return [
        found
        for found in (
            _steps(profile, few),
            _units(profile, few),
            _collectives(profile, few),
            _memory(profile),
        )
        if found
    ]


def _steps(profile: Findings, few: bool) -> Table:
    ranks = sorted({step.rank for step in profile.steps})
    own = {rank: [step for step in profile.steps if step.rank == rank] for rank in ranks}
    names = [name for name in PARTS if any(step.parts[name] for step in profile.steps)]
    rows: list[Sequence[str]] = [("rank", "step", *names)]

    def row(
        name: str, over: Callable[[list[float]], float], of: Callable[[StepTimes], float]
    ) -> str:
        return _ms(over([median(map(of, own[rank])) for rank in ranks]))

    wanted: list[tuple[str, Callable[[list[float]], float]]] = [
        ("min", min),
        ("median", median),
        ("max", max),
    ]
    for name, over in wanted if len(ranks) > 1 else []:
        parts = [row(name, over, lambda step, part=part: step.parts[part]) for part in names]  # type: ignore[misc]
        rows.append((name, row(name, over, lambda step: step.seconds), *parts))
    shown = ranks
    if few and len(ranks) > _FEW_RANKS:
        shown = sorted({each.rank for each in profile.slow[:_FEW_SLOW]})
    for rank in shown:
        parts = [_ms(median(step.parts[part] for step in own[rank])) for part in names]
        rows.append((str(rank), _ms(median(step.seconds for step in own[rank])), *parts))
    return "milliseconds of a step", rows


def _units(profile: Findings, few: bool) -> Table | None:
    names = list(dict.fromkeys(row.unit for row in profile.units))
    times = {(row.unit, row.phase): row.seconds for row in profile.units}

    def most(name: str) -> float:
        return max(max(times.get((name, phase), [0.0])) for phase in ("forward", "backward"))

    rows: list[Sequence[str]] = [
        ("unit", "forward", "slowest rank", "ms", "backward", "slowest rank", "ms")
    ]
    shown = sorted(names, key=most, reverse=True)[:_FEW_ROWS] if few else names
    for name in (name for name in names if name in shown):
        cells: list[str] = []
        for phase in ("forward", "backward"):
            seconds = times.get((name, phase))
            if seconds is None:
                cells += ["", "", ""]
            else:
                cells += [_ms(median(seconds)), str(seconds.index(max(seconds))), _ms(max(seconds))]
        rows.append((name, *cells))
    left = len(names) - len(shown)
    title = "milliseconds a step in each unit, the median of ranks" + (
        f" (and {left} shorter ones)" if left else ""
    )
    return (title, rows) if names else None


def _collectives(profile: Findings, few: bool) -> Table | None:
    rows: list[Sequence[str]] = [
        (
            "collective",
            "axis",
            "a step",
            "MB",
            "ms each",
            "exposed ms",
            "waited ms",
            "for rank",
            "GB/s",
            "bus GB/s",
        )
    ]
    shown = profile.collectives[:_FEW_ROWS] if few else profile.collectives
    for each in shown:
        rates = [each.algorithm_bandwidth, each.bus_bandwidth] if each.nbytes else [0.0, 0.0]
        last = str(each.last_rank) if each.last_rank >= 0 else ""
        numbers = [_ms(each.seconds), _ms(each.exposed_s), _ms(each.waited_s)]
        sizes = [f"{each.count:.3g}", f"{each.nbytes / 1e6:,.3f}"]
        rows.append(
            (
                each.name,
                each.axis,
                *sizes,
                *numbers,
                last,
                *(f"{rate / 1e9:,.2f}" for rate in rates),
            )
        )
    left = len(profile.collectives) - len(shown)
    title = "collectives a step, the mean of ranks" + (
        f" (and {left} shorter ones)" if left else ""
    )
    return (title, rows) if len(rows) > 1 else None


def _memory(profile: Findings) -> Table | None:
    if not profile.memory:
        return None
    kinds = sorted({what for row in profile.memory.values() for what in row})
    rows: list[Sequence[str]] = [("memory", *kinds)]
    for phase in ("at rest", "forward", "backward", "optimizer", "peak"):
        row = profile.memory.get(phase)
        if row:
            rows.append(
                (phase, *(f"{row[kind] / 1e6:,.1f}" if kind in row else "" for kind in kinds))
            )
    planned = profile.numbers["planned"]
    beside = (
        f"; training state takes at most {_mb(planned['peak'])} of it by plan" if planned else ""
    )
    return f"MB of memory at most, of all ranks{beside}", rows


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.3f} MB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}" if seconds >= 0.001 or not seconds else f"{seconds * 1e3:.2g}"
