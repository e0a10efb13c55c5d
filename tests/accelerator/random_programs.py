"""Random programs on the device "pretend", in tiers and beside themselves with everything on the device.

`python -m tests.accelerator.random_programs LIBRARY FOLDER EXAMPLES SEED SIZE RANK` prints, as JSON, "right" or the program
that was not. All ranks draw the same programs of `property_tests/streamed_programs.py`, and none shrinks one: they would do
that apart.
"""

from __future__ import annotations

import json
import sys
import traceback
from itertools import starmap
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch.distributed.device_mesh import DeviceMesh

from property_tests.streamed_programs import Placed, Training, places, programs, trained
from tests.accelerator import device
from zero_fn.local.gloo import give_groups_one_thread

# Over one axis, and not by torch's fused kernels, which are not those of the host.
_places = places.filter(lambda placed: placed.outer is None and "fused" not in placed.optimizer)


def compare(placed: Placed, program: list[tuple[str, int]], folder: str) -> None:
    expected, found = trained(placed, program, None), trained(placed, program, folder)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        done: Any = program[number] if number < len(program) else "the end"
        assert len(one) == len(other), done
        assert all(starmap(torch.equal, zip(one, other, strict=True))), done


def main(library: Path, folder: str, examples: int, seeded: int, size: int, rank: int) -> None:
    torch.set_num_threads(1)
    device.load(library)
    give_groups_one_thread()
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    device.join(dist.group.WORLD)
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.NAME, mesh_dim_names=("dp",))
    Training.device_type = device.NAME
    Training.axis = staticmethod(lambda: mesh)

    @seed(seeded)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),
    )
    @given(_places.filter(lambda placed: size == 1 or placed.stage != "plain"), programs)
    def law(placed: Placed, program: list[tuple[str, int]]) -> None:
        compare(placed, program, folder)

    said = "right"
    try:
        law()
    except Exception as error:
        said = "\n".join([*getattr(error, "__notes__", ()), traceback.format_exc()[-3000:]])
    print(json.dumps(said), flush=True)
    if said == "right":
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:7]))
