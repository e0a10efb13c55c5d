"""examples/launch/ray_train.py: examples/pretrain.py on workers of Ray Train, one of which is killed."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.outside.examples.programs import ROOT, skip_without
from tests.outside.launchers.runs import SIZES, has_saved, losses, running_in, wait_for

skip_without("ray", extra="launchers")

pytestmark = pytest.mark.nightly
QUIETLY = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "RAY_DEDUP_LOGS": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "120",
}
"""Fewer processes, on the loopback interface."""

STARTED = "world_rank=1, local_rank=1"


@pytest.fixture
def folder():
    """A short name: Ray makes sockets in it, whose paths may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as name:
        yield Path(name)


def _run_and_kill_a_worker(folder, failures):
    """Runs the example, and kills worker 1 after the first checkpoint. Its status, and what it said."""
    # Each of Ray's dozen processes would import it, for one second, to check formats that nobody uses here.
    (folder / "rfc3987_syntax.py").write_text("raise ImportError")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | QUIETLY
    environ |= {"HOME": str(folder), "RAY_TMPDIR": str(folder), "PYTHONPATH": f"{folder}:{ROOT}"}
    program = [str(ROOT / "examples" / "launch" / "ray_train.py"), "--workers=2", f"--failures={failures}"]
    # If the tests are killed, so is the driver, and with it what Ray has started.
    command = ["setpriv", "--pdeathsig=KILL", sys.executable, *program, "--", *SIZES, "--steps=40", "--save=runs"]
    told = folder / "log"
    with told.open("w") as log:
        driver = subprocess.Popen(command, cwd=folder, env=environ, stdout=log, stderr=log)
    try:
        wait_for(lambda: has_saved(folder / "runs") or driver.poll() is not None, 150)
        wait_for(lambda: STARTED in told.read_text() or driver.poll() is not None, 5)  # Ray passes lines on later
        assert driver.poll() is None, told.read_text()
        os.kill(int(re.findall(r"pid=(\d+)\) world_rank=1", told.read_text())[0]), signal.SIGKILL)
        driver.wait(150)
    finally:
        driver.kill()
    return driver.wait(), told.read_text()


def test_a_killed_worker_costs_the_steps_since_the_last_checkpoint(folder, expected):
    status, said = _run_and_kill_a_worker(folder, failures=1)
    assert status == 0, said
    assert said.count(STARTED) == 2, said
    assert losses(folder / "runs") == expected[:40]
    assert wait_for(lambda: not running_in(folder), 10), running_in(folder)


def test_a_killed_worker_that_is_not_started_again_ends_the_program_and_is_named(folder):
    before = set(os.listdir("/dev/shm"))
    status, said = _run_and_kill_a_worker(folder, failures=0)
    assert status == 1, said
    error = said[said.rindex("ray.train.WorkerGroupError: ") :]
    # Which of the two Ray hears of first is a race; either names the rank.
    names = ("LostRankError: Rank 1 of axis 'dp' (2)", "[Rank 1 Error Snippet]")
    assert any(name in error for name in names), error
    assert wait_for(lambda: not running_in(folder), 10), running_in(folder)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "ray" in name or "plasma" in name]
