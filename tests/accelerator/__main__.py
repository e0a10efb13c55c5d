"""All that is tried on one accelerator, by one process for each rank.

`python -m tests.accelerator DEVICE FOLDER EXAMPLES SIZE RANK` prints, as JSON, what became of each case: "right", or what is
wrong. DEVICE is the compiled library of the device "pretend", or the name of a real one: cuda. What needs no other rank is
tried where there is none; on a real device the stages too, over NCCL. See `device.begin_group` for the backend of two ranks.
"""

import json
import sys

import torch
import torch.distributed as dist

import zero_fn as zf
from tests.accelerator import device, programs, races, random_programs, ranks


def main(where, folder, examples, size, rank):
    torch.set_num_threads(1)
    is_real = not where.endswith(".so")
    device.choose(where)
    found, is_daily = {}, examples <= 3
    if size == 1:
        tiers = [device.host()] if is_daily else [device.host(), zf.nvme(folder)]
        found |= programs.results(tiers, programs.PROGRAMS | races.PROGRAMS)
    mesh = device.begin_group(f"{folder}/store", rank, size)
    if size > 1 or is_real:
        found |= ranks.results(mesh, folder, [name for name in ranks.CASES if not is_daily or name not in ranks.LONG])
    if size == 1 or set(found.values()) <= {"right", device.UNMEASURED}:  # else the other rank waits
        found["random programs"] = random_programs.result(mesh, folder, examples)
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:6]))
