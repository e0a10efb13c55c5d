"""How ranks tell one another something: bits that are or-ed over them, and whether something failed on one.

[Note: beside the computation] Beside an accelerator the bits travel on a stream of their own: to the device, over the ranks,
and back to the host. A host that reads them waits for that stream, not for what the device was given to compute before: a
copy of the ordinary kind would leave the device without work at the beginning of each forward and backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zero_fn.errors import DisagreementError, LostRankError, StorageError
from zero_fn.transport.agreement import agree
from zero_fn.transport.line import Line, Work
from zero_fn.transport.links import line_over
from zero_fn.values.mesh import Axis, mesh_axis

R = TypeVar("R")

__all__ = ["Bits", "Outcome", "axes_of", "done_over", "same_along", "sum_along"]


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


@cache
def _stream_of(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


class Outcome:
    """Tells all ranks whether something failed on this one. A collective, whose answer is under way.

    Communicates a byte per rank to each peer.
    """

    def __init__(self, line: Line, own: Exception | None, what: str) -> None:
        """Sends the message. `own` is the error of this rank, and `what` says in errors what failed."""
        bits = [own is not None and rank == line.rank for rank in range(line.size)]
        self._line, self._own, self._what = line, own, what
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


def same_along(meshes: Iterable[DeviceMesh], rows: Sequence[str], what: str, *, fix: str) -> None:
    """`agree` over all ranks of meshes that cross, those of the innermost axis together."""
    axes = [axis for mesh in meshes for axis in axes_of(mesh, range(mesh.ndim), what)]
    line = line_over(sorted(axes, key=lambda axis: int(axis.mesh.mesh.flatten().diff()[0])))
    agree(line.exchange, what, rows, why="each would train in another way", fix=fix)


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
