"""A run whose ranks are killed at random: whether it ends as if nobody had, and how much of the time was of use.

    python examples/benchmarks/kills.py --kills 100                        # each some seconds after training went on
    python examples/benchmarks/kills.py --kills 10 --ranks 2 -- --stage 1  # options of ../pretrain.py
    python examples/benchmarks/kills.py --minutes 20 --mean 60 -- --elastic 1 --save-every 1000    # one a minute
    python examples/benchmarks/kills.py --launch ...                       # by zf.launch(restarts=), which needs no imports

`torchrun --max-restarts` starts pretrain.py, which saves every few steps, copies its state into shared memory (`--elastic`),
and goes on from the newest. A random rank gets SIGKILL at a random moment. Then the same number of steps is run undisturbed,
without saves and copies, and losses are compared to the bit.

    goodput     seconds that the steps of the run take undisturbed, over the seconds that it took
    noticed     seconds from a kill until torchrun has seen the end of the rank
    back        seconds from a kill until a step is taken that had not been taken before it
    left        processes, shared memory and temporary files that the run has left behind, but for torchrun's own logs

Linux; `--seed` repeats the draws, though not where in a step they strike.
"""

from __future__ import annotations

import argparse
import math
import os
import queue
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import zero_fn as zf

PRETRAIN = Path(__file__).parents[1] / "pretrain.py"
SMALL = "--layers 2 --dim 64 --heads 2 --seq 32 --batch 12 --save-every 5"
MARK = "ZERO_FN_KILLS"
LAUNCH = """
import runpy, sys, zero_fn as zf
ranks, restarts, program = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
del sys.argv[:3]
zf.launch(runpy.run_path(program)["main"], ranks, restarts=restarts, timeout_s=None)
"""


class Run:
    """pretrain.py under torchrun, and what it prints, as it comes."""

    def __init__(self, args: argparse.Namespace, restarts: int, options: list[str], folder: str, steps: int) -> None:
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self.by_launch: bool = args.launch
        ranks, python = args.ranks, [sys.executable, "-u"]
        start = [*python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        start = (
            [*python, "-c", LAUNCH, str(ranks), str(restarts)]
            if args.launch
            else [*start, f"--max-restarts={restarts}"]
        )
        program = [str(PRETRAIN), *SMALL.split(), "--save", folder, "--steps", str(steps), *options]
        environ = os.environ | {"OMP_NUM_THREADS": "1", MARK: self.mark, "PYTHONPATH": str(PRETRAIN.parents[1])}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [*start, *program], env=environ, stdout=pipe, stderr=subprocess.STDOUT, text=True
        )
        self.lines: queue.SimpleQueue[tuple[float, str]] = queue.SimpleQueue()
        self.said: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)
            self.lines.put((time.monotonic(), line))
        self.lines.put((time.monotonic(), ""))

    def processes(self) -> Iterator[tuple[int, list[str]]]:
        """Those that belong to the run, with their environment."""
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                environ = (entry / "environ").read_text(errors="replace").split("\0")
            except OSError:  # it has ended
                continue
            if f"{MARK}={self.mark}" in environ:
                yield int(entry.name), environ

    def signal_rank(self, draws: random.Random, number: signal.Signals) -> None:
        """Sends a signal to a rank. Those of zf.launch are forked from a process that it has started."""
        found = [
            pid
            for pid, environ in self.processes()
            if (
                parent(parent(pid)) == self.process.pid
                if self.by_launch
                else any("RANK=" in each[:5] for each in environ)
            )
        ]
        if found:
            os.kill(draws.choice(sorted(found)), number)


def parent(pid: int) -> int:
    """Of a process; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def temporary() -> set[str]:
    """What there is in shared memory and in folders for temporary files."""
    found = (path for folder in ("/dev/shm", tempfile.gettempdir()) for path in Path(folder).glob("*"))
    return {str(path) for path in found if not path.name.startswith("torchelastic_")}


def disturbed(run: Run, args: argparse.Namespace) -> tuple[list[float], list[float], list[float]]:
    """Kills ranks until enough were killed, then tells the run to leave. When each kill was; how long each took to be
    noticed, and until the run was further than before."""
    draws, kills, noticed, back = random.Random(args.seed), list[float](), list[float](), list[float]()
    end = time.monotonic() + 60 * args.minutes if args.kills is None else math.inf
    due, steps, before = math.inf if args.kills else time.monotonic() + draws.expovariate(1 / args.mean), 0, -1
    while True:
        now = time.monotonic()
        if len(kills) == len(back) and (now > end or len(kills) == args.kills):
            if run.by_launch:
                run.signal_rank(draws, signal.SIGTERM)  # then all leave
            else:
                run.process.terminate()
            return kills, noticed, back
        if now > due:
            run.signal_rank(draws, signal.SIGKILL)
            kills.append(time.monotonic())
            due, before = math.inf if args.kills else kills[-1] + draws.expovariate(1 / args.mean), steps
            back += [math.nan] * (len(kills) - 1 - len(back))  # killed again before it had come back
        try:
            when, line = run.lines.get(timeout=max(min(due - now, 0.2), 0))
        except queue.Empty:
            continue
        if not line:
            raise RuntimeError("the run has ended by itself:\n" + "".join(run.said[-40:]))
        if ("exitcode: -9" in line or " Restart " in line) and len(noticed) < len(kills):
            noticed.append(when - kills[-1])
        if found := re.match(r"step (\d+):", line):
            steps = int(found[1])
            if steps > before and len(back) < len(kills):
                back.append(when - kills[-1])
            if args.kills and due == math.inf:
                due = when + draws.expovariate(1 / args.mean)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--launch", action="store_true", help="zf.launch(restarts=) in place of torchrun")
    parser.add_argument("--kills", type=int, help="end after so many, each at a mean of --mean seconds after going on")
    parser.add_argument("--minutes", type=float, default=20.0, help="without --kills: end after these")
    parser.add_argument("--mean", type=float, default=1.0, help="seconds between kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("options", nargs="*", help="of pretrain.py, after --")
    args = parser.parse_args()
    folder, before = tempfile.mkdtemp(prefix="kills-"), temporary()
    began = time.monotonic()
    run = Run(args, 1_000_000, [*args.options, "--leave-within", "25"], f"{folder}/killed", 1_000_000_000)
    kills, noticed, back = disturbed(run, args)
    run.process.wait()
    wall = time.monotonic() - began
    time.sleep(2)  # a small process removes what was in shared memory
    left = [str(pid) for pid, _ in run.processes()] + sorted(temporary() - before)
    losses = zf.load(f"{folder}/killed", only="extra")["losses"]
    unsaved = ["--elastic", "0", "--save-every", str(len(losses))]
    alone = Run(args, 0, [*args.options, *unsaved], f"{folder}/alone", len(losses))
    times = []
    while line := alone.lines.get()[1]:
        times += [time.monotonic()] if line.startswith("step") else []
    undisturbed = zf.load(f"{folder}/alone", only="extra")["losses"]
    step_s = (times[-2] - times[0]) / (10 * (len(times) - 2))
    first = next((n for n, pair in enumerate(zip(losses, undisturbed, strict=True)) if pair[0] != pair[1]), None)
    print(f"{len(kills)} kills, {len(losses)} steps of {args.ranks} ranks, {wall:.0f} s; torch {torch.__version__}")
    print(
        f"losses   {'equal to the bit' if first is None else f'differ from step {first}'}, of {len(undisturbed)} steps"
    )
    print(f"goodput  {len(losses) * step_s / wall:.3f}, at {1e3 * step_s:.1f} ms a step undisturbed")
    for name, seconds in {"noticed": noticed, "back": [each for each in back if each == each]}.items():
        if seconds:
            print(f"{name:<8} {statistics.median(seconds):.2f} s, at most {max(seconds):.2f} s, of {len(seconds)}")
    print(f"left     {', '.join(left) or 'nothing'}")
    shutil.rmtree(folder)
    return int(first is not None or bool(left) or not kills)


if __name__ == "__main__":
    sys.exit(main())
