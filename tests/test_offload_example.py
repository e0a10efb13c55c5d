"""`examples/offload_nvme.py` trains under its own memory limit, in small."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "offload_nvme.py"


@pytest.mark.skipif(sys.platform != "linux", reason="limits its memory as Linux counts it")
def test_the_example_trains_with_its_states_on_disk(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLE, "--path", tmp_path, "--layers", "3", "--dim", "128", "--steps", "3"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=EXAMPLE.parent.parent, check=False)
    assert done.returncode == 0, done.stderr
    assert f"in nvme('{tmp_path}')" in done.stdout
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)
