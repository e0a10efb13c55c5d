"""Ranks on this machine, as the process that starts them sees them:
they run a function and return a report each.

`launch` runs one function and ends the ranks. The pool of the tests keeps them for many functions.

[Note: the fork server] After a plain fork, a process hangs if torch has run threads in its parent.
A spawned process imports torch again, which takes seconds. The fork server of `multiprocessing` has
imported torch once, has no threads, and forks ranks from itself. A process has one fork server,
which it shares with all other users of this start method.
"""

from __future__ import annotations

import atexit
import contextlib
import linecache
import math
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TextIO

import torch
import torch.distributed as dist

from zero_fn.errors import StateError
from zero_fn.local import first_failure
from zero_fn.local import rank as inside
from zero_fn.local.gloo import give_groups_one_thread, loopback
from zero_fn.local.pickling import dumps
from zero_fn.local.rank import Report, live

__all__ = ["LocalRanks"]

_JOINED_S = 300.0
_KILLED_S = 10.0
_SHOWN_S = 0.1  # most seconds until prints of rank 0 appear
_STACKS_S = 1.0  # seconds in which a rank writes its stacks
_SHOWN_LINES = 20
_PRELOADED = [
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch._dynamo",
    live.__module__,
]
_starting = threading.Lock()


class LocalRanks(contextlib.AbstractContextManager["LocalRanks"]):
    """n ranks on this machine with an initialised default process group;
    the arguments are those of `launch`.

    Raises:
        StateError: No rank can be started.
        Exception: What a rank raised that cannot join the group.
    """

    def __init__(
        self,
        n: int,
        *,
        backend: str = "gloo",
        threads: int = 1,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.n = n
        self._folder = tempfile.TemporaryDirectory(prefix="zero_fn-ranks-")
        self._peers: list[_Peer] = []
        self._shown: list[_Peer] = []
        # Without this, multiprocessing would wait for the ranks, and these for a function.
        atexit.register(self.close)
        store = f"{self._folder.name}/store"  # a file: two launches might choose the same port
        local = {"GLOO_SOCKET_IFNAME": interface} if (interface := loopback()) else {}
        # A count of threads that is unset accelerate sets too high.
        own = {"OMP_NUM_THREADS": str(threads), **(environ or {})}
        whole_environ = {
            **local,
            **os.environ,
            **own,
            "WORLD_SIZE": str(n),
            "LOCAL_WORLD_SIZE": str(n),
        }
        start_method = multiprocessing.get_start_method(allow_none=True)
        cells = {name: entry for name, entry in linecache.cache.items() if entry[1:2] == (None,)}

        def join() -> None:
            assert inside.place is not None, "only ranks join"
            rank, _ = inside.place
            os.environ.clear()
            os.environ.update(whole_environ, RANK=str(rank), LOCAL_RANK=str(rank))
            # The user's start method, not the one by which ranks are started.
            multiprocessing.set_start_method(start_method, force=True)
            # Source lines of notebook cells, which are in no file, for tracebacks.
            linecache.cache.update(cells)
            if "numpy" in sys.modules:
                # Without this, every launch would draw the server's numbers.
                sys.modules["numpy"].random.seed()
            torch.set_num_threads(threads)
            if "nccl" in backend:
                torch.cuda.set_device(rank)
            dist.set_debug_level_from_env()  # type: ignore[attr-defined]
            give_groups_one_thread()
            file_store = dist.FileStore(store, n)  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=file_store, rank=rank, world_size=n)

        try:
            self._start()
            self.run(join, timeout_s=_JOINED_S)
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        timeout_s: float | None,
        since_s: float | None = None,
        is_last: bool = False,
    ) -> list[Any]:
        """Runs `fn(*args, **kwargs)` on every rank and returns their values.

        Raises what `launch` raises.

        Ranks have `timeout_s` seconds since `since_s` by the monotonic clock; None for now.

        An exception ends the ranks. In the last function ranks wait for its threads, and prints of
        rank 0 are shown here. Other output is kept, and its last lines are added to an error.
        """
        assert self._peers, "these ranks are gone"
        message = (
            dumps((fn, tuple(args), dict(kwargs or {})), "The function or an argument"),
            is_last,
        )
        began_s = time.monotonic() if since_s is None else since_s
        end_s = math.inf if timeout_s is None else began_s + timeout_s
        self._shown = self._peers[: int(is_last)]
        answers: dict[int, Report | int] = {}
        failure = None
        try:
            for peer in self._peers:
                peer.ask(message)
            while len(answers) < self.n and time.monotonic() < end_s:
                waiting = [peer for peer in self._peers if peer.rank not in answers]
                wait(
                    [end for peer in waiting for end in (peer.connection, peer.process.sentinel)],
                    _SHOWN_S,
                )
                answers |= {
                    peer.rank: answer for peer in waiting if (answer := peer.answer()) is not None
                }
                self._show()
                if failure := first_failure.first_failure(answers, self.n):
                    end_s = min(
                        end_s, time.monotonic() + first_failure.GRACE_S
                    )  # [Note: whose fault], in `first_failure.py`
            if failure is not None:
                rank, error = failure
                if printed := self._peers[rank].printed():
                    error.add_note(f"The last lines that rank {rank} printed:\n{printed}")
                raise error
            if late := [peer for peer in self._peers if peer.rank not in answers]:
                for peer in late:
                    peer.ask_where()
                time.sleep(_STACKS_S)
                raise first_failure.hung(
                    {peer.rank: peer.errors.read() for peer in late}, self.n, timeout_s
                )
            reports = [
                answer for _, answer in sorted(answers.items()) if isinstance(answer, Report)
            ]
            return [pickle.loads(report.pickled) for report in reports]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kills the ranks and the processes that they started, waits for their end,
        and shows the last prints of rank 0."""
        for peer in self._peers:
            peer.kill()
        for peer in self._peers:
            peer.process.join(_KILLED_S)
        self._show()
        for peer in self._peers:
            peer.connection.close()
            peer.output.close()
            peer.errors.close()
        self._peers.clear()
        self._shown.clear()
        self._folder.cleanup()
        atexit.unregister(self.close)  # the last: Ctrl-C may have come before

    def _start(self) -> None:
        with _starting:
            main = sys.modules["__main__"]
            # %reset leaves neither.
            spec, file = getattr(main, "__spec__", None), vars(main).pop("__file__", None)
            main.__spec__ = None  # with either of them, each rank would execute the script again
            try:
                _ensure_server()
                for rank in range(self.n):
                    # One by one: Ctrl-C may come between.
                    self._peers.append(_peer(rank, self.n, self._folder.name))
            except (OSError, EOFError) as error:
                raise StateError(
                    "The fork server of local ranks does not run.",
                    error=f"{type(error).__name__}: {error}",
                    fix=f"{sys.executable} -c 'import zero_fn' must work with the same "
                    "sys.path and environment",
                ) from error
            finally:
                main.__spec__ = spec
                vars(main).update({} if file is None else {"__file__": file})

    def _show(self) -> None:
        for peer in self._shown:
            # A rank cannot print to a notebook itself.
            print(peer.output.read(), end="", flush=True)
            print(peer.errors.read(), end="", flush=True, file=sys.stderr)


def _ensure_server() -> None:
    """Starts the fork server, which finds the modules of this process,
    and has one thread, or it must not fork."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    environ = {**one_thread, "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    before = {name: os.environ[name] for name in environ if name in os.environ}
    os.environ.update(environ)
    try:
        multiprocessing.forkserver.set_forkserver_preload(_PRELOADED)
        multiprocessing.forkserver.ensure_running()
    finally:
        for name in environ:
            del os.environ[name]
        os.environ.update(before)


@dataclass(frozen=True, slots=True)
class _Peer:
    """A rank, as this process sees it."""

    rank: int
    process: BaseProcess
    pid: int
    connection: Connection
    output: TextIO  # the file of its stdout, read as far as it was shown or is of earlier functions
    errors: TextIO  # the file of its stderr

    def ask(self, message: tuple[bytes, bool]) -> None:
        """Sends a function, unless the rank has ended (`answer` tells).

        Forgets what the rank has printed so far.
        """
        self.output.read()
        self.errors.read()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(message)

    def answer(self) -> Report | int | None:
        """The report of the rank, or its exit code; None as long as there is neither."""
        exit_code = self.process.exitcode  # before the poll: a report may come until the rank ends
        with contextlib.suppress(EOFError, OSError):
            if self.connection.poll():
                report: Report = self.connection.recv()
                return report
        return exit_code

    def ask_where(self) -> None:
        """Makes the rank write its stacks to its stderr, of which all earlier text is skipped."""
        self.errors.read()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)

    def printed(self) -> str:
        """The last lines that were not read yet, and the first lines of
        faulthandler's report if the rank crashed."""
        text = self.output.read() + self.errors.read()
        before, fatal, stack = text.partition("Fatal Python error")
        return "\n".join(
            before.splitlines()[-_SHOWN_LINES:] + (fatal + stack).splitlines()[:_SHOWN_LINES]
        )

    def kill(self) -> None:
        """Kills the rank and the processes that it started, if it still runs."""
        if self.process.exitcode is None:
            self.process.kill()
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)


def _peer(rank: int, n: int, folder: str) -> _Peer:
    context = multiprocessing.get_context("forkserver")
    names = f"{folder}/{rank}.output", f"{folder}/{rank}.errors"
    text: dict[str, Any] = {"encoding": "utf-8", "errors": "replace", "newline": ""}
    output, errors = (open(name, "w+", **text) for name in names)  # noqa: SIM115
    ours, theirs = context.Pipe()
    process = context.Process(target=live, args=(theirs, rank, n, names))
    process.start()
    theirs.close()
    assert process.pid is not None, "it was started"
    return _Peer(rank, process, process.pid, ours, output, errors)
