"""`examples/train_gpt.py` saves and goes on: its losses are those of a run that nothing has interrupted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import zero_fn as zf

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = str(ROOT / "examples" / "train_gpt.py")
SMALL = {
    "--layers": 1, "--dim": 16, "--heads": 2, "--seq": 16, "--batch": 12, "--warmup": 2, "--evaluate-every": 2, "--sample": 0,
}  # fmt: skip
STEPS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a text, and a run that nothing has interrupted."""
    made = tmp_path_factory.mktemp("runs")
    (made / "text").write_bytes(bytes(range(32, 127)) * 200)
    run(made, "whole", "--steps", str(STEPS))
    return made


def command(folder: Path, name: str, *options: str) -> list[str]:
    small = [str(word) for option in SMALL.items() for word in option]
    folders = ["--text", str(folder / "text"), "--save", str(folder / name), "--out", str(folder / "out")]
    return [*small, "--no-compare", *folders, *options]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(folder: Path, name: str, *options: str) -> None:
    told = subprocess.run(
        [sys.executable, PROGRAM, *command(folder, name, *options)], env=environment(), capture_output=True, text=True
    )
    assert told.returncode == 0, told.stdout + told.stderr


def losses(folder: Path) -> list[float]:
    found: list[float] = zf.load(folder, only="extra")["losses"]["train"]
    return found


def test_a_resumed_run_is_the_whole_one(folder: Path) -> None:
    run(folder, "same", "--steps", "4")
    run(folder, "same", "--steps", str(STEPS), "--resume")
    assert losses(folder / "same") == losses(folder / "whole")


@pytest.mark.parametrize(("ranks", "stage"), [("3", "1"), ("1", "0")])
def test_other_ranks_and_another_stage_go_on(folder: Path, ranks: str, stage: str) -> None:
    name = f"on-{ranks}"
    run(folder, name, "--steps", "4")
    run(folder, name, "--steps", str(STEPS), "--resume", "--ranks", ranks, "--stage", stage)
    assert losses(folder / name) == pytest.approx(losses(folder / "whole"), abs=1e-4)
