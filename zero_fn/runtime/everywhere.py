"""Tells every rank of an error that one rank alone may meet, such as a disk that fails.

`transport/agreement.py` compares what ranks hold before a collective; here they tell one another how something went.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zero_fn.errors import DisagreementError, LostRankError, StorageError
from zero_fn.runtime.ored import Ored
from zero_fn.runtime.slot import slot_of
from zero_fn.transport.agreement import agree
from zero_fn.transport.line import Line
from zero_fn.transport.links import line_over
from zero_fn.values.mesh import Axis, mesh_axis

R = TypeVar("R")

__all__ = ["Told", "done_along", "everywhere", "is_cut", "is_shared", "same_along"]


def everywhere(parameters: Iterable[Tensor], act: Callable[[], R], what: str) -> R:
    """What `act` returns; raises on every rank if it raised on any.

    Communicates a byte per rank to each peer, and waits.

    Args:
        parameters: Resting parameters: the ranks of their meshes are meant.
        act: What may fail.
        what: What it does, for the message: "A step of a streamed optimizer".

    Raises:
        StorageError: It failed on another rank.
        Exception: What it raised on this rank.
    """
    axes = [axis for mesh in _meshes(parameters) for axis in _axes_of(mesh, range(mesh.ndim), what)]
    return _done(axes, act, Exception, what)


def done_along(mesh: DeviceMesh, dims: Iterable[int], act: Callable[[], R], what: str) -> R:
    """Calls `act` and returns its result, if no disk failed in it on any rank along some axes of a mesh, data axes or not.

    Communicates a byte per rank to each peer, along one axis after the other, and waits.

    Raises:
        StorageError: A disk failed, on this rank or another.
    """
    return _done(_axes_of(mesh, dims, what), act, StorageError, what)


def same_along(mesh: DeviceMesh, rows: Sequence[str], what: str, *, fix: str) -> None:
    """Raises on every rank of a mesh if a rank has other rows.

    Communicates 16 bytes to each peer, and the rows if they differ; waits.

    Raises:
        DisagreementError: Names two ranks, those of the last axis together, and the first row that differs.
    """
    links = line_over(_axes_of(mesh, reversed(range(mesh.ndim)), what))
    agree(links.exchange, what, rows, why="each would edit its shard in another way", fix=fix)


class Told:
    """Tells all ranks whether something failed on this one. A collective, whose answer is under way.

    Communicates a byte per rank to each peer.
    """

    def __init__(self, links: Line, own: Exception | None, what: str) -> None:
        """Sends the message. `own` is the error of this rank, and `what` says in errors what failed."""
        bits = [own is not None and rank == links.rank for rank in range(links.size)]
        self._links, self._own, self._what = links, own, what
        self._bits = Ored(links, bits, f"how it went: {what}")

    def failure(self) -> Exception | None:
        """Waits. Returns the error of this rank, or one that names the ranks that failed; None if none did."""
        self._bits.settle()
        if self._own is not None or self._links.size == 1:
            return self._own
        failed = [rank for rank, has_failed in enumerate(self._bits.read()) if has_failed]
        if not failed:
            return None
        along = " x ".join(map(str, reversed(self._links.axes)))
        return StorageError(
            f"{self._what} failed on rank {', '.join(map(str, failed))} of axis {along}.",
            here=f"rank {self._links.rank}, where it went well",
            why="ranks would go on from different states",
            fix="see the error of that rank; then start all ranks again, a training from its last checkpoint",
        )


def _done(axes: Iterable[Axis], act: Callable[[], R], expected: type[Exception], what: str) -> R:
    """Calls `act` and returns its result. An expected error on one rank raises on every rank along these axes."""
    failure: Exception | None = None
    done: list[R] = []
    try:
        done.append(act())
    except expected as error:
        failure = error
    links = [line_over([axis]) for axis in axes]
    try:
        for each in links:
            failure = Told(each, failure, what).failure()
    except (LostRankError, DisagreementError):
        for each in links:
            each.give_up()  # ranks along the other axes would wait for this one
        raise
    if failure is not None:
        raise failure
    return done[0]


def _axes_of(mesh: DeviceMesh, dims: Iterable[int], what: str) -> list[Axis]:
    """Those of some axes of a mesh along which there are several ranks."""
    names = mesh.mesh_dim_names
    axes = [mesh_axis(mesh[names[dim]] if names and mesh.ndim > 1 else mesh, verb=what) for dim in dims]
    return [axis for axis in axes if axis.size > 1]


def is_shared(parameters: Iterable[Tensor]) -> bool:
    """Whether other ranks hold these parameters, or other shards of them."""
    return bool(_meshes(parameters))


def is_cut(parameter: Tensor) -> bool:
    """Whether this rank holds a part of a parameter, and other ranks the rest."""
    slot = slot_of(parameter)
    return slot is not None and slot.path.layout is not None


def _meshes(parameters: Iterable[Tensor]) -> list[DeviceMesh]:
    """The meshes on which resting parameters lie, those of one rank left out."""
    specs = (slot.spec for slot in map(slot_of, parameters) if slot is not None)
    return list(dict.fromkeys(spec.mesh for spec in specs if spec is not None and spec.mesh.size() > 1))
