"""`examples/offload_nvme.py` trains, and `examples/generate_nvme.py` generates, under a memory limit of its own, in small."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "offload_nvme.py"
GENERATE = EXAMPLE.with_name("generate_nvme.py")


@pytest.mark.skipif(sys.platform != "linux", reason="limits its memory as Linux counts it")
def test_the_example_trains_with_everything_on_disk(tmp_path: Path) -> None:
    sizes = ["--layers", "3", "--dim", "128", "--steps", "3"]
    command = [sys.executable, EXAMPLE, "--path", tmp_path, *sizes, "--everything"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=EXAMPLE.parent.parent, check=False)
    assert done.returncode == 0, done.stderr
    assert f"in nvme('{tmp_path}')" in done.stdout
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)


@pytest.mark.skipif(sys.platform != "linux", reason="limits its memory as Linux counts it")
def test_a_model_larger_than_memory_generates(tmp_path: Path) -> None:
    """151 MB of parameters under a limit of 119 MB for all else; without offload it does not even begin."""
    command = [sys.executable, GENERATE, "--path", tmp_path, "--layers", "12", "--dim", "512", "--tokens", "2"]
    command += ["--memory", "0.35"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=EXAMPLE.parent.parent, check=False)
    assert done.returncode == 0, done.stderr
    assert "Once upon a time" in done.stdout
    nbytes, room = map(int, re.findall(r"(\d+) MB of", done.stdout)[:2])
    assert room < nbytes
    stock = subprocess.run(
        [*command, "--stock"], capture_output=True, text=True, cwd=EXAMPLE.parent.parent, check=False
    )
    assert stock.returncode != 0
    assert "allocate memory" in stock.stderr
