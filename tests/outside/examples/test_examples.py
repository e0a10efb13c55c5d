"""Examples, run as a user runs them, at other sizes than they have by themselves.

The exit status of an example of several axes says whether its losses are those of one process.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.outside.examples.programs import ROOT, Interpreter
from tests.support.versions import IS_2_11

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="limits its memory as Linux counts it")
SCHEDULE = "1F1B" if IS_2_11 else "ZBVZeroBubble"  # which sends from a rank to itself there


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("train_3d.py", f"--steps 3 --schedule {SCHEDULE} --layers 8 --dim 16 --heads 2"),
        ("hybrid.py", "--layers 2 --dim 32 --seq 16 --steps 2"),
    ],
)
def test_several_axes_train_as_one_process_does(interpreter: Interpreter, name: str, sizes: str) -> None:
    said = interpreter.run(ROOT / "examples" / name, *sizes.split())
    assert said.ended == 0, said
    assert "largest difference" in said.out, said


def _ran(line: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *line.split()]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)


def test_experts_train_under_torchrun_as_in_one_process() -> None:
    sizes = "--dp 1 --ep 2 --experts 6 --top 1 --tokens 8 --steps 2"
    done = _ran(f"-m torch.distributed.run --standalone --nproc-per-node=2 examples/moe.py {sizes}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 5


@LINUX
def test_a_model_trains_with_everything_on_disk(tmp_path: Path) -> None:
    done = _ran(f"examples/offload_nvme.py --path {tmp_path} --layers 3 --dim 128 --steps 3 --everything")
    assert done.returncode == 0, done.stderr
    assert f"in nvme('{tmp_path}')" in done.stdout
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)


@LINUX
def test_a_model_larger_than_memory_generates(tmp_path: Path) -> None:
    """151 MB of parameters under a limit of 119 MB for all else; without offload it does not even begin."""
    line = f"examples/generate_nvme.py --path {tmp_path} --layers 12 --dim 512 --tokens 2 --memory 0.35"
    done = _ran(line)
    assert done.returncode == 0, done.stderr
    assert "Once upon a time" in done.stdout
    nbytes, room = map(int, re.findall(r"(\d+) MB of", done.stdout)[:2])
    assert room < nbytes
    stock = _ran(f"{line} --stock")
    assert stock.returncode != 0
    assert "allocate memory" in stock.stderr
