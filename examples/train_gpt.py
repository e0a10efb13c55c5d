"""Trains a small GPT with ZeRO stage 0, 1, 2 or 3: one switch for the memory, the same losses.

    python examples/train_gpt.py --stage 3               two local ranks, no launcher
    torchrun --nproc-per-node 8 examples/train_gpt.py    the ranks it is given; CUDA and NCCL where there are GPUs
    torchrun --max-restarts 3 ... --save runs/a          a rank that dies costs the steps since the last checkpoint

What there is to learn is the last line of `build`; the rest is PyTorch as ever: a stock optimizer over
`model.parameters()`, stock `clip_grad_norm_`, a loop, and `zf.save` and `zf.load`. At the end plain DDP trains on the same
batches, and a table sets losses, bytes held, bytes sent and speed side by side, each count beside its formula.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from time import perf_counter

import torch
from baseline import ddp_backward, ddp_model
from corpus import Corpus
from gpt import GPT, generate, next_byte_loss
from options import Options, parse
from ranks import Job, data_parallel_axis
from report import Losses, Run, progress_bar, write_report
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW, Optimizer

import zero_fn as zf

STAGES = {0: zf.replicate, 1: zf.zero1, 2: zf.zero2, 3: zf.zero3}


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
    with data_parallel_axis() as mesh:
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


def main() -> None:
    """Runs on the ranks that torchrun gave, or on local ones."""
    options, corpus = parse()
    if "RANK" in os.environ:
        sys.exit(train(options, corpus))
    sys.exit(zf.launch(train, options.ranks, options, corpus, timeout_s=None)[0])


if __name__ == "__main__":
    main()
