"""Stages over two ranks on the device "pretend": `python -m tests.accelerator.ranks LIBRARY FOLDER RANK` prints what became
of each, as JSON. Over the backend's own collectives, as on NCCL.

The oracle is each stage with everything on the device, and for those the stage before.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import zero_fn as zf
from tests.accelerator import device
from tests.accelerator.programs import adamw, all_away, batches, net, trained
from zero_fn.collectives import Native, transport
from zero_fn.local.gloo import give_groups_one_thread
from zero_fn.mesh import mesh_axis
from zero_fn.tiers import Tier

__all__ = ["CASES"]

STAGES = ("zero1", "zero2", "zero3")
CASES = [
    f"{stage}, {dtype}, {tier}"
    for dtype in ("float32", "bfloat16")
    for stage in STAGES
    for tier in ("none", "cpu", "nvme")
]


def share(rank: int) -> Iterator[Tensor]:
    for batch in batches():
        yield batch.chunk(2)[rank]


def result(case: str, mesh: DeviceMesh, tier: Tier | None) -> list[Any]:
    stage, dtype, _ = case.split(", ")
    model = net() if dtype == "float32" else zf.precision(net())
    model = getattr(zf, stage)(model, mesh)
    model = model if tier is None else all_away(model, tier)
    optimizer: Any = adamw(model) if tier is None else zf.streamed(adamw(model))
    found: list[Any] = trained(model, optimizer, share(mesh.get_local_rank()))
    for parameter in model.parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        found.append(whole.detach().cpu().tolist())
    return found


def main(library: Path, folder: str, rank: int) -> None:
    torch.set_num_threads(1)
    device.load(library)
    give_groups_one_thread()
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    device.join(dist.group.WORLD)
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.NAME, mesh_dim_names=("dp",))
    assert isinstance(transport(mesh_axis(mesh, verb="a test")), Native)
    tiers: dict[str, Tier | None] = {"none": None, "cpu": zf.cpu(pinned=False), "nvme": zf.nvme(folder)}
    said: dict[str, str] = {}
    expected: dict[str, list[Any]] = {}
    for case in CASES:
        _, dtype, tier = case.split(", ")
        try:
            found = result(case, mesh, tiers[tier])
        except Exception:
            said[case] = traceback.format_exc()[-1500:]
            break  # the other rank waits for what this one has left out
        said[case] = "right" if found == expected.setdefault(dtype, found) else "other numbers than those before"
    print(json.dumps(said), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
