"""Two hosts on this machine: ranks of one host share memory, and those of two have only a link between them.

    def hello(word):                                # runs on every rank, in an initialized gloo group
        return word, os.uname().nodename

    def test_hosts(hosts):
        ran = hosts.run(hello, "hello", link=Link(delay_ms=200))
        assert ran.values[2] == ("hello", "host-b")

A host is namespaces of its own: of networks, processes, mounts and its name. The folders `OWN` and /dev/shm are others on
each host; the rest is shared. The link is a tap device in each host, and a process between them, which delays, drops, counts
and cuts: of modules of the kernel this needs `tun` only. Ranks ask it by `ask`. The process has imported torch, and forks the
ranks. With the process that runs the tests all of this ends.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import heapq
import importlib
import math
import os
import pickle
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, NoReturn

import cloudpickle  # type: ignore[import-untyped]
import torch
import torch.distributed as dist

from tests.support.ranks import sent_by_value
from zero_fn.local.gloo import give_groups_one_thread
from zero_fn.local.launcher import _PRELOADED

__all__ = ["OWN", "PORT", "WIRE", "CannotMakeHosts", "Hosts", "Link", "Ran", "ask"]

NAMES, WIRE, OWN, PORT = ("host-a", "host-b"), "wire", "/mnt", 29500
NEW_NS, NEW_UTS, NEW_IPC, NEW_PID, NEW_NET = 0x20000, 0x4000000, 0x8000000, 0x20000000, 0x40000000
BIND, PRIVATE = 0x1000, 0x44000  # MS_BIND; MS_REC | MS_PRIVATE
TAP, TUNSETIFF = 0x1002, 0x400454CA  # IFF_TAP | IFF_NO_PI
MOST_FRAME = 65536

libc = ctypes.CDLL(None, use_errno=True)


class CannotMakeHosts(Exception):
    """This machine has no network namespaces, or lacks what makes them."""


class Link(NamedTuple):
    """What a link does to frames, each way."""

    delay_ms: float = 0.0
    loss: float = 0.0
    mbit: float = math.inf


CLEAN = Link()


@dataclass
class Ran:
    """What came of a case."""

    values: list[Any]  # what each rank returned; None if it was killed
    struck_s: float  # when a fault was asked for first, by the monotonic clock; 0 if none was
    seconds: float  # that the case took


def ask(what: str) -> dict[str, int]:
    """Asks the process between the hosts, on a rank: "begin" (from here on the link is as bad as it was asked for), "cut" (no
    frame arrives), "vanish" (nor does a process of host b live on), or "count". What has come to the link: frames, their
    bytes, bytes of TCP in them but for those of the store, and frames dropped."""
    assert _site is not None, "only ranks ask"
    _site.send(("ask", what))
    counts: dict[str, int] = _site.recv()
    return counts


_site: Connection | None = None


# -- the process of the tests ----------------------------------------------------------------------------------------


class Hosts:
    """`hosts.run(fn, *args)` runs a case on fresh hosts and ranks, the first half of them on host a."""

    def __init__(self) -> None:
        if missing := [name for name in ("setpriv", "unshare", "ip") if shutil.which(name) is None]:
            raise CannotMakeHosts(f"there is no {', '.join(missing)}")
        spaces = [
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "--net",
            *["--map-root-user"] * (os.geteuid() != 0),
        ]
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", *spaces, sys.executable, "-c"]
        self._connection, theirs = Pipe()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [*command, f"from tests.support import hosts; hosts.serve({theirs.fileno()})"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
            pass_fds=[theirs.fileno()],
            stdout=self._log,
            stderr=self._log,
        )
        theirs.close()
        try:
            if error := self._connection.recv():
                raise CannotMakeHosts(error)
        except EOFError:
            raise CannotMakeHosts(self._said()) from None

    def run(
        self, fn: Callable[..., object], *args: object, link: Link = CLEAN, per_host: int = 2, deadline_s: float = 60.0
    ) -> Ran:
        """Runs `fn(*args)` on every rank; with one per host, in a process of each host without a group. Fails if a rank
        raised, ended or did not return in time, and nobody had asked for that."""
        with sent_by_value(fn):
            self._connection.send((cloudpickle.dumps((fn, args)), link, per_host, deadline_s))
        try:
            ran, failure = self._connection.recv()
        except EOFError:
            raise AssertionError(f"the hosts have ended:\n{self._said()}") from None
        assert not failure, f"{failure}\n{self._said()}"
        assert isinstance(ran, Ran)
        return ran

    def close(self) -> None:
        """Ends all processes."""
        self._connection.close()
        self._process.kill()  # of setpriv, which is unshare now: its child, and so all others, end with it
        self._process.wait()
        self._log.close()

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read()[-4000:]


# -- the process between the hosts -----------------------------------------------------------------------------------


def serve(fd: int) -> None:
    """Runs cases until the connection ends."""
    connection = Connection(fd)
    os.set_inheritable(fd, False)
    for name in _PRELOADED:
        importlib.import_module(name)
    error = ""
    try:
        os.close(_tap())
    except OSError as failed:
        error = str(failed)
    connection.send(error)
    while True:
        try:
            case = connection.recv()
        except EOFError:
            return
        with tempfile.TemporaryFile() as log:
            before = os.dup(2)
            os.dup2(log.fileno(), 2)
            ran, failure = _run(*case)
            os.dup2(before, 2)
            os.close(before)
            if failure:
                log.seek(0)
                failure += "\n" + log.read().decode(errors="replace")[-6000:]
        connection.send((ran, failure))


def _tap() -> int:
    """A tap device in the namespace of this process; its other end."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", WIRE.encode(), TAP))
    return fd


def _run(pickled: bytes, link: Link, per_host: int, deadline_s: float) -> tuple[Ran, str]:
    size, began_s = 2 * per_host, time.monotonic()
    wires, hosts, ranks = list[int](), list[int](), list[Connection]()
    for number in range(2):
        # Devices are made here, where both ends of the link are needed, and a host takes this process's namespace along.
        _checked(libc.unshare(NEW_NET))
        wires.append(_tap())
        pipes = [Pipe() for _ in range(per_host)]
        if not (pid := os.fork()):
            for fd in (*wires, *(each.fileno() for each in ranks)):
                os.close(fd)
            _alone(partial(_host, number, [theirs for _, theirs in pipes], pickled, deadline_s))
        for _, theirs in pipes:
            theirs.close()
        hosts.append(pid)
        ranks += [ours for ours, _ in pipes]
    forwarder = _Forwarder(wires)
    values: dict[int, Any] = {}
    failure, struck_s = "", 0.0
    while len(values) < size and not failure:
        left_s = began_s + deadline_s + 3 - time.monotonic()
        talking = {each: rank for rank, each in enumerate(ranks) if rank not in values}
        ready = wait([*wires, *talking], max(0.0, min(left_s, forwarder.due_s())))
        forwarder.forward()
        for connection in talking.keys() & {each for each in ready if isinstance(each, Connection)}:
            rank = talking[connection]
            try:
                kind, said = connection.recv()
            except (EOFError, ConnectionResetError):
                kind, said = "raised", "Its process has ended."
            if rank in values:  # its host has vanished
                continue
            if kind != "ask":
                values[rank] = said
                failure = failure or (f"rank {rank} failed\n{said}" if kind == "raised" else "")
                continue
            if said == "begin":
                forwarder.link = link
            elif said != "count":
                struck_s = struck_s or time.monotonic()
                forwarder.is_cut = True
            if said == "vanish":
                values |= dict.fromkeys(range(per_host, size))
                os.kill(hosts[1], signal.SIGKILL)
            else:
                connection.send(dict(forwarder.counts))
        if left_s <= 0:
            failure = f"ranks {sorted({*range(size)} - {*values})} did not return within {deadline_s:g} s"
    for pid in hosts:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for each in ranks:
        each.close()
    for wire in wires:
        os.close(wire)
    return Ran([values.get(rank) for rank in range(size)], struck_s, time.monotonic() - began_s), failure


@dataclass
class _Forwarder:
    """Moves frames from each wire to the other."""

    wires: list[int]
    link: Link = CLEAN
    is_cut: bool = False
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("frames", "nbytes", "payload", "dropped"), 0))
    under_way: list[tuple[float, int, int, bytes]] = field(default_factory=list)
    free_s: list[float] = field(default_factory=lambda: [0.0, 0.0])  # when a wire has sent what it was given
    draws: random.Random = field(default_factory=lambda: random.Random(0))

    def due_s(self) -> float:
        """Seconds until a frame arrives."""
        return max(0.0, self.under_way[0][0] - time.monotonic()) if self.under_way else 1.0

    def forward(self) -> None:
        for source, wire in enumerate(self.wires):
            for _ in range(64):
                try:
                    frame = os.read(wire, MOST_FRAME)
                except BlockingIOError:
                    break
                self._take(source, frame)
        while self.under_way and self.under_way[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(self.under_way)
            if not self.is_cut:
                with suppress(OSError):  # its host is not up yet, or is gone
                    os.write(self.wires[target], frame)

    def _take(self, source: int, frame: bytes) -> None:
        self.counts["frames"] += 1
        self.counts["nbytes"] += len(frame)
        self.counts["payload"] += _payload(frame)
        if self.is_cut or self.draws.random() < self.link.loss:
            self.counts["dropped"] += 1
            return
        now_s = time.monotonic()
        self.free_s[source] = max(now_s, self.free_s[source]) + len(frame) * 8e-6 / self.link.mbit
        arrives_s = self.free_s[source] + self.link.delay_ms / 1e3
        heapq.heappush(self.under_way, (arrives_s, self.counts["frames"], 1 - source, frame))


def _payload(frame: bytes) -> int:
    """Bytes of TCP in a frame, without headers; 0 for the store's and for what is not TCP over IPv4."""
    if frame[12:14] != b"\x08\x00" or frame[23] != 6:
        return 0
    header_nbytes = (frame[14] & 15) * 4
    tcp = 14 + header_nbytes
    if PORT in struct.unpack_from("!HH", frame, tcp):
        return 0
    return int.from_bytes(frame[16:18], "big") - header_nbytes - (frame[tcp + 12] >> 4) * 4


# -- the processes of a host -----------------------------------------------------------------------------------------


def _alone(act: Callable[[], None]) -> NoReturn:
    """Ends this process, a fork, after an act. It ends with its parent, too."""
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    status = 1
    try:
        act()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _checked(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _host(number: int, connections: list[Connection], pickled: bytes, deadline_s: float) -> None:
    _checked(libc.unshare(NEW_NS | NEW_UTS | NEW_IPC | NEW_PID))
    if pid := os.fork():  # the child is the first process of the host: with it all others end
        for connection in connections:
            connection.close()
        os.waitpid(pid, 0)
    else:
        _alone(partial(_first, number, connections, pickled, deadline_s))


def _first(number: int, connections: list[Connection], pickled: bytes, deadline_s: float) -> None:
    _checked(libc.mount(None, b"/", None, PRIVATE, None))
    _checked(libc.mount(b"proc", b"/proc", b"proc", 0, None))
    for folder in (OWN, "/dev/shm"):
        _checked(libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, None))
    _checked(libc.sethostname(NAMES[number].encode(), len(NAMES[number])))
    # Gloo looks for the address of the host's name.
    with open(f"{OWN}/.hosts", "w") as file:
        file.write("127.0.0.1 localhost\n" + "".join(f"10.0.0.{at} {name}\n" for at, name in enumerate(NAMES, 1)))
    _checked(libc.mount(f"{OWN}/.hosts".encode(), b"/etc/hosts", None, BIND, None))
    lines = "link set lo up", f"link set {WIRE} txqueuelen 20000 up", f"addr add 10.0.0.{number + 1}/24 dev {WIRE}"
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)
    for local in range(len(connections)):
        if not os.fork():
            _alone(partial(_rank, number, local, connections, pickled, deadline_s))
    for connection in connections:
        connection.close()
    while True:
        os.wait()  # also what others have left


def _rank(number: int, local: int, connections: list[Connection], pickled: bytes, deadline_s: float) -> None:
    global _site
    _site = site = connections.pop(local)
    for connection in connections:
        connection.close()  # an end of a rank is seen by the end of its connection
    faulthandler.dump_traceback_later(deadline_s)
    per_host = len(connections) + 1
    rank, size = number * per_host + local, 2 * per_host
    meeting = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": PORT, "RANK": rank, "WORLD_SIZE": size}
    meeting |= {"LOCAL_RANK": local, "LOCAL_WORLD_SIZE": per_host}
    try:
        fn, args = pickle.loads(pickled)
        if per_host > 1:
            os.environ.update({name: str(value) for name, value in meeting.items()})
            torch.set_num_threads(1)
            give_groups_one_thread()
            dist.init_process_group("gloo")
        site.send(("value", fn(*args)))
    except BaseException:
        site.send(("raised", traceback.format_exc()))
    signal.pause()  # an exit would be a closed connection to those that are not done
