"""`python -m zero_fn launch`: a command line of the deepspeed launcher (0.19), followed by
torchrun, which this becomes."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from zero_fn.errors import ConfigError, ZeroError

_REFUSED = {
    "--autotuning": (
        "python -m zero_fn plan, which says without runs what fits and how long a step takes"
    ),
    "--bind_cores_to_rank --bind_core_list": (
        "OMP_NUM_THREADS and numactl, or torchrun --numa-binding=node of GPUs"
    ),
    "--elastic_training --min_elastic_nodes --max_elastic_nodes": (
        "torchrun --nnodes MIN:MAX --max-restarts 3 ..."
    ),
    "--launcher --launcher_args": (
        "leave it out; under srun or mpirun start train.py itself: zf.from_environment()"
    ),
    "--force_multi --ssh_port --venv_script": (
        "leave it out, and run the line that is printed for a host there"
    ),
    "--save_pid": (
        "leave it out, and take $! of the shell: the process of this command becomes torchrun"
    ),
}
"""Options that torchrun has nothing for, with what to do instead."""


def _from_zero(text: str) -> int | None:
    return int(text) if int(text) >= 0 else None


class _Refused(argparse.Action):
    def __call__(
        self, parser: object, namespace: object, values: object, option: str | None = None
    ) -> None:
        raise ConfigError(f"torchrun has nothing that does what {option} does.", fix=str(self.help))


_TEXTS = ("-i --include", "-e --exclude", "--master_addr", "--enable_each_rank_log", "--log_level")
_NUMBERS = ("--num_nodes", "--num_gpus --num_accelerators", "--node_rank", "--master_port")
_FLAGS = (
    "-q --quiet",
    "-m --module",
    "--no_python",
    "--no_ssh",
    "--no_ssh_check",
    "--no_local_rank",
)


def main(arguments: Sequence[str]) -> int:
    """Becomes torchrun, and so has its exit status. Returns 2 if the options cannot be followed."""
    try:
        options = options_of(arguments)
        hostfile = Path(options.hostfile).read_text() if Path(options.hostfile).is_file() else None
        if options.include or options.exclude or options.num_gpus:
            # Removed, as DeepSpeed does: numbers are those of the whole host.
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        devices = torch.cuda.device_count() or options.num_gpus or 1
        lines = torchrun_lines(options, hostfile, devices)
        own = this_host(options, lines)
    except (ZeroError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    is_told = not options.quiet and options.log_level in ("", "debug", "info")
    for host, line in lines.items():
        if is_told if host == own else not options.no_ssh:
            print(f"zero_fn launch: on {host}: {shlex.join(line)}", file=sys.stderr, flush=True)
    os.execvp(lines[own][0], lines[own])


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of the deepspeed launcher.

    One that torchrun has nothing for is an error that says what to do instead.
    """
    parser = argparse.ArgumentParser(
        "python -m zero_fn launch", description="Options are those of `deepspeed --help`."
    )
    parser.add_argument("-H", "--hostfile", default="/job/hostfile")
    for names in _TEXTS:
        parser.add_argument(*names.split(), default="")
    for names in _NUMBERS:
        parser.add_argument(*names.split(), type=_from_zero)
    for names in _FLAGS:
        parser.add_argument(*names.split(), action="store_true")
    for names, fix in _REFUSED.items():
        parser.add_argument(*names.split(), action=_Refused, nargs="?", help=fix)
    parser.add_argument("user_script")
    parser.add_argument("user_args", nargs=argparse.REMAINDER)
    return parser.parse_args(arguments)


def torchrun_lines(
    options: argparse.Namespace, hostfile: str | None, devices: int
) -> dict[str, list[str]]:
    """What to run on each host, in the order of ranks.

    Without a hostfile there is this host with its `devices`.
    """
    hosts = _hosts(options, f"localhost slots={devices}" if hostfile is None else hostfile)
    lines = {}
    log, port = options.enable_each_rank_log, options.master_port
    for rank, (host, slots) in enumerate(hosts.items()):
        line = ["env", f"CUDA_VISIBLE_DEVICES={','.join(slots)}"] * (
            hostfile is not None or len(slots) < devices
        )
        line += [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(len(slots))]
        line += ["--nnodes", str(len(hosts)), "--node-rank", str(rank)] * (len(hosts) > 1)
        if len(hosts) > 1 or options.master_addr or port:  # else torchrun takes a free port
            line += [
                "--master-addr",
                options.master_addr or next(iter(hosts)),
                "--master-port",
                str(port or 29500),
            ]
        line += ["--log-dir", log, "--redirects", "3"] * (log not in ("", "None"))
        line += ["--module"] * options.module + ["--no-python"] * options.no_python
        line += [options.user_script]
        # torchrun fills it in, and makes $ of $$.
        line += ["--local_rank=${local_rank}"] * (not options.no_local_rank)
        lines[host] = line + [word.replace("$", "$$") for word in options.user_args]
    return lines


def this_host(options: argparse.Namespace, lines: dict[str, list[str]]) -> str:
    """The host that this is: by --node_rank, as the only one, or by its name."""
    names = {socket.gethostname(), socket.getfqdn()} if len(lines) > 1 else {*lines}
    if options.node_rank is not None:
        names = {*[*lines][options.node_rank : options.node_rank + 1]}
    own = [host for host in lines if host in names]
    if len(own) != 1:
        fix = "run each line on its host, or say which of them this is: --node_rank 0"
        raise ConfigError(
            "This is none of the hosts.",
            **{h: shlex.join(line) for h, line in lines.items()},
            fix=fix,
        )
    return own[0]


def _hosts(options: argparse.Namespace, text: str) -> dict[str, list[str]]:
    rows = [row for row in map(str.strip, text.splitlines()) if row and not row.startswith("#")]
    hosts = {
        m[1]: [*map(str, range(int(m[2])))]
        for row in rows
        if (m := re.match(r"(\S+)\s+slots=(\d+)", row))
    }
    if len(hosts) < len(rows):
        raise ConfigError(
            "The hostfile is wrong.", lines="; ".join(rows), fix="each host once: worker-0 slots=8"
        )
    picks, nodes, gpus = options.include or options.exclude, options.num_nodes, options.num_gpus
    if sum(map(bool, (options.include, options.exclude, nodes or gpus))) > 1:
        raise ConfigError(
            "Devices are chosen twice.",
            fix="--include, or --exclude, or --num_nodes and --num_gpus",
        )
    named = {
        (host, slot)
        for host, at, slots in (part.partition(":") for part in picks.split("@") if part)
        for slot in (slots.split(",") if at else hosts.get(host, "?"))
    }
    missing = named - {(host, slot) for host, slots in hosts.items() for slot in slots}
    is_asked = bool(options.include)
    kept = [
        (host, [slot for slot in slots if ((host, slot) in named) == is_asked][: gpus or None])
        for host, slots in hosts.items()
    ]
    taken = dict([each for each in kept if each[1]][: nodes or None])
    if missing or len(taken) < (nodes or 1) or min(map(len, taken.values())) < (gpus or 0):
        raise ConfigError(
            "There are no such devices.",
            there="; ".join(rows),
            fix="ask for these, or give a hostfile",
        )
    return taken
