"""Pipeline x data x tensor parallelism on one mesh, with ZeRO along the data axis.

    python examples/train_3d.py                               2 x 2 x 2 local ranks, stage 3, 1F1B
    python examples/train_3d.py --stage 2 --schedule ZBVZeroBubble
    torchrun --nproc-per-node 16 examples/train_3d.py --pp 4 --layers 8

Each of the three is a function of the module and one axis of the mesh, and none knows of the others:

    parallelize_module(part, mesh["tp"], ...)       torch: columns and rows of the matrices
    zf.zero3(part, mesh["dp"])                      zero_fn: parameters, gradients, optimizer states
    PipelineStage(part, ..., mesh.get_group("pp"))  torch: which layers, and when

At the end one process trains the whole model on the whole batches, and the losses are set side by side.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from program import device_option, mesh_of, on_ranks, option, parse
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import zero_fn as zf

STAGES = {0: zf.replicate, 1: zf.zero1, 2: zf.zero2, 3: zf.zero3}
ONE_PART, TWO_PARTS = ("GPipe", "1F1B"), ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble")
V_SHAPED = ("ZBVZeroBubble",)
MAX_NORM = 1.0
TOLERANCE = 1e-4  # of a loss near 4: tensor parallelism adds partial sums in another order than one process


@dataclass(frozen=True)
class Options:
    """The command line."""

    stage: int = option(3, "ZeRO stage", choices=sorted(STAGES))
    schedule: str = option("1F1B", "schedule of the pipeline", choices=[*ONE_PART, *TWO_PARTS])
    steps: int = option(10, "optimizer steps")
    pp: int = option(2, "ranks of the pipeline")
    dp: int = option(2, "data-parallel ranks: each has data of its own")
    tp: int = option(2, "tensor-parallel ranks: they share each matrix")
    layers: int = option(4, "layers of the whole model")
    dim: int = option(32, "width")
    heads: int = option(4, "attention heads")
    vocab: int = option(64, "symbols")
    seq: int = option(16, "length of a sequence")
    rows: int = option(8, "sequences of each data-parallel rank")
    microbatches: int = option(4, "microbatches of a step")
    device: str | None = device_option()

    def __post_init__(self) -> None:
        if self.layers % self.number_of_parts:
            raise ValueError(
                f"--layers {self.layers} are not a multiple of the {self.number_of_parts} parts of {self.schedule}"
            )
        if self.heads % self.tp or self.dim % self.heads:
            raise ValueError(f"--heads {self.heads} must be a multiple of --tp {self.tp} and divide --dim {self.dim}")

    @property
    def ranks(self) -> int:
        """Ranks of all three axes."""
        return self.pp * self.dp * self.tp

    @property
    def number_of_parts(self) -> int:
        """Parts of the pipeline: one or two on each of its ranks."""
        return self.pp if self.schedule in ONE_PART else 2 * self.pp


class Layer(nn.Module):
    """Causal attention and a feed-forward layer. It counts heads from the width, which tensor parallelism cuts."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.out = nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (linear(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return x


def layers(options: Options) -> list[nn.Module]:
    """The whole model, drawn from one seed, as a list that is cut into parts."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(Layer(options.dim, options.heads)) for _ in range(options.layers)]
    blocks[0].insert(0, nn.Embedding(options.vocab, options.dim))
    blocks[-1].extend([nn.LayerNorm(options.dim), nn.Linear(options.dim, options.vocab)])
    return list(blocks)


def parts_of_rank(options: Options, place: int) -> dict[int, range]:
    """The parts of the pipeline on a rank, each with the numbers of its layers."""
    numbers = [place]
    if options.schedule in TWO_PARTS:
        numbers.append(2 * options.pp - 1 - place if options.schedule in V_SHAPED else place + options.pp)
    each = options.layers // options.number_of_parts
    return {number: range(number * each, (number + 1) * each) for number in numbers}


def build(options: Options, mesh: DeviceMesh) -> dict[int, nn.Module]:
    """The parts of this rank: tensor parallel first, then ZeRO."""
    everything = layers(options)
    parts = {}
    for index, numbers in parts_of_rank(options, mesh["pp"].get_local_rank()).items():
        part: nn.Module = nn.Sequential(*(everything[number] for number in numbers)).to(options.device)
        for layer in part.modules():
            if isinstance(layer, Layer):
                columns: dict[str, Any] = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
                rows: dict[str, Any] = {name: RowwiseParallel() for name in ("out", "down")}
                parallelize_module(layer, mesh["tp"], columns | rows)
        parts[index] = STAGES[options.stage](part, mesh["dp"], units="*.*")
    return parts


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(options: Options, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one data-parallel rank: each token is the sum of the two before it."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = [torch.randint(0, options.vocab, (options.rows,), generator=generator) for _ in range(2)]
    while len(tokens) <= options.seq:
        tokens.append((tokens[-1] + tokens[-2]) % options.vocab)
    text = torch.stack(tokens, dim=1).to(options.device)
    return text[:, :-1].contiguous(), text[:, 1:]  # stages take dense inputs only (2.11)


def clip(parts: dict[int, nn.Module], mesh: DeviceMesh) -> None:
    """Clips by the norm over all ranks. torch computes it over dp and tp; over pp squares are added up."""
    parameters = [parameter for part in parts.values() for parameter in part.parameters()]
    norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    square = (norm.full_tensor() if isinstance(norm, DTensor) else norm).square()
    dist.all_reduce(square, group=mesh.get_group("pp"))
    clip_grads_with_norm_(parameters, MAX_NORM, square.sqrt())


def train(options: Options) -> list[float]:
    """What every rank runs. Returns the loss of each step, a mean over the data axis."""
    device = torch.device(options.device or "cpu")
    with mesh_of(device.type, pp=options.pp, dp=options.dp, tp=options.tp) as mesh:
        parts = build(options, mesh)
        optimizer = torch.optim.AdamW([p for part in parts.values() for p in part.parameters()], lr=3e-3)
        stages: Any = [
            PipelineStage(part, index, options.number_of_parts, device, group=mesh.get_group("pp"))
            for index, part in parts.items()
        ]
        schedule: Any = schedules.get_schedule_class(options.schedule)(
            stages[0] if len(stages) == 1 else stages, options.microbatches, loss_fn=loss_of
        )
        has_first, has_last = 0 in parts, options.number_of_parts - 1 in parts
        means = []
        for step in range(options.steps):
            tokens, targets = batch(options, step, mesh["dp"].get_local_rank())
            losses: list[Tensor] = []
            with zf.accumulate(*parts.values(), unshard=True):  # one gather and one reduction for each unit and step
                schedule.step(
                    *([tokens] if has_first else []), **({"target": targets, "losses": losses} if has_last else {})
                )
            clip(parts, mesh)
            optimizer.step()
            optimizer.zero_grad()
            none = torch.zeros((), device=device)
            total = torch.stack([loss.detach() for loss in losses]).mean() if has_last else none
            dist.all_reduce(total)
            means.append(total.item() / (options.dp * options.tp))
    return means


def train_alone(options: Options) -> list[float]:
    """The same training in one process on the whole batches."""
    model = nn.Sequential(*layers(options)).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    means = []
    for step in range(options.steps):
        both = [batch(options, step, rank) for rank in range(options.dp)]
        loss = loss_of(model(torch.cat([tokens for tokens, _ in both])), torch.cat([targets for _, targets in both]))
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        means.append(loss.item())
    return means


def main() -> int:
    """Trains both ways and prints the losses; 1 if they differ."""
    options = parse(Options, __doc__)
    losses = on_ranks(options.ranks, train, options)
    if losses is None:
        return 0
    alone = train_alone(options)
    print(f"pp {options.pp} x dp {options.dp} x tp {options.tp}, ZeRO-{options.stage}, {options.schedule}")
    print(f"{'step':>5} {'this':>9} {'one process':>12}")
    for step, (one, other) in enumerate(zip(losses, alone, strict=True)):
        print(f"{step:5} {one:9.5f} {other:12.5f}")
    difference = max(abs(one - other) for one, other in zip(losses, alone, strict=True))
    print(f"largest difference {difference:.1e}, allowed {TOLERANCE:.0e}")
    return int(difference > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
