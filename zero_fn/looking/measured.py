"""`python -m zero_fn links`: measures memory, disks, and what lies between ranks,
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
from zero_fn.one_host.same_host import SameHost
from zero_fn.planning.links import LinkSpeeds, measure_links
from zero_fn.planning.sweep import sweep
from zero_fn.storage.files import SpillFile
from zero_fn.transport.links import open_transport
from zero_fn.values.mesh import mesh_axis

__all__ = ["main"]

_LEAST_NBYTES, _MOST_NBYTES, _ROUNDS = 8 << 20, 64 << 20, 5


def main(arguments: Sequence[str]) -> int:
    """Measures and prints.

    Returns 0; 1 and the error if something cannot be measured; 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(
        prog="python -m zero_fn links",
        description="Measures how fast bytes move: in memory, to and from disks, between ranks, "
        "to and from accelerators. Under torchrun its ranks measure, else ranks that this "
        "command starts. No file is left but that of --out.",
    )
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    add = parser.add_argument
    add(
        "--path",
        action="append",
        default=[],
        metavar="DIR",
        help="a folder of a disk; may be repeated",
    )
    add(
        "--seconds", type=float, default=20.0, help="about how long it takes (default: %(default)s)"
    )
    add("--ranks", type=int, default=devices or 2, help="ranks to start (default: %(default)s)")
    add(
        "--axis",
        default="dp",
        help="the mesh axis that zf.planning.autoplan is asked for (default: %(default)s)",
    )
    add("--json", action="store_true", help="print JSON, in bytes and bytes per second")
    add(
        "--out",
        metavar="FILE",
        help="write that JSON to a file, which zf.planning.LinkSpeeds.read reads",
    )
    options = parser.parse_args(arguments)
    if options.seconds < 1 or options.ranks < 1:
        parser.error("--seconds and --ranks are at least 1")
    try:
        _run(options, rank=int(os.environ.get("RANK", "0")))
    except ZeroError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _run(options: argparse.Namespace, rank: int) -> None:
    is_launched = "RANK" in os.environ
    ranks = int(os.environ["WORLD_SIZE"]) if is_launched else options.ranks
    disks = []
    if rank == 0:
        if options.out:
            # The folder is tried now, so that an error does not come at the end.
            SpillFile(os.path.dirname(options.out) or ".", "--out").close()
        disks = [
            sweep(path, options.seconds / 2 / len(options.path), ranks) for path in options.path
        ]
    how = options.axis, options.path, options.seconds / 5
    if is_launched:
        give_groups_one_thread()
        links, between, threads = _measured(*how)
        dist.destroy_process_group()
    else:
        threads = max(len(os.sched_getaffinity(0)) // ranks, 1)
        links, between, _ = launch(_measured, ranks, *how, threads=threads)[0]
    if rank == 0:
        found = {"ranks": ranks, "threads": threads, "between": between, "links": asdict(links)}
        text = json.dumps({**found, "disks": [asdict(disk) for disk in disks]}, indent=1)
        head = f"ranks: {ranks}, all at once; threads of each: {threads}; between them: {between}"
        print(text if options.json else "\n\n".join(map(str, (f"{head}\n{links}", *disks))))
        if options.out:
            Path(options.out).write_text(text + "\n")


def _measured(name: str, paths: Sequence[str], seconds: float) -> tuple[LinkSpeeds, str, int]:
    """On each rank: speeds in about so many seconds, what moves bytes between ranks,
    and the threads of a rank."""
    local, kind = int(os.environ["LOCAL_RANK"]), "cpu"
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if devices and devices >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(local)
        kind = str(torch.accelerator.current_accelerator())
    mesh = init_device_mesh(kind, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=(name,))[name]
    path = paths or None
    first = measure_links(mesh, path=path, nbytes=_LEAST_NBYTES, rounds=1)
    # Seconds for each byte of a round.
    each = (
        sum(
            1 / speed
            for speed in (first.disk_read, first.disk_write, *2 * [*first.sent.values()])
            if speed
        )
        + 8 / first.memory
    )
    nbytes = int(min(max(seconds / each / (_ROUNDS + 1), _LEAST_NBYTES), _MOST_NBYTES))
    rounds = int(min(max(seconds / each / nbytes - 1, 1), _ROUNDS))
    transport = open_transport(axis := mesh_axis(mesh, verb="links"))
    is_shared = isinstance(transport, SameHost) and transport.shares_memory
    between = "shared memory" if is_shared else axis.backend if axis.size > 1 else "nothing"
    return (
        measure_links(mesh, path=path, nbytes=nbytes, rounds=rounds),
        between,
        torch.get_num_threads(),
    )
