"""The collectives of a module over all of its data axes: a line for each, with a transport and a process group of its own.

A tensor travels by hops, one for each axis on its route. The axis that cuts the tensor first comes first:

    all-gather       backwards: the axis that cuts last completes this rank's piece on the axis before, and so on
    reduce-scatter   forwards: over the first axis, then the piece over the next axis: scattered if that cuts it, else summed
    any, exchange    over one axis, then over the next

One axis is a route of one hop. Of two axes the second moves only 1/n of the tensor, for n ranks on the first: let the second
be the slow one. A mean is the mean over the second axis of the means over the first, each summed in the order of its ranks. A
tensor that lies on one of the axes (experts) travels along the other axis only; its gradients hold the sum over the first.

[Note: hops] When an all-gather returns, its last hop is under way, and those before it were waited for. A reduction issues
its later hops when it is waited for. Schedules wait in the same order on every rank, so ranks stay in step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from math import prod
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zero_fn.errors import DisagreementError, LostRankError, warn_once
from zero_fn.one_host.same_host import SameHost
from zero_fn.transport.exchange import Alone
from zero_fn.transport.line import Line, Transport, Work
from zero_fn.transport.native import Native
from zero_fn.transport.segment import BufferPlace, Contribution, Route, Segment
from zero_fn.values.mesh import Axis

__all__ = ["BY_BACKEND", "Lines", "line_over", "open_transport"]

_Item = TypeVar("_Item", Segment, Contribution)

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


_Again = list[tuple[int, BufferPlace, torch.dtype, Route]]
"""Of contributions what is the same in every step."""


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

    def gather_plan(self, segments: Sequence[Segment]) -> Sequence[Segment]:
        return segments  # each all-gather decides anew which segments an axis takes

    def all_gather(self, plan: Sequence[Segment], what: str) -> Work:
        with self._telling_others():
            return self._rest_of(self._last_hops(plan, what))

    def reduce_plan(self, contributions: Sequence[Contribution], buffers: Sequence[Tensor]) -> _Again:
        return [(each.piece_rows, BufferPlace(each.out, buffers), each.sum_dtype, each.route) for each in contributions]

    def reduce_scatter(self, plan: _Again, rows: Sequence[Tensor], buffers: Sequence[Tensor], what: str) -> Work:
        contributions = [
            Contribution(own, piece_rows, place.of(buffers), sum_dtype, route)
            for own, (piece_rows, place, sum_dtype, route) in zip(rows, plan, strict=True)
        ]
        with self._telling_others():
            reductions = [self._reductions(number, chosen, what) for number, chosen in _by_axis(contributions)]
            heads = [next(reduction) for reduction in reductions]
        return self._rest_of(hop for head, later in zip(heads, reductions, strict=True) for hop in chain([head], later))

    def any(self, bits: Tensor, what: str, *, check: str = "") -> Work:
        with self._telling_others():
            *others, last = self._lines
            for line in others:
                # Waited for here: which ranks wait for the result depends on the bits, and the next hop must not.
                line.any(bits, what, check=check).wait()
            return self._rest_of([last.any(bits, what, check=check)])

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

    def _rest_of(self, hops: Iterable[Work]) -> Work:
        """The hops that are left, as one collective: waiting for it issues and waits for each of them."""
        return Work(finish=self._wait_for_all, kept=(hops,))

    def _wait_for_all(self, hops: Iterable[Work]) -> None:
        with self._telling_others():
            for hop in hops:
                hop.wait()

    def _last_hops(self, segments: Sequence[Segment], what: str) -> list[Work]:
        """Issues the last hop of an all-gather, over the axis that cuts first, once all hops before it were waited for."""
        last: list[Work] = []
        for number, chosen in _by_axis(segments):
            line = self._lines[number]
            inner: list[_Room] = []
            for segment in chosen:
                route = [hop for hop in segment.route[1:] if hop[1] is not None]
                if route:
                    inner.append(_Room(segment.piece(line.rank), route, self._lines))
            if inner:
                for hop in self._last_hops([room.segment for room in inner], what):
                    hop.wait()
                for room in inner:
                    room.copy_back()
            last.append(_gathered(line, chosen, what))
        return last

    def _reductions(self, number: int, contributions: Sequence[Contribution], what: str) -> Iterator[Work]:
        """The hops of reductions that begin on the same axis, each issued when it is asked for."""
        line = self._lines[number]
        pieces: list[Contribution] = []
        later: list[Contribution] = []
        shared: list[tuple[Tensor, Route]] = []  # pieces that the second axis does not cut: all its ranks need them
        alone: list[Tensor] = []
        for contribution in contributions:
            out, dtype, route = contribution.out, contribution.sum_dtype, contribution.route[1:]
            own = contribution.numel_of(line.rank)
            if not route:
                pieces.append(contribution)
                alone.append(out)
                continue
            second, cut_numel = route[0]
            is_shared = cut_numel is None
            total = out if out.dtype == dtype and is_shared else torch.empty(own, dtype=dtype, device=out.device)
            pieces.append(Contribution(contribution.rows, contribution.piece_rows, total, dtype))
            if not own:
                continue  # on every rank of the second axis
            piece_numel = cut_numel or -(-own // self._lines[second].size)
            if is_shared:
                shared.append((out, [(second, piece_numel)]))
                out = Segment(out, own, piece_numel).piece(self._lines[second].rank)
            later.append(Contribution(total, piece_numel, out, dtype, route))
        yield _reduced(line, pieces, what)
        for out in alone:
            out.div_(self.size // line.size)  # the mean over axes whose ranks have added up on the way here
        for second, chosen in _by_axis(later):
            yield _reduced(self._lines[second], chosen, what)
        rooms = [_Room(out, route, self._lines) for out, route in shared]
        if rooms:
            yield from self._last_hops([room.segment for room in rooms], what)
            for room in rooms:
                room.copy_back()


def _gathered(line: Line, segments: Sequence[Segment], what: str) -> Work:
    return line.all_gather(list(segments), what)


def _reduced(line: Line, contributions: Sequence[Contribution], what: str) -> Work:
    outs = [each.out for each in contributions]
    return line.reduce_scatter(line.reduce_plan(contributions, outs), [each.rows for each in contributions], outs, what)


class _Room:
    """Memory in which an all-gather completes a tensor: that of the tensor, or a copy with room for padding."""

    def __init__(self, own: Tensor, route: Route, lines: Sequence[Line]) -> None:
        (number, piece_numel), *_ = route
        assert piece_numel is not None, "an axis that cuts nothing has nothing to complete"
        self._own = self._place = own
        padded_numel = piece_numel * lines[number].size
        if lines[number].pads and padded_numel > own.numel():
            self._place = own.new_empty(padded_numel)
            self._place[: own.numel()] = own
        self.segment = Segment(self._place, own.numel(), piece_numel, route)

    def copy_back(self) -> None:
        if self._place is not self._own:
            self._own.copy_(self._place[: self._own.numel()])


def _by_axis(items: Sequence[_Item]) -> list[tuple[int, list[_Item]]]:
    """The items whose route begins on each axis, by the number of the axis."""
    found: dict[int, list[_Item]] = {}
    for item in items:
        found.setdefault(item.route[0][0], []).append(item)
    return sorted(found.items())
