"""The two pictures of `train_gpt.py`: losses over steps, and bytes per rank and state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # needs no screen; to be chosen before pyplot is imported
import matplotlib.pyplot as plt
from corpus import Corpus
from matplotlib.axes import Axes
from options import Options
from report import STATES, Run, megabytes

import zero_fn as zf

__all__ = ["draw_bytes", "draw_losses"]

INK, FAINT, GRID = "#22252b", "#7d838c", "#e4e7eb"
TRAINING, VALIDATION = "#4269d0", "#e4572e"
COLORS = {"parameters": "#4269d0", "gradients": "#efb118", "optimizer": "#3ca951"}
PALE = {"parameters": "#c3cfef", "gradients": "#f9e3b0", "optimizer": "#bfe2c3"}
STYLE = {
    "savefig.dpi": 160,
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
}


def draw_losses(path: Path, options: Options, corpus: Corpus, runs: Sequence[Run]) -> None:
    """Training and validation loss over steps, with the loss of plain DDP laid over it."""
    with plt.style.context(STYLE):
        zero, *others = runs
        figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
        steps = range(1, zero.losses.step + 1)
        axes.plot(steps, zero.losses.train, color=TRAINING, linewidth=2, label=f"training, {zero.name}")
        for other in others:
            theirs = other.losses.train
            label = f"training, {other.name} (first {len(theirs)} steps)"
            axes.plot(steps[: len(theirs)], theirs, color=INK, linewidth=1, linestyle=(0, (2, 3)), label=label)
        validated_steps, validation = zip(*zero.losses.validation.items(), strict=True)
        label = "validation, other files"
        axes.plot(validated_steps, validation, "o-", color=VALIDATION, markersize=5, linewidth=1.5, label=label)
        axes.set(xlabel="step", ylabel="loss, nats per byte", xlim=(0, None))
        _title(
            axes,
            f"The loss of a GPT over bytes, {zero.name}, {options.ranks} ranks",
            f"{corpus.source}: {megabytes(len(corpus.train), 1)} to train on, {megabytes(len(corpus.validation), 1)} "
            f"to validate; {options.batch} x {options.seq} bytes a step",
        )
        axes.legend(frameon=True, facecolor="white", edgecolor="none", framealpha=1)
        figure.savefig(path)
        plt.close(figure)


def draw_bytes(path: Path, options: Options, runs: Sequence[Run], plans: Sequence[zf.Plan]) -> None:
    """What each stage holds by formula, beside what was measured."""
    bars = [(f"stage {stage}\nformula", plan.held, False) for stage, plan in enumerate(plans)]
    places = (options.stage + 1, 0)
    for place, run in zip(places, runs, strict=False):
        bars.insert(place, (f"{run.name}\nmeasured", run.held, True))
    with plt.style.context(STYLE):
        figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
        first_measured = next(place for place, (_, _, is_measured) in enumerate(bars) if is_measured)
        for place, (_, held, is_measured) in enumerate(bars):
            base = 0.0
            for state, label in STATES.items():
                height = getattr(held, state) / 1e6
                axes.bar(
                    place,
                    height,
                    bottom=base,
                    width=0.68,
                    color=COLORS[state] if is_measured else PALE[state],
                    edgecolor="white",
                    label=label if place == first_measured else None,
                )
                base += height
            axes.annotate(megabytes(held.total, 1), (place, base), (0, 4), textcoords="offset points", ha="center")
        axes.set_xticks(range(len(bars)), [label for label, _, _ in bars])
        axes.tick_params(axis="x", length=0)
        axes.set(
            ylabel="MB per rank, at rest after a step", ylim=(0, 1.12 * max(held.total for _, held, _ in bars) / 1e6)
        )
        _title(
            axes,
            f"What a rank holds, {options.ranks} ranks",
            "full colour: measured in this run; pale: by the formula of the stage",
        )
        axes.legend(loc="lower right", bbox_to_anchor=(1.01, 1.06), ncols=3, columnspacing=1.2, handlelength=1.2)
        figure.savefig(path)
        plt.close(figure)


def _title(axes: Axes, title: str, subtitle: str) -> None:
    axes.set_title(f"{subtitle}\n", loc="left", fontsize=9, color=FAINT, linespacing=0.6)
    axes.annotate(
        title, (0, 1), (0, 24), xycoords="axes fraction", textcoords="offset points", fontsize=12, weight="bold"
    )
