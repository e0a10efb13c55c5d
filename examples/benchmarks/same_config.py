"""One DeepSpeed config, followed by DeepSpeed and by `zf.from_deepspeed`: losses and learning rates side by side.

    pip install deepspeed ninja            # 0.19, in an environment of its own, with this project
    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 examples/benchmarks/same_config.py

Prints a row for each config: the last loss of both, the largest difference of losses in any step, and that of learning rates.
Nothing is timed. In float32 losses differ by roundings; in bfloat16 by more, because gradients are summed in float32 here.
"""

from __future__ import annotations

import copy
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zero_fn as zf

Json = dict[str, Any]
Curve = tuple[list[float], list[float]]  # of losses, of rates

STEPS, MICROBATCHES, ROWS = 20, 2, 4
BASE: Json = {"train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": MICROBATCHES}
LINEAR: Json = {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 3e-3, "warmup_type": "linear"}}
DECAY: Json = {
    "type": "WarmupDecayLR",
    "params": {"total_num_steps": STEPS, "warmup_num_steps": 4, "warmup_max_lr": 0.1},
}
COSINE: Json = {"type": "WarmupCosineLR", "params": {"total_num_steps": STEPS, "warmup_num_steps": 4}}


def optimizer(kind: str, **params: object) -> Json:
    return {"type": kind, "params": {"lr": 3e-3, **params}}


CONFIGS: dict[str, Json] = {
    "Adam": {"optimizer": optimizer("Adam", betas=[0.9, 0.95])},
    "Adam, stage 1": {"optimizer": optimizer("Adam"), "zero_optimization": {"stage": 1}},
    "AdamW, linear warm-up, clipped at 0.1, stage 2": {
        "optimizer": optimizer("AdamW", weight_decay=0.1),
        "scheduler": LINEAR,
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": 2},
    },
    "AdamW of torch, stage 1": {"optimizer": optimizer("AdamW", torch_adam=True), "zero_optimization": {"stage": 1}},
    "Adam of torch, cosine, not clipped, stage 3": {
        "optimizer": optimizer("Adam", torch_adam=True, weight_decay=0.1, adam_w_mode=False),
        "scheduler": COSINE,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3},
    },
    "SGD, log warm-up and decay, stage 2": {
        "optimizer": optimizer("SGD", lr=0.1, momentum=0.9),
        "scheduler": DECAY,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 2},
    },
    "Adagrad, stage 1": {
        "optimizer": optimizer("Adagrad", lr=0.01),
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
    },
    "Adam, states on the host, stage 2": {
        "optimizer": optimizer("Adam"),
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    },
    "Adam in bfloat16, stage 2": {
        "optimizer": optimizer("Adam"),
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
    },
}


def built() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))


def loss_of(model: Any, step: int, number: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * number + dist.get_rank())
    x = torch.randn(ROWS, 32, generator=generator)
    return nn.functional.mse_loss(model(x.to(dtype)).float(), torch.sin(3 * x[:, :8]))


def mean(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def by_deepspeed(config: Json, dtype: torch.dtype) -> Curve:
    import deepspeed  # type: ignore[import-not-found,unused-ignore]

    model = built()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=copy.deepcopy(config))
    losses, rates = [], []
    for step in range(STEPS):
        rates.append(float(engine.get_lr()[0]))
        for number in range(MICROBATCHES):
            loss = loss_of(engine, step, number, dtype)
            engine.backward(loss)
            engine.step()
        losses.append(mean(loss))
    return losses, rates


def by_zero_fn(config: Json, dtype: torch.dtype) -> Curve:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    setup = zf.from_deepspeed(built(), config, mesh["dp"])
    losses, rates = [], []
    for step in range(STEPS):
        rates.append(float(setup.optimizer.param_groups[0]["lr"]))
        with zf.accumulate(setup.model):
            for number in range(setup.accumulation_steps):
                loss = loss_of(setup.model, step, number, dtype)
                torch.autograd.backward(setup.scaled(loss))
        setup.step()
        losses.append(mean(loss))
    return losses, rates


def main() -> None:
    os.environ.setdefault("LOCAL_SIZE", os.environ["LOCAL_WORLD_SIZE"])  # else DeepSpeed asks numactl for it, often
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed prints to standard output
    sys.stdout.flush()
    for name, entries in CONFIGS.items():
        config = {**BASE, **entries}
        dtype = torch.bfloat16 if "bf16" in config else torch.float32
        (theirs, their_rates), (ours, our_rates) = by_deepspeed(config, dtype), by_zero_fn(config, dtype)
        furthest = max(abs(one - other) for one, other in zip(theirs, ours, strict=True))
        of_rates = max(abs(one - other) for one, other in zip(their_rates, our_rates, strict=True))
        if dist.get_rank() == 0:
            losses = f"DeepSpeed {theirs[-1]:.6f}, here {ours[-1]:.6f}"
            print(f"{name:<48} {losses}, apart by {furthest:.1e}; rates by {of_rates:.1e}", file=out, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
