"""The collectives of the backend itself: of NCCL, and of any backend but gloo on the host.

Large pieces are gathered in one group of all-gathers, from where they rest to where they are used. Small even pieces are
packed into one message. [Note: small pieces travel together]

[Note: gloo gathers one by one] gloo groups all-gathers of host memory only, and two groups at once may free memory twice,
inside torch: see `zero_fn.local.gloo`. So on gloo each all-gather is issued alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zero_fn.transport.messages import Gathering, Reducing
from zero_fn.transport.segment import Contribution, Contributions, Pending, Segment
from zero_fn.transport.waiting import Failure, OnStream

__all__ = ["Native"]


class Native:
    """Collectives of a process group. Sums are in the order the backend chooses."""

    pads = True

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self._group, self._rank, self._size = group, rank, size
        self._is_gloo: bool | None = None  # the first tensor shows on which device, and so which backend
        # Methods of the group cost the host a tenth of dist.all_gather_into_tensor for each tensor. torch 2.13 renamed them.
        self._gather_group = _method(group, "all_gather_single_coalesced", "allgather_into_tensor_coalesced")
        self._gather_one = _method(group, "all_gather_single", "_allgather_base")
        self._reduce = _method(group, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")

    def prepared(self, segments: Sequence[Segment]) -> Sequence[Segment]:
        return Gathering(segments, self._rank, self._size)

    def all_gather(self, segments: Sequence[Segment], mark: int = 0) -> Pending:
        if not segments:
            return Pending()
        plan = segments if isinstance(segments, Gathering) else Gathering(segments, self._rank, self._size)
        if plan.of_first is not None:
            return self._broadcast(plan.of_first.view(torch.uint8))
        wholes: list[Tensor] = []
        pieces: list[Tensor] = []
        for pack in plan.packs:
            pieces.append(pack.own if pack.own is not None else torch.cat(pack.pieces))
            wholes.append(pack.begin())
        for segment, whole, piece in plan.apart:
            if segment.source is not None and piece is not segment.source:
                segment.piece(self._rank).copy_(segment.source)
            wholes.append(whole)
            pieces.append(piece)
        if not plan.travels_as_it_is:
            wholes, pieces = [w.view(torch.uint8) for w in wholes], [piece.view(torch.uint8) for piece in pieces]

        def unpack() -> None:
            for pack in plan.packs:
                pack.finish()

        works = self._gather(wholes, pieces)
        return Pending(works, unpack if plan.packs else None, (pieces, wholes), plan.nbytes * (self._size - 1))

    def reduce_scatter(self, contributions: Sequence[Contribution], mark: int = 0) -> Pending:
        plan, rows, buffers = self._reducing(contributions)
        inputs: dict[torch.dtype, list[Tensor]] = {}  # one group each: gloo mixes up dtypes in a group
        outputs: dict[torch.dtype, list[Tensor]] = {}
        sums: list[Tensor] = []
        written: list[tuple[list[Tensor], Tensor, list[int]]] = []  # outs, the sums they take, pieces of these
        for run in plan.runs:
            message, total = run.message(rows), run.total(buffers)
            if total is None:
                total = message.new_empty(sum(run.sizes))
                written.append(([contributions[at].out for at in run.at], total, run.sizes))
            sums.append(total)
            if run.dtype.is_complex:
                message, total = torch.view_as_real(message).view(-1), torch.view_as_real(total).view(-1)
            inputs.setdefault(run.dtype, []).append(message)
            outputs.setdefault(run.dtype, []).append(total)
        works = [_work(self._reduce(outputs[dtype], wholes), wholes[0]) for dtype, wholes in inputs.items()]

        def divide() -> None:
            if len(sums) == 1:
                sums[0].div_(self._size)
            else:
                torch._foreach_div_(sums, self._size)
            for outs, total, sizes in written:
                parts = total.split_with_sizes(sizes) if len(outs) > 1 else (total.narrow(0, 0, outs[0].numel()),)
                torch._foreach_copy_(outs, parts)

        return Pending(works, divide if sums else None, (inputs, contributions), plan.nbytes * (self._size - 1))

    def _broadcast(self, whole: Tensor) -> Pending:
        if not whole.numel():
            return Pending()
        work = dist.broadcast(whole, group=self._group, group_src=0, async_op=True)
        return Pending([_work(work, whole)], kept=whole, nbytes=whole.nbytes * (self._size - 1) // self._size)

    def _gather(self, wholes: list[Tensor], pieces: list[Tensor]) -> list[tuple[Any, int | None]]:
        """Begins all-gathers. [Note: gloo gathers one by one]"""
        if self._is_gloo is None:
            self._is_gloo = self._group._get_backend(pieces[0].device).name() == "gloo"
        if not self._is_gloo:
            return [_work(self._gather_group(wholes, pieces), pieces[0])]
        return [_work(self._gather_one(whole, piece), piece) for whole, piece in zip(wholes, pieces, strict=True)]

    def _reducing(self, contributions: Sequence[Contribution]) -> tuple[Reducing, Sequence[Tensor], Sequence[Tensor]]:
        """How contributions travel, their rows, and the buffers of the means. The first is kept for `Contributions`."""
        if not isinstance(contributions, Contributions):
            return Reducing(contributions, self._size), [contribution.rows for contribution in contributions], []
        plan: Reducing | None = contributions.memo.get(Native)
        if plan is None:
            plan = contributions.memo[Native] = Reducing(contributions, self._size)
        return plan, contributions.rows, contributions.buffers

    def any(self, bits: Tensor, mark: int = 0) -> Pending:
        work = dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return Pending([_work(work, bits)], kept=bits, nbytes=2 * bits.numel() * (self._size - 1) // self._size)

    def exchange(self, rows: Tensor, mark: int = 0) -> Pending:
        own = rows.narrow(0, self._rank, 1).view(-1)  # an index would not do where ranks are simulated
        return Pending(self._gather([rows.view(-1)], [own]), kept=rows, nbytes=own.nbytes * (self._size - 1))

    def give_up(self, failure: Failure | None = None) -> None:
        """Does nothing: peers learn it from the watchdog of the backend, or when this rank ends."""


def _work(work: Any, on: Tensor) -> tuple[Any, int | None]:
    """A work as `Pending` takes it. If a stream waits for it, the watchdog of the backend keeps the timeout."""
    return (work if on.is_cpu else OnStream(work)), None


def _method(group: dist.ProcessGroup, *names: str) -> Callable[..., Any]:
    """The first of these methods that this torch has."""
    found = next(getattr(group, name) for name in names if hasattr(group, name))
    return cast(Callable[..., Any], found)
