"""`examples/train_gpt.py` saves and goes on: its losses are those of a run that nothing has interrupted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import zero_fn as zf
from tests.outside.examples.programs import ROOT, Interpreter

PROGRAM = ROOT / "examples" / "train_gpt.py"
SMALL = {
    "--layers": 1, "--dim": 16, "--heads": 2, "--seq": 16, "--batch": 12, "--warmup": 2, "--evaluate-every": 2, "--sample": 0,
}  # fmt: skip
STEPS = 6
LONG = 20
"""Steps of the run of which a rank is killed."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, interpreter: Interpreter) -> Path:
    """With a text, a run that nothing has interrupted, and one that ended early."""
    made = tmp_path_factory.mktemp("runs")
    (made / "text").write_bytes(bytes(range(32, 127)) * 200)
    for name, steps in (("whole", LONG), ("begun", 4)):
        assert interpreter.run(PROGRAM, *command(made, name, "--steps", str(steps))).ended == 0
    return made


def command(folder: Path, name: str, *options: str) -> list[str]:
    small = [str(word) for option in SMALL.items() for word in option]
    folders = ["--text", str(folder / "text"), "--save", str(folder / name), "--out", str(folder / "out")]
    return [*small, "--no-compare", *folders, *options]


def losses(folder: Path) -> list[float]:
    found: list[float] = zf.load(folder, only="extra")["losses"]["train"]
    return found


def test_a_resumed_run_is_the_whole_one(folder: Path, interpreter: Interpreter) -> None:
    """Other ranks and other stages have tests of their own, without this program."""
    shutil.copytree(folder / "begun", folder / "resumed")
    assert interpreter.run(PROGRAM, *command(folder, "resumed", "--steps", str(STEPS), "--resume")).ended == 0
    assert losses(folder / "resumed") == losses(folder / "whole")[:STEPS]


def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(folder: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    # Ranks that are started again meet in a store of their own: torchrun's shared one has the addresses of the killed.
    environ = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*launcher, PROGRAM, *command(folder, "killed", "--steps", str(LONG))],
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    saved = folder / "killed" / "step-000004" / "manifest.json"
    while not saved.exists() and process.poll() is None:
        time.sleep(0.002)
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(ranks[-1]), signal.SIGKILL)
    _, told = process.communicate(timeout=240)
    assert process.returncode == 0, told
    assert "exitcode: -9" in told, told
    assert losses(folder / "killed") == losses(folder / "whole")


def test_a_rank_that_is_lost_after_the_last_save_leaves_a_run_that_is_done(
    folder: Path, interpreter: Interpreter
) -> None:
    restarted = {"TORCHELASTIC_RESTART_COUNT": "1", "RANK": "0", "WORLD_SIZE": "2"}
    said = interpreter.run(PROGRAM, *command(folder, "whole", "--steps", str(LONG)), environ=restarted)
    assert said.ended == 0
    assert f"has all {LONG} steps" in said.out
