"""The collectives of a module over all of its data axes: a line for each, with a transport and a process group of its own.

A tensor travels by hops, one for each axis on its route. The axis that cuts the tensor first comes first:

    all-gather       backwards: the axis that cuts last completes this rank's piece on the axis before, and so on
    reduce-scatter   forwards: over the first axis, then the piece over the next axis: scattered if that cuts it, else summed
    any, exchange    over one axis, then over the next

One axis is a route of one hop. Of two axes the second moves only 1/n of the tensor, for n ranks on the first: let the second
be the slow one. A mean is the mean over the second axis of the means over the first, each summed in the order of its ranks. A
tensor that lies on one of the axes (experts) travels along the other axis only; its gradients hold the sum over the first.

[Note: hops] The plan of a gather or of a reduction is made once: it has the plan of each hop. When an all-gather returns, its
last hop is under way, and those before it were waited for. A reduction issues its later hops when it is waited for. Schedules
wait in the same order on every rank, so ranks stay in step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_fn.errors import DisagreementError, LostRankError, warn_once
from zero_fn.one_host.same_host import SameHost
from zero_fn.transport.direct_exchange import Alone
from zero_fn.transport.line import Line, Transport, Work
from zero_fn.transport.native import Native
from zero_fn.transport.segment import BufferPlace, Contribution, Route, Segment
from zero_fn.values.mesh import Axis

__all__ = ["BY_BACKEND", "Lines", "line_over", "open_transport"]

_Hops = tuple[list[tuple[Line, Any]], ...]
"""The hops of an all-gather, the last axis first: which lines take part in each, and the plan of each."""

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


class _ReducePlans:
    """How contributions are summed over two axes: what each hop adds up, and in which buffers."""

    def __init__(self, lines: Sequence[Line], contributions: Sequence[Contribution], buffers: Sequence[Tensor]) -> None:
        size = prod(line.size for line in lines)
        rooms, heads, later = list(buffers), list[Contribution](), list[Contribution]()
        self.means: list[tuple[BufferPlace, int]] = []  # of one hop, and how many ranks have added up on the way here
        self.shared: list[tuple[BufferPlace, Route]] = []  # what the second axis does not cut: all its ranks need it
        for each in contributions:
            line, route, total = lines[each.route[0][0]], each.route[1:], each.out
            own = each.numel_of(line.rank)
            if not route:
                self.means.append((BufferPlace(each.out, buffers), size // line.size))
            elif route[0][1] is not None or total.dtype != each.sum_dtype:
                total = torch.empty(own, dtype=each.sum_dtype, device=total.device)
                rooms.append(total)
            heads.append(Contribution(each.rows, each.piece_rows, total, each.sum_dtype, each.route))
            if not route or not own:  # of nothing all ranks of the second axis have nothing
                continue
            second, cut_numel = route[0]
            piece_numel, out = cut_numel or -(-own // lines[second].size), each.out
            if cut_numel is None:
                self.shared.append((BufferPlace(out, buffers), [(second, piece_numel)]))
                out = Segment(out, own, piece_numel).piece(lines[second].rank)
            later.append(Contribution(total, piece_numel, out, each.sum_dtype, route))
        # Between the hops sums are in memory of their own: as many elements of a dtype.
        self.between = [(room.numel(), room.dtype, room.device) for room in rooms[len(buffers) :]]
        self.heads = [
            (lines[number], lines[number].reduce_plan([heads[at] for at in chosen], rooms), chosen)
            for number, chosen in _by_axis(heads)
        ]
        self.later = [
            (
                lines[number],
                lines[number].reduce_plan([later[at] for at in chosen], rooms),
                [BufferPlace(later[at].rows, rooms) for at in chosen],
            )
            for number, chosen in _by_axis(later)
        ]


class Lines(Line):
    """The collectives over several axes, by hops over one after the other."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines
        self.axes = tuple(axis for line in lines for axis in line.axes)
        self.pads, self.device = any(line.pads for line in lines), lines[0].device
        self.size = prod(line.size for line in lines)
        self.rank = 0
        for line in reversed(lines):
            self.rank = self.rank * line.size + line.rank

    def along(self, number: int) -> Line:
        return self._lines[number]

    def gather_plan(self, segments: Sequence[Segment]) -> _Hops:
        hops: list[list[tuple[Line, Any]]] = []
        while segments:
            hop = [(self._lines[number], [segments[at] for at in chosen]) for number, chosen in _by_axis(segments)]
            hops.insert(0, [(line, line.gather_plan(several)) for line, several in hop])
            pieces = [segment.piece_to_complete(self._lines[segment.route[0][0]].rank) for segment in segments]
            segments = [piece for piece in pieces if piece is not None]
        return tuple(hops)

    def all_gather(self, plan: _Hops | list[Segment], what: str) -> Work:
        *before, last = self.gather_plan(plan) if isinstance(plan, list) else plan
        with self._telling_others():
            for hop in before:
                for work in [line.all_gather(each, what) for line, each in hop]:
                    work.wait()
            works = [line.all_gather(each, what) for line, each in last]
        return Work(finish=self._wait_for_all, kept=(works,))

    def reduce_plan(self, contributions: Sequence[Contribution], buffers: Sequence[Tensor]) -> _ReducePlans:
        return _ReducePlans(self._lines, contributions, buffers)

    def reduce_scatter(self, plan: _ReducePlans, rows: Sequence[Tensor], buffers: Sequence[Tensor], what: str) -> Work:
        rooms = [*buffers, *(torch.empty(numel, dtype=dtype, device=device) for numel, dtype, device in plan.between)]
        with self._telling_others():
            heads = [
                line.reduce_scatter(each, [rows[at] for at in chosen], rooms, what) for line, each, chosen in plan.heads
            ]
        return Work(finish=self._reduce_later, kept=(plan, heads, rooms, what))

    def _reduce_later(self, plan: _ReducePlans, heads: Sequence[Work], rooms: Sequence[Tensor], what: str) -> None:
        self._wait_for_all(heads)
        for place, ranks in plan.means:
            place.of(rooms).div_(ranks)
        with self._telling_others():
            works = [
                line.reduce_scatter(each, [place.of(rooms) for place in places], rooms, what)
                for line, each, places in plan.later
            ]
        self._wait_for_all(works)
        outs = [(place.of(rooms), route) for place, route in plan.shared]
        segments = [Segment(out, out.numel(), route[0][1] or 0, route, is_tight=True) for out, route in outs]
        if segments:
            self.all_gather(segments, what).wait()

    def any(self, bits: Tensor, what: str, *, check: str = "") -> Work:
        with self._telling_others():
            *others, last = self._lines
            for line in others:
                # Waited for here: which ranks wait for the result depends on the bits, and the next hop must not.
                line.any(bits, what, check=check).wait()
            return Work(finish=self._wait_for_all, kept=([last.any(bits, what, check=check)],))

    def exchange(self, message: Tensor, what: str = "digests") -> Tensor:
        with self._telling_others():
            rows = message
            for line in self._lines:
                rows = line.exchange(rows.view(-1), what)
            return rows.view(-1, message.numel())

    def give_up(self) -> None:
        for line in self._lines:
            line.give_up()

    @contextmanager
    def _telling_others(self) -> Iterator[None]:
        """Tells the ranks of all axes of a failure on one: they would wait for this rank."""
        try:
            yield
        except (LostRankError, DisagreementError):
            self.give_up()
            raise

    def _wait_for_all(self, works: Sequence[Work]) -> None:
        with self._telling_others():
            for work in works:
                work.wait()


def _by_axis(items: Sequence[Segment | Contribution]) -> list[tuple[int, list[int]]]:
    """The numbers of the items whose route begins on each axis, by the number of the axis."""
    found: dict[int, list[int]] = {}
    for at, item in enumerate(items):
        found.setdefault(item.route[0][0], []).append(at)
    return sorted(found.items())
