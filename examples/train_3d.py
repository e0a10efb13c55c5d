"""Pipeline x data x tensor parallelism on one mesh, with ZeRO along the data axis.

    python examples/train_3d.py                               2 x 2 x 2 local ranks, stage 3, 1F1B
    python examples/train_3d.py --stage 2 --schedule ZBVZeroBubble
    torchrun --nproc-per-node 8 examples/train_3d.py          the ranks it is given

Each of the three is a function of the module and one axis of the mesh, and none knows of the others:

    parallelize_module(part, mesh["tp"], ...)       torch: columns and rows of the matrices
    zf.zero3(part, mesh["dp"])                      zero_fn: parameters, gradients, optimizer states
    PipelineStage(part, ..., mesh.get_group("pp"))  torch: which layers, and when

At the end one process trains the whole model on the whole batches, and the losses are set side by side.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mesh_of_ranks import mesh_of, on_ranks
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
PP, DP, TP = 2, 2, 2
VOCAB, DIM, HEADS, SEQ, LAYERS = 64, 32, 4, 16, 4
ROWS, MICROBATCHES = 8, 4  # of each data-parallel rank
MAX_NORM = 1.0
TOLERANCE = 1e-4  # of a loss near 4: tensor parallelism adds partial sums in another order than one process


class Layer(nn.Module):
    """Causal attention and a feed-forward layer; the heads are counted from the width, so half of them may live elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.q, self.k, self.v = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.out = nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (linear(y).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return x


def layers() -> list[nn.Module]:
    """The whole model, drawn from one seed, as a list that is cut into parts."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(Layer()) for _ in range(LAYERS)]
    blocks[0].insert(0, nn.Embedding(VOCAB, DIM))
    blocks[-1].extend([nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)])
    return list(blocks)


def parts_of_rank(schedule: str, place: int) -> dict[int, list[int]]:
    """Which layers make up which parts of the pipeline on a rank."""
    if schedule in ONE_PART:
        each = LAYERS // PP
        return {place: list(range(place * each, (place + 1) * each))}
    second = 2 * PP - 1 - place if schedule in V_SHAPED else place + PP
    return {place: [place], second: [second]}


def build(schedule: str, stage: int, mesh: DeviceMesh) -> dict[int, nn.Module]:
    """The parts of this rank: tensor parallel first, then ZeRO."""
    everything = layers()
    parts = {}
    for index, numbers in parts_of_rank(schedule, mesh["pp"].get_local_rank()).items():
        part: nn.Module = nn.Sequential(*(everything[number] for number in numbers))
        for layer in part.modules():
            if isinstance(layer, Layer):
                columns: dict[str, Any] = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
                rows: dict[str, Any] = {name: RowwiseParallel() for name in ("out", "down")}
                parallelize_module(layer, mesh["tp"], columns | rows)
        parts[index] = STAGES[stage](part, mesh["dp"], units="*.*")
    return parts


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one data-parallel rank: each token is the sum of the two before it."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = [torch.randint(0, VOCAB, (ROWS,), generator=generator) for _ in range(2)]
    while len(tokens) <= SEQ:
        tokens.append((tokens[-1] + tokens[-2]) % VOCAB)
    text = torch.stack(tokens, dim=1)
    return text[:, :-1].contiguous(), text[:, 1:]  # stages take dense inputs only (2.11)


def clip(parts: dict[int, nn.Module], mesh: DeviceMesh) -> None:
    """Clips by the norm over all ranks: stock over data and tensor axes, one number over the pipeline."""
    parameters = [parameter for part in parts.values() for parameter in part.parameters()]
    norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    square = (norm.full_tensor() if isinstance(norm, DTensor) else norm).square()
    dist.all_reduce(square, group=mesh.get_group("pp"))
    clip_grads_with_norm_(parameters, MAX_NORM, square.sqrt())


def train(steps: int, stage: int, schedule_name: str) -> list[float]:
    """What every rank runs: the losses of each step, means over the data axis."""
    with mesh_of(pp=PP, dp=DP, tp=TP) as mesh:
        parts = build(schedule_name, stage, mesh)
        optimizer = torch.optim.AdamW([p for part in parts.values() for p in part.parameters()], lr=3e-3)
        number_of_parts = PP if schedule_name in ONE_PART else 2 * PP
        stages: Any = [
            PipelineStage(part, index, number_of_parts, torch.device("cpu"), group=mesh.get_group("pp"))
            for index, part in parts.items()
        ]
        schedule: Any = schedules.get_schedule_class(schedule_name)(
            stages[0] if schedule_name in ONE_PART else stages, MICROBATCHES, loss_fn=loss_of
        )
        has_first, has_last = 0 in parts, number_of_parts - 1 in parts
        means = []
        for step in range(steps):
            tokens, targets = batch(step, mesh["dp"].get_local_rank())
            losses: list[Tensor] = []
            with zf.accumulate(*parts.values(), unshard=True):  # one gather and one reduction for each unit and step
                schedule.step(
                    *([tokens] if has_first else []), **({"target": targets, "losses": losses} if has_last else {})
                )
            clip(parts, mesh)
            optimizer.step()
            optimizer.zero_grad()
            total = torch.stack([loss.detach() for loss in losses]).mean() if has_last else torch.zeros(())
            dist.all_reduce(total)
            means.append(total.item() / (DP * TP))
    return means


def train_alone(steps: int) -> list[float]:
    """The same training in one process on the whole batches."""
    model = nn.Sequential(*layers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    means = []
    for step in range(steps):
        both = [batch(step, rank) for rank in range(DP)]
        loss = loss_of(model(torch.cat([tokens for tokens, _ in both])), torch.cat([targets for _, targets in both]))
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        means.append(loss.item())
    return means


def main() -> int:
    """Trains both ways and prints the losses; 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=sorted(STAGES), default=3)
    parser.add_argument("--schedule", choices=[*ONE_PART, *TWO_PARTS], default="1F1B")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    sizes = {"pp": PP, "dp": DP, "tp": TP}
    losses = on_ranks(sizes, train, options.steps, options.stage, options.schedule)
    if losses is None:
        return 0
    alone = train_alone(options.steps)
    print(f"pp {PP} x dp {DP} x tp {TP}, ZeRO-{options.stage}, {options.schedule}")
    print(f"{'step':>5} {'this':>9} {'one process':>12}")
    for step, (one, other) in enumerate(zip(losses, alone, strict=True)):
        print(f"{step:5} {one:9.5f} {other:12.5f}")
    difference = max(abs(one - other) for one, other in zip(losses, alone, strict=True))
    print(f"largest difference {difference:.1e}, allowed {TOLERANCE:.0e}")
    return int(difference > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
