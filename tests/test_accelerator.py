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

ROOT = Path(__file__).parents[1]


def begun(program: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", f"tests.accelerator.{program}", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, err[-3000:]
    found: dict[str, Any] = json.loads(out)
    return found


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
