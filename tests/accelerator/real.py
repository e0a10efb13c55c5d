"""The first minutes on a real accelerator, in the order that finds most per minute.

    python -m tests.accelerator.real --minutes 20 --out DIR

Each part is a process of its own, ended when its time is up: what a part broke, and a hang, end with it. After each part DIR
has its output as a file, and `report.json` and `report.md` say what is known so far. Nothing is installed; a part that lacks
something says so. `--parts` chooses some of them, `--device pretend` tries the parts that can run on the device "pretend".
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.accelerator import device

__all__ = ["main"]

ROOT = Path(__file__).parents[2]
BENCHMARK = "examples/benchmarks/accelerator.py"


class Part(NamedTuple):
    """One question.

    Attributes:
        minutes: Its share of the time; a part that takes less leaves the rest to those after it.
        commands: Processes that run at once, as arguments of Python; DEVICE and FOLDER stand for what they are told.
        on_pretend: Whether the device "pretend" can answer it.
    """

    minutes: float
    commands: Sequence[Sequence[str]]
    on_pretend: bool = False


def _programs(examples: int, size: int) -> list[list[str]]:
    return [
        ["-m", "tests.accelerator", "DEVICE", "FOLDER", str(examples), str(size), str(rank)] for rank in range(size)
    ]


def _benchmark(*options: str) -> list[list[str]]:
    return [[BENCHMARK, "--path", "FOLDER", *options]]


PARTS = {
    "limits": Part(1, _benchmark("--gpt", "2x64x32", "--tokens", "64", "--rounds", "1")),
    "programs": Part(4, _programs(500, 1), on_pretend=True),
    "two ranks, one device": Part(2, _programs(50, 2), on_pretend=True),
    "more programs": Part(2, [["-m", "tests.accelerator.more", "DEVICE"]]),
    "GPT of 1.3 B": Part(3, _benchmark("--gpt", "24x2048x1024", "--tokens", "16384", "65536", "--rounds", "3")),
    "GPT of 6.5 B": Part(
        4,
        _benchmark(
            "--gpt", "32x4096x1024", "--tokens", "16384", "--rounds", "2", "--ways", "states", "host", "host, forward"
        ),
    ),
    "traces": Part(
        3,
        _benchmark(
            "--gpt", "12x2048x1024", "--tokens", "16384", "--rounds", "2", "--numel", "1000000", "--traces", "FOLDER"
        ),
    ),
}


def about(name: str) -> dict[str, Any]:
    """Versions, the device, the memory of the host."""
    import torch

    found: dict[str, Any] = {
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
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        }
    return found


def run(part: Part, where: str, folder: str, seconds: float) -> dict[str, Any]:
    """Runs the processes of a part until they end or their time is up."""
    told = {"DEVICE": where, "FOLDER": folder}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
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


def _ended(codes: Sequence[int]) -> str:
    if -signal.SIGKILL in codes:
        return "its time was up"
    return "well" if not any(codes) else f"with exit codes {', '.join(map(str, codes))}"


def write(out: Path, found: dict[str, Any]) -> None:
    """Writes what is known so far."""
    (out / "report.json").write_text(json.dumps(found, indent=1))
    lines = ["# What ran on an accelerator", "", *(f"- {name}: {value}" for name, value in found["about"].items()), ""]
    for name, part in found["parts"].items():
        wrong = [line for line in part["said"].splitlines() if "Error" in line]
        lines += [f"## {name}: ended {part['ended']}, {part['seconds']} s, {len(wrong)} lines with an error", ""]
        lines += ["```", *part["said"][-6000:].splitlines(), "```", ""]
    (out / "report.md").write_text("\n".join(lines))


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the report")
    parser.add_argument("--folder", type=Path, help="a folder of the fastest local disk; left out, one in --out")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    where = str(device.compiled(options.out)) if options.device == "pretend" else options.device
    found: dict[str, Any] = {"about": about(options.device), "parts": {}}
    write(options.out, found)
    end = time.monotonic() + 60 * options.minutes
    chosen = {name: PARTS[name] for name in options.parts if options.device != "pretend" or PARTS[name].on_pretend}
    for number, (name, part) in enumerate(chosen.items()):
        left, asked = end - time.monotonic(), sum(each.minutes for each in list(chosen.values())[number:])
        if left <= 0:
            break
        with tempfile.TemporaryDirectory(dir=options.folder or options.out) as folder:
            found["parts"][name] = run(part, where, folder, left * part.minutes / asked)
            for trace in Path(folder).glob("trace*"):
                trace.replace(options.out / trace.name)
        (options.out / f"{name}.txt").write_text(found["parts"][name]["said"])
        write(options.out, found)
        print(f"{name}: ended {found['parts'][name]['ended']}, {found['parts'][name]['seconds']} s", flush=True)
    return found


if __name__ == "__main__":
    main()
