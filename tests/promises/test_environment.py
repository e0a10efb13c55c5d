"""`python -m zero_fn env` says what is here and what is missing; `links` measures it, and leaves nothing."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import zero_fn as zf
from tests.support.groups import pretended
from tests.units.storage.disks import small_disk
from zero_fn.planning import links_command

MIB = 1 << 20
REFUSED = """
import ctypes, resource, runpy, struct, sys
# A filter of seccomp, as containers have it: io_uring_setup (425) gets EPERM, other calls go on.
rows = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)]
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("rows", ctypes.c_char_p)]
program = Program(len(rows), b"".join(struct.pack("HBBI", *row) for row in rows))
libc = ctypes.CDLL(None)
assert not libc.prctl(38, 1, 0, 0, 0) and not libc.prctl(22, 2, ctypes.byref(program), 0, 0)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 4096))
sys.argv = ["zero_fn", "env", "--json"]
runpy.run_module("zero_fn", run_name="__main__")
"""


def ran(*arguments, code="", **environ):
    """A command in a process of its own; `code` in its place, if there is some."""
    what = ["-c", code] if code else ["-m", "zero_fn", *arguments]
    kept = {n: v for n, v in os.environ.items() if n != "CC"}
    return subprocess.run([sys.executable, *what], capture_output=True, text=True, env={**kept, **environ}, timeout=120)


def test_env_is_a_page_that_names_nobody():
    done = ran("env", "--json", HOME="/home/somebody", USER="somebody", XDG_CACHE_HOME=str(Path.home() / ".cache"))
    page = json.loads(done.stdout)
    assert (done.returncode, page["uses"]["zero_fn"]) == (0, zf.__version__), done.stderr
    assert f"PyTorch version: {torch.__version__}" in page["torch"]
    assert page["uses"]["between ranks of this host"] == "shared memory"
    host = socket.gethostname().partition(".")[0]
    assert not any(name in done.stdout for name in ("somebody", *([host] if len(host) > 2 else [])))


def test_env_says_what_is_slower_without_a_compiler_io_uring_and_locked_memory():
    done = ran(code=REFUSED, PATH="")
    page = json.loads(done.stdout)
    found = {what.partition(" (")[0].partition(":")[0]: kind for kind, what, _ in page["findings"]}
    assert done.returncode == 0
    assert found.items() >= {"no kernels": "slower", "no io_uring": "slower"}.items()
    assert "seccomp" in next(fix for _, what, fix in page["findings"] if what.startswith("no io_uring"))
    assert page["uses"]["disks"].startswith("threads: no io_uring")
    assert page["uses"]["steps on the host"].startswith("torch, no kernels: no C compiler")


def test_env_fails_where_training_would():
    """Where no file takes a byte, as on a full disk, and gloo is told to use an interface that is not there."""
    code = "import resource, runpy, sys, tempfile, zero_fn; tempfile.tempdir = None; sys.argv[1:] = ['env'];"
    code += "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); runpy.run_module('zero_fn', run_name='__main__')"
    done = ran(code=code, GLOO_SOCKET_IFNAME="nowhere")
    assert done.returncode == 1
    assert "missing: no folder takes temporary files" in done.stdout
    assert "missing: gloo does not start" in done.stdout
    assert "slower: ranks of this host share no memory: [Errno 27]" in done.stdout
    assert done.stdout.count("fix: ") == done.stdout.count("missing: ") + done.stdout.count("slower: ")


@pytest.mark.nightly
def test_links_are_measured_and_read_by_autoplan(tmp_path):
    disk, out = tmp_path / "disk", tmp_path / "links.json"
    disk.mkdir()
    done = ran("links", "--path", str(disk), "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert list(disk.iterdir()) == []
    links = zf.planning.LinkSpeeds.read(out)
    assert done.stdout == f"{links}\n"
    assert min(links.memory, links.disk_read, links.disk_write, links.sent["dp"]) > 0
    with pretended(2) as mesh:
        assert zf.planning.autoplan(nn.Linear(4, 4), mesh, "1GiB", links=links, tier=zf.nvme(disk)).best.fits


@pytest.mark.nightly
def test_links_are_those_of_the_ranks_of_torchrun():
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "-m", "zero_fn", "links"]
    done = subprocess.run([sys.executable, *start], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.count("sent along 'dp'")) == (0, 1), "rank 0 prints"


def test_links_say_why_a_place_cannot_be_measured(tmp_path, capsys):
    def told(path, *more):
        assert links_command.main(["--path", str(path), *more]) == 1
        return capsys.readouterr().err

    (tmp_path / "file").touch()
    assert "ENOENT" in told(tmp_path / "nowhere")
    assert "ENOTDIR" in told(tmp_path / "file")
    assert "FileNotFoundError" in told(tmp_path, "--out", str(tmp_path / "nowhere" / "links.json"))
    with small_disk(tmp_path / "small", "size=50m") as small:  # less than one rank measures
        assert "TierError" in told(small)
        assert list(small.iterdir()) == []
    with small_disk(tmp_path / "kept", "ro") as kept:
        assert "EROFS" in told(kept)


def test_links_leave_nothing_when_interrupted(tmp_path):
    def heeds():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell starts jobs in the background with Ctrl-C ignored

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a short name: it has sockets
        command = [sys.executable, "-m", "zero_fn", "links", "--path", folder]
        environ = {**os.environ, "TMPDIR": folder, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}  # torch makes that one
        job = subprocess.Popen(
            command, env=environ, start_new_session=True, stderr=subprocess.PIPE, text=True, preexec_fn=heeds
        )
        try:
            # Not before: between two lines of `multiprocessing` its folder is there, and nobody is to remove it.
            while not any(Path(folder).glob("pymp-*/*")):
                assert job.poll() is None
                time.sleep(0.01)
            os.killpg(job.pid, signal.SIGINT)  # as a terminal does
            job.communicate(timeout=60)  # and all that it started has closed the pipe
        finally:
            job.kill()
        assert (job.returncode, os.listdir(folder)) == (130, [])
