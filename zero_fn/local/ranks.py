"""Ranks on this machine, seen from the process that asked for them: a function in, one outcome per rank out.

    here                        rank r of n
    ----                        -----------
    Seat            ------->    joins the default process group
    function        ------->    runs it
    Outcome         <-------    a value, or an exception with its traceback
    (leash)         <-------    an exit code, if it died instead        [Note: the leash], in `fork_server`

`launch` runs one function and lets the ranks go; the pool of the tests keeps them and runs many.

[Note: whose fault]
One failure makes others: peers of a dead rank see a closed connection, peers of a rank that raised wait for it. So
after the first failure the others get `_GRACE_S` to report, and then blame goes, in this order, to a rank that died, to
the rank that raised first (the clock is the machine's), to the ranks that did not return in time.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import linecache
import math
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Self, TextIO, TypeVar

from zero_fn.errors import StateError
from zero_fn.local import rank as inside
from zero_fn.local.fork_server import Child, fork_rank
from zero_fn.local.rank import Outcome, Seat
from zero_fn.local.sending import SendError, loads, pack, sentence

__all__ = ["LocalRanks", "RankDied", "RankHung", "RankTraceback"]

E = TypeVar("E", bound=BaseException)

_GRACE_S = 1.0  # longer than a rank takes to say whom it lost (`zero_fn.guarded.LAST_WORDS_S`)
_KILLED_S = 10.0
_STACKS_S = 1.0
_TAIL_LINES = 20
_SHOWN_FRAMES = 3


class RankDied(StateError):
    """A rank ended, by a signal or by exiting, before it returned a value."""


class RankHung(StateError):
    """Ranks did not return in time; the message says where they were."""


class RankTraceback(Exception):
    """The traceback of a rank as text: the `__cause__` of the exception that the rank raised."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


@dataclass(slots=True)
class _Peer:
    """One rank, seen from here.

    Attributes:
        outcome: Of the function it runs, once reported.
        exit_code: Once it ended; negative for a signal.
        heard_nbytes: Bytes of its output file that belong to earlier functions.
    """

    rank: int
    child: Child
    output: Path
    stacks: Path
    outcome: Outcome | None = None
    exit_code: int | None = None
    has_ended: bool = False
    heard_nbytes: int = 0

    @property
    def is_done(self) -> bool:
        return self.outcome is not None or self.has_ended

    @property
    def has_died(self) -> bool:
        return self.has_ended and (self.outcome is None or (self.outcome.is_value and self.exit_code != 0))

    @property
    def has_raised(self) -> bool:
        return self.outcome is not None and not self.outcome.is_value

    def new_output(self) -> str:
        """The last lines that the rank printed during the current function; empty if its output is shown elsewhere."""
        if not self.output.exists():
            return ""
        with self.output.open("rb") as file:
            file.seek(self.heard_nbytes)
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])


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
        self._peers: list[_Peer] = []
        self._forwards: list[_Forward] = []
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
                    end_s = min(end_s, time.monotonic() + _GRACE_S)  # [Note: whose fault]
            self._judge(timeout_s)
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
        self._judge(timeout_s)

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
        peer = _Peer(rank, child, output, directory / f"{rank}.stacks")
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
        forward = _Forward(stream)
        self._forwards.append(forward)
        self._sources[forward.reader] = lambda: self._show(forward)
        return opened.enter_context(forward.writer).fileno()

    def _pump(self, end_s: float) -> None:
        left_s = end_s - time.monotonic()
        for source in wait(list(self._sources), None if left_s == math.inf else max(0.0, left_s)):
            if source in self._sources:
                self._sources[source]()

    def _hear(self, peer: _Peer) -> None:
        try:
            peer.outcome = pickle.loads(peer.child.connection.recv_bytes())
        except (EOFError, OSError):
            self._sources.pop(peer.child.connection, None)  # the leash says why

    def _bury(self, peer: _Peer) -> None:
        while peer.child.connection in self._sources and peer.child.connection.poll():
            self._hear(peer)
        peer.exit_code = peer.child.exit_code()
        peer.has_ended = True
        self._sources.pop(peer.child.connection, None)
        self._sources.pop(peer.child.leash, None)

    def _show(self, forward: _Forward) -> None:
        if not forward.show():
            self._sources.pop(forward.reader, None)

    def _is_silent(self) -> bool:
        is_shown = not any(forward.reader in self._sources for forward in self._forwards)
        return is_shown and all(peer.has_ended for peer in self._peers)

    def _value(self, peer: _Peer) -> Any:
        assert peer.outcome is not None, f"rank {peer.rank} has no outcome"
        try:
            return loads(peer.outcome.pickled)
        except Exception as error:
            raise SendError(
                f"Rank {peer.rank} returned a value that cannot be rebuilt in this process.",
                error=f"{type(error).__name__}: {error}",
                fix="return plain tensors and numbers: value.full_tensor(), value.item()",
            ) from error

    def _judge(self, timeout_s: float | None) -> None:
        """Raises the one error that explains the others, if there is any. [Note: whose fault]"""
        died = [peer for peer in self._peers if peer.has_died]
        raised = [peer for peer in self._peers if peer.has_raised]
        stuck = [peer for peer in self._peers if not peer.is_done]
        if died:
            raise self._death(died[0])
        if raised:
            first = min(raised, key=lambda peer: peer.outcome.at_s if peer.outcome else math.inf)
            error, cause = self._raised(first)
            raise error from cause
        if stuck:
            raise self._hang(stuck, timeout_s)

    def _death(self, peer: _Peer) -> RankDied:
        code = peer.exit_code
        if code is None:
            how, (why, fix) = "was lost with the fork server", _OUTSIDE
        elif code < 0:
            how, (why, fix) = f"was killed by {signal.Signals(-code).name}", _SIGNALS.get(-code, _OUTSIDE)
        else:
            how, (why, fix) = f"exited with code {code}", _EXIT
        after = "after" if peer.outcome is not None else "before"
        error = RankDied(
            f"Rank {peer.rank} of {self.n} {how} {after} it returned.",
            rank=peer.rank,
            pid=peer.child.pid,
            exit_code=code,
            why=why,
            fix=fix,
        )
        return self._with_output(error, peer)

    def _raised(self, peer: _Peer) -> tuple[BaseException, RankTraceback]:
        assert peer.outcome is not None, f"rank {peer.rank} has no outcome"
        cause = RankTraceback(peer.outcome.traceback)
        error: BaseException = loads(peer.outcome.pickled)
        if self.n > 1:
            error.add_note(f"Raised on rank {peer.rank} of {self.n}; {self._elsewhere(peer)}.")
        return self._with_output(error, peer), cause

    def _elsewhere(self, blamed: _Peer) -> str:
        words = {
            "also raised": [p.rank for p in self._peers if p.has_raised and p is not blamed],
            "had returned": [p.rank for p in self._peers if p.outcome is not None and p.outcome.is_value],
            "still ran": [p.rank for p in self._peers if not p.is_done],
        }
        return "; ".join(f"{_ranks(ranks)} {what}" for what, ranks in words.items() if ranks)

    def _with_output(self, error: E, peer: _Peer) -> E:
        if printed := peer.new_output():
            error.add_note(f"The last lines that rank {peer.rank} printed:\n{printed}")
        return error

    def _hang(self, stuck: list[_Peer], timeout_s: float | None) -> RankHung:
        assert timeout_s is not None, "without a limit nobody is late"
        stacks = self._stacks(stuck)
        error = RankHung(
            sentence(f"{_ranks([peer.rank for peer in stuck])} of {self.n} did not return within {timeout_s:g} s."),
            **{f"rank_{rank}": _innermost(stack) for rank, stack in stacks.items()},
            returned=_ranks([peer.rank for peer in self._peers if peer.outcome is not None]) or "none",
            fix="call the same collectives in the same order on every rank; if it only needs longer, raise timeout_s",
        )
        for rank, stack in stacks.items():
            error.add_note(f"Rank {rank}, most recent call first:\n{stack}")
        return error

    def _stacks(self, stuck: list[_Peer]) -> dict[int, str]:
        """Where ranks are, by faulthandler: rank -> text, most recent call first."""
        for peer in stuck:
            peer.child.send_signal(signal.SIGUSR1)
        end_s = time.monotonic() + _STACKS_S
        written: dict[int, int] = {}
        while time.monotonic() < end_s:
            time.sleep(0.05)
            now = {peer.rank: peer.stacks.stat().st_size for peer in stuck if peer.stacks.exists()}
            if now == written and len(now) == len(stuck) and all(now.values()):
                break
            written = now
        return {peer.rank: _of_user(peer.stacks.read_text()) if peer.rank in written else "" for peer in stuck}


class _Forward:
    """A pipe whose text is written to a Python stream as it comes."""

    def __init__(self, stream: TextIO) -> None:
        reader, writer = os.pipe()
        self.reader = reader
        self.writer: IO[bytes] = os.fdopen(writer, "wb")
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def show(self) -> bool:
        """Writes what has come; False at the end."""
        chunk = os.read(self.reader, 1 << 16)
        self._stream.write(self._decoder.decode(chunk, final=not chunk))
        self._stream.flush()
        return bool(chunk)

    def close(self) -> None:
        os.close(self.reader)


_EXIT = ("the function or a library ended the process", "return a value instead of exiting")
_OUTSIDE = ("somebody ended it from outside", "see the logs of the system")
_SIGNALS = {
    int(signal.SIGKILL): ("often the kernel, because memory ran out (see dmesg)", "fewer ranks or a smaller model"),
    int(signal.SIGABRT): ("compiled code gave up", "its last words are in what the rank printed"),
    int(signal.SIGSEGV): ("a fault in compiled code", "the Python stack is in what the rank printed"),
}


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def _of_user(stack: str) -> str:
    """A faulthandler text without the frames below the user's function, which are the same on every rank."""
    lines = stack.splitlines()
    ours = [i for i, line in enumerate(lines) if f'"{inside.__file__}"' in line and line.endswith("in _perform")]
    return "\n".join(lines[: ours[0]] if ours else lines)


def _innermost(stack: str) -> str:
    """One line of a faulthandler text: the innermost frames outside torch."""
    lines = [line.strip() for line in stack.split("\n\n")[-1].splitlines() if line.strip().startswith("File")]
    outside = [line for line in lines if "/torch/" not in line]
    where = []
    for line in (outside or lines)[:_SHOWN_FRAMES]:
        file, _, rest = line.removeprefix('File "').partition('", line ')
        number, _, function = rest.partition(" in ")
        where.append(f"{function} at {Path(file).name}:{number}")
    return ", called by ".join(where) or "unknown: it did not answer SIGUSR1"


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
