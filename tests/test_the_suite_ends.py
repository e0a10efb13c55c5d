"""Whatever a test does: the suite goes on, and the next test finds nothing of it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_fn as zf
from tests.simulation import axis
from tests.support.groups import alone

ROOT = Path(__file__).parents[1]


class OutOfTime(Exception):
    """What pytest-timeout raises in the main thread."""


def summed_for_ever():
    while True:
        dist.all_reduce(torch.zeros(1), group=axis().get_group())


def test_simulated_ranks_whose_test_is_out_of_time_end_and_the_next_test_trains(simulated):
    def ring(*_):
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(OutOfTime):
            simulated(2).run(summed_for_ever)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not dist.is_initialized()
    with alone() as mesh:
        model = zf.shard_params(nn.Linear(4, 4), mesh)
        with zf.metrics(model, torch.optim.SGD(model.parameters(), lr=0.1), sinks=[], every=1) as metrics:
            model(torch.ones(2, 4)).sum().backward()
            metrics.step()
    assert simulated(2).run(dist.get_rank) == [0, 1]


def run(folder, text, *arguments):
    """What pytest says of a file of tests, with the watchdog and without anything else of this suite."""
    (folder / "conftest.py").write_text(
        "from tests.support import watchdog\n"
        "watchdog._GRACE_S = 0.5\n"
        "def pytest_configure(config):\n"
        "    if hasattr(config, 'workerinput') or not config.getoption('numprocesses', None):\n"
        "        config.pluginmanager.register(watchdog.Watchdog())\n"
    )
    (folder / "test_planted.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}", *arguments]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    ended = subprocess.run(
        [*command, str(folder)], cwd=folder, env=environ, text=True, capture_output=True, timeout=100
    )
    return ended.stdout + ended.stderr


WAITS_IN_C = """
import ctypes, pytest

@pytest.mark.timeout(1)
def test_waits():
    lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    lock(mutex)
    lock(mutex)  # for good, with the lock of the interpreter: no signal and no thread is heard

@pytest.mark.parametrize("number", range(4))
def test_others(number):
    pass
"""


def test_a_wait_in_c_is_ended_and_the_other_tests_run(tmp_path):
    said = run(tmp_path, WAITS_IN_C, "-n2")
    assert "test_waits overstays" in said, said
    assert "1 failed, 4 passed" in said, said
