"""Pipeline x data x tensor parallelism on one mesh, with ZeRO along the data axis.

    torchrun --nproc-per-node 8 train_3d.py --pp 2 --tp 2 --schedule Interleaved1F1B
    torchrun --nproc-per-node 8 train_3d.py --precision bf16 --recompute 1 --save runs/a

Each is a function of the module and one axis of the mesh, and none knows of the others:

    parallelize_module(part, mesh["tp"], ...)       torch: columns and rows of the matrices
    zf.shard_params(part, mesh["dp"])               zero_fn: parameters, gradients, optimizer states
    PipelineStage(part, ..., mesh.get_group("pp"))  torch: which layers, and when
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import zero_fn as zf

STAGES = [zf.replicate, zf.shard_optimizer, zf.shard_grads, zf.shard_params]
PLAN: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
PLAN |= {name: RowwiseParallel() for name in ("out", "down")}


@dataclass
class Options:
    stage: int = 3  # of ZeRO
    schedule: str = "1F1B"  # or GPipe; two parts a rank: Interleaved1F1B, LoopedBFS, ZBVZeroBubble
    pp: int = 2  # ranks of the pipeline
    tp: int = 2  # ranks that share each matrix; the data axis has the rest
    layers: int = 4
    dim: int = 32
    heads: int = 4
    rows: int = 8  # sequences of 16 tokens, of each data-parallel rank
    microbatches: int = 4
    steps: int = 10
    precision: str = "fp32"  # or bf16: compute in bfloat16, parameters at rest in float32
    recompute: int = 0  # 1: of a layer its input is kept alone; its forward runs again
    save: str = ""  # a folder for checkpoints; a run goes on from there, at any pp, dp, tp, stage
    save_every: int = 5


class Layer(nn.Module):
    """Causal attention and a feed-forward layer. It counts heads from the width, which tensor parallelism cuts."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.width, self.norm1, self.norm2 = dim // heads, nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (linear(y).unflatten(-1, (-1, self.width)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    for field in fields(Options):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    options = Options(**vars(parser.parse_args()))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = (options.pp, int(os.environ["WORLD_SIZE"]) // (options.pp * options.tp), options.tp)
    mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp", "tp"))  # starts the process group, too
    pipe, rank = mesh.get_group("pp"), mesh["pp"].get_local_rank()
    torch.manual_seed(0)  # every rank draws the whole model, and keeps its parts
    model: list[nn.Module] = [Layer(options.dim, options.heads) for _ in range(options.layers)]
    model[0] = nn.Sequential(nn.Embedding(64, options.dim), model[0])
    model[-1] = nn.Sequential(model[-1], nn.Linear(options.dim, 64))
    kind = schedules.get_schedule_class(options.schedule)
    several = issubclass(kind, schedules.PipelineScheduleMulti)
    last = 2 * options.pp - 1 if several else options.pp - 1  # the number of the last part
    numbers = [rank, last - rank if options.schedule.startswith("ZBV") else rank + options.pp] if several else [rank]
    parts, each = {}, options.layers // (last + 1)
    for number in numbers:
        part: nn.Module = nn.Sequential(*model[number * each : (number + 1) * each]).to(device)
        for layer in part.modules():
            if isinstance(layer, Layer):
                parallelize_module(layer, mesh["tp"], PLAN)
        part = zf.precision(part) if options.precision == "bf16" else part
        part = zf.checkpoint_activations(part, units=Layer) if options.recompute else part
        parts[number] = STAGES[options.stage](part, mesh["dp"], units=Layer)
    stages = [PipelineStage(part, number, last + 1, device, group=pipe) for number, part in parts.items()]
    schedule = kind(stages if several else stages[0], options.microbatches, loss_fn=loss_of)
    parameters = [parameter for part in parts.values() for parameter in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    layers = [(each * n + i, layer) for n in parts for i, layer in enumerate(parts[n].children())]
    saved = nn.ModuleDict({str(number): layer for number, layer in layers})  # as in the whole model
    said = zf.resume(options.save, saved, optimizer) if options.save else None
    for step in range(said["step"] if said else 0, options.steps):
        # ranks of pp and tp see the same batch
        draws = torch.Generator().manual_seed(1000 * step + mesh["dp"].get_local_rank())
        text = (torch.randint(64, (options.rows, 1), generator=draws) + 3 * torch.arange(17)).to(device) % 64
        losses: list[Tensor] = []
        given = [text[:, :-1].contiguous()] if 0 in parts else []
        wanted = {"target": text[:, 1:].contiguous(), "losses": losses} if last in parts else {}
        with zf.accumulate(*parts.values(), unshard=True):  # one gather and one reduction for each unit and step
            schedule.step(*given, **wanted)
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])  # over dp and tp; then over pp
        square = (norm.full_tensor() if isinstance(norm, DTensor) else norm).square()
        dist.all_reduce(square, group=pipe)
        clip_grads_with_norm_(parameters, 1.0, square.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        if losses and mesh["dp"].get_local_rank() == mesh["tp"].get_local_rank() == 0:
            print(f"step {step}: loss {torch.stack(losses).mean().item():.5f}", flush=True)
        if options.save and (step + 1) % options.save_every == 0:
            zf.save(f"{options.save}/step-{step + 1}", saved, optimizer, extra={"step": step + 1})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
