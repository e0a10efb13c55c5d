"""pretrain.py under mpirun, of Open MPI and of MPICH."""

import shutil
import sys

import pytest

from tests.outside.launchers.runs import Marked, losses, pretrain, until
from zero_fn.local.started_rank import _free_port

MPIRUN = {
    "Open MPI": (["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2"], "OMPI_COMM_WORLD_RANK"),
    "MPICH": (["mpiexec.hydra", "-genv", "MASTER_PORT", "PORT", "-n", "2"], "PMI_RANK"),  # which names no job
}


@pytest.fixture(params=MPIRUN)
def mpirun(request):
    command, variable = MPIRUN[request.param]
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]}: examples/launch/install-debian.sh")
    return [str(_free_port()) if part == "PORT" else part for part in command], variable


def test_losses_are_those_of_torchrun(mpirun, tmp_path, expected):
    command, _ = mpirun
    Marked(tmp_path).finished([*command, sys.executable, *pretrain(tmp_path / "runs", 20)])
    assert losses(tmp_path / "runs") == expected[:20]


def test_a_killed_rank_ends_the_run_which_says_so_and_goes_on(mpirun, tmp_path, expected):
    (command, variable), marked, folder = mpirun, Marked(tmp_path), tmp_path / "runs"
    running = marked.run([*command, sys.executable, *pretrain(folder, 100_000)])
    marked.kill_rank(1, variable, folder)
    said, _ = running.communicate(timeout=60)
    assert running.returncode not in (0, None)
    # MPICH names a process that ended so, which may be one that it has killed itself.
    assert ("process rank 1" if "openmpi" in command[0] else "BAD TERMINATION") in said, said
    until(lambda: not marked.left(), 10)
    done = len(losses(folder))
    marked.finished([*command, sys.executable, *pretrain(folder, done + 4)])
    assert losses(folder)[: len(expected)] == expected[: done + 4]
