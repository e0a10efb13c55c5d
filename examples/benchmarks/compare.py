"""Trains the same GPT on the same batches under every mode, one step of each in turn, and prints step times as ratios.

    python examples/benchmarks/compare.py --layers 8 --dim 512 --seq 64 --batch 1 --ranks 2

Machines are shared and noisy: a ratio of two steps that ran one after the other says more than two times. All modes live in
the same processes; the order rotates from round to round. Per mode: the median ratio of its step to that of DDP and of
FSDP2 in the same round with a 95 % bootstrap interval, CPU time per step, bytes held and sent, and the losses, which must
agree. Results go to standard output and, with --out, to a JSON file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import zero_fn as zf


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(self.norm_attention(x)).view(b, s, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, d)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))


class GPT(nn.Module):
    """A small byte-level GPT."""

    def __init__(self, layers: int, dim: int, seq: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, dim), nn.Embedding(seq, dim)
        self.blocks = nn.ModuleList(Block(dim, max(1, dim // 64)) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 256, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


@dataclass
class Mode:
    """A model in training and what its steps cost."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    sent_nbytes: int = 0

    def step(self, tokens: Tensor, *, autocast: bool) -> None:
        dist.barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        with zf.traffic() as sent:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                logits = self.model(tokens[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        dist.barrier()
        self.wall_s.append(time.perf_counter() - wall)
        self.cpu_s.append(time.process_time() - cpu)
        self.losses.append(loss.item())
        self.sent_nbytes = sent.nbytes


def fsdp2(model: GPT, mesh: DeviceMesh, bf16: bool) -> nn.Module:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)  # in place
    return model


def transformed(transform: Callable[..., nn.Module]) -> Callable[[GPT, DeviceMesh, bool], nn.Module]:
    def build(model: GPT, mesh: DeviceMesh, bf16: bool) -> nn.Module:
        sharded = transform(model, mesh)
        return zf.precision(sharded) if bf16 else sharded

    return build


MODES: dict[str, Callable[[GPT, DeviceMesh, bool], nn.Module]] = {
    "ddp": lambda model, mesh, bf16: DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True),
    "fsdp2": fsdp2,
    "replicate": transformed(zf.replicate),
    "zero1": transformed(zf.zero1),
    "zero2": transformed(zf.zero2),
    "zero3": transformed(zf.zero3),
}


def run(args: argparse.Namespace) -> dict[str, object]:
    """All modes on one rank; the values of rank 0 are reported."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes() * 8), dtype=torch.uint8).long()
    modes: dict[str, Mode] = {}
    for name in args.modes:
        torch.manual_seed(0)
        model = MODES[name](GPT(args.layers, args.dim, args.seq), mesh, args.bf16)
        modes[name] = Mode(model, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True))
    names = list(modes)
    for step in range(args.rounds + args.warmup):
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(text) - args.seq - 1, (world * args.batch,), generator=generator)
        starts = starts[rank * args.batch : (rank + 1) * args.batch]
        tokens = torch.stack([text[start : start + args.seq + 1] for start in starts.tolist()])
        for name in names[step % len(names) :] + names[: step % len(names)]:
            modes[name].step(tokens, autocast=args.bf16 and name == "ddp")
    return {name: summary(mode, args.warmup) for name, mode in modes.items()}


def summary(mode: Mode, warmup: int) -> dict[str, object]:
    held = zf.held(mode.model, mode.optimizer)
    return {
        "wall_s": mode.wall_s[warmup:],
        "cpu_s": mode.cpu_s[warmup:],
        "loss": mode.losses[-1],
        "held_nbytes": {"parameters": held.parameters, "optimizer": held.optimizer},
        "sent_nbytes": mode.sent_nbytes,
    }


def interval(ratios: list[float]) -> str:
    """Median and 95 % bootstrap interval."""
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor(ratios)
    medians = (
        values[torch.randint(len(ratios), (2000, len(ratios)), generator=generator)].median(1).values.sort().values
    )
    return f"{statistics.median(ratios):.2f} [{medians[50]:.2f}, {medians[1949]:.2f}]"


def table(results: dict[str, dict[str, list[float]]]) -> str:
    lines = [
        f"{'mode':10} {'step ms':>8} {'CPU ms':>8}  {'/ ddp':18} {'/ fsdp2':18} {'held MB':>8} {'sent MB':>8} {'loss':>8}"
    ]
    for name, result in results.items():
        against = {
            base: interval([a / b for a, b in zip(result["wall_s"], results[base]["wall_s"], strict=True)])
            for base in ("ddp", "fsdp2")
            if base in results
        }
        held = sum(result["held_nbytes"].values())  # type: ignore[attr-defined]
        lines.append(
            f"{name:10} {statistics.median(result['wall_s']) * 1e3:8.1f} {statistics.median(result['cpu_s']) * 1e3:8.1f}"
            f"  {against.get('ddp', ''):18} {against.get('fsdp2', ''):18} {held / 1e6:8.1f}"
            f" {result['sent_nbytes'] / 1e6:8.2f} {result['loss']:8.4f}"  # type: ignore[operator]
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    results = zf.launch(run, args.ranks, args, timeout_s=None)[0]
    print(table(results))  # type: ignore[arg-type]
    if args.out:
        args.out.write_text(json.dumps({"arguments": vars(args) | {"out": str(args.out)}, "results": results}))


if __name__ == "__main__":
    main()
