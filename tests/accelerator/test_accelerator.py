"""What leaves an accelerator and comes back, on a device that only pretends to be one. See `accelerator/device.cpp`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.accelerator import device, races
from tests.accelerator.entries import PROGRAMS as ENTRIES
from tests.accelerator.programs import PROGRAMS
from tests.accelerator.ranks import CASES, LONG
from tests.support.profiles import PROFILE

ROOT = Path(__file__).parents[2]
EXAMPLES = {"dev": 10, "ci": 500}.get(PROFILE, 5_000)


nightly = pytest.mark.nightly
needs_compiler = pytest.mark.skipif(
    device.compiler() is None, reason="the device is compiled, and there is no compiler of C++"
)


@pytest.fixture
def library():
    """The device, compiled once."""
    return device.compiled()


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


def outcomes(library, folder, size, *command):
    """What became of each case, as each process prints it at its end."""
    words = [word.format(library=library, folder=folder) for word in command]
    return [json.loads(out.splitlines()[-1]) for out in printed(folder, size, words)]


@needs_compiler
@pytest.mark.parametrize("examples", [3, pytest.param(EXAMPLES, marks=nightly)])
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=nightly)])
def test_programs_on_an_accelerator_are_right_wherever_their_states_rest(library, tmp_path, size, examples):
    cases = [name for name in CASES if examples > 3 or name not in LONG]
    if size == 1:
        tiers = ("Cpu", "Nvme") if examples > 3 else ("Cpu",)
        cases = {f"{name}, {tier}" for name in (*PROGRAMS, *races.PROGRAMS) for tier in tiers}
    command = f"tests.accelerator {{library}} {{folder}} {examples} {size} RANK"
    for found in outcomes(library, tmp_path / "own", size, *command.split()):
        assert found == dict.fromkeys([*cases, "random programs"], "right")


@needs_compiler
@pytest.mark.parametrize(
    ("size", "name"),
    [
        (1, "daily"),
        pytest.param(1, "training", marks=nightly),
        pytest.param(2, "training", marks=nightly),
        pytest.param(2, "collectives", marks=nightly),
    ],
)
def test_promises_are_kept_on_an_accelerator(library, tmp_path, size, name):
    """What tests/promises says of programs, and tests/units/transport of collectives."""
    words = ["tests.accelerator.promises", library, tmp_path / "own", size, "RANK", name]
    for out in printed(tmp_path / "own", size, words):
        assert " passed" in out.splitlines()[-1]


@nightly
@needs_compiler
def test_a_rank_that_stops_is_named_to_the_one_that_waits(library, tmp_path):
    words = ["tests.accelerator.stopped", library, tmp_path / "own", "RANK", 2]
    assert all("a rank that stops: right" in out for out in printed(tmp_path / "own", 2, words))


@nightly
@needs_compiler
def test_what_people_call_first_is_right_on_an_accelerator(library, tmp_path):
    pytest.importorskip("transformers", reason="the extra [transformers] is not installed")
    (found,) = outcomes(library, tmp_path / "own", 1, *["tests.accelerator.entries", "{library}", "{folder}"])
    expected = dict.fromkeys([run.__name__ for run in ENTRIES], "right")
    assert found == {**expected, "in_float16": device.UNMEASURED}


@nightly
@needs_compiler
def test_a_llama_generates_the_same_tokens_from_the_device_the_host_and_a_disk(library, tmp_path):
    pytest.importorskip("transformers", reason="the extra [transformers] is not installed")
    command = "tests.accelerator.generation {library} {folder} --shape small --tokens 8"
    (found,) = outcomes(library, tmp_path / "own", 1, *command.split())
    assert found == dict.fromkeys(["device", "host", "disk"], "right")


@nightly
@needs_compiler
def test_losses_of_the_benchmark_do_not_depend_on_where_states_rest(library, tmp_path):
    (losses,) = outcomes(
        library, tmp_path / "own", 1, *["tests.accelerator.benchmark", "{library}", "losses", "{folder}"]
    )
    assert {"plain", "device", "states", "host", "host, forward", "disk", "plain, again"} <= set(losses)
    assert losses.pop("host, 16 bits") != losses["host"], "its gradients are rounded"
    assert len(set(losses.values())) == 1, losses
