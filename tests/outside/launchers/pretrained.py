"""examples/pretrain.py under launchers: its losses on two ranks of one host, and what a launcher has left behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import zero_fn as zf
from tests.outside.examples.programs import ROOT, run_on_a_rank
from tests.support.ranks import Ranks

__all__ = ["SIZES", "has_saved", "losses", "losses_of_two_ranks", "running_in", "wait_for"]

SIZES = ["--layers=2", "--dim=32", "--heads=2", "--seq=16", "--batch=12", "--save-every=2", "--steps=40"]


def has_saved(folder: Path) -> bool:
    """Whether there is a checkpoint."""
    return any(folder.glob("step-*/manifest.json"))


def losses(folder: Path) -> list[float]:
    """Of the newest checkpoint."""
    found: list[float] = zf.load(folder, only="extra")["losses"]
    return found


def losses_of_two_ranks(ranks: Ranks, folder: Path) -> list[float]:
    """Of a run that nothing has interrupted."""
    program = (ROOT / "examples" / "pretrain.py").read_text()
    ranks(2, deadline_s=120).run(run_on_a_rank, program, "pretrain.py", str(folder), *SIZES, "--save=runs")
    found = losses(folder / "runs")
    assert len(found) == 40
    return found


def running_in(folder: Path) -> list[str]:
    """Commands of processes that have this folder in their environment, as all that a launcher has started there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if str(folder).encode() in path.read_bytes():
                found.append(path.with_name("cmdline").read_text())
        except OSError:  # has ended by now
            continue
    return found


def wait_for(is_so: Callable[[], object], deadline_s: float) -> bool:
    """Whether it has come true in time."""
    end = time.monotonic() + deadline_s
    while not (found := bool(is_so())) and time.monotonic() < end:
        time.sleep(0.005)
    return found
