"""Stages over two ranks on the device "pretend": `python -m tests.accelerator.ranks LIBRARY FOLDER RANK` prints what became
of each, as JSON. Over the backend's own collectives, as on NCCL.

The oracle is each stage with everything on the device, and for those the stage before.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import zero_fn as zf
from tests.accelerator import device
from tests.accelerator.programs import Net, adamw, all_away, batches, net, trained
from zero_fn.local.gloo import give_groups_one_thread
from zero_fn.mesh import mesh_axis
from zero_fn.tiers import Tier
from zero_fn.transport.links import open_transport
from zero_fn.transport.native import Native

__all__ = ["CASES"]

STAGES = ("zero1", "zero2", "zero3")
CASES = [
    f"{stage}, {dtype}, {tier}"
    for dtype in ("float32", "bfloat16")
    for stage in STAGES
    for tier in ("none", "cpu", "nvme")
] + ["proposals"]


def share(rank: int) -> Iterator[Tensor]:
    for batch in batches():
        yield batch.chunk(2)[rank]


def planned_on_meta(stage: str, dtype: str, mesh: DeviceMesh, tier: Tier | None) -> zf.Plan:
    """What is said before anything is made."""
    with torch.device("meta"):
        model: Any = Net() if dtype == "float32" else zf.precision(Net())
    model = getattr(zf, stage)(model, mesh)
    model = model if tier is None else all_away(model, tier)
    return zf.plan(model, adamw(model))


def result(case: str, mesh: DeviceMesh, tier: Tier | None) -> list[Any]:
    stage, dtype, _ = case.split(", ")
    model = net() if dtype == "float32" else zf.precision(net())
    model = getattr(zf, stage)(model, mesh)
    model = model if tier is None else all_away(model, tier)
    found, optimizer = numbers(model, mesh, is_streamed=tier is not None)
    planned, held = planned_on_meta(stage, dtype, mesh, tier), zf.held(model, optimizer)
    assert (held.parameters, held.optimizer) == (
        planned.held.parameters + planned.padding.parameters,
        planned.held.optimizer,
    )
    assert (held.buffers, dict(held.tiers)) == (planned.held.buffers, dict(planned.held.tiers))
    assert zf.plan(model, optimizer).host_nbytes == planned.host_nbytes == held.on_host
    return found


def numbers(model: Any, mesh: DeviceMesh, *, is_streamed: bool) -> tuple[list[Any], Any]:
    """Losses, norms and parameters of a short training, and its optimizer."""
    optimizer: Any = zf.streamed(adamw(model)) if is_streamed else adamw(model)
    found: list[Any] = trained(model, optimizer, share(mesh.get_local_rank()))
    for parameter in model.parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        found.append(whole.detach().cpu().tolist())
    return found, optimizer


def proposals(mesh: DeviceMesh, tiers: Sequence[Tier]) -> list[Any]:
    """All that `autoplan` proposes give the same numbers, but for the sum of a norm over whole gradients, and the rank that
    holds more holds what it said."""
    found = zf.autoplan(net(), mesh, "1GiB", links=zf.measure_links(mesh, path=tiers[1].paths[0], rounds=1), tier=tiers)
    assert {p.bound for p in found.all} <= {"collectives", "optimizer", "disk", "link"}
    assert len(found.all) == 40
    first: dict[bool, list[Any]] = {}
    for proposal in found.all:
        model = proposal.place(net(), mesh)
        values, optimizer = numbers(model, mesh, is_streamed=proposal.tier is not None)
        assert values == first.setdefault(proposal.transform == "replicate", values), proposal.away
        held, said = zf.held(model, optimizer), proposal.held
        pairs = [(held.optimizer, said.optimizer), (held.buffers, said.buffers), (held.on_host, proposal.host)]
        pairs += [(held.tiers.get(str(tier), 0), said.tiers.get(str(tier), 0)) for tier in tiers]
        assert all(own == most if mesh.get_local_rank() == 0 else own <= most for own, most in pairs), pairs
    return first[False]


def main(library: Path, folder: str, rank: int) -> None:
    torch.set_num_threads(1)
    device.load(library)
    give_groups_one_thread()
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    device.join(dist.group.WORLD)
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.NAME, mesh_dim_names=("dp",))
    assert isinstance(open_transport(mesh_axis(mesh, verb="a test")), Native)
    tiers: dict[str, Tier | None] = {"none": None, "cpu": zf.cpu(pinned=False), "nvme": zf.nvme(folder)}
    said: dict[str, str] = {}
    expected: dict[str, list[Any]] = {}
    for case in CASES:
        dtype = "bfloat16" if "bfloat16" in case else "float32"
        try:
            if case == "proposals":
                found = proposals(mesh, [tier for tier in tiers.values() if tier is not None])
            else:
                found = result(case, mesh, tiers[case.rpartition(", ")[2]])
        except Exception:
            said[case] = traceback.format_exc()[-1500:]
            break  # the other rank waits for what this one has left out
        said[case] = "right" if found == expected.setdefault(dtype, found) else "other numbers than those before"
    print(json.dumps(said), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
