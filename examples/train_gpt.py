"""Trains a small GPT with ZeRO stage 0, 1, 2 or 3: one switch for the memory, the same losses.

    python examples/train_gpt.py --stage 3               two local ranks, no launcher
    torchrun --nproc-per-node 8 examples/train_gpt.py    the ranks it is given; CUDA and NCCL where there are GPUs
    torchrun --max-restarts 3 ... --save runs/a          a rank that dies costs the steps since the last checkpoint

The lesson is the last line of `build`. The rest is plain PyTorch: a stock optimizer over `model.parameters()`, stock
`clip_grad_norm_`, a loop; and `zf.save` and `zf.load`. At the end plain DDP trains on the same batches. A table shows losses,
bytes held, bytes sent and speed of both, and beside each count what the formula says. `gpt.py` has the model and the text,
`program.py` what all examples share: the command line, the device and the ranks.
"""

from __future__ import annotations

import json
import math
import os
import resource
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from gpt import GPT, Config, Corpus, generate, next_byte_loss, rows
from program import device_option, mesh_of, on_ranks, option, parse
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from tqdm import tqdm  # type: ignore[import-untyped]

import zero_fn as zf

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STAGES = {0: zf.replicate, 1: zf.zero1, 2: zf.zero2, 3: zf.zero3}
Precision = Literal["fp32", "bf16"]
SAME_RUN = ("layers", "dim", "heads", "seq", "text", "batch", "lr", "clip", "seed")
"""What a resumed run must share with the one it continues. Stage, ranks, microbatches and precision may change."""


def build(options: Options, stage: int, mesh: DeviceMesh, device: str) -> nn.Module:
    """The model, built from the seed and then transformed as the stage says."""
    torch.manual_seed(options.seed)
    with torch.device(device):
        model: nn.Module = GPT(options.config)
    if options.precision == "bf16":
        model = zf.precision(model, compute=torch.bfloat16)
    return STAGES[stage](model, mesh)


def train(options: Options, corpus: Corpus) -> str | None:
    """What every rank runs. Rank 0 returns a complaint if the losses differ from those of DDP."""
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
    """The training loop, the same for every stage and for DDP. It begins at the step where the losses of `run` end."""
    options, losses = job.options, run.losses
    bar = tqdm(
        range(losses.step, steps),
        initial=losses.step,
        total=steps,
        disable=not job.is_first,
        mininterval=0.5,
        bar_format=f"{run.name:<9} {{n_fmt}}/{{total_fmt}} |{{bar:20}}| {{elapsed}}<{{remaining}}{{postfix}}",
    )
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
    """One backward for each microbatch, one reduction of gradients for all; "microbatch row time" -> the mean loss."""
    total = torch.zeros((), device=microbatches.device)
    with zf.accumulate(model) if len(microbatches) > 1 else nullcontext():
        for tokens in microbatches:
            loss = next_byte_loss(model, tokens) / len(microbatches)
            loss.backward()
            total += loss.detach()
    return total


def adamw(model: nn.Module, options: Options) -> Optimizer:
    """A stock optimizer. Its states are sharded as the parameters are that it is given."""
    return AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)


def save(options: Options, model: nn.Module, optimizer: Optimizer, losses: Losses) -> None:
    """Writes a checkpoint into a folder of its own. Batches and the learning rate follow from the step."""
    if options.save is not None:
        zf.save(options.save / f"step-{losses.step:06d}", model, optimizer, extra={"losses": losses})


def load(options: Options, model: nn.Module, optimizer: Optimizer, losses: Losses) -> None:
    """Reads the last complete checkpoint, whatever the stage and the number of ranks that wrote it."""
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

    stage: int = option(3, "ZeRO stage: what is sharded, from nothing (0) to everything (3)", choices=[0, 1, 2, 3])
    precision: Precision = option("fp32", "dtype of compute; gradients are summed in fp32", choices=["fp32", "bf16"])
    ranks: int = option(2, "local ranks; torchrun says it by itself")
    device: str | None = device_option()
    layers: int = option(4, "blocks")
    dim: int = option(176, "width")
    heads: int = option(4, "attention heads")
    seq: int = option(256, "length of a sequence, bytes")
    checkpoint_activations: bool = option(False, "recompute blocks in the backward: less memory, one more forward")
    text: str | None = option(None, "the text to learn, a file or a folder; by default Python's standard library")
    steps: int = option(120, "optimizer steps")
    batch: int = option(16, "sequences of a step, over all ranks and microbatches")
    accumulate: int = option(1, "microbatches of a step")
    lr: float = option(3e-3, "highest learning rate")
    warmup: int = option(10, "steps to the highest learning rate")
    clip: float = option(1.0, "largest norm of the gradient")
    seed: int = option(0, "seed of the weights and the batches")
    evaluate_every: int = option(20, "steps from one validation to the next")
    save: Path | None = option(None, "checkpoint into this folder at each validation and at the end", kind=Path)
    resume: bool = option(False, "continue from the last checkpoint in --save, as ranks that torchrun restarts do")
    compare: bool = option(True, "also train plain DDP on the same batches")
    compare_steps: int = option(60, "steps of the training with plain DDP, at most --steps")
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


@dataclass(slots=True)
class Losses:
    """The loss of every step since step 0, including the steps before a resume."""

    train: list[float] = field(default_factory=list)
    validation: dict[int, float] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Steps taken."""
        return len(self.train)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps; `load_state_dict` takes it."""
        return {"train": list(self.train), "validation": list(self.validation.items())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues the record of another run."""
        self.train, self.validation = list(state["train"]), dict(state["validation"])


@dataclass(slots=True)
class Run:
    """What one training showed.

    Attributes:
        name: The name of the training in the table.
        formula: The bytes that a rank should hold and send.
        losses: The losses of all steps.
        seconds: The duration of each step of this process.
        sent_nbytes: The bytes that zero_fn sent from this rank in the last step.
        held: The bytes that this rank holds at the end.
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
        if device == "cuda":
            memory = f"{torch.cuda.max_memory_allocated() / 1e9:.2f} GB at most on the GPU"
        else:
            memory = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6:,.0f} MB resident at most"
        speed = f"{self.tokens_per_second(options):,.0f} tokens/s"
        return f"loss {self.losses.train[-1]:.3f}{''.join(validation)}, {speed}, {memory}"


@dataclass(frozen=True, slots=True)
class Job:
    """What all ranks and both trainings share."""

    options: Options
    corpus: Corpus
    mesh: DeviceMesh

    @property
    def is_first(self) -> bool:
        """Whether this rank shows and writes the results."""
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
    """Reads the text, and decides whether to resume.

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


# From here on: the report. None of it is the lesson.

STATES = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer state"}

# How far two trainings on the same batches may drift apart, in nats. In fp32 they differ by rounding alone; in bf16 also
# because autocast and `zf.precision` round to bf16 at different places.
TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}

INK, FAINT = "#22252b", "#7d838c"
COLORS = {
    "train": "#4269d0",
    "validation": "#e4572e",
    "parameters": "#4269d0",
    "gradients": "#efb118",
    "optimizer": "#3ca951",
}
STYLE: dict[Any, Any] = {
    "savefig.dpi": 160,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e4e7eb",
    "legend.frameon": False,
}


def write_report(
    options: Options, corpus: Corpus, runs: Sequence[Run], plans: Sequence[zf.Plan], sample: bytes
) -> str | None:
    """Prints the sample and the table, and writes `loss.png` and `bytes.png`.

    Args:
        options: The command line.
        corpus: The text that the run trained on.
        runs: The training with zero_fn, then the one with plain DDP if there was one.
        plans: The formulas for stages 0 to 3.
        sample: Text that the model wrote.

    Returns:
        What is wrong if the losses of the two trainings differ by more than rounding explains.
    """
    import matplotlib

    matplotlib.use("Agg")  # needs no screen; to be chosen before pyplot is imported
    if options.sample:
        text = sample.decode("utf-8", "replace").split("\0")[0]
        text = "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)
        print(f"\n{' the model writes ':-^79}\n{text}\n{'':-^79}")
    print(f"\n{table(options, runs)}")
    loss_png, bytes_png = options.out / "loss.png", options.out / "bytes.png"
    with matplotlib.rc_context(STYLE):
        draw_losses(loss_png, options, corpus, runs)
        draw_bytes(bytes_png, options, runs, plans)
    print(f"\nwrote {loss_png} and {bytes_png}")
    if len(runs) == 1:
        return None
    zero, ddp = runs
    gap = max(abs(ours - theirs) for ours, theirs in zip(zero.losses.train, ddp.losses.train, strict=False))
    said = f"the losses of {zero.name} and plain DDP over {ddp.losses.step} steps differ by at most {gap:.1e}"
    if not gap <= TOLERANCE[options.precision]:
        return f"{said}: more than rounding explains ({TOLERANCE[options.precision]:.0e})"
    print(f"{said}: they agree")
    return None


def table(options: Options, runs: Sequence[Run]) -> str:
    """What was measured beside what the formula says, for each run."""
    rows = [["", *(cell for run in runs for cell in (f"{run.name}, {run.losses.step} steps", "by formula"))]]

    def add(label: str, cells: Sequence[tuple[str, str]]) -> None:
        rows.append([label, *(cell for pair in cells for cell in pair)])

    def loss(of: dict[int, float], step: int) -> tuple[str, str]:
        return (f"{of[step]:.6f}" if step in of else "-", "")

    ends = sorted({run.losses.step for run in runs})
    for step in dict.fromkeys((1, *ends)):
        add(f"training loss at step {step}", [loss(dict(enumerate(run.losses.train, 1)), step) for run in runs])
    for step in ends:
        add(f"validation loss at step {step}", [loss(run.losses.validation, step) for run in runs])
    for state, label in {**STATES, "total": "total"}.items():
        held = [(megabytes(getattr(run.held, state)), megabytes(getattr(run.formula.held, state))) for run in runs]
        add(f"held per rank: {label}", held)
    sent = ["not counted" if run.name == "plain DDP" else megabytes(run.sent_nbytes) for run in runs]  # by torch
    add(
        "sent per rank and step",
        [(each, megabytes(run.formula.sent_nbytes)) for each, run in zip(sent, runs, strict=True)],
    )
    add("tokens/s of all ranks", [(f"{run.tokens_per_second(options):,.0f}", "") for run in runs])

    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join((row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:]))).rstrip() for row in rows]
    return "\n".join((lines[0], "-" * len(lines[0]), *lines[1:]))


def megabytes(nbytes: float, digits: int = 3) -> str:
    """Bytes in MB, 1 MB = 1e6 bytes."""
    return f"{nbytes / 1e6:,.{digits}f} MB"


def draw_losses(path: Path, options: Options, corpus: Corpus, runs: Sequence[Run]) -> None:
    """Training and validation loss over steps, with the loss of plain DDP laid over it."""
    from matplotlib import pyplot as plt  # only the rank that writes needs it

    zero, *others = runs
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    steps = range(1, zero.losses.step + 1)
    axes.plot(steps, zero.losses.train, color=COLORS["train"], linewidth=2, label=f"training, {zero.name}")
    for other in others:
        theirs = other.losses.train
        label = f"training, {other.name} (first {len(theirs)} steps)"
        axes.plot(steps[: len(theirs)], theirs, color=INK, linewidth=1, linestyle=(0, (2, 3)), label=label)
    validated = zero.losses.validation
    axes.plot(
        list(validated), list(validated.values()), "o-", color=COLORS["validation"], label="validation, other files"
    )
    axes.set(xlabel="step", ylabel="loss, nats per byte", xlim=(0, None))
    add_title(
        axes,
        f"The loss of a GPT over bytes, {zero.name}, {options.ranks} ranks",
        f"{corpus.source}: {megabytes(len(corpus.train), 1)} to train on, {megabytes(len(corpus.validation), 1)} "
        f"to validate; {options.batch} x {options.seq} bytes a step",
    )
    axes.legend(frameon=True, facecolor="white", edgecolor="none", framealpha=1)
    figure.savefig(path)
    plt.close(figure)


def draw_bytes(path: Path, options: Options, runs: Sequence[Run], plans: Sequence[zf.Plan]) -> None:
    """What each stage holds by formula, in pale bars, beside what was measured."""
    from matplotlib import pyplot as plt  # only the rank that writes needs it

    bars = [(f"stage {stage}\nformula", plan.held, False) for stage, plan in enumerate(plans)]
    for place, run in zip((options.stage + 1, 0), runs, strict=False):
        bars.insert(place, (f"{run.name}\nmeasured", run.held, True))
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for place, (_, held, is_measured) in enumerate(bars):
        base = 0.0
        for state in STATES:
            height = getattr(held, state) / 1e6
            axes.bar(place, height, bottom=base, width=0.68, color=COLORS[state], alpha=1 if is_measured else 0.35)
            base += height
        axes.annotate(megabytes(held.total, 1), (place, base), (0, 4), textcoords="offset points", ha="center")
    axes.set_xticks(range(len(bars)), [label for label, _, _ in bars])
    axes.tick_params(axis="x", length=0)
    axes.set(ylabel="MB per rank, at rest after a step", ylim=(0, 1.12 * max(held.total for _, held, _ in bars) / 1e6))
    add_title(
        axes,
        f"What a rank holds, {options.ranks} ranks",
        "full colour: measured in this run; pale: by the formula of the stage",
    )
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLORS[state]) for state in STATES]
    axes.legend(handles, STATES.values(), loc="lower right", bbox_to_anchor=(1.01, 1.06), ncols=3)
    figure.savefig(path)
    plt.close(figure)


def add_title(axes: Axes, title: str, subtitle: str) -> None:
    """A title in bold, and below it a faint line."""
    axes.set_title(f"{subtitle}\n", loc="left", fontsize=9, color=FAINT, linespacing=0.6)
    axes.annotate(
        title, (0, 1), (0, 24), xycoords="axes fraction", textcoords="offset points", fontsize=12, weight="bold"
    )


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
