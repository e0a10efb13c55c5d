"""The examples of several axes, run as a user runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("options", [["--stage", "3", "--schedule", "ZBVZeroBubble"]])
def test_three_axes_train_as_one_process_does(options: list[str]) -> None:
    """Its exit status says whether the losses agree."""
    command = [sys.executable, "examples/train_3d.py", "--steps", "3", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n") == 6
