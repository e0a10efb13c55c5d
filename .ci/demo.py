"""The demo: trains the GPT of examples/pretrain.py with ZeRO stage 0, 1, 2 or 3, then with plain DDP, and compares.

    .ci/demo --stage 3                             two local ranks, no launcher
    torchrun --nproc-per-node 8 .ci/demo.py        the ranks it is given; CUDA and NCCL where there are GPUs

A table shows losses, bytes held, bytes sent and speed of both, and beside each count what `zf.plan` says; `loss.png` and
`bytes.png` in `--out` draw them. The exit status is not 0 if the losses differ by more than rounding explains.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import statistics
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from tqdm import tqdm

import zero_fn as zf

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from pretrain import GPT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STAGES = [zf.replicate, zf.shard_optimizer, zf.shard_grads, zf.shard_params]
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    stage: int
    precision: str
    ranks: int
    device: str
    layers: int
    dim: int
    heads: int
    seq: int
    text: Path | None
    steps: int
    batch: int
    lr: float
    seed: int
    evaluate_every: int
    compare: bool
    compare_steps: int
    sample: int
    out: Path

    def rate(self, step: int) -> float:
        """The learning rate of a step: a warmup of 10, then 1/sqrt(step), so that it does not depend on `steps`."""
        return self.lr * min((step + 1) / 10, (30 / (step + 1)) ** 0.5, 1.0)


def parse() -> Options:
    """Reads the command line, and refuses what cannot be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--stage", type=int, default=3, choices=range(4), help="of ZeRO: what is sharded, from nothing (0) to all (3)")
    add("--precision", default="fp32", choices=["fp32", "bf16"], help="dtype of compute; gradients are summed in fp32")
    add("--ranks", type=int, default=2, help="local ranks (default: 2); torchrun says it by itself")
    add("--device", choices=["cpu", "cuda"], help="by default cuda if every local rank has a GPU")
    add("--layers", type=int, default=4, help="blocks (default: 4)")
    add("--dim", type=int, default=176, help="width (default: 176)")
    add("--heads", type=int, default=4, help="attention heads (default: 4)")
    add("--seq", type=int, default=256, help="bytes of a sequence (default: 256)")
    add("--text", type=Path, help="the text to learn, a file or a folder; by default Python's standard library")
    add("--steps", type=int, default=120, help="optimizer steps (default: 120)")
    add("--batch", type=int, default=16, help="sequences of a step, over all ranks (default: 16)")
    add("--lr", type=float, default=3e-3, help="highest learning rate (default: 3e-3)")
    add("--seed", type=int, default=0, help="of the weights and the batches (default: 0)")
    add("--evaluate-every", type=int, default=20, help="steps from one validation to the next (default: 20)")
    add("--compare", action=argparse.BooleanOptionalAction, default=True, help="also train plain DDP")
    add("--compare-steps", type=int, default=60, help="steps with plain DDP, at most --steps (default: 60)")
    add("--sample", type=int, default=200, help="bytes of text to draw at the end (default: 200)")
    add("--out", type=Path, default=Path("runs/demo"), help="folder for the two PNGs (default: runs/demo)")
    given = parser.parse_args()
    given.ranks = int(os.environ.get("WORLD_SIZE", given.ranks))
    gpus, local_ranks = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", given.ranks))
    if given.device == "cuda" and gpus < local_ranks:
        parser.error(f"--device cuda needs a GPU for each of {local_ranks} local ranks, and torch sees {gpus}")
    given.device = given.device or ("cuda" if gpus >= local_ranks else "cpu")
    for name in ("ranks", "layers", "dim", "heads", "seq", "steps", "batch", "lr", "evaluate_every", "compare_steps"):
        if not getattr(given, name) > 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0, got {getattr(given, name)}")
    if given.batch % given.ranks:
        parser.error(f"--batch {given.batch} sequences cannot be shared equally by {given.ranks} ranks")
    if given.dim % given.heads:
        parser.error(f"--dim {given.dim} is no multiple of --heads {given.heads}")
    return Options(**vars(given))


def build(options: Options, stage: int, mesh: DeviceMesh, device: str) -> nn.Module:
    """The model, built from the seed and then transformed as the stage says."""
    model = plain(options, device)
    model = zf.precision(model) if options.precision == "bf16" else model
    return STAGES[stage](model, mesh)


def plain(options: Options, device: str) -> nn.Module:
    """The model of the seed, before any transform."""
    torch.manual_seed(options.seed)
    with torch.device(device):
        return GPT(options.layers, options.dim, options.heads, options.seq)


def train(options: Options, corpus: Corpus) -> str | None:
    """What every rank runs. Rank 0 returns a complaint if the losses differ from those of DDP."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
    mesh = init_device_mesh(options.device, (options.ranks,), mesh_dim_names=("dp",))
    job = Job(options, corpus, mesh)
    plans = [zf.plan(build(options, stage, mesh, "meta")) for stage in range(4)]
    model = build(options, options.stage, mesh, options.device)
    run = Run(f"stage {options.stage}", plans[options.stage])
    fit(run, model, adamw(model, options), job, options.steps)
    with zf.unsharded(model):  # whole plain tensors inside: text is drawn without a message
        sample = draw(model, options)
    del model

    runs = [run]
    if options.compare:
        replica: nn.Module = plain(options, options.device)
        replica = DistributedDataParallel(Autocast(replica, options), gradient_as_bucket_view=True)
        formula = zf.plan(build(replace(options, precision="fp32"), 0, mesh, "meta"))
        runs.append(Run("plain DDP", formula))
        fit(runs[-1], replica, adamw(replica, options), job, min(options.steps, options.compare_steps))
    return write_report(options, corpus, runs, plans, sample) if job.is_first else None


def fit(run: Run, model: nn.Module, optimizer: Optimizer, job: Job, steps: int) -> None:
    """The training loop, the same for every stage and for DDP."""
    options = job.options
    shown = f"{run.name:<9} {{n_fmt}}/{{total_fmt}} |{{bar:20}}| {{elapsed}}<{{remaining}}{{postfix}}"
    bar = tqdm(range(steps), disable=not job.is_first, mininterval=0.5, bar_format=shown)
    for step in bar:
        start = perf_counter()
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = options.rate(step)
        with zf.traffic() as sent:
            loss = next_byte_loss(model, job.share(job.corpus.train, step))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        run.train.append(job.mean(loss))
        run.seconds.append(perf_counter() - start)
        run.sent_nbytes = sent.nbytes
        if (step + 1) % options.evaluate_every == 0 or step + 1 == steps:
            with torch.no_grad():
                run.validation[step + 1] = job.mean(next_byte_loss(model, job.share(job.corpus.validation, 0)))
        bar.set_postfix_str(run.progress(options), refresh=step + 1 == steps)
    run.held = zf.memory(model, optimizer)


def adamw(model: nn.Module, options: Options) -> Optimizer:
    """A stock optimizer. Its states are sharded as the parameters are that it is given."""
    return AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)


def next_byte_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean cross-entropy of each next byte, in nats; "row (seq + 1)" to a number."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


class Autocast(nn.Module):
    """Runs a module in bf16 if the options say so, its parameters and gradients in fp32."""

    def __init__(self, module: nn.Module, options: Options) -> None:
        super().__init__()
        self.module, self.options = module, options

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast(self.options.device, torch.bfloat16, enabled=self.options.precision == "bf16"):
            return self.module(tokens)


@torch.no_grad()
def draw(model: nn.Module, options: Options) -> bytes:
    """Text that begins with "def ", the same on every rank."""
    draws = torch.Generator().manual_seed(0)
    tokens = torch.tensor([list(b"def ")], device=options.device)
    for _ in range(options.sample):
        odds = (model(tokens[:, -options.seq :])[0, -1].float().cpu() / 0.6).softmax(-1)
        tokens = torch.cat((tokens, torch.multinomial(odds, 1, generator=draws).to(options.device)[None]), dim=1)
    return bytes(tokens[0].tolist())


@dataclass(slots=True)
class Run:
    """What one training showed: losses by step, seconds of each step, bytes sent in the last one and held at the end."""

    name: str
    formula: zf.inspect.Plan
    train: list[float] = field(default_factory=list)
    validation: dict[int, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    sent_nbytes: int = 0
    held: zf.inspect.MemoryUse = field(default_factory=lambda: zf.inspect.MemoryUse(0, 0, 0))

    def tokens_per_second(self, options: Options) -> float:
        """Over all ranks, by the median step, so that a disturbed step does not count."""
        return options.batch * options.seq / statistics.median(self.seconds)

    def progress(self, options: Options) -> str:
        """The end of the progress bar."""
        validation = [f" (validation {loss:.3f})" for loss in self.validation.values()][-1:]
        if options.device == "cuda":
            memory = f"{torch.cuda.max_memory_allocated() / 1e9:.2f} GB at most on the GPU"
        else:
            memory = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6:,.0f} MB resident at most"
        speed = f"{self.tokens_per_second(options):,.0f} tokens/s"
        return f"loss {self.train[-1]:.3f}{''.join(validation)}, {speed}, {memory}"


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

    def share(self, text: Tensor, step: int) -> Tensor:
        """This rank's rows of the batch of a step, "row (seq + 1)", which is the same for every number of ranks."""
        seq, draws = self.options.seq, torch.Generator().manual_seed(self.options.seed * 1_000_003 + step)
        starts = torch.randint(len(text) - seq, (self.options.batch, 1), generator=draws)
        starts = starts.chunk(self.options.ranks)[self.mesh.get_local_rank()]
        return text[starts + torch.arange(seq + 1)].to(self.options.device, torch.long)

    def mean(self, loss: Tensor) -> float:
        """The mean over ranks."""
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.mesh.get_group())
        return total.item() / self.options.ranks


@dataclass(frozen=True, slots=True)
class Corpus:
    """Where a text comes from, and its two splits: bytes to train on, and bytes of other files to validate on."""

    source: str
    train: Tensor
    validation: Tensor

    @staticmethod
    def load(options: Options) -> Corpus:
        """Reads the standard library, or a file or folder of the user's: whole files validate; of a single one its end.

        Raises:
            ValueError: There is no such path, or there are fewer than `seq + 1` bytes in a split.
        """
        root = options.text or Path(sysconfig.get_path("stdlib"))
        if not root.exists():
            raise ValueError(f"no such file or folder: {root}")
        paths = [root] if root.is_file() else sorted(root.rglob("*" if options.text else "*.py"))
        files = {path.relative_to(root): path.read_bytes() for path in paths if path.is_file()}
        skipped = {name for name in files if any(part in SKIPPED or part.startswith(".") for part in name.parts)}
        files = {name: text for name, text in files.items() if name not in skipped and text and b"\0" not in text}
        total, train, validation = sum(map(len, files.values())), bytearray(), bytearray()
        for name in sorted(files, key=lambda name: hashlib.sha256(name.as_posix().encode()).digest()):
            if len(files) == 1:
                cut = round(0.9 * total)
                train, validation = bytearray(files[name][:cut]), bytearray(files[name][cut:])
            else:
                part = validation if len(validation) < 0.1 * total else train
                part += files[name] + b"\0"
        if min(len(train), len(validation)) <= options.seq:
            raise ValueError(
                f"the text is too short: {root} holds {len(train):,} bytes to train on and {len(validation):,} to "
                f"validate on, and each must be longer than a sequence of {options.seq:,} bytes"
            )
        source = str(root) if options.text else "Python's standard library"
        return Corpus(source, *(torch.frombuffer(part, dtype=torch.uint8) for part in (train, validation)))


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
    options: Options, corpus: Corpus, runs: Sequence[Run], plans: Sequence[zf.inspect.Plan], sample: bytes
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
    gap = max(abs(ours - theirs) for ours, theirs in zip(zero.train, ddp.train, strict=False))
    said = f"the losses of {zero.name} and plain DDP over {len(ddp.train)} steps differ by at most {gap:.1e}"
    if not gap <= TOLERANCE[options.precision]:
        return f"{said}: more than rounding explains ({TOLERANCE[options.precision]:.0e})"
    print(f"{said}: they agree")
    return None


def table(options: Options, runs: Sequence[Run]) -> str:
    """What was measured beside what the formula says, for each run."""
    rows = [["", *(cell for run in runs for cell in (f"{run.name}, {len(run.train)} steps", "by formula"))]]

    def add(label: str, cells: Sequence[tuple[str, str]]) -> None:
        rows.append([label, *(cell for pair in cells for cell in pair)])

    def loss(of: dict[int, float], step: int) -> tuple[str, str]:
        return (f"{of[step]:.6f}" if step in of else "-", "")

    ends = sorted({len(run.train) for run in runs})
    for step in dict.fromkeys((1, *ends)):
        add(f"training loss at step {step}", [loss(dict(enumerate(run.train, 1)), step) for run in runs])
    for step in ends:
        add(f"validation loss at step {step}", [loss(run.validation, step) for run in runs])
    for state, label in {**STATES, "total": "total"}.items():
        held = [(megabytes(getattr(run.held, state)), megabytes(getattr(run.formula.memory, state))) for run in runs]
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
    steps = range(1, len(zero.train) + 1)
    axes.plot(steps, zero.train, color=COLORS["train"], linewidth=2, label=f"training, {zero.name}")
    for other in others:
        theirs = other.train
        label = f"training, {other.name} (first {len(theirs)} steps)"
        axes.plot(steps[: len(theirs)], theirs, color=INK, linewidth=1, linestyle=(0, (2, 3)), label=label)
    validated = zero.validation
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


def draw_bytes(path: Path, options: Options, runs: Sequence[Run], plans: Sequence[zf.inspect.Plan]) -> None:
    """What each stage holds by formula, in pale bars, beside what was measured."""
    from matplotlib import pyplot as plt  # only the rank that writes needs it

    bars = [(f"stage {stage}\nformula", plan.memory, False) for stage, plan in enumerate(plans)]
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
    options = parse()
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        corpus = Corpus.load(options)
    except (ValueError, OSError) as error:
        print(f"demo: error: {error}", file=sys.stderr)
        sys.exit(2)
    if "RANK" in os.environ:
        sys.exit(train(options, corpus))
    sys.exit(zf.launch(train, options.ranks, options, corpus, timeout_s=None)[0])


if __name__ == "__main__":
    main()
