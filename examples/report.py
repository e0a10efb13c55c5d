"""What `train_gpt.py` shows: a progress bar, some text, a table. None of it is the lesson."""

from __future__ import annotations

import resource
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TypedDict

import torch
from corpus import Corpus
from options import Options
from tqdm import tqdm  # type: ignore[import-untyped]

import zero_fn as zf

__all__ = ["STATES", "Losses", "Run", "megabytes", "progress_bar", "write_report"]

STATES = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer state"}

# How far two trainings on the same batches may drift apart, in nats: by rounding alone, in fp32; by where autocast
# rounds to bf16 and where `zf.precision` does, in bf16.
TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}


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
    # Only the rank that writes needs matplotlib.
    from pictures import draw_bytes, draw_losses

    if options.sample:
        print(f"\n{' the model writes ':-^79}\n{_readable(sample)}\n{'':-^79}")
    print(f"\n{_table(options, runs)}")
    loss_png, bytes_png = options.out / "loss.png", options.out / "bytes.png"
    draw_losses(loss_png, options, corpus, runs)
    draw_bytes(bytes_png, options, runs, plans)
    print(f"\nwrote {loss_png} and {bytes_png}")
    return None if len(runs) == 1 else _judge(options, *runs)


def megabytes(nbytes: float, digits: int = 3) -> str:
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
        held = [(megabytes(getattr(run.held, state)), megabytes(getattr(run.formula.held, state))) for run in runs]
        rows.append(_row(f"held per rank: {label}", held))
    rows.append(_row("sent per rank and step", [(_sent(run), megabytes(run.formula.sent_nbytes)) for run in runs]))
    rows.append(_row("tokens/s of all ranks", [(f"{run.tokens_per_second(options):,.0f}", "") for run in runs]))

    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join((row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:]))).rstrip() for row in rows]
    return "\n".join((lines[0], "-" * len(lines[0]), *lines[1:]))


def _row(label: str, cells: Sequence[tuple[str, str]]) -> list[str]:
    return [label, *chain.from_iterable(cells)]


def _sent(run: Run) -> str:
    """What zero_fn counted; torch does not count for DDP."""
    is_counted = run.sent_nbytes > 0 or run.formula.sent_nbytes == 0
    return megabytes(run.sent_nbytes) if is_counted else "not counted"


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
