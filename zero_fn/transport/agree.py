"""How ranks tell one another something: bits that are or-ed over them, whether something failed on one, and whether all hold
the same rows of text. Where those differ a later collective would hang or mix up bytes.

[Note: beside the computation] Beside an accelerator the bits travel on a stream of their own: to the device, over the ranks,
and back to the host. A host that reads them waits for that stream, not for what the device was given to compute before: a
copy of the ordinary kind would leave the device without work at the beginning of each forward and backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import cache
from hashlib import blake2b
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zero_fn.errors import DisagreementError, LostRankError, StorageError
from zero_fn.transport.line import Line, Work
from zero_fn.transport.links import line_over
from zero_fn.transport.waiting import deadline
from zero_fn.values.mesh import Axis, mesh_axis

R = TypeVar("R")

__all__ = [
    "Bits",
    "Flag",
    "Outcome",
    "Unions",
    "agree",
    "agree_along",
    "axes_of",
    "differ",
    "digest",
    "done_over",
    "exchange_bytes",
    "on_all_ranks",
    "same_along",
    "sum_along",
]

Exchange = Callable[[Tensor], Tensor]
"""Sends a message of bytes to all ranks and returns the messages of all, a row each. They must have one length. Waits."""

_on_the_way: deque[tuple[torch.Event, Tensor, Tensor]] = deque()
"""Memory of messages that go to a device and come back, until they are back: the copies read and write it."""


class Bits:
    """Bits that are or-ed over ranks, under way. [Note: beside the computation]"""

    __slots__ = ("_bits", "_end", "_work")

    def __init__(self, line: Line, bits: Sequence[bool], what: str, *, check: str = "") -> None:
        """Sends the message: a byte for each bit, to each peer. All ranks send one of the same length, with the same text
        `check`. `what` it says is for errors."""
        self._work: Work | None = None
        self._end: torch.Event | None = None
        if line.device.type == "cpu":
            self._bits = torch.tensor(bits, dtype=torch.uint8, device="cpu")
            self._work = line.any(self._bits, what, check=check)
            return
        self._bits = torch.tensor(bits, dtype=torch.uint8, device="cpu", pin_memory=line.device.type == "cuda")
        stream = _stream_of(line.device)
        with stream:
            there = self._bits.to(line.device, non_blocking=True)
            line.any(there, what, check=check).wait()
            self._bits.copy_(there, non_blocking=True)
        self._end = stream.record_event()
        while _on_the_way and _on_the_way[0][0].query():  # a host that waited for it would not run ahead
            _on_the_way.popleft()
        _on_the_way.append((self._end, self._bits, there))

    def finish_unread(self) -> None:
        """Nobody reads it: a message of the host is waited for, because the next one would be taken for it."""
        if self._work is not None:
            self._work.wait()

    def read(self) -> list[bool]:
        """Waits. The bits of all ranks."""
        self.finish_unread()
        if self._end is not None:
            self._end.synchronize()
        return [bool(bit) for bit in self._bits.tolist()]


class Unions:
    """Bits or-ed over the ranks of a line, of which some are known to this rank before they come."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._unread: list[Bits] = []

    def any(self, local: list[bool], what: str, *, check: str = "", second: Sequence[bool] = ()) -> list[bool]:
        """The bits `local`, or-ed over ranks. If some are set on no rank, those of `second` follow. If all are set on this
        rank, the host does not wait. `what`: what they mean, for errors; `check`: a text that must be equal on all ranks."""
        message = Bits(self._line, [*local, *second], what, check=check)
        if all(local):
            self._unread.append(message)  # the result is known: the host need not wait for it now
            return local
        union = message.read()
        return union[: len(local)] if all(union[: len(local)]) else union

    def finish_unread(self) -> None:
        """Waits for the messages that nobody had to read."""
        unread, self._unread = self._unread, []
        for message in unread:
            message.finish_unread()


@cache
def _stream_of(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


class Flag:
    """A bit that any rank raises, and all ranks see raised at the same call.

    Made by all ranks, with a process group of its own, in which nothing else waits.
    """

    def __init__(self) -> None:
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        self._group: dist.ProcessGroup | None = None
        if world is not None and world.size() > 1:
            backend = "gloo" if dist.is_gloo_available() else None
            self._group = dist.new_group(backend=backend, timeout=timedelta(seconds=deadline()))
        self._bit = torch.zeros(1, dtype=torch.uint8)
        self._work = None

    def is_raised(self, here: bool) -> bool:
        """Whether any rank had `here` at its call before this one. A collective of 1 byte, for which the next call waits.

        Raises:
            LostRankError: A rank has ended, or did not call before the deadline of collectives.
        """
        try:
            if self._work is not None:
                self._work.wait()
            raised = bool(self._bit.item())
            self._bit = torch.tensor([here or raised], dtype=torch.uint8)
            if self._group is not None:
                self._work = dist.all_reduce(self._bit, dist.ReduceOp.MAX, self._group, async_op=True)
        except RuntimeError as error:
            raise LostRankError(
                "Ranks that ask one another whether to leave have lost one.",
                why=str(error).splitlines()[0],
                fix="call is_due() on every rank, in every step; see what the others say",
            ) from error
        return raised


class Outcome:
    """Tells all ranks whether something failed on this one. A collective, whose answer is under way.

    Communicates a byte per rank to each peer.
    """

    def __init__(self, line: Line, own: Exception | None, what: str) -> None:
        """Sends the message. `own` is the error of this rank, and `what` says in errors what failed."""
        bits = [own is not None and rank == line.rank for rank in range(line.size)]
        self._line = line
        self._own = own
        self._what = what
        self._bits = Bits(line, bits, f"how it went: {what}")

    def failed_on_any_rank(self) -> Exception | None:
        """Waits. Returns the error of this rank, or one that names the ranks that failed; None if none did."""
        self._bits.finish_unread()
        if self._own is not None or self._line.size == 1:
            return self._own
        failed = [rank for rank, has_failed in enumerate(self._bits.read()) if has_failed]
        if not failed:
            return None
        along = " x ".join(map(str, reversed(self._line.axes)))
        return StorageError(
            f"{self._what} failed on rank {', '.join(map(str, failed))} of axis {along}.",
            here=f"rank {self._line.rank}, where it went well",
            why="ranks would go on from different states",
            fix="see the error of that rank; then start all ranks again, a training from its last checkpoint",
        )


def done_over(axes: Iterable[Axis], act: Callable[[], R], what: str, expected: type[Exception] = StorageError) -> R:
    """Calls `act` and returns its result. An expected error on one rank raises on every rank along these axes.

    Communicates a byte per rank to each peer, along one axis after the other, and waits.
    """
    failure: Exception | None = None
    done: list[R] = []
    try:
        done.append(act())
    except expected as error:
        failure = error
    lines = [line_over([axis]) for axis in axes]
    try:
        for line in lines:
            failure = Outcome(line, failure, what).failed_on_any_rank()
    except (LostRankError, DisagreementError):
        for line in lines:
            line.give_up()  # ranks along the other axes would wait for this one
        raise
    if failure is not None:
        raise failure
    return done[0]


def on_all_ranks(meshes: Iterable[DeviceMesh], act: Callable[[], R], what: str) -> R:
    """`done_over` all ranks of these meshes, for any error of `act`."""
    return done_over(_axes_of_all(meshes, what), act, what, Exception)


def digest(rows: Sequence[str]) -> bytes:
    """16 bytes that differ if any row differs."""
    return blake2b("\n".join(rows).encode(), digest_size=16).digest()


def agree(line: Line, what: str, rows: Sequence[str], *, why: str, fix: str) -> None:
    """Raises on every rank if any rank holds other rows. `what` they describe ("layout"), `why` and `fix` are for the error.

    Communicates 16 bytes to each peer, and the rows only if they differ. Waits.

    Raises:
        DisagreementError: Names two ranks and the first row that differ.
    """
    _require_equal(line, what, [rows], [line.size], why, fix)


def agree_along(line: Line, what: str, rows: Sequence[tuple[Sequence[Axis], str]], *, why: str, fix: str) -> None:
    """`agree` for rows that need not be the same along every axis: experts differ along theirs, shards along those that cut.
    Each row comes with the axes along which it must be.

    Communicates 16 bytes for each axis to each peer, if there are rows. Waits.
    """
    along = [[row for alike, row in rows if axis in alike] for axis in line.axes]
    if any(along):
        _require_equal(line, what, along, [axis.size for axis in line.axes], why, fix)


def differ(line: Line, rows: Sequence[str]) -> bool:
    """Whether any rank holds other rows than rank 0. Communicates 16 bytes to each peer; waits."""
    digests = line.exchange(_bytes(digest(rows)))
    return not torch.equal(digests, digests[:1].expand_as(digests))


def _require_equal(
    line: Line, what: str, rows: Sequence[Sequence[str]], sizes: Sequence[int], why: str, fix: str
) -> None:
    """Compares, along each axis of a grid of ranks, the rows for that axis. Those of the first have consecutive numbers."""
    found = line.exchange(_bytes(b"".join(map(digest, rows))))
    digests = found.view(len(found), len(rows), -1)
    step = 1
    for number, (size, held) in enumerate(zip(sizes, rows, strict=True)):
        for rank in range(len(digests)):
            first = rank - rank // step % size * step
            if not torch.equal(digests[rank, number], digests[first, number]):
                raise _disagreement(line, what, (first, rank), held, why, fix)
        step *= size


def _disagreement(
    line: Line, what: str, ranks: tuple[int, int], rows: Sequence[str], why: str, fix: str
) -> DisagreementError:
    """The error for two ranks that hold different rows. Exchanges the rows of all ranks; waits."""
    texts = exchange_bytes(line.exchange, "\n".join(("rows", *rows)).encode())
    first, second = (texts[rank].decode().split("\n")[1:] for rank in ranks)
    at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    found = {
        f"rank_{rank}": held[at] if at < len(held) else f"nothing after {len(held)} parameters"
        for rank, held in zip(ranks, (first, second), strict=True)
    }
    return DisagreementError(f"Ranks {ranks[0]} and {ranks[1]} hold different {what}.", **found, why=why, fix=fix)


def exchange_bytes(exchange: Exchange, raw: bytes) -> list[bytes]:
    """What each rank gives, of any length. Waits."""
    lengths = exchange(torch.tensor([len(raw)]).view(torch.uint8)).view(torch.int64).flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(raw)] = _bytes(raw)
    return [row[:length].numpy().tobytes() for row, length in zip(exchange(padded), lengths, strict=True)]


def _bytes(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def same_along(meshes: Iterable[DeviceMesh], rows: Sequence[str], what: str, *, fix: str) -> None:
    """`agree` over all ranks of meshes that cross, those of the innermost axis together."""
    line = line_over(sorted(_axes_of_all(meshes, what), key=lambda axis: int(axis.mesh.mesh.flatten().diff()[0])))
    agree(line, what, rows, why="each would train in another way", fix=fix)


def sum_along(mesh: DeviceMesh, own: float, what: str) -> float:
    """The sum of a number over the ranks of one axis, in their order, so the same on each. Communicates 8 bytes a rank."""
    line = line_over(axes_of(mesh, range(mesh.ndim), what))
    if line.size == 1:
        return own
    sent = torch.tensor([own], dtype=torch.float64).view(torch.uint8).to(line.device)
    return float(sum(line.exchange(sent, what).view(torch.float64).flatten().tolist()))


def axes_of(mesh: DeviceMesh, dims: Iterable[int], what: str) -> list[Axis]:
    """Those of some axes of a mesh along which there are several ranks."""
    names = mesh.mesh_dim_names
    axes = [mesh_axis(mesh[names[dim]] if names and mesh.ndim > 1 else mesh, verb=what) for dim in dims]
    return [axis for axis in axes if axis.size > 1]


def _axes_of_all(meshes: Iterable[DeviceMesh], what: str) -> list[Axis]:
    return [axis for mesh in meshes for axis in axes_of(mesh, range(mesh.ndim), what)]
