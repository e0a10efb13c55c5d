"""What leaves an accelerator and comes back, on a device that only pretends to be one. See `accelerator/device.cpp`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.accelerator import device
from tests.accelerator.programs import PROGRAMS
from tests.accelerator.ranks import CASES
from tests.profiles import PROFILE

ROOT = Path(__file__).parents[2]
EXAMPLES = {"dev": 20, "ci": 500}.get(PROFILE, 5_000)


def begun(program: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", f"tests.accelerator.{program}", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> Any:
    try:
        out, err = process.communicate(timeout=240 + EXAMPLES)
    finally:
        process.kill()
    assert process.returncode == 0, err[-3000:]
    return json.loads(out)


@pytest.mark.skipif(device.compiler() is None, reason="the device is compiled, and there is no compiler of C++")
def test_programs_and_stages_on_an_accelerator_are_right_wherever_their_states_rest(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """One test, so that the device is compiled by one process of tests only."""
    cache = getattr(pytestconfig, "cache", None)
    library = device.compiled(cache.mkdir("accelerator") if cache is not None else tmp_path)
    alone = said(begun("programs", library, tmp_path))
    assert len(alone) == 2 * len(PROGRAMS)
    assert {name: found for name, found in alone.items() if found != "right"} == {}
    for found in map(said, [begun("ranks", library, tmp_path, rank) for rank in range(2)]):
        assert found == dict.fromkeys(CASES, "right")
    losses = said(begun("benchmark", library, tmp_path))
    assert set(losses) == {"device", "states", "host", "host, forward", "disk"}
    assert len(set(losses.values())) == 1, losses
    for size in (1, 2):
        folder = tmp_path / str(size)
        folder.mkdir()
        command = "random_programs", library, folder, EXAMPLES // size, 0, size
        for found in map(said, [begun(*command, rank) for rank in range(size)]):
            assert found == "right"
