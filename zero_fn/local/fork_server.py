"""A process that has imported torch and forks ranks from itself on request.

    this process  --control socket-->  fork server  --fork-->  rank 0, rank 1, ...
                  <----- one leash and one connection per rank ------>

[Note: why a fork server of our own]
A plain fork hangs once torch has run threads in the parent; a spawned process imports torch again (seconds) and
executes `__main__` again. A fork server does neither. `multiprocessing` has one, but it executes `__main__` in every
child, its preload list is one per process and may be taken by the user's code, its daemons may not have children
(`DataLoader` workers), and in Python 3.11 it ignores `sys.path` while preloading. Windows has no fork: use WSL.

[Note: the leash]
The server alone reaps ranks and signals them, so a process id is never used after its process is gone. Each rank has a
leash, a socket between the server and this process::

    server -> here     4 bytes: the process id;  later 4 bytes: the exit code, negative for a signal
    here -> server     1 byte: a signal for the rank;  end of file: kill the rank and its descendants

Sockets close when a process dies, whatever killed it, so ranks end with the process that asked for them, and with the
server (on Linux).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import BinaryIO, NoReturn

from zero_fn.errors import StateError

__all__ = ["Child", "fork_rank", "serve"]

_START_S = 300.0
_PRELOADED = ("torch", "torch.distributed", "torch.distributed.tensor", "torch.distributed.checkpoint", "torch._dynamo")
_CODE = struct.Struct("i")
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Child:
    """A forked rank, seen from the process that asked for it.

    Attributes:
        connection: Messages to and from the rank.
        leash: Signals to the rank, its exit code back. [Note: the leash]
        pid: Its process id, for messages to people; signals go over the leash.
    """

    connection: Connection
    leash: socket.socket
    pid: int

    def send_signal(self, number: int) -> None:
        """Sends one signal to the rank; does nothing if it is gone."""
        with contextlib.suppress(OSError):
            self.leash.send(bytes([number]))

    def kill(self) -> None:
        """Kills the rank and its descendants; its exit code still arrives on the leash."""
        with contextlib.suppress(OSError):
            self.leash.shutdown(socket.SHUT_WR)

    def exit_code(self) -> int | None:
        """The exit code that is waiting on the leash, negative for a signal; None if the server died with the rank."""
        code = _receive_code(self.leash)
        self.leash.close()
        return code


def fork_rank(stdout_fd: int, stderr_fd: int) -> Child:
    """Forks a process that runs `zero_fn.local.rank.rank_main` with the given standard streams.

    The server is started by the first call and serves every later one; a server that died is replaced.

    Args:
        stdout_fd: File descriptor for the standard output of the rank; stays open here.
        stderr_fd: The same for its standard error.

    Raises:
        StateError: There is no fork on this system, or the server cannot start.
    """
    global _server
    with _starting:
        if _server is None or not _server.is_usable():
            _server = _ForkServer()
        return _server.fork(stdout_fd, stderr_fd)


class _ForkServer:
    """This process's end of a fork server."""

    def __init__(self) -> None:
        if not hasattr(os, "fork"):
            raise StateError(
                "Local ranks need fork, which this system does not have.",
                system=sys.platform,
                fix="run under Linux, macOS or WSL, or start ranks with torchrun",
            )
        self._owner_pid = os.getpid()
        self._log: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the server)
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*_interpreter(), "-c", _program(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=_environ(),
                start_new_session=True,  # Ctrl-C reaches this process only, which then kills its ranks
            )
        atexit.register(self.close)
        try:
            self._control.settimeout(_START_S)
            if self._control.recv(1) != b"r":
                raise self._died("The fork server of local ranks did not start.")
            self._control.settimeout(None)
        except BaseException:
            self.close()
            raise

    def is_usable(self) -> bool:
        """Whether the server runs and belongs to this process (and not to one that forked this one)."""
        return os.getpid() == self._owner_pid and self._process.poll() is None

    def fork(self, stdout_fd: int, stderr_fd: int) -> Child:
        connection, its_connection = socket.socketpair()
        leash, its_leash = socket.socketpair()
        with its_connection, its_leash:
            fds = [its_connection.fileno(), its_leash.fileno(), stdout_fd, stderr_fd]
            try:
                socket.send_fds(self._control, [b"f"], fds)
            except OSError as broken:
                raise self._died("The fork server of local ranks died.") from broken
        pid = _receive_code(leash)
        if pid is None:
            raise self._died("The fork server of local ranks died.")
        return Child(Connection(connection.detach()), leash, pid)

    def close(self) -> None:
        """Ends the server and with it every rank."""
        self._control.close()
        if os.getpid() == self._owner_pid:
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()
        atexit.unregister(self.close)

    def _died(self, summary: str) -> StateError:
        self._log.seek(0)
        printed = self._log.read().decode(errors="replace").strip().splitlines()
        return StateError(
            summary,
            interpreter=sys.executable,
            exit_code=self._process.poll(),
            printed=printed[-1] if printed else "nothing",
            fix="python -c 'import zero_fn' must work with the same sys.path and environment",
        )


_starting = threading.Lock()
_server: _ForkServer | None = None


def _interpreter() -> list[str]:
    """This interpreter with its flags (-O, -W, -X), so that ranks run the same Python."""
    return [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]


def _program(control_fd: int) -> str:
    path = [entry for entry in sys.path if isinstance(entry, str)]
    return f"import sys; sys.path[:] = {path!r}; from zero_fn.local.fork_server import serve; serve({control_fd})"


def _environ() -> dict[str, str]:
    """The server's environment: one thread everywhere, because a process with threads must not fork.

    A rank gets the caller's environment and number of threads after the fork.
    """
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    environ = {**os.environ, **one_thread}
    environ.pop("TORCH_DISTRIBUTED_DEBUG", None)  # a rank sets the level itself, before it joins
    return environ


def _receive_code(leash: socket.socket) -> int | None:
    """The next 4-byte number of a leash; None at its end."""
    with contextlib.suppress(OSError):
        received = leash.recv(_CODE.size, socket.MSG_WAITALL)
        if len(received) == _CODE.size:
            return int(_CODE.unpack(received)[0])
    return None


# ------------------------------------------------------------------------------------------------ inside the server


def serve(control_fd: int) -> None:
    """Imports torch, then forks ranks until the other end of the control socket closes. Runs in the server process."""
    _import_all()
    gc.collect()
    gc.freeze()  # what was imported is never garbage: ranks need not look at it again, and share its pages
    server = _Server(socket.socket(fileno=control_fd))
    server.control.sendall(b"r")
    server.run()


class _Server:
    """The loop of the server process: forks, reaps, signals."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.leashes: dict[int, socket.socket] = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(control, selectors.EVENT_READ, self._fork)
        self.death_reader, self.death_writer = socket.socketpair()
        self.death_writer.setblocking(False)
        self.selector.register(self.death_reader, selectors.EVENT_READ, self._reap)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a Python handler is what makes the wakeup descriptor work
        signal.set_wakeup_fd(self.death_writer.fileno(), warn_on_full_buffer=False)
        self.running = True

    def run(self) -> None:
        while self.running:
            for key, _ in self.selector.select():
                key.data()
        for pid in self.leashes:
            _kill_descendants(pid)

    def _fork(self) -> None:
        request, fds, _, _ = socket.recv_fds(self.control, 1, 4)
        if not request:
            self.running = False
            return
        connection_fd, leash_fd, stdout_fd, stderr_fd = fds
        leash = socket.socket(fileno=leash_fd)
        pid = os.fork()
        if pid == 0:
            self._become_rank(connection_fd, leash, stdout_fd, stderr_fd)
        for fd in (connection_fd, stdout_fd, stderr_fd):
            os.close(fd)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # also done by the child: whoever comes first, the group exists before anyone needs it
        self.leashes[pid] = leash
        self.selector.register(leash, selectors.EVENT_READ, lambda: self._pull(pid))
        with contextlib.suppress(OSError):
            leash.send(_CODE.pack(pid))

    def _pull(self, pid: int) -> None:
        leash = self.leashes.get(pid)
        if leash is None:
            return
        try:
            number = leash.recv(1)
        except OSError:
            number = b""
        if number:
            os.kill(pid, number[0])
        else:
            self.selector.unregister(leash)
            _kill_descendants(pid)

    def _reap(self) -> None:
        self.death_reader.recv(4096)
        while self.leashes:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            _kill_descendants(pid)  # a rank takes its own workers with it
            leash = self.leashes.pop(pid)
            with contextlib.suppress(KeyError):
                self.selector.unregister(leash)
            with contextlib.suppress(OSError):
                leash.send(_CODE.pack(os.waitstatus_to_exitcode(status)))
            leash.close()

    def _become_rank(self, connection_fd: int, leash: socket.socket, stdout_fd: int, stderr_fd: int) -> NoReturn:
        """Turns this forked copy of the server into a rank, which ends here."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setpgid(0, 0)
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            self.selector.close()
            for ours in (self.control, self.death_reader, self.death_writer, leash, *self.leashes.values()):
                ours.close()
            os.dup2(stdout_fd, 1)
            os.dup2(stderr_fd, 2)
            os.close(stdout_fd)
            os.close(stderr_fd)
            importlib.import_module("zero_fn.local.rank").rank_main(Connection(connection_fd))
            code = 0
        except SystemExit as asked:
            code = _exit_code(asked)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)  # not a normal exit: the server's exit handlers are not the rank's


def _import_all() -> None:
    for module in (*_PRELOADED, "zero_fn.local.rank"):
        importlib.import_module(module)
    import torch

    torch.set_num_threads(1)
    tasks = Path("/proc/self/task")
    threads = len(list(tasks.iterdir())) if tasks.exists() else threading.active_count()
    if threads > 1:
        names = ", ".join(thread.name for thread in threading.enumerate())
        raise SystemExit(f"{threads} threads after importing torch ({names}): such a process must not fork")
    sys.stdout.flush()
    sys.stderr.flush()


def _kill_descendants(pid: int) -> None:
    """Kills the process group of a rank, which is the rank and what it started."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def _exit_code(asked: SystemExit) -> int:
    """The exit code of `sys.exit(asked.code)`, whose message, if it is one, goes to the standard error."""
    if asked.code is None:
        return 0
    if isinstance(asked.code, int):
        return asked.code & 0xFF
    print(asked.code, file=sys.stderr)
    return 1
