"""pretrain.py under `accelerate launch`. `--multi_gpu` looks for no GPU: its ranks compute where they can."""

import sys
from importlib.util import find_spec

import pytest

from tests.outside.launchers.runs import Marked, losses, pretrain, until

if find_spec("accelerate") is None:
    pytest.skip("the extra [transformers] is not installed", allow_module_level=True)
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"]
LAUNCH += ["--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"]


def test_losses_are_those_of_torchrun(tmp_path, expected):
    Marked(tmp_path).finished([*LAUNCH, *pretrain(tmp_path / "runs", 20)])
    assert losses(tmp_path / "runs") == expected[:20]


@pytest.mark.nightly
def test_a_killed_rank_ends_the_run_which_says_so_and_goes_on(tmp_path, expected):
    marked, folder = Marked(tmp_path), tmp_path / "runs"
    running = marked.run([*LAUNCH, *pretrain(folder, 100_000)])
    marked.kill_rank(1, "RANK", folder)
    said, _ = running.communicate(timeout=60)
    assert running.returncode == 1 and "exitcode: -9" in said, said
    until(lambda: not marked.left(), 10)
    done = len(losses(folder))
    marked.finished([*LAUNCH, *pretrain(folder, done + done % 2 + 2)])
    assert losses(folder)[: len(expected)] == expected[: done + done % 2 + 2]
