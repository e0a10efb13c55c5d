"""What `train_gpt.py` shows: a progress bar, some text, a table. None of it is the lesson."""

from __future__ import annotations

import resource
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
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
        losses: Of all steps.
        seconds: Duration of each step of this process.
        sent_nbytes: Bytes that zero_fn sent from this rank in the last step.
        held: Bytes held by this rank at the end.
    """

    name: str
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
    options: Options, corpus: Corpus, zero: Run, ddp: Run | None, plans: Sequence[zf.Plan], sample: bytes
) -> str | None:
    """Prints the sample and the table, and writes `loss.png` and `bytes.png`.

    Args:
        options: Of the run.
        corpus: That it trained on.
        zero: The training with zero_fn.
        ddp: The training with plain DDP on the same batches, if there was one.
        plans: The formulas for stages 0 to 3.
        sample: Text that the model wrote.

    Returns:
        What is wrong if the losses of the two trainings differ by more than rounding explains.
    """
    # Only the rank that writes needs matplotlib.
    from pictures import draw_bytes, draw_losses

    if sample:
        print(f"\n{' the model writes ':-^79}\n{_readable(sample)}\n{'':-^79}")
    print(f"\n{_table(options, zero, ddp, plans)}")
    loss_png, bytes_png = options.out / "loss.png", options.out / "bytes.png"
    draw_losses(loss_png, options, corpus, zero, ddp)
    draw_bytes(bytes_png, options, zero, ddp, plans)
    print(f"\nwrote {loss_png} and {bytes_png}")
    return None if ddp is None else _judge(options, zero, ddp)


def megabytes(nbytes: float, digits: int = 3) -> str:
    """Bytes in MB, 1 MB = 1e6 bytes."""
    return f"{nbytes / 1e6:,.{digits}f} MB"


@dataclass(frozen=True, slots=True)
class _Row:
    """A line of the table."""

    label: str
    zero: str = ""
    zero_formula: str = ""
    ddp: str = ""
    ddp_formula: str = ""


def _table(options: Options, zero: Run, ddp: Run | None, plans: Sequence[zf.Plan]) -> str:
    plan, replicated = plans[options.stage], plans[0]
    last = ddp.losses.step if ddp else zero.losses.step
    held = ddp.held if ddp else zf.Held(0, 0, 0)
    lines = [_Row("", zero.name, "by formula", "plain DDP", "by formula")]
    for step in sorted({1, last, zero.losses.step}):
        theirs = f"{ddp.losses.train[step - 1]:.6f}" if ddp and step <= last else "not run so far"
        lines.append(_Row(f"training loss at step {step}", f"{zero.losses.train[step - 1]:.6f}", "", theirs))
    for step in sorted({last, zero.losses.step} & zero.losses.validation.keys()):
        theirs = f"{ddp.losses.validation[step]:.6f}" if ddp and step <= last else "not run so far"
        lines.append(_Row(f"validation loss at step {step}", f"{zero.losses.validation[step]:.6f}", "", theirs))
    for state, label in {**STATES, "total": "total"}.items():
        amounts = (megabytes(getattr(each, state)) for each in (zero.held, plan.held, held, replicated.held))
        lines.append(_Row(f"held per rank: {label}", *amounts))
    sent = megabytes(zero.sent_nbytes), megabytes(plan.sent_nbytes)
    lines.append(_Row("sent per rank and step", *sent, "by torch", megabytes(replicated.sent_nbytes)))
    speed = f"{ddp.tokens_per_second(options):,.0f}" if ddp else ""
    lines.append(_Row("tokens/s of all ranks", f"{zero.tokens_per_second(options):,.0f}", "", speed))
    return _aligned(lines, columns=5 if ddp else 3)


def _aligned(lines: Sequence[_Row], columns: int) -> str:
    cells = [(line.label, line.zero, line.zero_formula, line.ddp, line.ddp_formula)[:columns] for line in lines]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    texts = [
        "  ".join(
            (row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)))
        )
        for row in cells
    ]
    return "\n".join(text.rstrip() for text in (texts[0], "-" * len(texts[0]), *texts[1:]))


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
