"""`python -m zero_fn links`: measures memory, a disk, and what lies between ranks,
of this machine or of those of torchrun.

    python -m zero_fn links --path /local_nvme --out links.json
    torchrun --nproc-per-node 8 -m zero_fn links --path /local_nvme --out links.json

`zf.planning.LinkSpeeds.read("links.json")` is for `zf.planning.autoplan`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from zero_fn.errors import ZeroError
from zero_fn.launch import launch
from zero_fn.local.gloo import give_groups_one_thread
from zero_fn.planning.links import LinkSpeeds, measure_links

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Measures and prints.

    Returns 0; 1 and the error if something cannot be measured; 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(
        prog="python -m zero_fn links",
        description="Measures how fast bytes move: in memory, to and from a disk, between ranks, "
        "to and from accelerators. Under torchrun its ranks measure, else ranks that this "
        "command starts. No file is left but that of --out.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--path", action="append", metavar="DIR", help="a folder of a disk, or of each of several")
    add("--ranks", type=int, default=_devices() or 2, help="ranks to start")
    add("--axis", default="dp", help="the mesh axis that zf.planning.autoplan is asked for")
    add(
        "--out",
        metavar="FILE",
        help="write JSON to a file, which zf.planning.LinkSpeeds.read reads",
    )
    options = parser.parse_args(arguments)
    how = options.axis, options.path
    try:
        if "RANK" in os.environ:
            give_groups_one_thread()
            links = _measured(*how)
            dist.destroy_process_group()
        else:
            threads = max(len(os.sched_getaffinity(0)) // max(options.ranks, 1), 1)
            links = launch(_measured, options.ranks, *how, threads=threads)[0]
        if os.environ.get("RANK", "0") == "0":
            print(links)
            if options.out:
                Path(options.out).write_text(json.dumps({"links": asdict(links)}, indent=1) + "\n")
    except (ZeroError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _devices() -> int:
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def _measured(axis: str, path: Sequence[str] | None) -> LinkSpeeds:
    """On each rank."""
    kind = "cpu"
    if 0 < int(os.environ["LOCAL_WORLD_SIZE"]) <= _devices():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        kind = str(torch.accelerator.current_accelerator())
    mesh = init_device_mesh(kind, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=(axis,))
    return measure_links(mesh[axis], path=path)
