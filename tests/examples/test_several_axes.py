"""The examples of several axes, run as a user runs them, at other sizes than they have by themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.versions import IS_2_11

ROOT = Path(__file__).parents[2]


def _printed(*command: str) -> list[str]:
    """The exit status of each says whether its losses are those of one process."""
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_three_axes_train_as_one_process_does() -> None:
    schedule = "1F1B" if IS_2_11 else "ZBVZeroBubble"  # which sends from a rank to itself there
    sizes = ["--steps", "3", "--schedule", schedule, "--layers", "8", "--dim", "16", "--heads", "2"]
    assert len(_printed("examples/train_3d.py", *sizes)) == 6


def test_compositions_of_two_data_axes_train_alike_and_send_what_is_planned() -> None:
    assert len(_printed("examples/hybrid.py", "--layers", "2", "--dim", "32", "--seq", "16", "--steps", "2")) == 7


def test_experts_train_under_torchrun_as_in_one_process() -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    sizes = ["--dp", "1", "--ep", "2", "--experts", "6", "--top", "1", "--tokens", "8", "--steps", "2"]
    assert len(_printed(*torchrun, "examples/moe.py", *sizes)) == 5
