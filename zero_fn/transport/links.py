"""The collectives of a module over all of its data axes: a line for each, with a transport and a process group of its own.

A tensor travels by hops, one for each axis on its route. The axis that cuts the tensor first comes first:

    all-gather       the axis that cuts last completes this rank's piece on the axis before, and so on
    any, exchange    over one axis, then over the next

One axis is a route of one hop. Of two axes the second moves only 1/n of the tensor, for n ranks on the first: let the second
be the slow one. A tensor that lies on one of the axes (experts) travels along the other axis only. Reductions go hop by hop,
too, the first axis first: `zero_fn.runtime.sums`.

[Note: hops] When an all-gather returns, its last hop is under way, and those before it were waited for. Schedules wait in the
same order on every rank, so ranks stay in step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zero_fn.errors import warn_once
from zero_fn.one_host.same_host import SameHost
from zero_fn.transport.direct_exchange import Alone
from zero_fn.transport.line import Line, Transport, Work
from zero_fn.transport.native import Native
from zero_fn.transport.segment import Segment
from zero_fn.values.mesh import Axis

__all__ = ["BY_BACKEND", "Lines", "alike", "gather_hops", "line_over", "open_transport"]

BY_BACKEND: dict[str, Callable[[dist.ProcessGroup, int, int], Transport]] = {"gloo": SameHost}
"""The class of the transport for a backend, called with group, rank and size; `Native` for a backend that is not here."""


def open_transport(axis: Axis) -> Transport:
    """The transport for the backend of an axis.

    For host memory on gloo: a direct exchange, through shared memory if all ranks are on one host. Otherwise: the
    collectives of the backend.
    """
    if axis.size == 1:
        return Alone()
    if axis.device_type == "cuda" and axis.backend == "gloo":
        warn_once(
            "gloo moves what rests on CUDA.",
            axis=axis,
            why="where torch gathers a DTensor, as full_tensor() does, it ends the process there (pytorch issue 152645)",
            fix='init_process_group("nccl"); since NCCL 2.30 ranks may share a GPU: NCCL_MULTI_RANK_GPU_ENABLE=1',
        )
    make = BY_BACKEND.get(axis.backend, Native) if axis.device_type == "cpu" else Native
    return make(axis.group, axis.rank, axis.size)


def line_over(axes: Sequence[Axis]) -> Line:
    """The collectives over some axes, the innermost first: a transport is opened for each. Without axes one rank is alone."""
    lines = [Line(open_transport(axis), axis) for axis in axes] or [Line(Alone(), None)]
    return lines[0] if len(lines) == 1 else Lines(lines)


def gather_hops(line: Line, segments: Sequence[Segment]) -> list[list[tuple[Line, Any]]]:
    """The hops of an all-gather over all axes of a line, the last axis first: of each the lines
    along one axis that take part, with their plans. Hops are made one after the other."""
    hops: list[list[tuple[Line, Any]]] = []
    while segments:
        hop = [
            (line.along(number), [segments[at] for at in chosen])
            for number, chosen in alike([segment.axis for segment in segments])
        ]
        hops.insert(0, [(along, along.gather_plan(several)) for along, several in hop])
        pieces = [segment.piece_to_complete(line.along(segment.axis).rank) for segment in segments]
        segments = [piece for piece in pieces if piece is not None]
    return hops


class Lines(Line):
    """The collectives over several axes, by hops over one after the other."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines
        for line in lines:
            line.beside = [other.raw for other in lines if other is not line]
        self.axes = tuple(axis for line in lines for axis in line.axes)
        self.pads = any(line.pads for line in lines)
        self.device = lines[0].device
        self.size = prod(line.size for line in lines)
        self.rank = 0
        for line in reversed(lines):
            self.rank = self.rank * line.size + line.rank

    def along(self, number: int) -> Line:
        return self._lines[number]

    def all_gather(self, segments: list[Segment], what: str) -> Work:
        works: list[Work] = []
        for hop in gather_hops(self, segments):
            _wait_for_all(works)
            works = [line.all_gather(each, what) for line, each in hop]
        return Work(finish=_wait_for_all, kept=(works,))

    def any(self, bits: Tensor, what: str, *, check: str = "") -> Work:
        *others, last = self._lines
        for line in others:
            # Waited for here: which ranks wait for the result depends on the bits, and the next hop must not.
            line.any(bits, what, check=check).wait()
        return last.any(bits, what, check=check)

    def exchange(self, message: Tensor, what: str = "digests") -> Tensor:
        rows = message
        for line in self._lines:
            rows = line.exchange(rows.view(-1), what)
        return rows.view(-1, message.numel())

    def give_up(self) -> None:
        for line in self._lines:
            line.give_up()


def _wait_for_all(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


def alike(axes: Sequence[int]) -> list[tuple[int, list[int]]]:
    """For each axis, the numbers of the items whose next axis it is."""
    return [(axis, [at for at, each in enumerate(axes) if each == axis]) for axis in sorted(set(axes))]
