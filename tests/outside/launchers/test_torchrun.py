"""pretrain.py under torchrun that is told to leave. What a killed rank does there is in ../examples/test_examples.py."""

import os
import signal

import pytest

from tests.outside.launchers.runs import TORCHRUN, Marked, losses, pretrain, until


@pytest.mark.nightly
@pytest.mark.parametrize("told", ["torchrun", "one rank"])
def test_who_is_told_to_leave_saves_and_goes_on_where_it_was(told, tmp_path, expected):
    marked, folder = Marked(tmp_path), tmp_path / "runs"
    leaves = [*TORCHRUN, "2", *pretrain(folder, 100_000), "--save-every", "100000", "--leave-within", "20"]
    running = marked.run(leaves)
    assert running.stdout is not None
    while "step 10:" not in running.stdout.readline():
        assert running.poll() is None
    (rank,) = marked.ranks(1, "RANK")
    os.kill(running.pid if told == "torchrun" else rank, signal.SIGTERM)
    said, _ = running.communicate(timeout=60)
    assert running.returncode == 1  # torchrun has no other for a rank that ends with 75
    assert ("got signal: 15" if told == "torchrun" else "exitcode  : 75") in said, said
    until(lambda: not marked.left(), 10)
    done = len(losses(folder))
    assert done > 10 and losses(folder)[: len(expected)] == expected[:done]
    marked.finished([*TORCHRUN, "2", *pretrain(folder, done + done % 2 + 2)])  # of which every second is saved
    assert losses(folder)[: len(expected)] == expected[: done + done % 2 + 2]
