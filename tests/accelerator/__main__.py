"""All that is tried on the device "pretend", by one process for each rank.

`python -m tests.accelerator LIBRARY FOLDER EXAMPLES SIZE RANK` prints, as JSON, what became of each case: "right", or what is
wrong. What needs no other rank is tried where there is none.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.accelerator import benchmark, device, programs, random_programs, ranks
from zero_fn.local.gloo import give_groups_one_thread


def main(library: Path, folder: str, examples: int, size: int, rank: int) -> None:
    torch.set_num_threads(1)
    device.load(library)
    found: dict[str, object] = {}
    if size == 1:
        found |= programs.results(folder)
        found["losses"] = benchmark.losses(folder)
    give_groups_one_thread()
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    device.join(dist.group.WORLD)
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.NAME, mesh_dim_names=("dp",))
    if size > 1:
        found |= ranks.results(mesh, folder)
    if size == 1 or set(found.values()) == {"right"}:  # else the other rank waits
        found["random programs"] = random_programs.result(mesh, folder, examples)
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:6]))
