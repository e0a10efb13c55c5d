"""pretrain.py under torchrun that loses a host, and gets it back: it goes on with the ranks that there are."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import zero_fn as zf
from tests.outside.launchers.runs import TORCHRUN, Marked, losses, pretrain, until


def _host(marked, port, folder):
    """torchrun as it is started on each of up to two hosts of two ranks."""
    hosts = ["--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=9", "--rdzv-backend=c10d", "--rdzv-id=run"]
    meets = [f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1", "--rdzv-conf=last_call_timeout=2"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *hosts, *meets]
    command = [*torchrun, *pretrain(folder, 100_000), "--leave-within=20"]
    log = (folder.parent / f"log-{len(list(folder.parent.iterdir()))}").open("w")
    environ = marked.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else a host that comes later waits in vain
    with log:
        return subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)


@pytest.mark.nightly
def test_a_run_goes_on_with_fewer_ranks_and_with_more(tmp_path):
    marked, folder = Marked(tmp_path), tmp_path / "runs"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    hosts = [_host(marked, port, folder)]
    until(lambda: _listens(port))  # the first host has the store, and must not be the one that is lost
    hosts.append(_host(marked, port, folder))
    until(lambda: _steps_by(folder, 4) >= 20)
    _lose(hosts.pop())
    lost_at = _steps_by(folder, 4)
    until(lambda: _steps_by(folder, 2) > lost_at + 20)
    hosts.append(_host(marked, port, folder))  # its ranks begin anew, and those that run are told to leave
    until(lambda: _steps_by(folder, 4) > lost_at + 40)
    hosts[0].terminate()
    for host in hosts:
        host.wait(60)
    until(lambda: not marked.left(), 10)
    found = losses(folder)
    marked.finished([*TORCHRUN, "4", *pretrain(tmp_path / "undisturbed", len(found) + len(found) % 2)])
    assert found == pytest.approx(losses(tmp_path / "undisturbed")[: len(found)], abs=1e-3)


def _listens(port):
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def _steps_by(folder, ranks):
    """Steps that the newest checkpoint has which so many ranks have saved."""
    found = zf.checkpoints(folder) if folder.is_dir() else []
    return max((each.step or 0 for each in found if each.is_complete and each.ranks == ranks), default=0)


def _lose(host):
    """Kills torchrun of a host and its ranks at once."""
    children = Path(f"/proc/{host.pid}/task/{host.pid}/children").read_text().split()
    for pid in (host.pid, *map(int, children)):
        os.kill(pid, signal.SIGKILL)
    host.wait()
