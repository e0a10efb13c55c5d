"""Trains a small GPT with ZeRO stage 0, 1, 2 or 3: one switch for the memory, the same losses.

    python examples/train_gpt.py --stage 3               two local ranks, no launcher
    torchrun --nproc-per-node 8 examples/train_gpt.py    the ranks it is given; CUDA and NCCL where there are GPUs
    torchrun --max-restarts 3 ... --save runs/a          a rank that dies costs the steps since the last checkpoint

What there is to learn is the last line of `build`; the rest is PyTorch as ever: a stock optimizer over
`model.parameters()`, stock `clip_grad_norm_`, a loop, and `zf.save` and `zf.load`. At the end plain DDP trains on the same
batches, and a table sets losses, bytes held, bytes sent and speed side by side, each count beside its formula.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Literal

import torch
import torch.distributed as dist
from gpt import GPT, Config, Corpus, generate, next_byte_loss, rows
from program import device_option, mesh_of, on_ranks, option, parse
from report import Losses, Run, progress_bar, write_report
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import zero_fn as zf

STAGES = {0: zf.replicate, 1: zf.zero1, 2: zf.zero2, 3: zf.zero3}
Precision = Literal["fp32", "bf16"]
SAME_RUN = ("layers", "dim", "heads", "seq", "text", "batch", "lr", "clip", "seed")
"""What a resumed run must share with the one it continues. Stage, ranks, microbatches and precision may change."""


def build(options: Options, stage: int, mesh: DeviceMesh, device: str) -> nn.Module:
    """The model of a seed, at rest as the stage says."""
    torch.manual_seed(options.seed)
    with torch.device(device):
        model: nn.Module = GPT(options.config)
    if options.precision == "bf16":
        model = zf.precision(model, compute=torch.bfloat16)
    return STAGES[stage](model, mesh)


def train(options: Options, corpus: Corpus) -> str | None:
    """What every rank runs; rank 0 returns a complaint if the losses differ from those of DDP."""
    with mesh_of(options.device or "cpu", dp=options.ranks) as mesh:
        job, device = Job(options, corpus, mesh), mesh.device_type
        plans = [zf.plan(build(options, stage, mesh, "meta"), backwards=options.accumulate) for stage in STAGES]
        model = build(options, options.stage, mesh, device)
        optimizer = adamw(model, options)
        run = Run(f"stage {options.stage}", plans[options.stage], Losses())
        if options.resume:
            load(options, model, optimizer, run.losses)
        fit(run, model, optimizer, backward, job, options.steps, save)
        with zf.unsharded(model):  # whole plain tensors inside: text is drawn without a message
            prompt = torch.tensor(list(b"def "), device=device)
            sample = generate(model, prompt, options.sample, window=options.seq)
        del model, optimizer

        runs = [run]
        if options.compare:
            replica = ddp_model(options, device)
            runs.append(Run("plain DDP", zf.plan(build(replace(options, precision="fp32"), 0, mesh, "meta")), Losses()))
            steps = min(options.steps, options.compare_steps)
            fit(runs[-1], replica, adamw(replica, options), ddp_backward, job, steps)
        return write_report(options, corpus, runs, plans, bytes(sample.tolist())) if job.is_first else None


def fit(
    run: Run,
    model: nn.Module,
    optimizer: Optimizer,
    backward: Callable[[nn.Module, Tensor], Tensor],
    job: Job,
    steps: int,
    save: Callable[[Options, nn.Module, Optimizer, Losses], None] | None = None,
) -> None:
    """The training loop, which knows nothing of how the model rests. It goes on from where the losses of `run` end."""
    options, losses = job.options, run.losses
    bar = progress_bar(run, steps, quiet=not job.is_first)
    for step in bar:
        start = perf_counter()
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = options.rate(step)
        with zf.traffic() as sent:
            loss = backward(model, job.share(job.corpus.train, step, options.accumulate))
            nn.utils.clip_grad_norm_(model.parameters(), options.clip)
            optimizer.step()
        losses.train.append(job.mean(loss))
        run.seconds.append(perf_counter() - start)
        run.sent_nbytes = sent.nbytes

        if (step + 1) % options.evaluate_every == 0 or step + 1 == steps:
            with torch.no_grad():
                loss = next_byte_loss(model, job.share(job.corpus.validation, 0, 1)[0])
            losses.validation[step + 1] = job.mean(loss)
            if save is not None:
                save(options, model, optimizer, losses)
        bar.set_postfix_str(run.progress(options, job.mesh.device_type), refresh=step + 1 == steps)
    run.held = zf.held(model, optimizer)


def backward(model: nn.Module, microbatches: Tensor) -> Tensor:
    """One backward for each microbatch, one reduction for all; "microbatch row time" -> the mean loss."""
    total = torch.zeros((), device=microbatches.device)
    with zf.accumulate(model) if len(microbatches) > 1 else nullcontext():
        for tokens in microbatches:
            loss = next_byte_loss(model, tokens) / len(microbatches)
            loss.backward()
            total += loss.detach()
    return total


def adamw(model: nn.Module, options: Options) -> Optimizer:
    """A stock optimizer: its states rest where the parameters that it is given rest."""
    return AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)


def save(options: Options, model: nn.Module, optimizer: Optimizer, losses: Losses) -> None:
    """All that a run goes on from, in a folder of its own: batches and the learning rate follow from the step."""
    if options.save is not None:
        zf.save(options.save / f"step-{losses.step:06d}", model, optimizer, extra={"losses": losses})


def load(options: Options, model: nn.Module, optimizer: Optimizer, losses: Losses) -> None:
    """Continues from the last complete checkpoint, which any stage and number of ranks have written."""
    assert options.save is not None
    zf.load(options.save, model, optimizer, extra={"losses": losses})


class Autocast(nn.Module):
    """Runs a module in bf16, its parameters and gradients in fp32."""

    def __init__(self, module: nn.Module, device: str) -> None:
        super().__init__()
        self.module = module
        self.device = device

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            logits: Tensor = self.module(tokens)
        return logits


def ddp_model(options: Options, device: str) -> nn.Module:
    """The model of the same seed, replicated by DDP with its most frugal buckets."""
    torch.manual_seed(options.seed)
    with torch.device(device):
        module: nn.Module = GPT(options.config)
    if options.precision == "bf16":
        module = Autocast(module, device)
    return DistributedDataParallel(module, gradient_as_bucket_view=True)


def ddp_backward(model: nn.Module, microbatches: Tensor) -> Tensor:
    """One backward for each microbatch, one all-reduce for all; "microbatch row time" -> the mean loss."""
    assert isinstance(model, DistributedDataParallel)
    total = torch.zeros((), device=microbatches.device)
    for index, tokens in enumerate(microbatches):
        with nullcontext() if index == len(microbatches) - 1 else model.no_sync():
            loss = next_byte_loss(model, tokens) / len(microbatches)
            loss.backward()
        total += loss.detach()
    return total


@dataclass(frozen=True, slots=True)
class Options:
    """The command line: what is sharded, the model, the training, checkpoints and results."""

    stage: int = option(3, "of ZeRO: what is sharded, from nothing to all", choices=[0, 1, 2, 3])
    precision: Precision = option("fp32", "of compute; reductions are fp32", choices=["fp32", "bf16"])
    ranks: int = option(2, "local ranks; under torchrun, its ranks are used")
    device: str | None = device_option()
    layers: int = option(4, "blocks")
    dim: int = option(176, "width")
    heads: int = option(4, "attention heads")
    seq: int = option(256, "length of a sequence, bytes")
    checkpoint_activations: bool = option(False, "less memory for one more forward")
    text: str | None = option(None, "a file or a folder; by default Python's standard library")
    steps: int = option(120, "optimizer steps")
    batch: int = option(16, "sequences of a step, over all ranks and microbatches")
    accumulate: int = option(1, "microbatches of a step")
    lr: float = option(3e-3, "highest learning rate")
    warmup: int = option(10, "steps to the highest learning rate")
    clip: float = option(1.0, "largest norm of the gradient")
    seed: int = option(0, "of the weights and the batches")
    evaluate_every: int = option(20, "steps from one validation to the next")
    save: Path | None = option(None, "checkpoint into this folder at each validation and at the end", kind=Path)
    resume: bool = option(False, "continue from the last checkpoint in --save, as ranks that torchrun restarts do")
    compare: bool = option(True, "train plain DDP on the same batches")
    compare_steps: int = option(60, "steps of that, at most --steps")
    sample: int = option(200, "bytes of text to draw at the end")
    out: Path = option(Path("runs/train_gpt"), "folder for the two PNGs", kind=Path)

    def __post_init__(self) -> None:
        _ = self.config  # raises if the shape is impossible
        for name in (
            "ranks",
            "steps",
            "batch",
            "accumulate",
            "warmup",
            "evaluate_every",
            "compare_steps",
            "lr",
            "clip",
        ):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {value}")
        if self.sample < 0:
            raise ValueError(f"--sample must not be negative, got {self.sample}")
        if self.batch % (self.ranks * self.accumulate):
            raise ValueError(
                f"--batch {self.batch} sequences cannot be shared equally by {self.ranks} ranks x "
                f"{self.accumulate} microbatches: give a multiple of {self.ranks * self.accumulate}"
            )
        if self.resume and self.save is None:
            raise ValueError("--resume needs the folder to resume from: add --save DIR")

    @property
    def config(self) -> Config:
        """The shape of the model."""
        return Config(self.layers, self.dim, self.heads, self.seq, checkpoint_activations=self.checkpoint_activations)

    def rate(self, step: int) -> float:
        """The learning rate of a step: a linear warmup, then 1/sqrt(step), so that it does not depend on `steps`."""
        return self.lr * min((step + 1) / self.warmup, math.sqrt(3 * self.warmup / (step + 1)), 1.0)


@dataclass(frozen=True, slots=True)
class Job:
    """What every rank and both trainings have in common."""

    options: Options
    corpus: Corpus
    mesh: DeviceMesh

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that shows and writes results."""
        return self.mesh.get_local_rank() == 0

    def share(self, text: Tensor, step: int, microbatches: int) -> Tensor:
        """This rank's rows of a step: "(rank microbatch row) time -> microbatch row time", row `rank`."""
        batch = rows(text, self.options.batch, self.options.seq, step=step, seed=self.options.seed)
        shares = batch.view(self.mesh.size(), microbatches, -1, self.options.seq + 1)
        return shares[self.mesh.get_local_rank()].to(self.mesh.device_type)

    def mean(self, loss: Tensor) -> float:
        """The mean over ranks."""
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.mesh.get_group())
        return total.item() / self.mesh.size()


def prepare(options: Options) -> tuple[Options, Corpus]:
    """The text that is asked for, and whether to resume.

    Raises:
        ValueError: The text is too short, or `--save` holds nothing to resume, another run, or one to be overwritten.
        OSError: A folder cannot be made.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    corpus = Corpus.load(options.text, options.seq)
    folder = options.save
    if folder is None:
        return options, corpus
    found = zf.checkpoints(folder) if folder.is_dir() else []
    saved = max((each.step for each in found if each.is_complete and each.step is not None), default=None)
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):  # torchrun has lost a rank
        options = replace(options, resume=saved is not None)
        if saved is not None and saved >= options.steps:
            said = f"{folder} has all {options.steps} steps: a rank was lost after the last save, before the report"
            print(said, file=sys.stderr)
            sys.exit(0)
    now = {name: getattr(options, name) for name in SAME_RUN}
    record = folder / "run.json"
    if not options.resume:
        if saved is not None:
            raise ValueError(f"{folder} holds a run of {saved} steps: add --resume, or choose another --save DIR")
        folder.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(now, indent=2) + "\n")
        return options, corpus
    if saved is None:
        raise ValueError(f"nothing to resume: {folder} holds no complete checkpoint")
    if saved >= options.steps:
        raise ValueError(f"nothing to do: {folder} is at step {saved}: give --steps above that, not {options.steps}")
    then = json.loads(record.read_text())
    changed = [f"--{name} was {then[name]}, is {value}" for name, value in now.items() if then[name] != value]
    if changed:
        raise ValueError(f"{folder} is another run: {'; '.join(changed)}")
    return options, corpus


def main() -> None:
    """Runs on the ranks that torchrun gave, or on local ones."""
    try:
        options, corpus = prepare(parse(Options, __doc__))
    except (ValueError, OSError) as error:
        print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(on_ranks(options.ranks, train, options, corpus))


if __name__ == "__main__":
    main()
