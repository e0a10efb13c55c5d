"""What leaves an accelerator and comes back, on a device that only pretends to be one. See `accelerator/device.cpp`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.accelerator import collectives, device, races
from tests.accelerator.programs import PROGRAMS
from tests.accelerator.ranks import CASES
from tests.profiles import PROFILE

ROOT = Path(__file__).parents[2]
EXAMPLES = {"dev": 10, "ci": 500}.get(PROFILE, 5_000)


def said(library: Path, folder: Path, size: int) -> list[dict[str, Any]]:
    """What became of each case, by rank."""
    command = ["tests.accelerator", library, folder, EXAMPLES // size, size, "RANK"]
    return [json.loads(out) for out in printed(folder, size, command)]


def printed(folder: Path, size: int, command: Sequence[object]) -> list[str]:
    """What processes print, each told its rank."""
    folder.mkdir()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", *(str(rank) if word == "RANK" else str(word) for word in command)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    found = []
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=240 + EXAMPLES)
            assert rank.returncode == 0, out[-3000:] + err[-3000:]
            found.append(out)
    finally:
        for rank in ranks:
            rank.kill()
    return found


@pytest.mark.skipif(device.compiler() is None, reason="the device is compiled, and there is no compiler of C++")
def test_programs_and_stages_on_an_accelerator_are_right_wherever_their_states_rest(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """One test, so that the device is compiled by one process of tests only."""
    cache = getattr(pytestconfig, "cache", None)
    library = device.compiled(cache.mkdir("accelerator") if cache is not None else tmp_path)
    (alone,) = said(library, tmp_path / "alone", 1)
    losses = alone.pop("losses")
    assert {"plain", "device", "states", "host", "host, forward", "disk", "plain, again"} <= set(losses)
    assert len(set(losses.values())) == 1, losses
    assert len(alone) == 2 * (len(PROGRAMS) + len(races.PROGRAMS)) + 1
    assert {name: found for name, found in alone.items() if found != "right"} == {}
    for found in said(library, tmp_path / "two", 2):
        assert found == dict.fromkeys([*CASES, "random programs"], "right")
    words = ["tests.accelerator.collectives", library, tmp_path / "collectives", "RANK", 2]
    for out in printed(tmp_path / "collectives", 2, words):
        assert [line.partition(": ")[0] for line in out.splitlines()] == [*collectives.CASES, "a rank that stops"]
        assert all(": right, " in line for line in out.splitlines()), out
