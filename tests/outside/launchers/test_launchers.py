"""pretrain.py under torchrun, `accelerate launch` and mpirun, which lose a rank or are told to leave; it goes on to the bit.

Slurm, Ray, Kubernetes and hosts that come and go have files of their own. Every day: `../examples/test_examples.py`.
"""

import os
import shutil
import signal
import sys

import pytest

from tests.outside.launchers.runs import TORCHRUN, Marked, losses, pretrain, until
from zero_fn.local.from_environment import _free_port

pytestmark = pytest.mark.nightly

# `--multi_gpu` looks for no GPU: ranks compute where they can.
ACCELERATE = ["--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
LAUNCHERS = {
    "accelerate": (
        [sys.executable, "-m", "accelerate.commands.launch", *ACCELERATE, "--main_process_port=0"],
        "RANK",
        "exitcode: -9",
    ),
    "Open MPI": (
        ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable],
        "OMPI_COMM_WORLD_RANK",
        "process rank 1",
    ),
    "MPICH": (  # which names no job; and a process that ended so, which may be one that it has killed itself
        ["mpiexec.hydra", "-genv", "MASTER_PORT", "PORT", "-n", "2", sys.executable],
        "PMI_RANK",
        "BAD TERMINATION",
    ),
}
"""A command, its name of a rank's number, and what it says of a rank that was killed."""


def _goes_on(marked, command, folder, expected):
    """Nothing is left of a run, and it goes on with the losses of one that nothing has disturbed."""
    until(lambda: not marked.left(), 10)
    done = len(losses(folder))
    assert losses(folder)[: len(expected)] == expected[:done]
    end = done + done % 2 + 2  # of which every second is saved
    marked.finished([*command, *pretrain(folder, end)])
    assert losses(folder)[: len(expected)] == expected[:end]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_rank_ends_the_run_which_says_so_and_goes_on(launcher, tmp_path, expected):
    command, variable, says = LAUNCHERS[launcher]
    if launcher == "accelerate":
        pytest.importorskip("accelerate", reason="the extra [transformers] is not installed")
    elif shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]}: examples/launch/install-debian.sh")
    command = [str(_free_port()) if part == "PORT" else part for part in command]
    marked, folder = Marked(tmp_path), tmp_path / "runs"
    running = marked.run([*command, *pretrain(folder, 100_000)])
    marked.kill_rank(1, variable, folder)
    said, _ = running.communicate(timeout=60)
    assert running.returncode not in (0, None)
    assert says in said, said
    _goes_on(marked, command, folder, expected)


@pytest.mark.parametrize("told", ["torchrun", "one rank"])
def test_who_is_told_to_leave_saves_and_goes_on_where_it_was(told, tmp_path, expected):
    marked, folder, torchrun = Marked(tmp_path), tmp_path / "runs", [*TORCHRUN, "2"]
    leaves = [*torchrun, *pretrain(folder, 100_000), "--save-every", "100000", "--leave-within", "20"]
    running = marked.run(leaves)
    while "step 10:" not in running.stdout.readline():
        assert running.poll() is None
    (rank,) = marked.ranks(1, "RANK")
    os.kill(running.pid if told == "torchrun" else rank, signal.SIGTERM)
    said, _ = running.communicate(timeout=60)
    assert running.returncode == 1  # torchrun has no other for a rank that ends with 75
    assert ("got signal: 15" if told == "torchrun" else "exitcode  : 75") in said, said
    assert len(losses(folder)) > 10
    _goes_on(marked, torchrun, folder, expected)
