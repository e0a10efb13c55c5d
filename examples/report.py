"""What `train_gpt.py` shows: a progress bar, some text, a table, two pictures. None of it is the lesson."""

from __future__ import annotations

import resource
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import torch
from gpt import Corpus
from tqdm import tqdm  # type: ignore[import-untyped]

import zero_fn as zf

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from train_gpt import Options

__all__ = ["Losses", "Run", "progress_bar", "write_report"]

STATES = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer state"}

# How far two trainings on the same batches may drift apart, in nats: by rounding alone, in fp32; by where autocast
# rounds to bf16 and where `zf.precision` does, in bf16.
TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}

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


class LossState(TypedDict):
    """`Losses` as a checkpoint holds them."""

    train: list[float]
    validation: list[tuple[int, float]]


@dataclass(slots=True)
class Losses:
    """Every loss since step 0, also of the runs that this one continues."""

    train: list[float] = field(default_factory=list)
    validation: dict[int, float] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Steps taken."""
        return len(self.train)

    def state_dict(self) -> LossState:
        """What `load_state_dict` takes."""
        return {"train": list(self.train), "validation": list(self.validation.items())}

    def load_state_dict(self, state: LossState) -> None:
        """Continues the record of another run."""
        self.train, self.validation = list(state["train"]), dict(state["validation"])


@dataclass(slots=True)
class Run:
    """What one training showed.

    Attributes:
        name: How the table calls it.
        formula: For what a rank holds and sends.
        losses: Of all steps.
        seconds: Duration of each step of this process.
        sent_nbytes: Bytes that zero_fn sent from this rank in the last step.
        held: Bytes held by this rank at the end.
    """

    name: str
    formula: zf.Plan
    losses: Losses
    seconds: list[float] = field(default_factory=list)
    sent_nbytes: int = 0
    held: zf.Held = field(default_factory=lambda: zf.Held(0, 0, 0))

    def tokens_per_second(self, options: Options) -> float:
        """Over all ranks, by the median step, so that a disturbed step does not count."""
        return options.batch * options.seq / statistics.median(self.seconds)

    def progress(self, options: Options, device: str) -> str:
        """The end of the progress bar."""
        validation = [f" (validation {loss:.3f})" for loss in self.losses.validation.values()][-1:]
        speed = f"{self.tokens_per_second(options):,.0f} tokens/s"
        return f"loss {self.losses.train[-1]:.3f}{''.join(validation)}, {speed}, {_memory(device)}"


def progress_bar(run: Run, steps: int, *, quiet: bool) -> tqdm[int]:
    """Counts from the steps already taken up to `steps`."""
    return tqdm(
        range(run.losses.step, steps),
        initial=run.losses.step,
        total=steps,
        disable=quiet,
        mininterval=0.5,
        bar_format=f"{run.name:<9} {{n_fmt}}/{{total_fmt}} |{{bar:20}}| {{elapsed}}<{{remaining}}{{postfix}}",
    )


def write_report(
    options: Options, corpus: Corpus, runs: Sequence[Run], plans: Sequence[zf.Plan], sample: bytes
) -> str | None:
    """Prints the sample and the table, and writes `loss.png` and `bytes.png`.

    Args:
        options: Of the run.
        corpus: That it trained on.
        runs: The training with zero_fn, then the one with plain DDP if there was one.
        plans: The formulas for stages 0 to 3.
        sample: Text that the model wrote.

    Returns:
        What is wrong if the losses of the two trainings differ by more than rounding explains.
    """
    import matplotlib

    matplotlib.use("Agg")  # needs no screen; to be chosen before pyplot is imported
    if options.sample:
        print(f"\n{' the model writes ':-^79}\n{_readable(sample)}\n{'':-^79}")
    print(f"\n{_table(options, runs)}")
    loss_png, bytes_png = options.out / "loss.png", options.out / "bytes.png"
    _draw_losses(loss_png, options, corpus, runs)
    _draw_bytes(bytes_png, options, runs, plans)
    print(f"\nwrote {loss_png} and {bytes_png}")
    return None if len(runs) == 1 else _judge(options, *runs)


def _megabytes(nbytes: float, digits: int = 3) -> str:
    """Bytes in MB, 1 MB = 1e6 bytes."""
    return f"{nbytes / 1e6:,.{digits}f} MB"


def _table(options: Options, runs: Sequence[Run]) -> str:
    """What was measured beside what the formula says, for each run."""
    rows = [_row("", [(f"{run.name}, {run.losses.step} steps", "by formula") for run in runs])]
    ends = sorted({run.losses.step for run in runs})
    for step in dict.fromkeys((1, *ends)):
        losses = [_loss(dict(enumerate(run.losses.train, 1)).get(step)) for run in runs]
        rows.append(_row(f"training loss at step {step}", [(loss, "") for loss in losses]))
    for step in ends:
        losses = [_loss(run.losses.validation.get(step)) for run in runs]
        rows.append(_row(f"validation loss at step {step}", [(loss, "") for loss in losses]))
    for state, label in {**STATES, "total": "total"}.items():
        held = [(_megabytes(getattr(run.held, state)), _megabytes(getattr(run.formula.held, state))) for run in runs]
        rows.append(_row(f"held per rank: {label}", held))
    rows.append(_row("sent per rank and step", [(_sent(run), _megabytes(run.formula.sent_nbytes)) for run in runs]))
    rows.append(_row("tokens/s of all ranks", [(f"{run.tokens_per_second(options):,.0f}", "") for run in runs]))

    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join((row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:]))).rstrip() for row in rows]
    return "\n".join((lines[0], "-" * len(lines[0]), *lines[1:]))


def _row(label: str, cells: Sequence[tuple[str, str]]) -> list[str]:
    return [label, *chain.from_iterable(cells)]


def _sent(run: Run) -> str:
    """What zero_fn counted; torch does not count for DDP."""
    is_counted = run.sent_nbytes > 0 or run.formula.sent_nbytes == 0
    return _megabytes(run.sent_nbytes) if is_counted else "not counted"


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.6f}"


def _judge(options: Options, zero: Run, ddp: Run) -> str | None:
    gap = max(abs(ours - theirs) for ours, theirs in zip(zero.losses.train, ddp.losses.train, strict=False))
    tolerance = TOLERANCE[options.precision]
    said = f"the losses of {zero.name} and plain DDP over {ddp.losses.step} steps differ by at most {gap:.1e}"
    if not gap <= tolerance:
        return f"{said}: more than rounding explains ({tolerance:.0e})"
    print(f"{said}: they agree")
    return None


def _readable(sample: bytes) -> str:
    text = sample.decode("utf-8", "replace").split("\0")[0]
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)


def _memory(device: str) -> str:
    """What this process holds of the device, or of the host if that is where it computes."""
    if device == "cuda":
        return f"{torch.cuda.max_memory_allocated() / 1e9:.2f} GB at most on the GPU"
    resident = Path("/proc/self/statm")
    if resident.exists():
        return f"{int(resident.read_text().split()[1]) * resource.getpagesize() / 1e6:,.0f} MB resident"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:,.0f} MB resident at most"


def _draw_losses(path: Path, options: Options, corpus: Corpus, runs: Sequence[Run]) -> None:
    """Training and validation loss over steps, with the loss of plain DDP laid over it."""
    from matplotlib import pyplot as plt  # only the rank that writes needs it

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
            f"{corpus.source}: {_megabytes(len(corpus.train), 1)} to train on, {_megabytes(len(corpus.validation), 1)} "
            f"to validate; {options.batch} x {options.seq} bytes a step",
        )
        axes.legend(frameon=True, facecolor="white", edgecolor="none", framealpha=1)
        figure.savefig(path)
        plt.close(figure)


def _draw_bytes(path: Path, options: Options, runs: Sequence[Run], plans: Sequence[zf.Plan]) -> None:
    """What each stage holds by formula, beside what was measured."""
    from matplotlib import pyplot as plt  # only the rank that writes needs it

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
            axes.annotate(_megabytes(held.total, 1), (place, base), (0, 4), textcoords="offset points", ha="center")
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
