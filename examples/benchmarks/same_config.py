"""One DeepSpeed config, followed by DeepSpeed and by `zf.from_deepspeed`: losses, learning rates and times side by side.

    pip install deepspeed==0.19.8 ninja            # in an environment of its own, with this project
    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 examples/benchmarks/same_config.py
    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 examples/benchmarks/same_config.py ds_config.json configs/*.json

Prints a row for each config: the last loss of both, the largest difference of losses in any step, that of learning rates, and
the time of a step here in parts of DeepSpeed's, the median of steps that alternate. Without files, configs of each stage,
offload, scheduler, optimizer and precision that DeepSpeed runs on CPUs. Of files, batch sizes are replaced, "auto" is filled
in, and what DeepSpeed itself refuses is named. In float32 losses differ by roundings; in bfloat16 by more, because gradients
are summed in float32 here.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zero_fn as zf

Json = dict[str, Any]

STEPS, MICROBATCHES, ROWS, WIDTH = 20, 2, 16, 512
BASE: Json = {"train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": MICROBATCHES}
HOST: Json = {"device": "cpu"}
BF16: Json = {"bf16": {"enabled": True}}
RISES: Json = {"warmup_num_steps": 8, "warmup_type": "linear"}
SCHEDULERS: dict[str, Json] = {
    "WarmupLR": {**RISES, "warmup_max_lr": 3e-3},
    "WarmupDecayLR": {"total_num_steps": STEPS, "warmup_num_steps": 4, "warmup_max_lr": 3e-3},
    "WarmupCosineLR": {**RISES, "total_num_steps": STEPS, "warmup_num_steps": 4},
    "OneCycle": {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 6, "decay_step_size": 2,
                 "decay_lr_rate": 0.5},
    "LRRangeTest": {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 5, "lr_range_test_step_rate": 5},
}  # fmt: skip
OPTIMIZERS: dict[str, Json] = {
    "Adam": {"betas": [0.9, 0.95]},
    "AdamW": {"weight_decay": 0.1, "torch_adam": True},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adagrad": {"lr": 0.01},
    "RMSprop": {"lr": 1e-3},
    "NAdam": {"lr": 1e-3},
    "Muon": {"lr": 1e-2},
}
AUTO: Json = {
    "bf16.enabled": True, "bfloat16.enabled": True, "fp16.enabled": False, "gradient_clipping": 1.0,
    "optimizer.params.lr": 3e-3, "optimizer.params.betas": [0.9, 0.999], "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.1, "scheduler.params.warmup_min_lr": 0, "scheduler.params.warmup_max_lr": 3e-3,
    "scheduler.params.warmup_num_steps": 4, "scheduler.params.total_num_steps": STEPS,
}  # fmt: skip


def adam(**more: Any) -> Json:
    return {"optimizer": {"type": "Adam", "params": {"lr": 3e-3}}, **more}


def own_configs(disk: str) -> dict[str, Json]:
    """One thing of each config is not the default."""
    nvme = {"device": "nvme", "nvme_path": disk}
    found = {f"stage {stage}": adam(zero_optimization={"stage": stage}) for stage in range(4)}
    found |= {f"stage {stage}, bf16": adam(zero_optimization={"stage": stage}, **BF16) for stage in range(4)}
    for stage in (1, 2, 3):
        found[f"stage {stage}, states on the host"] = adam(
            zero_optimization={"stage": stage, "offload_optimizer": HOST}
        )
    away = {"offload_optimizer": HOST, "offload_param": HOST}
    found["stage 3, all on the host"] = adam(zero_optimization={"stage": 3, **away})
    found["stage 3, all on the host, bf16"] = adam(zero_optimization={"stage": 3, **away}, **BF16)
    found["stage 3, states on a disk"] = adam(zero_optimization={"stage": 3, "offload_optimizer": nvme})
    for kind, params in SCHEDULERS.items():
        found[f"stage 1, {kind}"] = adam(zero_optimization={"stage": 1}, scheduler={"type": kind, "params": params})
    for kind, params in OPTIMIZERS.items():
        optimizer = {"type": kind, "params": {"lr": 3e-3, **params}}
        allowed = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        whole = {"gradient_clipping": 0.0} if kind == "Muon" else {}  # DeepSpeed clips what Muon makes of gradients
        found[f"stage 2, {kind}"] = {"optimizer": optimizer, "zero_optimization": {"stage": 2}, **allowed, **whole}
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    found |= {f"stage {stage}, fp16": adam(zero_optimization={"stage": stage}, **fp16) for stage in (1, 2, 3)}
    found["stage 2, clipped at 0.1"] = adam(zero_optimization={"stage": 2}, gradient_clipping=0.1)
    found["stage 1, not clipped"] = adam(zero_optimization={"stage": 1}, gradient_clipping=0.0)
    found["stage 1, gradients added up"] = adam(zero_optimization={"stage": 1}, gradient_allreduce_op="sum")
    found["stage 0, predivided"] = adam(prescale_gradients=True, gradient_predivide_factor=2.0)
    found["stage 3, autocast"] = adam(
        zero_optimization={"stage": 3}, torch_autocast={"enabled": True, "dtype": "bfloat16"}
    )
    found["stage 1, bf16, sums in float32"] = adam(
        zero_optimization={"stage": 1}, data_types={"grad_accum_dtype": "fp32"}, **BF16
    )
    return found


def read(path: str, disk: str) -> Json:
    """A config of a file, for the sizes of this program."""

    def filled(section: Json, start: str) -> Json:
        found = {}
        for name, value in section.items():
            if isinstance(value, dict):
                found[name] = filled(value, f"{start}{name}.")
            elif value != "auto" or f"{start}{name}" in AUTO:
                found[name] = AUTO[f"{start}{name}"] if value == "auto" else value
        return found

    config = filled(json.loads(Path(path).read_text()), "")
    for section in config.get("zero_optimization", {}).values():
        if isinstance(section, dict) and "nvme_path" in section:
            section["nvme_path"] = disk
    sizes = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "steps_per_print"
    return adam() | {name: value for name, value in config.items() if name not in sizes}


def built() -> nn.Module:
    torch.manual_seed(0)
    blocks = [part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh())]
    return nn.Sequential(nn.Linear(32, WIDTH), *blocks, nn.Linear(WIDTH, 8))


def loss_of(model: Any, step: int, number: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * number + dist.get_rank())
    x = torch.randn(ROWS, 32, generator=generator)
    return nn.functional.mse_loss(model(x.to(dtype)).float(), torch.sin(3 * x[:, :8]))


Step = Callable[[int], tuple[float, float]]  # given its number: the rate before it, and the loss


def by_deepspeed(config: Json, dtype: torch.dtype) -> Step:
    import deepspeed  # type: ignore[import-not-found,unused-ignore]

    model = built()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=copy.deepcopy(config))

    def step(at: int) -> tuple[float, float]:
        rate = float(engine.get_lr()[0])
        for number in range(MICROBATCHES):
            loss = loss_of(engine, at, number, dtype)
            engine.backward(loss)
            engine.step()
        return rate, float(loss)

    return step


def by_zero_fn(config: Json, dtype: torch.dtype) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    setup = zf.from_deepspeed(built(), config, mesh["dp"])

    def step(at: int) -> tuple[float, float]:
        rate = setup.rates[0]
        with zf.accumulate(setup.model):
            for number in range(setup.accumulation_steps):
                loss = loss_of(setup.model, at, number, dtype)
                torch.autograd.backward(setup.scaled(loss))
        setup.step()
        return rate, float(loss)

    return step


def compared(config: Json) -> str:
    """Both, step by step in turn."""
    dtypes = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16}
    dtype = next((each for name, each in dtypes.items() if config.get(name, {}).get("enabled")), torch.float32)
    theirs, ours = by_deepspeed(config, dtype), by_zero_fn(config, dtype)
    of_losses, of_rates, ratios, last = 0.0, 0.0, [], (0.0, 0.0)
    for at in range(STEPS):
        began = time.perf_counter()
        their_rate, their_loss = theirs(at)
        between = time.perf_counter()
        our_rate, our_loss = ours(at)
        ratios.append((time.perf_counter() - between) / (between - began))
        of_losses, of_rates = max(of_losses, abs(their_loss - our_loss)), max(of_rates, abs(their_rate - our_rate))
        last = their_loss, our_loss
    furthest = torch.tensor([of_losses, of_rates])
    dist.all_reduce(furthest, dist.ReduceOp.MAX)
    apart = f"apart by {furthest[0]:.1e}; rates by {furthest[1]:.1e}"
    return f"DeepSpeed {last[0]:.6f}, here {last[1]:.6f}, {apart}; time {statistics.median(ratios[5:]):.2f}"


def main() -> None:
    os.environ.setdefault("LOCAL_SIZE", os.environ["LOCAL_WORLD_SIZE"])  # else DeepSpeed asks numactl for it, often
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed prints to standard output
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as disk:
        configs = {Path(path).name: read(path, disk) for path in sys.argv[1:]} or own_configs(disk)
        for name, entries in configs.items():
            try:
                row = compared({**BASE, **entries})
            except Exception as error:  # of DeepSpeed: what it refuses, or does not do on a CPU; on each rank
                row = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
            if dist.get_rank() == 0:
                print(f"{name:<40} {row}", file=out, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
