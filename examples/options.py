"""The options of `train_gpt.py`, and the messages for those that cannot work, before any rank starts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from corpus import Corpus, CorpusError
from gpt import Config

import zero_fn as zf

__all__ = ["Options", "Precision", "checkpoints", "parse"]

Precision = Literal["fp32", "bf16"]

# What a resumed run must share with the one it continues, or it would not be the same run. The stage, the number of
# ranks, the microbatches and the precision may change.
_SAME_RUN = ("layers", "dim", "heads", "seq", "text", "batch", "lr", "clip", "seed")


@dataclass(frozen=True, slots=True)
class Options:
    """One run. The help text of each option is in `parse`."""

    stage: int
    precision: Precision
    ranks: int
    layers: int
    dim: int
    heads: int
    seq: int
    checkpoint_activations: bool
    text: str | None
    steps: int
    batch: int
    accumulate: int
    lr: float
    warmup: int
    clip: float
    seed: int
    evaluate_every: int
    save: Path | None
    resume: bool
    compare: bool
    compare_steps: int
    sample: int
    out: Path

    @property
    def config(self) -> Config:
        """The shape of the model."""
        return Config(
            layers=self.layers,
            dim=self.dim,
            heads=self.heads,
            seq=self.seq,
            checkpoint_activations=self.checkpoint_activations,
        )

    def rate(self, step: int) -> float:
        """The learning rate of a step: a linear warmup, then 1/sqrt(step), so that it does not depend on `steps`."""
        return self.lr * min((step + 1) / self.warmup, math.sqrt(3 * self.warmup / (step + 1)), 1.0)


def parse(arguments: list[str] | None = None) -> tuple[Options, Corpus]:
    """Reads the command line and the text, and stops with a message if the run could not work.

    Args:
        arguments: Those of the command line if None.

    Returns:
        The options and the text that they name.
    """
    parser = _parser()
    options = Options(**vars(parser.parse_args(arguments)))
    if "WORLD_SIZE" in os.environ:
        options = dataclasses.replace(options, ranks=int(os.environ["WORLD_SIZE"]))
    if options.save is not None and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):  # torchrun has lost a rank
        saved = checkpoints(options.save)
        options = dataclasses.replace(options, resume=bool(saved))
        if max(saved, default=0) >= options.steps:
            parser.exit(
                0,
                f"{options.save} has all {options.steps} steps: a rank was lost after the last save, before the report\n",
            )
    try:
        _check(options)
        corpus = Corpus.load(options.text, options.seq)
        options.out.mkdir(parents=True, exist_ok=True)
        if options.save is not None:
            _check_checkpoints(options, options.save)
    except (ValueError, CorpusError, OSError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    return options, corpus


def checkpoints(folder: Path) -> dict[int, Path]:
    """The complete checkpoints in a folder by step; one that was interrupted does not count."""
    found = zf.checkpoints(folder) if folder.is_dir() else []
    return {each.step: each.path for each in found if each.is_complete and each.step is not None}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Trains a small GPT with ZeRO stage 0, 1, 2 or 3, then sets it against plain DDP.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    flag = argparse.BooleanOptionalAction

    group = parser.add_argument_group("ZeRO")
    group.add_argument(
        "--stage", type=int, choices=(0, 1, 2, 3), default=3, help="what is sharded, from nothing to all"
    )
    group.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of compute; reductions are fp32")
    group.add_argument("--ranks", type=int, default=2, help="local ranks; under torchrun, its ranks are used")

    group = parser.add_argument_group("model")
    group.add_argument("--layers", type=int, default=4, help="blocks")
    group.add_argument("--dim", type=int, default=176, help="width")
    group.add_argument("--heads", type=int, default=4, help="attention heads")
    group.add_argument("--seq", type=int, default=256, help="length of a sequence, bytes")
    group.add_argument("--checkpoint-activations", action="store_true", help="less memory for one more forward")

    group = parser.add_argument_group("training")
    group.add_argument("--text", metavar="PATH", help="a file or a folder; by default Python's standard library")
    group.add_argument("--steps", type=int, default=120, help="optimizer steps")
    group.add_argument("--batch", type=int, default=16, help="sequences of a step, over all ranks and microbatches")
    group.add_argument("--accumulate", type=int, default=1, help="microbatches of a step")
    group.add_argument("--lr", type=float, default=3e-3, help="highest learning rate")
    group.add_argument("--warmup", type=int, default=10, help="steps to the highest learning rate")
    group.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    group.add_argument("--seed", type=int, default=0, help="of the weights and the batches")
    group.add_argument("--evaluate-every", type=int, default=20, help="steps from one validation to the next")

    group = parser.add_argument_group("checkpoints and results")
    group.add_argument("--save", type=Path, metavar="DIR", help="checkpoint here at each validation and at the end")
    group.add_argument(
        "--resume",
        action="store_true",
        help="continue from the last checkpoint in --save DIR, as ranks that torchrun restarts do",
    )
    group.add_argument("--compare", action=flag, default=True, help="train plain DDP on the same batches")
    group.add_argument("--compare-steps", type=int, default=60, help="steps of that, at most --steps")
    group.add_argument("--sample", type=int, default=200, help="bytes of text to draw at the end")
    group.add_argument("--out", type=Path, metavar="DIR", default=Path("runs/train_gpt"), help="for the two PNGs")
    return parser


def _check(options: Options) -> None:
    options.config  # noqa: B018  raises if the shape is impossible
    for name in ("ranks", "steps", "batch", "accumulate", "warmup", "evaluate_every", "compare_steps", "lr", "clip"):
        value = getattr(options, name)
        if not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {value}")
    if options.sample < 0:
        raise ValueError(f"--sample must not be negative, got {options.sample}")
    shares = options.ranks * options.accumulate
    if options.batch % shares:
        raise ValueError(
            f"--batch {options.batch} sequences cannot be shared equally by {options.ranks} ranks x "
            f"{options.accumulate} microbatches: give a multiple of {shares}"
        )
    if options.resume and options.save is None:
        raise ValueError("--resume needs the folder to resume from: add --save DIR")


def _check_checkpoints(options: Options, folder: Path) -> None:
    """Refuses to continue nothing, to continue another run, and to overwrite a run."""
    now = {name: getattr(options, name) for name in _SAME_RUN}
    saved = checkpoints(folder)
    record = folder / "run.json"
    if not options.resume:
        if saved:
            raise ValueError(f"{folder} holds a run of {max(saved)} steps: add --resume, or choose another --save DIR")
        folder.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(now, indent=2) + "\n")
        return
    if not saved:
        raise ValueError(f"nothing to resume: {folder} holds no complete checkpoint")
    if max(saved) >= options.steps:
        raise ValueError(
            f"nothing to do: {folder} is at step {max(saved)}: give --steps above that, not {options.steps}"
        )
    then = json.loads(record.read_text())
    changed = [f"--{name} was {then[name]}, is {value}" for name, value in now.items() if then[name] != value]
    if changed:
        raise ValueError(f"{folder} is another run: {'; '.join(changed)}")
