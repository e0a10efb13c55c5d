"""pretrain.py as each launcher runs it: its command, its losses, and what is left of it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import zero_fn as zf
from tests.outside.examples.programs import ROOT, TORCHRUN

__all__ = ["SIZES", "TORCHRUN", "Marked", "has_saved", "losses", "pretrain", "running_in", "until", "wait_for"]

SIZES = ["--layers=2", "--dim=32", "--heads=2", "--seq=16", "--batch=12", "--save-every=2"]


def pretrain(folder, steps):
    """The program and its options."""
    return [str(ROOT / "examples" / "pretrain.py"), *SIZES, f"--steps={steps}", f"--save={folder}"]


def has_saved(folder):
    """Whether there is a checkpoint."""
    return any(folder.glob("step-*/manifest.json"))


def losses(folder):
    """Of all steps up to the newest checkpoint."""
    return zf.load(folder, only="extra")["losses"]


def wait_for(is_so, deadline_s):
    """Whether it has come true in time."""
    end = time.monotonic() + deadline_s
    while not (found := bool(is_so())) and time.monotonic() < end:
        time.sleep(0.01)
    return found


def until(is_so, deadline_s=60.0):
    """Waits until it is true."""
    assert wait_for(is_so, deadline_s), f"not within {deadline_s:g} s"


def running_in(folder):
    """Commands of processes that have this folder in their environment, as all that a launcher has started there."""
    return [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid, _ in _processes(folder)]


def _processes(folder):
    """Of these the number, and the environment."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            environ = path.read_text(errors="replace")
        except OSError:  # has ended by now
            continue
        if str(folder) in environ:
            yield int(path.parent.name), environ.split("\0")


class Marked:
    """Processes that have a folder in their environment."""

    def __init__(self, folder):
        self._folder = folder
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where `python` is this one
        own = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ZERO_FN_TEST": str(folder)}
        self.environ = os.environ | own

    def run(self, command):
        """Starts a command, whose output is one pipe."""
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=self.environ, stdout=pipe, stderr=subprocess.STDOUT, text=True)

    def finished(self, command):
        """What a command has said that ends well."""
        running = self.run(command)
        said, _ = running.communicate(timeout=120)
        assert running.returncode == 0, said
        return said

    def kill_rank(self, number, variable, folder):
        """Kills a rank, once there is a checkpoint."""
        until(lambda: has_saved(folder))
        (pid,) = self.ranks(number, variable)
        os.kill(pid, signal.SIGKILL)

    def ranks(self, number, variable):
        """Processes that run this rank: one, once it has begun."""
        wanted = f"{variable}={number}"
        return [pid for pid, environ in _processes(self._folder) if wanted in environ and _is_python(pid)]

    def left(self):
        """What processes there are that belong to the test."""
        return running_in(self._folder)


def _is_python(pid):
    return os.path.realpath(f"/proc/{pid}/exe") == os.path.realpath(sys.executable)
