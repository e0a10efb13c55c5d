"""`examples/train_gpt.py` saves and goes on: its losses are those of a run that nothing has interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import zero_fn as zf

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(ROOT / "examples" / "train_gpt.py")
SMALL = {
    "--layers": 1, "--dim": 16, "--heads": 2, "--seq": 16, "--batch": 12, "--warmup": 2, "--evaluate-every": 2, "--sample": 0,
}  # fmt: skip
STEPS = 6
LONG = 20
"""Steps of the run of which a rank is killed."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a text, and a run of each length that nothing has interrupted."""
    made = tmp_path_factory.mktemp("runs")
    (made / "text").write_bytes(bytes(range(32, 127)) * 200)
    run(made, "whole", "--steps", str(LONG))
    return made


def command(folder: Path, name: str, *options: str) -> list[str]:
    small = [str(word) for option in SMALL.items() for word in option]
    folders = ["--text", str(folder / "text"), "--save", str(folder / name), "--out", str(folder / "out")]
    return [*small, "--no-compare", *folders, *options]


def environment() -> dict[str, str]:
    """Ranks that are started again meet in a store of their own: torchrun's shared one has the addresses of the killed."""
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return {**os.environ, **own_store, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


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
    assert losses(folder / "same") == losses(folder / "whole")[:STEPS]


@pytest.mark.parametrize(("ranks", "stage"), [("3", "1"), ("1", "0")])
def test_other_ranks_and_another_stage_go_on(folder: Path, ranks: str, stage: str) -> None:
    name = f"on-{ranks}"
    run(folder, name, "--steps", "4")
    run(folder, name, "--steps", str(STEPS), "--resume", "--ranks", ranks, "--stage", stage)
    assert losses(folder / name) == pytest.approx(losses(folder / "whole")[:STEPS], abs=1e-4)


def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(folder: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    process = subprocess.Popen(
        [*launcher, PROGRAM, *command(folder, "killed", "--steps", str(LONG))],
        env=environment(),
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


def test_a_rank_that_is_lost_after_the_last_save_leaves_a_run_that_is_done(folder: Path) -> None:
    restarted = {**environment(), "TORCHELASTIC_RESTART_COUNT": "1", "RANK": "0", "WORLD_SIZE": "2"}
    told = subprocess.run(
        [sys.executable, PROGRAM, *command(folder, "whole", "--steps", str(LONG))],
        env=restarted,
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0
    assert f"has all {LONG} steps" in told.stderr
