"""A profile in words: one screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from zero_fn.inspect.table import table
from zero_fn.profiling.findings import Findings
from zero_fn.profiling.spans import PARTS

__all__ = ["text_of"]

Rows = list[Sequence[str]]
"""Of cells; the first has the names of columns."""

_FEW_RANKS = 8
_FEW_ROWS = 8
_FEW_SLOW = 3


def text_of(profile: Findings) -> str:
    """All of it."""
    if not profile.steps:
        return "profile: the block has not ended"
    lines = [*_headline(profile), *_bytes(profile)]
    for title, rows in (_steps(profile), _units(profile), _collectives(profile), _memory(profile)):
        if len(rows) > 1:
            lines += ["", title, *table(rows, right=range(1, len(rows[0])))]
    return "\n".join(lines)


def _headline(profile: Findings) -> Iterator[str]:
    numbers = profile.numbers
    seconds = numbers["seconds"]
    first = [
        f"{numbers['steps']} steps on {numbers['ranks']} ranks, {_ms(seconds)} ms a step (median)"
    ]
    if "tokens_per_second" in numbers:
        first.append(f"{numbers['tokens_per_second']:,.0f} tokens/s")
    if "utilisation" in numbers:
        first.append(f"{numbers['model_flops'] / seconds / 1e12:,.3g} TFLOP/s a rank")
        peak = numbers["peak_flops_per_second"] / 1e12
        first.append(f"{numbers['utilisation']:.1%} of the {peak:,.3g} that the device can do")
    yield ", ".join(first)
    if numbers["ranks"] > 1:
        none = ["no rank is slower than the others"]
        yield from map(str, profile.slow[:_FEW_SLOW] or none)
        known = [share for share in profile.overlap if share is not None]
        if known:
            yield (
                f"{min(known):.0%} to {max(known):.0%} of the communication runs beside computation"
            )


def _bytes(profile: Findings) -> Iterator[str]:
    numbers = profile.numbers
    for name, words, of_what in (
        ("sent", "sent along {!r}", "a step and rank"),
        ("moved", "moved {}", "a step and rank"),
        ("held", "held {}", "a rank"),
    ):
        for what, nbytes in numbers[name].items():
            line = f"{words.format(what)}: {_mb(nbytes)} {of_what}"
            if numbers["planned"]:
                line += f", planned {_mb(numbers['planned'][name].get(what, 0))}"
            if name == "sent":
                if what in numbers["carried"]:
                    line += f", at {numbers['carried'][what] / 1e9:,.3g} GB/s"
                line += f"; {numbers['exposed'][what] / numbers['seconds']:.0%} of a step"
                line += " waits for it"
            yield line


def _steps(profile: Findings) -> tuple[str, Rows]:
    names = [name for name in PARTS if any(step.parts[name] for step in profile.steps)]
    times: dict[int, list[list[float]]] = {}
    for step in profile.steps:
        cells = [step.seconds, *(step.parts[name] for name in names)]
        times.setdefault(step.rank, []).append(cells)
    own = {
        rank: [median(cells) for cells in zip(*rows, strict=True)] for rank, rows in times.items()
    }
    rows: Rows = [("rank", "step", *names)]
    if len(own) > 1:
        for name, over in (("min", min), ("median", median), ("max", max)):
            rows.append((name, *(_ms(over(cells)) for cells in zip(*own.values(), strict=True))))
    few = {each.rank for each in profile.slow[:_FEW_SLOW]}
    rows += [
        (str(rank), *map(_ms, cells))
        for rank, cells in own.items()
        if len(own) <= _FEW_RANKS or rank in few
    ]
    return "milliseconds of a step", rows


def _units(profile: Findings) -> tuple[str, Rows]:
    rows: Rows = [("unit", "forward", "slowest rank", "ms", "backward", "slowest rank", "ms")]
    times = {(row.unit, row.phase): row.seconds for row in profile.units}
    most: dict[str, float] = {}
    for row in profile.units:
        most[row.unit] = max(*row.seconds, most.get(row.unit, 0.0))
    shown = sorted(most, key=most.__getitem__, reverse=True)[:_FEW_ROWS]
    for name in most:
        if name in shown:
            cells = [
                cell
                for phase in ("forward", "backward")
                for cell in _of_ranks(times.get((name, phase)))
            ]
            rows.append((name, *cells))
    title = "milliseconds a step in each unit, the median of ranks"
    return title + _left_out(len(most)), rows


def _of_ranks(seconds: list[float] | None) -> tuple[str, str, str]:
    if seconds is None:
        return "", "", ""
    longest = max(seconds)
    return _ms(median(seconds)), str(seconds.index(longest)), _ms(longest)


def _collectives(profile: Findings) -> tuple[str, Rows]:
    names = "collective|axis|a step|MB|ms each|exposed ms|waited ms|for rank|GB/s|bus GB/s"
    rows: Rows = [names.split("|")]
    for each in profile.collectives[:_FEW_ROWS]:
        rows.append(
            (
                each.name,
                each.axis,
                f"{each.count:.3g}",
                f"{each.nbytes / 1e6:,.3f}",
                _ms(each.seconds),
                _ms(each.exposed_s),
                _ms(each.waited_s),
                str(each.last_rank) if each.last_rank >= 0 else "",
                f"{each.algorithm_bandwidth / 1e9:,.2f}",
                f"{each.bus_bandwidth / 1e9:,.2f}",
            )
        )
    return "collectives a step, the mean of ranks" + _left_out(len(profile.collectives)), rows


def _memory(profile: Findings) -> tuple[str, Rows]:
    kinds = sorted({what for row in profile.memory.values() for what in row})
    rows: Rows = [("memory", *kinds)]
    for phase in ("at rest", "forward", "backward", "optimizer", "peak"):
        if row := profile.memory.get(phase):
            cells = (f"{row[kind] / 1e6:,.1f}" if kind in row else "" for kind in kinds)
            rows.append((phase, *cells))
    title = "MB of memory at most, of all ranks"
    if planned := profile.numbers["planned"]:
        title += f"; training state takes at most {_mb(planned['peak'])} of it by plan"
    return title, rows


def _left_out(count: int) -> str:
    return f" (and {count - _FEW_ROWS} shorter ones)" if count > _FEW_ROWS else ""


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.3f} MB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}" if seconds >= 0.001 or not seconds else f"{seconds * 1e3:.2g}"
