"""`python -m zero_fn env` says what is here and what is missing; `links` measures it, and leaves nothing."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from torch import nn

import zero_fn as zf
from tests.support.groups import pretended
from tests.units.storage.disks import limited, small_disk
from zero_fn.planning import environment, measured
from zero_fn.planning.sweep import Setting, _advice, _limit, _ours
from zero_fn.storage.files import SpillFile

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


def test_env_is_a_page_of_json_that_names_nobody():
    secrets = {"HOME": "/home/somebody", "USER": "somebody", "HF_TOKEN": "hf_0123", "MASTER_ADDR": "node17"}
    paths = {"XDG_CACHE_HOME": str(Path.home() / ".cache"), "NCCL_DEBUG_FILE": "/home/somebody/nccl", "TMPDIR": "/tmp"}
    done = ran("env", "--json", NCCL_SOCKET_IFNAME="eth0,lo", NCCL_COMM_ID="10.0.0.7:99", **secrets, **paths)
    page = json.loads(done.stdout)
    assert (done.returncode, page["versions"]["zero_fn"]) == (0, zf.__version__), done.stderr
    assert page["machine"]["memory_nbytes"] > page["machine"]["free in memory of the machine_nbytes"] > 0
    assert page["uses"]["between ranks of this host"] == "shared memory"
    assert page["variables"].items() >= {"NCCL_SOCKET_IFNAME": "eth0,lo", "NCCL_DEBUG_FILE": "(set)"}.items()
    host = socket.gethostname().partition(".")[0]
    for name in ("somebody", "hf_0123", "node17", "10.0.0.7", *([host] if len(host) > 2 else [])):
        assert name not in done.stdout


def test_env_says_what_is_slower_without_a_compiler_io_uring_and_locked_memory():
    done = ran(code=REFUSED, PATH="")
    page = json.loads(done.stdout)
    found = {what.partition(" (")[0].partition(":")[0]: kind for kind, what, _ in page["findings"]}
    assert done.returncode == 0
    assert found.items() >= {"no kernels": "slower", "no io_uring": "slower"}.items()
    assert "seccomp" in next(fix for _, what, fix in page["findings"] if what.startswith("no io_uring"))
    assert page["machine"]["locked memory (ulimit -l)_nbytes"] == 4096
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


def test_env_says_that_torch_cannot_use_a_device(monkeypatch, tmp_path):
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23")
    monkeypatch.setattr(environment, "_NVIDIA", tmp_path / "version")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert dict(environment._versions())["driver of NVIDIA"] == "580.95.05"
    ((kind, what, _),) = environment._with_devices({}, {})
    assert (kind, "cannot use the NVIDIA device" in what) == ("missing", True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # asked for
    assert list(environment._with_devices({}, {})) == []


@pytest.mark.nightly
def test_links_are_measured_beside_fio_and_read_by_autoplan(tmp_path):
    disk, tools, out = tmp_path / "disk", tmp_path / "tools", tmp_path / "links.json"
    disk.mkdir()
    tools.mkdir()
    answer = json.dumps({"jobs": [{"read": {"bw_bytes": 1e9}, "write": {"bw_bytes": 2e9}}]})
    (tools / "fio").write_text(f"#!/bin/sh\necho \"$@\" >> {tools}/asked\necho '{answer}'\n")
    (tools / "fio").chmod(0o755)
    places = ("--path", str(disk), "--out", str(out))
    done = ran("links", "--json", "--seconds", "3", *places, PATH=f"{tools}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert json.loads(out.read_text()) == found
    assert list(disk.iterdir()) == []
    (measured_disk,) = found["disks"]
    ours, best, fio = (Setting(**each) for each in measured_disk["again"])
    assert (ours.block_nbytes, ours.at_once, fio.read, fio.write) == (8 * MIB, 8, 1e9, 2e9)
    assert f"--bs={8 * MIB} --iodepth=8" in (tools / "asked").read_text()
    tried = [Setting(**each) for each in measured_disk["tried"]]
    assert max(tried, key=lambda each: each.pace) == tried[0]
    assert (tried[0].engine, tried[0].block_nbytes, tried[0].at_once) == (best.engine, best.block_nbytes, best.at_once)
    links = zf.planning.LinkSpeeds.read(out)
    assert min(links.memory, links.disk_read, links.disk_write, links.sent["dp"]) > 0
    with pretended(2) as mesh:
        assert zf.planning.autoplan(nn.Linear(4, 4), mesh, "1GiB", links=links, tier=zf.nvme(disk)).best.fits


@pytest.mark.nightly
def test_links_are_those_of_the_ranks_of_torchrun():
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "-m", "zero_fn", "links"]
    done = subprocess.run(
        [sys.executable, *start, "--seconds", "2", "--json"], capture_output=True, text=True, timeout=120
    )
    found = json.loads(done.stdout)  # of one rank alone
    assert (done.returncode, found["ranks"], found["between"]) == (0, 3, "shared memory")


def test_links_say_why_a_place_cannot_be_measured(tmp_path, capsys):
    def told(path, *more):
        assert measured.main(["--path", str(path), "--seconds", "1", *more]) == 1
        return capsys.readouterr().err

    (tmp_path / "file").touch()
    assert "ENOENT" in told(tmp_path / "nowhere")
    assert "ENOTDIR" in told(tmp_path / "file")
    assert "needed_for : --out" in told(tmp_path, "--out", str(tmp_path / "nowhere" / "links.json"))
    with limited(resource.RLIMIT_FSIZE, MIB):
        assert "ulimit -f" in told(tmp_path)
    with small_disk(tmp_path / "small", "size=300m") as small:
        assert "1.88 GiB of disk, 300.00 MiB can be taken" in told(small)
        assert list(small.iterdir()) == []
    with small_disk(tmp_path / "kept", "ro") as kept:
        assert "EROFS" in told(kept)


@pytest.mark.parametrize("moment", ["while a disk is measured", "while ranks are"])
def test_links_leave_nothing_when_interrupted(moment, tmp_path):
    def heeds():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell starts jobs in the background with Ctrl-C ignored

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a short name: it has sockets
        path = ("--path", folder) if "disk" in moment else ()
        command = [sys.executable, "-m", "zero_fn", "links", "--seconds", "60", *path]
        environ = {**os.environ, "TMPDIR": folder, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}  # torch makes that one
        job = subprocess.Popen(
            command, env=environ, start_new_session=True, stderr=subprocess.PIPE, text=True, preexec_fn=heeds
        )

        def has_begun():
            if not path:
                # Not before: between two lines of `multiprocessing` its folder is there, and nobody is to remove it.
                return any(Path(folder).glob("pymp-*/*"))
            try:
                return any(os.readlink(fd).startswith(folder) for fd in Path(f"/proc/{job.pid}/fd").iterdir())
            except FileNotFoundError:  # one was closed meanwhile
                return False

        try:
            while not has_begun():
                assert job.poll() is None
                time.sleep(0.01)
            os.killpg(job.pid, signal.SIGINT)  # as a terminal does
            job.communicate(timeout=60)  # and all that it started has closed the pipe
        finally:
            job.kill()
        assert (job.returncode, os.listdir(folder)) == (130, [])


@pytest.mark.parametrize(
    ("system", "is_direct", "busy", "limit"),
    [
        ("tmpfs", True, 0.1, "limit: memory"),
        ("nfs4", True, 0.1, "limit: the network"),
        ("zfs", False, 0.1, "limit: the page cache. zfs takes no direct I/O"),
        ("ext4", True, 1.4, "limit: cores. This alone keeps 1.4"),
        ("ext4", True, 0.1, "limit: the disk"),
    ],
)
def test_links_say_what_limits_a_disk(system, is_direct, busy, limit, tmp_path):
    file = SpillFile(str(tmp_path), "test")
    file.is_direct = is_direct
    assert _limit(system, file, busy).startswith(limit)


def test_links_advise_settings_that_exist():
    ours, deeper = _ours(), Setting(_ours().engine, 8 * MIB, 16, 2.0, 2.0)
    assert "nothing else to set" in _advice("/disk", deeper, 1.05)
    assert f"buffer={128 * MIB}" in _advice("/disk", deeper, 1.3)
    assert "please report" in _advice("/disk", Setting(ours.engine, MIB, 16, 2.0, 2.0), 1.3)
