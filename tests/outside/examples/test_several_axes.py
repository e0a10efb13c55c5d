"""The examples of several axes, run as a user runs them, at other sizes than they have by themselves."""

from __future__ import annotations

import subprocess
import sys

from tests.outside.examples.programs import ROOT, Interpreter
from tests.support.versions import IS_2_11

# The exit status of each example says whether its losses are those of one process.


def _compared(interpreter: Interpreter, name: str, *arguments: str) -> None:
    said = interpreter.run(ROOT / "examples" / name, *arguments)
    assert said.ended == 0, said
    assert "largest difference" in said.out, said


def test_three_axes_train_as_one_process_does(interpreter: Interpreter) -> None:
    schedule = "1F1B" if IS_2_11 else "ZBVZeroBubble"  # which sends from a rank to itself there
    sizes = ["--steps", "3", "--schedule", schedule, "--layers", "8", "--dim", "16", "--heads", "2"]
    _compared(interpreter, "train_3d.py", *sizes)


def test_compositions_of_two_data_axes_train_alike_and_send_what_is_planned(interpreter: Interpreter) -> None:
    sizes = ["--layers", "2", "--dim", "32", "--seq", "16", "--steps", "2"]
    _compared(interpreter, "hybrid.py", *sizes)


def test_experts_train_under_torchrun_as_in_one_process() -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    sizes = ["--dp", "1", "--ep", "2", "--experts", "6", "--top", "1", "--tokens", "8", "--steps", "2"]
    command = [sys.executable, *torchrun, "examples/moe.py", *sizes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 5
