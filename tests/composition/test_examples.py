"""The examples of several axes, run as a user runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.versions import IS_2_11

ROOT = Path(__file__).parents[2]


def _printed(*command: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_three_axes_train_as_one_process_does() -> None:
    """Its exit status says whether the losses agree."""
    schedule = "1F1B" if IS_2_11 else "ZBVZeroBubble"  # which sends from a rank to itself there
    assert len(_printed("examples/train_3d.py", "--steps", "3", "--schedule", schedule)) == 6


def test_compositions_of_two_data_axes_train_alike_and_send_what_is_planned() -> None:
    assert len(_printed("examples/hybrid.py")) == 7
