"""A proposal as lines of Python."""

from __future__ import annotations

import torch

from zero_fn.planning.configurations import Training
from zero_fn.planning.models import PlannedModel
from zero_fn.planning.proposals import Proposal
from zero_fn.values.tiers import Nvme, Tier

__all__ = ["program_of"]


def program_of(found: Proposal, model: PlannedModel, training: Training) -> str:
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
    }.get(found.transform, f'zf.{found.transform}({computed}, mesh["dp"])')
    tiers = found.tiers
    away = {"params": tiers.params, "grads": tiers.grads, "optim": tiers.optim}
    given = ", ".join(f"{name}={_made(tier)}" for name, tier in away.items() if tier is not None)
    nodes = max(found.ranks // training.machine.per_node, 1)
    each = min(found.ranks, training.machine.per_node)
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
