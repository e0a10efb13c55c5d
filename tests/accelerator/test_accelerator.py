"""What leaves an accelerator and comes back, on a device that only pretends to be one. See `accelerator/device.cpp`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.accelerator import collectives, device, races
from tests.accelerator.entries import PROGRAMS as ENTRIES
from tests.accelerator.more import ON_PRETEND
from tests.accelerator.programs import PROGRAMS
from tests.accelerator.ranks import CASES
from tests.support.profiles import PROFILE

ROOT = Path(__file__).parents[2]
EXAMPLES = {"dev": 10, "ci": 500}.get(PROFILE, 5_000)


needs_compiler = pytest.mark.skipif(
    device.compiler() is None, reason="the device is compiled, and there is no compiler of C++"
)


@pytest.fixture
def library(pytestconfig, tmp_path):
    """The device, compiled once."""
    cache = getattr(pytestconfig, "cache", None)
    return device.compiled(cache.mkdir("accelerator") if cache is not None else tmp_path)


def said(library, folder, size):
    """What became of each case, by rank."""
    command = ["tests.accelerator", library, folder, EXAMPLES // size, size, "RANK"]
    return [json.loads(out) for out in printed(folder, size, command)]


def printed(folder, size, command):
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


@needs_compiler
def test_programs_and_stages_on_an_accelerator_are_right_wherever_their_states_rest(library, tmp_path):
    (alone,) = said(library, tmp_path / "alone", 1)
    losses = alone.pop("losses")
    assert {"plain", "device", "states", "host", "host, forward", "disk", "plain, again"} <= set(losses)
    assert losses.pop("host, 16 bits") != losses["host"], "its gradients are rounded"
    assert len(set(losses.values())) == 1, losses
    assert len(alone) == 2 * (len(PROGRAMS) + len(races.PROGRAMS)) + 1
    assert {name: found for name, found in alone.items() if found != "right"} == {}
    for found in said(library, tmp_path / "two", 2):
        assert found == dict.fromkeys([*CASES, "random programs"], "right")
    words = ["tests.accelerator.collectives", library, tmp_path / "collectives", "RANK", 2]
    out, other = printed(tmp_path / "collectives", 2, words)
    assert [line.partition(": ")[0] for line in out.splitlines()] == [*collectives.CASES, "a rank that stops"]
    assert all(": right, " in line for line in out.splitlines()), out
    assert other == ""


def said_alone(library, folder, module, *arguments):
    """What became of each case of a program of one process, which is the last line that it prints."""
    (out,) = printed(folder, 1, [f"tests.accelerator.{module}", library, *arguments])
    found = json.loads(out.splitlines()[-1])
    return found


@needs_compiler
def test_programs_that_a_real_device_runs_compiled_are_right(library, tmp_path):
    found = said_alone(library, tmp_path / "more", "more")
    assert found == dict.fromkeys([run.__name__ for run in ON_PRETEND], "right")


@needs_compiler
def test_what_people_call_first_is_right_on_an_accelerator(library, tmp_path):
    pytest.importorskip("transformers", reason="the extra [transformers] is not installed")
    pytest.importorskip("accelerate", reason="the extra [transformers] is not installed")
    found = said_alone(library, tmp_path / "own", "entries", tmp_path / "own")
    assert found == dict.fromkeys([run.__name__ for run in ENTRIES], "right")


@needs_compiler
def test_a_llama_generates_the_same_tokens_from_the_device_the_host_and_a_disk(library, tmp_path):
    pytest.importorskip("transformers", reason="the extra [transformers] is not installed")
    found = said_alone(library, tmp_path / "own", "generation", tmp_path / "own", "--numel", "3e5", "--tokens", "8")
    assert found == dict.fromkeys(["device", "host", "disk"], "right")
