"""The first minutes on a real accelerator, in the order that finds most per minute.

    python -m tests.accelerator.real --minutes 7 --out DIR
    python -m tests.accelerator.real --minutes 4 --parts programs steps --out DIR

Each part is a process of its own, or several at once, ended when its time is up: what a part broke, and a hang, end with
it. After each part DIR/report.md says all that is known so far. The output ends with a table of the parts, what was wrong,
and the last lines of each measurement. Nothing is installed; what a part lacks, it says, and the next one begins.
`--device pretend` tries all of it, small, on the device "pretend".
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.accelerator import device

__all__ = ["main"]

ROOT = Path(__file__).parents[2]
STEPS, BOUNDS = "examples/benchmarks/accelerator.py", "examples/benchmarks/accelerator_bounds.py"


class Part(NamedTuple):
    """One question.

    Attributes:
        seconds: Its time. A part that takes less leaves the rest to those after it.
        commands: Processes that run at once, as arguments of Python; DEVICE, FOLDER and SECONDS stand for what they are told.
        lines: Last lines of its output that are shown at the end.
        environment: Variables of its processes; NCCL stands for the library that `--nccl` names.
    """

    seconds: float
    commands: Sequence[Sequence[str]]
    lines: int = 0
    environment: Mapping[str, str] = {}


def _programs(examples, size):
    return [
        ["-m", "tests.accelerator", "DEVICE", "FOLDER", str(examples), str(size), str(rank)] for rank in range(size)
    ]


def _promises(size, name):
    return [
        ["-m", "tests.accelerator.promises", "DEVICE", "FOLDER", str(size), str(rank), name] for rank in range(size)
    ]


def _collectives():
    stopped = [["-m", "tests.accelerator.stopped", "DEVICE", "FOLDER", str(rank), "2"] for rank in range(2)]
    return [*_promises(2, "collectives"), *stopped]


def _steps(*options):
    return [[STEPS, "--path", "FOLDER", "--seconds", "SECONDS", *options]]


# NCCL takes two ranks on one device since 2.30, which may have to be loaded in place of torch's own.
_BY_NCCL = {
    "LD_PRELOAD": "NCCL",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_DEBUG": "WARN",
    "ZERO_FN_TEST_BACKEND": "nccl",
}
PARTS = {
    "bounds": Part(40, [[BOUNDS, "--path", "FOLDER"]], lines=40),
    "programs": Part(
        100,
        [
            *_programs(20, 1),
            ["-m", "tests.accelerator.entries", "DEVICE", "FOLDER"],
            *_promises(1, "training"),
        ],
    ),
    "two ranks, gloo": Part(45, [*_programs(6, 2), *_promises(2, "training")]),
    "collectives, gloo": Part(30, _collectives()),
    "collectives, NCCL": Part(45, _collectives(), environment=_BY_NCCL),
    "stages, NCCL": Part(45, [*_programs(6, 2), *_promises(2, "training")], environment=_BY_NCCL),
    "steps": Part(150, _steps(), lines=45),
    "traces": Part(75, _steps("--traces", "FOLDER"), lines=45),
    "largest": Part(120, _steps("--largest"), lines=20),
    "generation": Part(
        40, [["-m", "tests.accelerator.generation", "DEVICE", "FOLDER", "--seconds", "SECONDS"]], lines=12
    ),
}
_SMALL = {
    STEPS: ["--gpt", "2x64x32", "--rounds", "1", "--tokens", "64", "--product", "64", "--shapes", "2x64x32"],
    BOUNDS: ["--numel", "4096"],
    "tests.accelerator.generation": ["--shape", "small", "--tokens", "2"],
}
_SLOWER = 6  # the device "pretend" computes with one core


def _on_pretend(command):
    """The same command, small, for the device "pretend"."""
    program = command[0] if command[0] in _SMALL else command[1]
    command = [*command, *_SMALL.get(program, ())]
    return ["-m", "tests.accelerator.benchmark", "DEVICE", *command] if program.startswith("examples") else command


def about(name):
    """Versions, the device, the memory of the host."""
    import torch

    found = {
        "machine": platform.platform(),
        "cores": os.cpu_count(),
        "host GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if name == "cuda" and torch.cuda.is_available():
        found |= {
            "device": torch.cuda.get_device_name(),
            "device GiB": round(torch.cuda.get_device_properties(0).total_memory / 2**30),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return found


def run(part, told, seconds, preload=None):
    """Runs the processes of a part until they end or their time is up."""
    told = {**told, "SECONDS": str(int(seconds))}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    environment |= {name: preload or "" if value == "NCCL" else value for name, value in part.environment.items()}
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as said:
        processes = [
            subprocess.Popen(
                [sys.executable, *(told.get(word, word) for word in command)],
                cwd=ROOT,
                env=environment,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for command in part.commands
        ]
        for process in processes:
            try:
                process.wait(max(0.0, started + seconds - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said.seek(0)
        text = said.read()
    codes = [process.returncode for process in processes]
    return {"ended": _ended(codes), "seconds": round(time.monotonic() - started, 1), "said": text}


def _ended(codes):
    if -signal.SIGKILL in codes:
        return "its time was up"
    return "well" if not any(codes) else f"with exit codes {', '.join(map(str, codes))}"


def table(found):
    """What ended how, what was wrong, and what was measured."""
    lines = [f"{name}: {value}" for name, value in found["about"].items()]
    lines += ["", f"{'part':<18} {'seconds':>8} {'right':>6} {'wrong':>6}  ended"]
    for name, part in found["parts"].items():
        said = part["said"].splitlines()
        right, wrong = (sum(f": {word}" in line for line in said) for word in ("right", "wrong: "))
        lines.append(f"{name:<18} {part['seconds']:>8} {right:>6} {wrong:>6}  {part['ended']}")
    for name, part in found["parts"].items():
        said = part["said"].splitlines()
        if name in PARTS and PARTS[name].lines:
            lines += ["", f"{name}:", *said[-PARTS[name].lines :]]
        elif part["ended"] != "well":
            lines += ["", f"{name}, its last lines:", *said[-6:]]
        lines += [f"{name}: {line[:400]}" for line in said if ": wrong: " in line]
    return lines


def write(out, found):
    """Writes what is known so far."""
    (out / "report.json").write_text(json.dumps(found, indent=1))
    lines = ["# What ran on an accelerator", "", "```", *table(found), "```", ""]
    for name, part in found["parts"].items():
        lines += [f"## {name}", "", "```", *part["said"][-200_000:].splitlines(), "```", ""]
    (out / "report.md").write_text("\n".join(lines))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=7, help="of all parts together")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the report")
    parser.add_argument("--folder", type=Path, help="a folder of the fastest local disk; left out, one in --out")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--nccl", help="libnccl.so.2 of NCCL 2.30 or newer, which takes two ranks on one device")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    where = str(device.compiled()) if options.device == "pretend" else options.device
    found = {"about": about(options.device), "parts": {}}
    end = time.monotonic() + 60 * options.minutes
    for name in options.parts:
        part, left = PARTS[name], end - time.monotonic()
        if options.device == "pretend":
            part = part._replace(seconds=_SLOWER * part.seconds, commands=[*map(_on_pretend, part.commands)])
        lacks = _lacks(part, options.nccl, left)
        if lacks is not None:
            found["parts"][name] = {"ended": f"it did not begin: {lacks}", "seconds": 0, "said": ""}
        else:
            with tempfile.TemporaryDirectory(dir=options.folder or options.out) as folder:
                told = {"DEVICE": where, "FOLDER": folder}
                found["parts"][name] = run(part, told, min(part.seconds, left), options.nccl)
                for trace in Path(folder).glob("trace*"):
                    (options.out / trace.name).write_bytes(trace.read_bytes())
        write(options.out, found)
        print(f"{name}: {found['parts'][name]['ended']}, {found['parts'][name]['seconds']} s", flush=True)
    print("\n".join(table(found)), flush=True)
    return found


def _lacks(part, nccl, left):
    """Why a part cannot begin."""
    if left < min(part.seconds / 3, 10):
        return "no time is left"
    if "NCCL" in part.environment.values() and nccl is None:
        return "--nccl names no library"
    return None


if __name__ == "__main__":
    main()
