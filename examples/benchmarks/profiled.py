"""`zf.profile` names what is wrong: faults that are really there, what it says of them, and what looking on costs.

    python examples/benchmarks/profiled.py                      # all of it: minutes
    python examples/benchmarks/profiled.py forward cost         # some of it

Two ranks of one thread each train a GPT at ZeRO-3 under a fault. Profiles of ten steps are taken, one after another, and what
each says is compared with what is wrong:

    none        nothing: what the machine itself does; two cores are rarely alike
    forward     rank 1 sleeps for 20 ms in the forward of unit 3
    backward    rank 1 sleeps for 20 ms in the backward of unit 3
    disk        the model rests on a disk, of which rank 1 gets 40 MB/s each way (a limit of cgroups, which needs root)
    link        the ranks are two hosts, as slow_link.py makes them, with 0.5 Gbit/s between them
    cores       rank 0 has a core, and rank 1 shares one with a process that is always busy

`cost` takes the time of ten steps with nobody who looks on, under `zf.profile`, and under `zf.metrics(every=10)`, by turns in
the same processes: the mean of the ten, and their median, which leaves out what is done once or twice in a block. Ratios are
medians over rounds with a 95 % bootstrap interval. The machine has to be quiet for them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import contestants
import slow_link
import torch
import torch.distributed as dist
import torch.nn.functional as F
from measured import ratios_of, shown, table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

import zero_fn as zf

STEPS, SLEEP_S, DISK_NBYTES, UNIT = 10, 0.02, 40_000_000, "blocks.3"
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"  # ends with the rank
FAULTS = {  # what is wrong, and who is to be named: rank, part, unit, phase
    "none": ("nothing", None),
    "forward": (f"rank 1 sleeps for 20 ms in the forward of {UNIT}", (1, "idle", UNIT, "forward")),
    "backward": (f"rank 1 sleeps for 20 ms in the backward of {UNIT}", (1, "idle", UNIT, "backward")),
    "disk": ("rank 1 may read and write 40 MB/s ({limit.parent})", (1, "copies", "", "")),
    "link": ("{gbit:g} Gbit/s between two hosts (tc)", None),
    "cores": ("rank 1 shares its core with a busy process", (1, "idle", "", "")),
}


def built(shape: str, folder: str = "") -> tuple[nn.Module, Optimizer, Callable[[], None]]:
    """A model, which rests in the folder if there is one, its optimizer, and a step."""
    torch.set_num_threads(1)
    layers, dim, seq, batch = map(int, shape.split("x"))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = zf.shard_params(contestants.GPT(layers, dim, seq), mesh, units=contestants.Block)
    model = zf.offload(model, params=zf.nvme(folder), optim=zf.nvme(folder)) if folder else model
    optimizer: Optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer = zf.streamed(optimizer) if folder else optimizer
    tokens = torch.randint(256, (batch, seq + 1), generator=torch.Generator().manual_seed(dist.get_rank()))

    def step() -> None:
        torch.autograd.backward(F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()))
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def spoil(name: str, model: nn.Module, limit: Path) -> None:
    """Makes a fault on this rank, as long as it lives. `limit`: a cgroup whose processes have a slow disk."""
    rank, layer = dist.get_rank(), model.get_submodule(f"{UNIT}.up")
    if name == "cores":
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[-rank]})
        subprocess.Popen([sys.executable, "-c", BUSY] if rank else ["true"])
    elif rank == 1 and name == "forward":
        layer.register_forward_pre_hook(lambda *_: time.sleep(SLEEP_S))
    elif rank == 1 and name == "backward":
        layer.register_full_backward_pre_hook(lambda *_: time.sleep(SLEEP_S))
    elif rank == 1 and name == "disk":
        (limit / "cgroup.procs").write_text(str(os.getpid()))


def show(name: str, args: argparse.Namespace, folder: str = "", limit: Path = Path()) -> None:
    """What is wrong, and what each profile says of it, printed by rank 0."""
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    model, optimizer, step = built(args.shape, folder)
    say(f"\n{name}: " + FAULTS[name][0].format(gbit=args.gbit, limit=limit))
    spoil(name, model, limit)
    for _ in range(2):
        step()
    for _ in range(args.rounds):
        with zf.profile(model, optimizer) as profile:
            for _ in range(STEPS):
                step()
        said = [str(each) for each in profile.slow] or ["no rank is slower than the others"]
        is_right = FAULTS[name][1] in [(each.rank, each.part, each.unit, each.phase) for each in profile.slow]
        if name == "link":
            said = [line for line in str(profile).splitlines() if line.startswith("sent along")]
            waits, carried = (profile.numbers[what]["dp"] for what in ("exposed", "carried"))
            is_right = waits > profile.numbers["seconds"] / 2 and 0.8 < carried * 8e-9 / args.gbit <= 1
        verdict = "said" if name == "none" else "right" if is_right else "wrong"
        say(f"  {verdict:5} {profile.numbers['seconds'] * 1e3:5.0f} ms  " + ("\n" + " " * 18).join(said), flush=True)


def on_slow_disk(args: argparse.Namespace) -> None:
    """Shows it, where a cgroup of version 2 or 1 can be made."""
    is_new = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    group = Path("/sys/fs/cgroup", "" if is_new else "blkio", f"zero_fn-{os.getpid()}")
    old = {f"blkio.throttle.{way}_bps_device": f"{{}} {DISK_NBYTES}" for way in ("read", "write")}
    limits = {"io.max": f"{{}} rbps={DISK_NBYTES} wbps={DISK_NBYTES}"} if is_new else old
    with TemporaryDirectory(dir=args.path) as folder:
        number = os.stat(folder).st_dev
        place = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
        try:
            disk = (place / ("../dev" if (place / "partition").exists() else "dev")).read_text().strip()
            group.mkdir()
            for name, text in limits.items():
                (group / name).write_text(text.format(disk))
        except OSError as error:
            print(f"\ndisk: none can be made slow here: {error}")
        else:
            zf.launch(show, 2, "disk", args, folder, group, timeout_s=None)
        finally:
            if group.exists():
                group.rmdir()


def cost(args: argparse.Namespace) -> None:
    """Steps by turns; rank 0 prints the table."""
    model, optimizer, step = built(args.shape)
    ways: dict[str, Callable[[], Any]] = {
        "nobody": nullcontext,
        "profile": lambda: zf.profile(model, optimizer),
        "metrics": lambda: zf.metrics(model, optimizer, every=STEPS),
    }
    costs: dict[str, list[list[float]]] = {way: [] for way in ways}
    for way in [way for turn in range(4 * args.rounds + 1) for way in ([*ways] * 2)[turn % 3 :][:3]]:
        with ways[way]() as looking:
            dist.barrier()
            times = [time.perf_counter()]
            for _ in range(STEPS):
                step()
                if way == "metrics":
                    looking.step()
                times.append(time.perf_counter())
        costs[way].append([over([b - a for a, b in pairwise(times)]) for over in (statistics.mean, statistics.median)])
    rows = []
    for way in ways:
        row: dict[str, object] = {"": way}
        for at, name in enumerate(("mean", "median")):
            times, base = ([each[at] for each in costs[of][1:]] for of in (way, "nobody"))
            row |= {f"ms, {name}": f"{statistics.median(times) * 1e3:.1f}"}
            row |= {f"{name} / nobody": shown(ratios_of(times, base), 3)}
        rows.append(row)
    if dist.get_rank() == 0:
        print(f"\ncost: {args.shape}, {4 * args.rounds} rounds of {STEPS} steps\n{table(rows)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", help=f"of {', '.join(FAULTS)}, cost; else all")
    parser.add_argument("--shape", default="6x256x128x1", help="layers x width x sequence x sequences")
    parser.add_argument("--rounds", type=int, default=5, help="profiles of each fault; of the cost four times as many")
    parser.add_argument("--gbit", type=float, default=0.5, help="of the link, each way, in Gbit/s")
    parser.add_argument("--path", default=".", help="a folder of the disk")
    parser.add_argument("--role", choices=["user", "hosts", "rank"], default="user", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "hosts":
        return slow_link.on_two_hosts(args.gbit, 1)
    if args.role == "rank":
        dist.init_process_group("gloo")
        show("link", args)
        dist.destroy_process_group()
        return 0
    for name in args.what or [*FAULTS, "cost"]:
        if name == "link":
            slow_link.start_hosts(sys.argv)
        elif name == "disk":
            on_slow_disk(args)
        else:
            zf.launch(*((cost, 2) if name == "cost" else (show, 2, name)), args, timeout_s=None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
