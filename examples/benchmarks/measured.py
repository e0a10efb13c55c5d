"""What a benchmark measures, and how sure it is: counters of the process, intervals of ratios, tables, pictures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zero_fn as zf

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_nbytes(*, peak: bool = False) -> int:
    """Resident memory of this process in bytes, now or at most since `forget_peak`; 0 where the system does not say.

    Pages that ranks share count in every process that maps them.
    """
    if not _STATUS.exists():
        return 0
    key = "VmHWM:" if peak else "VmRSS:"
    return next(int(line.split()[1]) * 1024 for line in _STATUS.read_text().splitlines() if line.startswith(key))


def forget_peak() -> None:
    """Begins a new peak of resident memory, where the system can."""
    if _CLEAR.exists():
        _CLEAR.write_text("5")


def sockets_nbytes(device: str = "lo") -> int:
    """Bytes that this host sent over a network device so far, of all its programs; 0 where the system does not say. Over "lo"
    go those to itself."""
    devices = Path("/proc/net/dev")
    if not devices.exists():
        return 0
    rows = [line.split() for line in devices.read_text().splitlines()]
    return next((int(row[9]) for row in rows if row[0] == f"{device}:"), 0)


def waited_s() -> float:
    """Seconds that threads of this process were ready to run and others ran: what the load of the machine took away."""
    waited = 0
    for thread in Path("/proc/self/task").glob("*/schedstat"):
        try:
            waited += int(thread.read_text().split()[1])
        except (OSError, ValueError, IndexError):  # the thread has ended
            continue
    return waited / 1e9


class Meter:
    """What calls of some functions on all ranks have cost this one since `read`, by `KEYS`.

    Seconds of CPU time of all threads and of the clock, bytes of payload as zero_fn counts it, bytes over sockets per rank,
    and by how many bytes the resident memory was raised at most.
    """

    KEYS = ("CPU", "wall", "payload", "sockets", "raised")

    def __init__(self) -> None:
        self._costs: list[tuple[float, ...]] = []

    def over(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, metered. All ranks begin at once."""

        def metered(*args: Any, **kwargs: Any) -> Any:
            dist.barrier()
            forget_peak()
            resident, sockets = resident_nbytes(), sockets_nbytes()
            wall, cpu = time.perf_counter(), time.process_time()
            with zf.traffic() as sent:
                found = function(*args, **kwargs)
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            dist.barrier()
            sockets = (sockets_nbytes() - sockets) // dist.get_world_size()
            self._costs.append((cpu, wall, sent.nbytes, sockets, resident_nbytes(peak=True) - resident))
            return found

        return metered

    def read(self) -> dict[str, float]:
        """The sums; of memory the most."""
        found, self._costs = [*zip(*self._costs, strict=True)], []
        return dict(zip(self.KEYS, [*map(sum, found[:-1]), max(found[-1])], strict=True))


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the ends of its 95 % bootstrap interval."""
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor(ratios)
    draws = values[torch.randint(len(ratios), (2000, len(ratios)), generator=generator)]
    medians = draws.median(1).values.sort().values
    return statistics.median(ratios), medians[50].item(), medians[1949].item()


def ratios_of(rounds: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Of what ran in the same rounds: each round against the same round."""
    return interval([one / other for one, other in zip(rounds, base, strict=True)])


def shown(ratio: tuple[float, float, float], digits: int = 2) -> str:
    """A ratio with its interval."""
    return "{:.{d}f} [{:.{d}f}, {:.{d}f}]".format(*ratio, d=digits)


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows with the same keys, in columns; numbers to the right."""
    keys = list(rows[0])
    cells = [keys, *([str(row[key]) for key in keys] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(keys))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    )


def draw_ratios(path: Path, title: str, ratios: Mapping[str, Mapping[str, tuple[float, float, float]]]) -> None:
    """Draws ratios with their intervals, one panel for each base. Needs matplotlib.

    Args:
        path: Of the PNG.
        title: Above the panels.
        ratios: By base, then by contestant.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1,
        len(ratios),
        figsize=(5 * len(ratios), 0.4 * len(next(iter(ratios.values()))) + 1.5),
        sharey=True,
        squeeze=False,
    )
    for panel, (base, found) in zip(panels[0], ratios.items(), strict=True):
        names = list(found)
        for at, name in enumerate(names):
            middle, low, high = found[name]
            color = "tab:blue" if name in ("replicate", "zero1", "zero2", "zero3") else "tab:gray"
            panel.barh(at, middle, color=color)
            panel.plot([low, high], [at, at], color="black", linewidth=1)
            panel.annotate(f"{middle:.2f}", (middle, at), xytext=(3, -3), textcoords="offset points", fontsize=8)
        panel.axvline(1, color="black", linewidth=0.8, linestyle=":")
        panel.set_yticks(range(len(names)), names)
        panel.invert_yaxis()
        panel.set_xlabel(f"step time / {base} (median, 95 % interval)")
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
