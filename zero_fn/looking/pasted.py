"""A configuration as lines of Python, and as a config of DeepSpeed."""

from __future__ import annotations

from typing import Any

import torch

from zero_fn.planning.configurations import Configuration, Training
from zero_fn.planning.models import PlannedModel
from zero_fn.values.tiers import Nvme, Tier

__all__ = ["deepspeed_of", "program_of"]

_STAGE_OF = {
    "replicate": 0,
    "shard_optimizer": 1,
    "shard_grads": 2,
    "shard_params": 3,
    "shard_params, shard_grads outer": 3,
}


def program_of(found: Configuration, model: PlannedModel, training: Training) -> str:
    """The first lines of a program of torchrun, up to the optimizer and the first values."""
    sizes, names = (", ".join(str(axis[at]) for axis in found.mesh) for at in (1, 0))
    quoted = ", ".join(f'"{name}"' for name in names.split(", "))
    comma = "," if len(found.mesh) == 1 else ""
    computed = "model" if training.computes_in == torch.float32 else "zf.precision(model)"
    placed = {
        "hybrid": f"zf.hybrid({computed}, mesh)",
        "shard_params, shard_grads outer": (
            f'zf.shard_grads(zf.shard_params({computed}, mesh["inner"]), mesh["outer"])'
        ),
    }.get(found.proposal.transform, f'zf.{found.proposal.transform}({computed}, mesh["dp"])')
    tiers = found.proposal.tiers
    away = {"params": tiers.params, "grads": tiers.grads, "optim": tiers.optim}
    given = ", ".join(f"{name}={_made(tier)}" for name, tier in away.items() if tier is not None)
    nodes = max(training.ranks // training.machine.per_node, 1)
    each = min(training.ranks, training.machine.per_node)
    optimizer = "torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)"
    if training.states_in_8_bits:
        optimizer = f"zf.states8bit({optimizer})"
    elif tiers.optim is not None:
        optimizer = f"zf.streamed({optimizer})"
    lines = [
        f"# torchrun --nnodes {nodes} --nproc-per-node {each} train.py",
        "import torch",
        "from torch.distributed.device_mesh import init_device_mesh",
        model.imports,
        "",
        "import zero_fn as zf",
        "",
        *model.source.splitlines(),
        f'mesh = init_device_mesh("cuda", ({sizes}{comma}), mesh_dim_names=({quoted}{comma}))',
        f"model = {placed}",
        *([f"model = zf.offload(model, {given})"] if given else []),
        *(["model = zf.checkpoint_activations(model)"] if found.recompute else []),
        "model = zf.materialize(model)  "
        "# new values; zf.load_pretrained(model, folder) has those of a folder",
        f"optimizer = {optimizer}",
    ]
    return "\n".join(lines)


def _made(tier: Tier) -> str:
    return "zf.nvme('/local_nvme')" if isinstance(tier, Nvme) else "zf.cpu()"


def deepspeed_of(found: Configuration, training: Training, microbatch: int) -> dict[str, Any] | str:
    """A config that DeepSpeed and `zf.from_deepspeed` take; or why there is none."""
    tiers, stage = found.proposal.tiers, _STAGE_OF.get(found.proposal.transform)
    if stage is None:
        return (
            "DeepSpeed has it as MiCS, which zf.from_deepspeed does not take: "
            "zf.hybrid(model, mesh)"
        )
    if training.states_in_8_bits:
        return (
            "DeepSpeed has no optimizer of its own with states in 8 bits: zf.states8bit(optimizer)"
        )
    if stage == 0 and tiers.optim is not None:
        return "DeepSpeed offloads nothing at stage 0"
    if tiers.params is not None and stage < 3:
        return "DeepSpeed offloads parameters at stage 3 alone"
    zero: dict[str, Any] = {"stage": stage}
    if len(found.mesh) > 1:
        zero["zero_hpz_partition_size"] = found.mesh[1][1]
    for name, tier in (("offload_optimizer", tiers.optim), ("offload_param", tiers.params)):
        if isinstance(tier, Nvme):
            zero[name] = {"device": "nvme", "nvme_path": "/local_nvme"}
        elif tier is not None:
            zero[name] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": microbatch,
        "gradient_accumulation_steps": training.microbatches,
        "bf16": {"enabled": training.computes_in != torch.float32},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "zero_optimization": zero,
    }
