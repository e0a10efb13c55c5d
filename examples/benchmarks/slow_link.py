"""A step of a GPT over a slow link: what fewer bits on the wire save there, and what they cost where there is no wire.

    python examples/benchmarks/slow_link.py                     # two hosts of two ranks, 1 Gbit/s between them
    python examples/benchmarks/slow_link.py --gbit 10
    python examples/benchmarks/slow_link.py --here              # four ranks of one host, which share memory

The two hosts are network namespaces with a link (veth) between them, which `tc` limits each way. This needs Linux with `ip`
and `tc` (iproute2), and root, or a system where users may make namespaces; else the program says what is missing. However it
ends, the system ends the namespaces and all in them.

All ways live in the same processes, begin with the same weights and see the same tokens: few, so that communication takes
the time. The order rotates from round to round. Seconds are medians, of the slowest rank; ratios are to bfloat16 at the same
stage in the same round, with a 95 % bootstrap interval. Of bytes:

    sent MB         by a rank, as zero_fn counts it
    link MB         that one host sent over the link, headers too: of four ranks 4/3 of what one sends; here, over sockets
    loss            of the last step, mean over ranks
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import contestants
import torch
import torch.distributed as dist
from measured import ratios_of, shown, sockets_nbytes, table
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zero_fn as zf

SEQ, WARMUP, PER_HOST = 8, 2, 2
STAGES = {"zero3": zf.shard_params, "zero2": zf.shard_grads}
FORMATS: dict[tuple[str, str], dict[str, Any]] = {  # the first of a stage is the base of its ratios
    ("zero3", "bf16"): {},
    ("zero3", "int8, int4"): {"gather": zf.wire.int8(), "reduce": zf.wire.int4()},
    ("zero2", "bf16"): {},
    ("zero2", "delta4, int4"): {"gather": zf.wire.delta4(), "reduce": zf.wire.int4()},
}
DEVICES = {"user": "lo", "rank": "wire"}  # over which bytes are counted
NEW = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]  # its processes end with the first of them
OURS = ["setpriv", "--pdeathsig", "KILL", *NEW, "--net", *["--map-root-user"] * (os.geteuid() != 0)]


def transform(stage: str, formats: str) -> Callable[[nn.Module, DeviceMesh], nn.Module]:
    options = {"compute": torch.bfloat16, **FORMATS[stage, formats]}
    return lambda model, mesh: zf.precision(STAGES[stage](model, mesh), **options)


def measure(args: argparse.Namespace) -> None:
    """Steps of all ways on one rank. Rank 0 prints the table."""
    torch.set_num_threads(1)
    mesh, device = init_device_mesh("cpu", (args.here or 2 * PER_HOST,), mesh_dim_names=("dp",)), DEVICES[args.role]
    (layers, dim), ways = map(int, args.shape.split("x")), {}
    for key in FORMATS:
        torch.manual_seed(0)
        ways[key] = contestants.zero_fn(transform(*key))(contestants.GPT(layers, dim, SEQ), mesh, False)
    costs: dict[tuple[str, str], list[tuple[float, ...]]] = {key: [] for key in ways}
    keys = [*ways]
    for number in range(args.rounds + WARMUP):
        draws = torch.Generator().manual_seed(97 * number + mesh.get_rank())
        tokens = torch.randint(256, (1, SEQ + 1), generator=draws)
        turn = number % len(keys)
        for key in (*keys[turn:], *keys[:turn]):
            dist.barrier()
            began, before = time.perf_counter(), sockets_nbytes(device)
            with zf.traffic() as sent:
                loss = ways[key].step(tokens)
            took = torch.tensor(time.perf_counter() - began)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            dist.all_reduce(loss)
            over = sockets_nbytes(device) - before
            costs[key].append((took.item(), sent.nbytes, over, loss.item() / mesh.size()))
    rows = []
    for (stage, formats), found in costs.items():
        seconds, sent_nbytes, link_nbytes, losses = zip(*found[WARMUP:], strict=True)
        base = [*zip(*costs[stage, "bf16"][WARMUP:], strict=True)]
        rows.append({
            "": f"{stage}, {formats}",
            "s a step": f"{statistics.median(seconds):.3f}",
            "/ bf16": shown(ratios_of(seconds, base[0])),
            "sent MB": f"{statistics.median(sent_nbytes) / 1e6:.1f}",
            "sent / bf16": f"{statistics.median(sent_nbytes) / statistics.median(base[1]):.3f}",
            "link MB": f"{statistics.median(link_nbytes) / 1e6:.1f}",
            "loss": f"{losses[-1]:.4f}",
        })  # fmt: skip
    if dist.get_rank() == 0:
        where = "one host" if device == "lo" else f"two hosts, {args.gbit:g} Gbit/s between them"
        title = f"{args.shape}, {mesh.size()} ranks, {where}, {args.rounds} rounds, torch {torch.__version__}"
        print(f"\n{title}\n{table(rows)}", flush=True)


def on_two_hosts(gbit: float, per_host: int) -> int:
    """Makes the hosts and starts the ranks; in namespaces of its own, as their first process. The status to end with."""
    commands = ["mount -t tmpfs tmpfs /run", "ip netns add a", "ip netns add b"]  # /run has the names of namespaces
    commands.append("ip link add wire netns a type veth peer name wire netns b")
    for number, name in enumerate("ab", 1):
        commands += [f"ip -n {name} link set lo up", f"ip -n {name} link set wire up"]
        commands.append(f"ip -n {name} addr add 10.0.0.{number}/24 dev wire")
        # A queue of a second loses nothing.
        commands.append(f"tc -n {name} qdisc add dev wire root tbf rate {gbit}gbit burst 256kb latency 1s")
    for line in commands:
        done = subprocess.run(shlex.split(line), capture_output=True, text=True, check=False)
        if done.returncode:
            return cannot(f"{line}: {done.stderr.strip()}")
    ranks, size = [], 2 * per_host
    for rank in range(size):
        environ = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "wire"}
        environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
        # Ranks that see one another's processes would share memory. Not so here, nor those of one host.
        command = ["ip", "netns", "exec", "ab"[rank // per_host], *NEW, sys.executable, *sys.argv, "--role", "rank"]
        errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        ranks.append((subprocess.Popen(command, env=os.environ | environ, stderr=errors), errors))
    while True:
        ended = [process.poll() for process, _ in ranks]
        if any(ended):  # the first to end so has failed: others fail as they lose it
            rank = next(rank for rank, status in enumerate(ended) if status)
            ranks[rank][1].seek(0)
            print(f"rank {rank} ended with {ended[rank]}\n{ranks[rank][1].read()}", file=sys.stderr)
            return 1
        if None not in ended:
            return 0
        time.sleep(0.05)


def cannot(why: str) -> int:
    print(f"No two hosts can be made here: {why}")
    return 0


def start_hosts(program: list[str]) -> int:
    """Runs a program in namespaces of its own, with `--role hosts`, where it calls `on_two_hosts`, which runs it on each rank
    with `--role rank`. The status to end with."""
    if missing := [name for name in ("setpriv", "unshare", "ip", "tc") if shutil.which(name) is None]:
        return cannot(f"there is no {', '.join(missing)}; apt-get install iproute2 util-linux, on Debian")
    tried = subprocess.run([*OURS, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        return cannot(tried.stderr.strip())
    command = [*OURS, sys.executable, *program, "--role", "hosts"]
    return subprocess.run(command, start_new_session=True, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gbit", type=float, default=1.0, help="of the link, each way, in Gbit/s")
    parser.add_argument("--shape", default="8x512", help="layers x width")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--here", type=int, nargs="?", const=4, help="ranks of one host, in place of two hosts")
    parser.add_argument("--role", choices=["user", "hosts", "rank"], default="user", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "hosts":
        return on_two_hosts(args.gbit, PER_HOST)
    if args.role == "rank":
        dist.init_process_group("gloo")
        measure(args)
        dist.destroy_process_group()
        return 0
    if args.here:
        zf.launch(measure, args.here, args, timeout_s=None)
        return 0
    return start_hosts(sys.argv)


if __name__ == "__main__":
    sys.exit(main())
