"""The backend's own collectives, grouped and in place: NCCL, and any other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zero_fn.collectives.segment import Contribution, Pending, Segment, nbytes_of
from zero_fn.traffic import count

__all__ = ["Native"]


class Native:
    """Collectives of a process group. Sums are in the order the backend chooses."""

    pads = True

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self._group, self._rank, self._size = group, rank, size
        # The group's own methods: dist.all_gather_into_tensor for each tensor costs the host ten times as much. torch 2.13
        # renamed them.
        self._gather = _method(group, "all_gather_single_coalesced", "allgather_into_tensor_coalesced")
        self._reduce = _method(group, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")

    def all_gather(self, segments: Sequence[Segment], mark: int = 0) -> Pending:
        if not segments:
            return Pending()
        # As bytes: a group of several dtypes is mixed up by gloo, and not every backend knows every dtype.
        wholes = [
            segment.whole.narrow(0, 0, segment.piece_numel * self._size).view(torch.uint8) for segment in segments
        ]
        nbytes = [whole.numel() // self._size for whole in wholes]
        pieces = [whole.narrow(0, self._rank * n, n) for whole, n in zip(wholes, nbytes, strict=True)]
        count("all-gather", sum(map(nbytes_of, pieces)) * (self._size - 1))
        return Pending([_work(self._gather(wholes, pieces), pieces[0])], kept=pieces)

    def reduce_scatter(self, contributions: Sequence[Contribution], mark: int = 0) -> Pending:
        inputs, outputs = [], []
        for contribution in contributions:
            segment = contribution.addend
            padded_numel = segment.piece_numel * self._size
            whole = segment.whole
            if whole.numel() != padded_numel or whole.dtype != contribution.sum_dtype:
                source = whole.narrow(0, 0, segment.numel)
                whole = torch.zeros(padded_numel, dtype=contribution.sum_dtype, device=source.device)
                whole.narrow(0, 0, segment.numel).copy_(source)
            inputs.append(whole)
            outputs.append(whole.new_empty(segment.piece_numel))
        works = []
        for dtype in dict.fromkeys(whole.dtype for whole in inputs):  # one group each: gloo mixes up dtypes in a group
            chosen = [(piece, whole) for piece, whole in zip(outputs, inputs, strict=True) if whole.dtype == dtype]
            reduction = self._reduce([_real(piece) for piece, _ in chosen], [_real(whole) for _, whole in chosen])
            works.append(_work(reduction, inputs[0]))

        def divide() -> None:
            outs = [contribution.out for contribution in contributions]
            torch._foreach_div_(outputs, self._size)
            torch._foreach_copy_(outs, [p.narrow(0, 0, out.numel()) for p, out in zip(outputs, outs, strict=True)])

        count("reduce-scatter", sum(map(nbytes_of, outputs)) * (self._size - 1))
        return Pending(works, divide if outputs else None, (inputs, contributions))

    def any(self, bits: Tensor, mark: int = 0) -> Pending:
        count("control", 2 * bits.numel() * (self._size - 1) // self._size)
        work = dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return Pending([_work(work, bits)], kept=bits)

    def exchange(self, message: Tensor, mark: int = 0) -> Tensor:
        rows = message.new_empty((self._size, message.numel()))
        Pending([_work(self._gather([rows.view(-1)], [message]), message)]).wait()
        count("control", message.numel() * (self._size - 1))
        return rows

    def give_up(self) -> None:
        """Peers wait for the watchdog of the backend, or see the connection closed when this rank ends."""


def _work(work: Any, on: Tensor) -> tuple[Any, int | None]:
    """A work as `Pending` takes it. Where streams wait, the watchdog of the backend holds the time limit of the group."""
    return (work if on.device.type == "cpu" else _OnStream(work)), None


class _OnStream:
    """A collective that a stream waits for, not the host: with a time limit the host would wait too."""

    __slots__ = ("_work",)

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, _limit: timedelta) -> None:
        self._work.wait()


def _method(group: dist.ProcessGroup, *names: str) -> Callable[..., Any]:
    """The first of these methods that this torch has."""
    found = next(getattr(group, name) for name in names if hasattr(group, name))
    return cast(Callable[..., Any], found)


def _real(flat: Tensor) -> Tensor:
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
