"""Ranks on this machine, seen from the process that asked for them: a function in, one outcome per rank out.

    here                        rank r of n
    ----                        -----------
    Seat            ------->    joins the default process group
    function        ------->    runs it
    Outcome         <-------    a value, or an exception with its traceback
    (leash)         <-------    an exit code, if it died instead        [Note: the leash], in `fork_server`

`launch` runs one function and lets the ranks go; the pool of the tests keeps them and runs many.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import math
import os
import pickle
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any, Self, TextIO

from zero_fn.local import blame
from zero_fn.local.fork_server import fork_rank
from zero_fn.local.output import Forward
from zero_fn.local.peer import Peer
from zero_fn.local.rank import Seat
from zero_fn.local.sending import SendError, loads, pack

__all__ = ["LocalRanks"]

_KILLED_S = 10.0


class LocalRanks:
    """n ranks on this machine with an initialised default process group.

    Args:
        n: Number of ranks, at least 1.
        backend: As `init_process_group` takes it.
        threads: Of torch, inside each rank.
        environ: Added to the environment of this process.
        collective_timeout_s: Seconds a collective may wait; None for torch's default.
        linger_s: Seconds a rank stays after it returned; None if more functions follow. [Note: leaving]
        is_shown: Whether what rank 0 prints goes to `sys.stdout` and `sys.stderr` as it comes. What the others print is
            kept, and its last lines are added to an error of theirs.

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
        linger_s: float | None = None,
        is_shown: bool = False,
    ) -> None:
        self.n = n
        self._directory = tempfile.TemporaryDirectory(prefix="zero_fn-ranks-")
        self._peers: list[Peer] = []
        self._forwards: list[Forward] = []
        self._sources: dict[Any, Callable[[], None]] = {}
        self._end_s = math.inf
        try:
            for rank in range(n):
                self._start(rank, is_shown=is_shown and rank == 0)
            for peer in self._peers:
                seat = Seat(
                    rank=peer.rank,
                    n=n,
                    backend=backend,
                    threads=threads,
                    collective_timeout_s=collective_timeout_s,
                    linger_s=linger_s,
                    directory=self._directory.name,
                    environ=_rank_environ(peer.rank, n, environ or {}),
                    cwd=os.getcwd(),
                    path=[entry for entry in sys.path if isinstance(entry, str)],
                    argv=list(sys.argv),
                    cells=_cells(),
                )
                _post(peer.child.connection, pickle.dumps(seat))
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
        by_value: ModuleType | None = None,
    ) -> list[Any]:
        """Runs one function on every rank.

        Args:
            fn: Moved by cloudpickle, with what it refers to.
            args: Its positional arguments, the same on every rank.
            kwargs: Its keyword arguments.
            timeout_s: Seconds until every rank must have returned; None for no limit.
            by_value: A module whose functions and classes are moved as they are here, not imported by the ranks.

        Returns:
            The value of each rank, in the order of ranks. After an exception the ranks are gone.

        Raises:
            SendError: Something cannot be pickled.
            RankDied: A rank ended before it returned.
            RankHung: The time is over.
            Exception: Whatever the first rank that raised has raised; its traceback is the `__cause__`.
        """
        message = pack(fn, args, dict(kwargs or {}), by_value)
        self._end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        for peer in self._peers:
            peer.outcome = None
            peer.heard_nbytes = peer.output.stat().st_size if peer.output.exists() else 0
        try:
            for peer in self._peers:
                _post(peer.child.connection, message)
            end_s = self._end_s
            while not all(peer.is_done for peer in self._peers) and time.monotonic() < end_s:
                self._pump(end_s)
                if any(peer.has_died or peer.has_raised for peer in self._peers):
                    end_s = min(end_s, time.monotonic() + blame.GRACE_S)  # [Note: whose fault], in `blame`
            blame.judge(self._peers, timeout_s)
            return [self._value(peer) for peer in self._peers]
        except BaseException:
            self.close()
            raise

    def finish(self, timeout_s: float | None) -> None:
        """Lets the ranks end by themselves, which joins their threads, within the time of the last `run`.

        Raises:
            RankDied: A rank ended with an exit code other than 0.
            RankHung: The time is over.
        """
        for peer in self._peers:
            self._sources.pop(peer.child.connection, None)
            peer.child.connection.close()
        while not all(peer.has_ended for peer in self._peers) and time.monotonic() < self._end_s:
            self._pump(self._end_s)
        for peer in self._peers:
            if not peer.has_ended:
                peer.outcome = None
        blame.judge(self._peers, timeout_s)

    def close(self) -> None:
        """Kills the ranks that still run, waits until they are gone, and shows the rest of what rank 0 printed."""
        end_s = time.monotonic() + _KILLED_S
        for peer in self._peers:
            peer.child.kill()
        try:
            while not self._is_silent() and time.monotonic() < end_s:
                self._pump(end_s)
        finally:
            for peer in self._peers:
                peer.child.connection.close()
                peer.child.leash.close()
            for forward in self._forwards:
                forward.close()
            for forgotten in (self._peers, self._forwards, self._sources):
                forgotten.clear()
            self._directory.cleanup()

    def _start(self, rank: int, *, is_shown: bool) -> None:
        directory = Path(self._directory.name)
        output = directory / f"{rank}.output"
        with contextlib.ExitStack() as opened:
            if is_shown:
                stdout_fd, stderr_fd = self._forward(sys.stdout, opened), self._forward(sys.stderr, opened)
            else:
                stdout_fd = stderr_fd = opened.enter_context(output.open("ab")).fileno()
            child = fork_rank(stdout_fd, stderr_fd)
        peer = Peer(rank, child, output, directory / f"{rank}.stacks")
        self._peers.append(peer)
        self._sources[child.connection] = lambda: self._hear(peer)
        self._sources[child.leash] = lambda: self._bury(peer)

    def _forward(self, stream: TextIO | None, opened: contextlib.ExitStack) -> int:
        """A file descriptor that ends in a Python stream, which in a notebook or a test is no file at all."""
        if stream is None:  # a process without a console
            return opened.enter_context(open(os.devnull, "wb")).fileno()
        stream.flush()
        if any(stream is own for own in (sys.__stdout__, sys.__stderr__)):
            with contextlib.suppress(OSError, io.UnsupportedOperation):
                return stream.fileno()  # a terminal stays a terminal: progress bars know its width
        forward = Forward(stream)
        self._forwards.append(forward)
        self._sources[forward.reader] = lambda: self._show(forward)
        return opened.enter_context(forward.writer).fileno()

    def _pump(self, end_s: float) -> None:
        left_s = end_s - time.monotonic()
        for source in wait(list(self._sources), None if left_s == math.inf else max(0.0, left_s)):
            if source in self._sources:
                self._sources[source]()

    def _hear(self, peer: Peer) -> None:
        try:
            peer.outcome = pickle.loads(peer.child.connection.recv_bytes())
        except (EOFError, OSError):
            self._sources.pop(peer.child.connection, None)  # the leash says why

    def _bury(self, peer: Peer) -> None:
        while peer.child.connection in self._sources and peer.child.connection.poll():
            self._hear(peer)
        peer.exit_code = peer.child.exit_code()
        peer.has_ended = True
        self._sources.pop(peer.child.connection, None)
        self._sources.pop(peer.child.leash, None)

    def _show(self, forward: Forward) -> None:
        if not forward.show():
            self._sources.pop(forward.reader, None)

    def _is_silent(self) -> bool:
        is_shown = not any(forward.reader in self._sources for forward in self._forwards)
        return is_shown and all(peer.has_ended for peer in self._peers)

    def _value(self, peer: Peer) -> Any:
        assert peer.outcome is not None, f"rank {peer.rank} has no outcome"
        try:
            return loads(peer.outcome.pickled)
        except Exception as error:
            raise SendError(
                f"Rank {peer.rank} returned a value that cannot be rebuilt in this process.",
                error=f"{type(error).__name__}: {error}",
                fix="return plain tensors and numbers: value.full_tensor(), value.item()",
            ) from error


def _rank_environ(rank: int, n: int, added: Mapping[str, str]) -> dict[str, str]:
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    local = {"GLOO_SOCKET_IFNAME": loopback} if loopback else {}  # ranks of one machine need no resolvable host name
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n}
    return {**local, **os.environ, **added, **{name: str(value) for name, value in place.items()}}


def _cells() -> dict[str, list[str]]:
    """Source lines of notebook cells, which are in no file that a rank could read."""
    return {name: entry[2] for name, entry in linecache.cache.items() if len(entry) == 4 and not os.path.exists(name)}


def _post(connection: Connection, message: bytes) -> None:
    """Sends to a rank that may be dead already: its leash tells."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.send_bytes(message)
