"""Trains a model of yours as a DeepSpeed config says, without DeepSpeed.

    torchrun --nproc-per-node 2 from_deepspeed_json.py                         with the config below
    torchrun --nproc-per-node 2 from_deepspeed_json.py --config ds_config.json --save runs/a
    python -m zero_fn launch --no_local_rank --num_gpus 2 from_deepspeed_json.py    as by the launcher deepspeed

The config becomes transforms and stock objects of torch, and a report says what became of each entry. Entries that are
unknown, or ask for what is not done here, are refused, all at once. For models of Hugging Face: finetune_hf.py.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zero_fn as zf

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
}


@dataclass
class Options:
    config: str = ""  # a JSON file; by default CONFIG
    save: str = ""  # a folder for a checkpoint at the end, from which a run also goes on
    layers: int = 4
    dim: int = 64
    steps: int = 20


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def main() -> None:
    parser = argparse.ArgumentParser()
    for field in fields(Options):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    options = Options(**vars(parser.parse_args()))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("dp",))  # starts the process group, too

    torch.manual_seed(0)  # every rank builds the same model
    model = nn.Sequential(*(Block(options.dim) for _ in range(options.layers)))
    setup = zf.from_deepspeed(model, options.config or CONFIG, mesh["dp"])
    if rank == 0:
        print(setup)  # a row for each entry: its value, and what it became
    extra = {"setup": setup}  # its scheduler, loss scale, and counts of steps
    if os.path.isdir(options.save):
        zf.load(options.save, setup.model, setup.optimizer, extra=extra)

    for step in range(setup.steps, options.steps):
        draws = torch.Generator().manual_seed(step * ranks + rank)  # every rank has other rows
        with zf.accumulate(setup.model):  # one reduction for all microbatches
            for _ in range(setup.accumulation_steps):
                x = torch.randn(setup.micro_batch_size, options.dim, generator=draws).to(setup.device)
                loss = (setup.model(x).float() - x.flip(1)).square().mean()
                setup.scaled(loss).backward()  # loss / accumulation_steps, times the loss scale of fp16
        setup.step()  # clips, steps optimizer and scheduler, drops gradients
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    if options.save and setup.steps == options.steps:
        zf.save(f"{options.save}/step-{setup.steps}", setup.model, setup.optimizer, extra=extra)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
