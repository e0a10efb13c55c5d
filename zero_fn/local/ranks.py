"""Ranks on this machine, seen from the process that asked for them: a function in, one report per rank out.

    here                        rank r of n
    ----                        -----------
    Seat            ------->    an argument of its process
    function        ------->    joins the default process group, runs it
    Report          <-------    a value, or an exception with its traceback

`launch` runs one function and lets the ranks go; the pool of the tests keeps them and runs many.

[Note: the fork server] A plain fork hangs once torch has run threads in the parent. A spawned process imports torch again,
which takes seconds. The fork server of `multiprocessing` has imported torch once, has no threads, and forks ranks from
itself. A process has one such server: all that uses this start method in it shares the server.
"""

from __future__ import annotations

import atexit
import contextlib
import linecache
import math
import multiprocessing
import multiprocessing.forkserver
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from zero_fn.errors import StateError
from zero_fn.local import blame
from zero_fn.local.peer import Peer
from zero_fn.local.rank import Seat, live
from zero_fn.local.sending import dumps, loads

__all__ = ["LocalRanks"]

_KILLED_S = 10.0
_SHOWN_S = 0.1
_PRELOADED = ["torch", "torch.distributed.tensor", "torch.distributed.checkpoint", "torch._dynamo", live.__module__]
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class LocalRanks:
    """n ranks on this machine with an initialised default process group.

    Args:
        n: Number of ranks, at least 1.
        backend: As `init_process_group` takes it.
        threads: Of torch, inside each rank.
        environ: Added to the environment of this process.
        collective_timeout_s: Seconds a collective may wait; None for torch's default.
        runs_once: Whether they run one function, wait for its threads and leave. What rank 0 prints is then shown here;
            other output is kept, and its last lines are added to an error.

    Raises:
        StateError: No rank can be started.
    """

    def __init__(
        self,
        n: int,
        *,
        backend: str = "gloo",
        threads: int = 1,
        environ: Mapping[str, str] | None = None,
        collective_timeout_s: float | None = None,
        runs_once: bool = False,
    ) -> None:
        self.n = n
        self._folder = tempfile.TemporaryDirectory(prefix="zero_fn-ranks-")
        self._peers: list[Peer] = []
        self._is_shown = runs_once
        atexit.register(self.close)  # or multiprocessing would wait for the ranks, and they for a function
        folder = Path(self._folder.name)
        cells = _cells()
        seats = [
            Seat(
                rank,
                n,
                backend,
                threads,
                collective_timeout_s,
                runs_once,
                folder,
                _environ(rank, n, environ or {}),
                cells,
            )
            for rank in range(n)
        ]
        try:
            with _server():
                for seat in seats:
                    self._peers.append(_start(seat))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        timeout_s: float | None,
    ) -> list[Any]:
        """Runs `fn(*args, **kwargs)` on every rank and returns their values, or raises what `launch` says it raises.

        After an exception the ranks are gone.
        """
        message = dumps((fn, tuple(args), dict(kwargs or {})), "The function or an argument")
        end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        try:
            for peer in self._peers:
                peer.ask(message)
            while not all(peer.is_done for peer in self._peers) and time.monotonic() < end_s:
                self._hear(min(_SHOWN_S, end_s - time.monotonic()))
                if any(peer.has_failed for peer in self._peers):
                    end_s = min(end_s, time.monotonic() + blame.GRACE_S)  # [Note: whose fault], in `blame`
            blame.judge(self._peers, timeout_s)
            reports = [peer.report for peer in self._peers]
            return [loads(report.pickled, "What a rank returned") for report in reports if report is not None]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kills the ranks that still run, waits until they are gone, and shows the rest of what rank 0 printed."""
        atexit.unregister(self.close)
        for peer in self._peers:
            peer.kill()
        for peer in self._peers:
            peer.process.join(_KILLED_S)
        self._show()
        for peer in self._peers:
            peer.close()
        self._peers.clear()
        self._folder.cleanup()

    def _hear(self, patience_s: float) -> None:
        """Waits until something has come from a rank, and takes it."""
        running = [peer for peer in self._peers if peer.exit_code is None]
        connections = [peer.connection for peer in running if not peer.connection.closed]
        wait([*connections, *(peer.process.sentinel for peer in running)], max(0.0, patience_s))
        for peer in running:
            peer.hear()
        self._show()

    def _show(self) -> None:
        """Writes what rank 0 has printed to the streams of this process, which in a notebook or a test are no files."""
        for peer in self._peers[: int(self._is_shown)]:
            for stream, kind in ((sys.stdout, "out"), (sys.stderr, "err")):
                if stream is not None and (text := peer.files[kind].read()):
                    stream.write(text)
                    stream.flush()


_starting = threading.Lock()


@contextlib.contextmanager
def _server() -> Iterator[None]:
    """Processes may be started inside: the fork server runs, and will not have them execute `__main__`.

    Raises:
        StateError: They cannot be started.
    """
    environ = {**_ONE_THREAD, "PYTHONPATH": os.pathsep.join(sys.path)}  # a process with threads must not fork
    with _starting:
        main, before = sys.modules["__main__"], {name: os.environ.get(name) for name in environ}
        sys.modules["__main__"] = ModuleType("__main__")
        os.environ.update(environ)
        try:
            multiprocessing.forkserver.set_forkserver_preload(_PRELOADED)
            multiprocessing.forkserver.ensure_running()
            yield
        except (OSError, EOFError, ValueError) as error:
            raise StateError(
                "The fork server of local ranks does not run.",
                interpreter=sys.executable,
                error=f"{type(error).__name__}: {error}",
                fix="python -c 'import zero_fn' must work with the same sys.path; without fork (Windows) use WSL or torchrun",
            ) from error
        finally:
            sys.modules["__main__"] = main
            for name, value in before.items():
                del os.environ[name]
                os.environ.update({} if value is None else {name: value})


def _start(seat: Seat) -> Peer:
    context = multiprocessing.get_context("forkserver")
    kinds = ("out", "err", "stacks")
    files = {kind: seat.file(kind).open("w+", encoding="utf-8", errors="replace", newline="") for kind in kinds}
    ours, theirs = context.Pipe()
    process = context.Process(target=live, args=(theirs, seat))
    process.start()
    theirs.close()
    return Peer(seat.rank, process, ours, files)


def _environ(rank: int, n: int, added: Mapping[str, str]) -> dict[str, str]:
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    local = {"GLOO_SOCKET_IFNAME": loopback} if loopback else {}  # ranks of one machine need no resolvable host name
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n}
    return {**local, **os.environ, **added, **{name: str(value) for name, value in place.items()}}


def _cells() -> dict[str, list[str]]:
    """Source lines of notebook cells, which are in no file that a rank could read."""
    return {name: entry[2] for name, entry in linecache.cache.items() if len(entry) == 4 and not os.path.exists(name)}
