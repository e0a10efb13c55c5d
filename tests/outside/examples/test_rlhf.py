"""`examples/rlhf/` as a user runs it: each program goes on from the folder that the one before it has written."""

import re
import sys

import pytest

from tests.outside.examples.programs import ROOT, TORCHRUN, printed, said_on_ranks
from tests.outside.integrations.worlds import import_all

PROGRAMS = ROOT / "examples" / "rlhf"


def _said(ranks, folder, line):
    name, _, arguments = line.partition(" ")
    return said_on_ranks(ranks(2, deadline_s=240), folder, f"rlhf/{name}.py {arguments}")


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
        assert max(reward) > reward[0] + 0.3, said  # single batches of two ranks differ as much
        assert _curve(said, "KL")[0] < 0.01 < 0.2 < _curve(said, "KL")[-1] < 2
        planned, trained = _bytes(said, "planned"), _bytes(said, "training")
        assert trained["reference"] == planned["reference"]
        actor = "policy" if "policy" in planned else "actor"
        assert trained[actor] == planned[actor]
        is_whole = _bytes(said, "generating")[actor] > trained["reference"] * 2
        assert is_whole == (actor == "actor")  # or its shards


def test_all_stages_write_the_same_models(ranks, folder):
    """To the bit, through everything that is drawn, and in less memory."""
    for line in ("sft --steps 3", "reward --steps 3", "ppo --steps 2", "grpo --steps 2"):
        held, curves, files = [], [], []
        for stage in (0, 1, 3):
            said = _said(ranks, folder, f"{line} --stage {stage} --save {line[:3]}-{stage}")
            held.append(sum(_bytes(said, "training").values()))
            curves.append(_curve(said, "loss" if line[0] in "sr" else "reward"))
            files.append((folder / f"{line[:3]}-{stage}" / "model.safetensors").read_bytes())
        assert curves == [curves[0]] * 3
        assert files == [files[0]] * 3, line
        assert held == sorted(held, reverse=True)
        assert held[-1] < 0.51 * held[0]


@pytest.mark.nightly
@pytest.mark.parametrize(("start", "name"), [([sys.executable], "sft"), ([*TORCHRUN, "2"], "ppo")])
def test_a_program_runs_alone_and_under_torchrun(folder, start, name):
    said = printed(*start, PROGRAMS / f"{name}.py", "--steps", "1", "--save", f"runs/own-{name}", cwd=folder)
    assert said.count("step 0") == 1
