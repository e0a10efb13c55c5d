"""`examples/rlhf/` as a user runs it: each program goes on from the folder that the one before it has written."""

import os
import re
import subprocess
import sys
from unittest.mock import patch

import pytest

from tests.outside.examples.programs import ROOT, run_on_a_rank
from tests.outside.integrations.worlds import import_all

PROGRAMS = ROOT / "examples" / "rlhf"


def _on_a_rank(name, folder, *arguments):
    """The program on a rank of a pool; the folder of a script is where Python looks first."""
    with patch.object(sys, "path", [str(PROGRAMS), *sys.path]):
        return run_on_a_rank((PROGRAMS / name).read_text(encoding="utf-8"), name, folder, *arguments)


def _said(ranks, folder, line):
    """What rank 0 of two printed."""
    name, *arguments = line.split()
    said = ranks(2, deadline_s=240).run(_on_a_rank, f"{name}.py", str(folder), *arguments)
    return said[0]


def _curve(said, what):
    return [float(value) for value in re.findall(rf"{what} (-?\d+\.\d+)", said)]


def _bytes(said, phase):
    line = re.search(rf"^ *{phase}: (.*)$", said, re.MULTILINE)
    assert line, said
    return {name: int(n.replace(",", "")) for name, n in re.findall(r"(\w+) ([\d,]+)", line[1])}


def test_the_programs_are_short():
    lines = {path.stem: len(path.read_text(encoding="utf-8").splitlines()) for path in PROGRAMS.glob("*.py")}
    assert sorted(lines) == ["grpo", "ppo", "reward", "sft", "words"]
    assert max(lines.values()) <= 150
    assert lines["words"] <= 100


@pytest.fixture(scope="module")
def folder(ranks, tmp_path_factory):
    """Where sft.py has made a model, in runs/sft."""
    ranks(2, deadline_s=240).run(import_all)
    made = tmp_path_factory.mktemp("rlhf")
    loss = _curve(_said(ranks, made, "sft --rows 32"), "loss")
    assert loss[-1] < loss[0] - 2
    return made


@pytest.mark.nightly
def test_answers_are_learned_then_judged_then_made_better(ranks, folder):
    """By PPO for the rule and for the reward model, and by GRPO. In each phase of a step memory holds what it should."""
    judged = _said(ranks, folder, "reward")
    assert _curve(judged, "loss")[0] > 0.6
    assert _curve(judged, "does:")[0] > 0.8
    for line in ("ppo --steps 41", "ppo --steps 41 --reward runs/reward --save runs/judged", "grpo --steps 41"):
        said = _said(ranks, folder, line)
        reward = _curve(said, "reward")
        assert len(reward) == 5
        assert reward[0] < 0.2, said
        assert reward[-1] > reward[0] + 0.3, said
        assert _curve(said, "KL")[0] < 0.01 < 0.2 < _curve(said, "KL")[-1] < 2
        planned, trained = _bytes(said, "planned"), _bytes(said, "training")
        assert {name: trained[name] for name in ("reference",)} == {"reference": planned["reference"]}
        actor = "policy" if "policy" in planned else "actor"
        assert trained[actor] == planned[actor]
        assert (_bytes(said, "generating")[actor] > trained["reference"] * 2) == (
            actor == "actor"
        )  # whole, or its shards


def test_all_stages_write_the_same_models(ranks, folder):
    """To the bit, through everything that is drawn, and in less memory."""
    for line in ("sft --steps 3", "reward --steps 3", "ppo --steps 2", "grpo --steps 2"):
        held, curves, files = [], [], []
        for stage in range(4):
            said = _said(ranks, folder, f"{line} --stage {stage} --save {line[:3]}-{stage}")
            held.append(sum(_bytes(said, "training").values()))
            curves.append(_curve(said, "loss" if line[0] in "sr" else "reward"))
            files.append((folder / f"{line[:3]}-{stage}" / "model.safetensors").read_bytes())
        assert curves == [curves[0]] * 4
        assert files == [files[0]] * 4, line
        assert held == sorted(held, reverse=True)
        assert held[3] < 0.51 * held[0]


@pytest.mark.parametrize("line", ["sft.py --steps 1", "ppo.py --steps 1 --save runs/own"])
def test_a_program_runs_alone_and_under_torchrun(folder, tmp_path, line):
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2 " if "ppo" in line else ""
    command = [sys.executable, *f"{torchrun}{PROGRAMS}/{line}".split()]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    where = folder if "ppo" in line else tmp_path
    done = subprocess.run(command, cwd=where, env=environ, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("step 0") == 1
