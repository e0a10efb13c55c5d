"""What leaves an accelerator and comes back, on a device that only pretends to be one. See `accelerator/device.cpp`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.accelerator import device
from tests.accelerator.programs import PROGRAMS

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(device.compiler() is None, reason="the device is compiled, and there is no compiler of C++")
def test_programs_on_an_accelerator_are_right_wherever_their_states_rest(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    cache = getattr(pytestconfig, "cache", None)
    library = device.compiled(cache.mkdir("accelerator") if cache is not None else tmp_path)
    command = [sys.executable, "-m", "tests.accelerator.programs", str(library), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert len(found) == 2 * len(PROGRAMS)
    assert {name: said for name, said in found.items() if said != "right"} == {}
