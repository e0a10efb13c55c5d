"""A process group over the wires: every collective that DTensor, zero_fn and torch's clipping call.

A collective sends all its messages when it is called and receives when its work is waited for. Sums are made in the order
of the ranks, so a collective gives the same bits on every rank and in every run.
"""

# torch declares overloads that nobody but their caller knows: one way to call each is enough here.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce as fold
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tests.simulation.traces import Traces
from tests.simulation.wires import Received, Sent, Wires

__all__ = ["Room", "SimulatedGroup"]

_REDUCTIONS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
}


class Room(Protocol):
    """Where groups find the case that runs now."""

    wires: Wires
    traces: Traces


class Work(dist.Work):
    """The work of some sends and receives, and what is done when they are over."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], object] | None = None) -> None:
        super().__init__()
        self._works, self._finish = works, finish

    def wait(self, timeout: object = None) -> bool:
        """Waits once; a second wait returns at once."""
        works, finish = self._works, self._finish
        self._works, self._finish = (), None
        for work in works:
            work.wait()
        if finish is not None:
            finish()
        return True

    def is_completed(self) -> bool:
        return not self._works


class SimulatedGroup(dist.ProcessGroup):
    """The backend "simulated". `name` is the same on all ranks; `members` are its ranks, counted in the whole world."""

    def __init__(self, room: Room, name: str, rank: int, members: Sequence[int]) -> None:
        super().__init__(rank, len(members))  # type: ignore[call-arg]
        self._room, self._name, self._place, self.members = room, name, rank, list(members)

    def size(self) -> int:
        return len(self.members)

    def rank(self) -> int:
        return self._place

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def name(self) -> str:
        return "simulated"

    getBackendName = name

    @property
    def group_name(self) -> str:
        return self._name

    pg_name = group_name

    def __repr__(self) -> str:
        return f"SimulatedGroup({self._name!r}, rank {self._place} of {self.members})"

    # -- point to point ---------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], dstRank: int, tag: object = 0) -> Sent:
        (tensor,) = tensors
        return self._room.wires.send((self._name, self.members[self._place], self.members[dstRank], tag), tensor)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: object = 0) -> Received:
        (tensor,) = tensors
        return self._room.wires.receive((self._name, self.members[srcRank], self.members[self._place], tag), tensor)

    # -- collectives ------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        works = []
        for tensor in _listed(tensors):
            parts = [torch.empty_like(tensor) for _ in self.members]
            finish = _reducing(parts, op, tensor)
            works.append(self._exchange("allreduce", tensor, [tensor] * self.size(), parts, finish))
        return Work(works)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        (tensor,) = _listed(tensors)
        self._note("broadcast", tensor)
        if self._place == opts.rootRank:
            return Work([self.send([tensor], rank, "broadcast") for rank in self._peers()])
        return Work([self.recv([tensor], opts.rootRank, "broadcast")])

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        (out,) = _listed(output_tensors)
        self._note("scatter", out)
        if self._place != opts.rootRank:
            return Work([self.recv([out], opts.rootRank, "scatter")])
        (pieces,) = input_tensors
        out.copy_(pieces[self._place])
        return Work([self.send([pieces[rank]], rank, "scatter") for rank in self._peers()])

    def barrier(self, opts: Any = None) -> Work:
        return self.allreduce([torch.ones(1, dtype=torch.uint8)])

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        return Work([self._all_gather(*pair, "allgather") for pair in zip(output_tensors, input_tensors, strict=True)])

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        pieces = output.view(-1).chunk(self.size()) if output.numel() else [output] * self.size()
        return self._all_gather(pieces, input.reshape(-1), "all_gather_single")

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        return Work([self.all_gather_single(*pair) for pair in zip(outputs, inputs, strict=True)])

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        pieces = input.reshape(-1).chunk(self.size()) if input.numel() else [input] * self.size()
        parts = [torch.empty_like(pieces[self._place]) for _ in self.members]
        return self._exchange("reduce_scatter_single", output, pieces, parts, _reducing(parts, op, output.view(-1)))

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        return Work([self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    def all_to_all_single(
        self, out: Tensor, own: Tensor, out_sizes: list[int], sizes: list[int], opts: Any = None
    ) -> Work:
        # Sizes differ between ranks: none is noted.
        return self._exchange("all_to_all_single", own[:0], own.split(sizes), out.split(out_sizes))

    # Their names before torch 2.13.
    alltoall_base = all_to_all_single
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _all_gather(self, pieces: Sequence[Tensor], own: Tensor, kind: str) -> Work:
        return self._exchange(kind, own, [own.view(piece.shape) for piece in pieces], pieces)

    def _exchange(
        self,
        kind: str,
        noted: Tensor,
        sent: Sequence[Tensor],
        received: Sequence[Tensor],
        finish: Callable[[], object] | None = None,
    ) -> Work:
        """Sends one tensor to each rank and receives one from each; that of this rank is copied at the end."""
        self._note(kind, noted)
        works: list[Sent | Received] = []
        for rank in self._peers():
            works += [self.send([sent[rank]], rank, kind), self.recv([received[rank]], rank, kind)]

        def end() -> None:
            received[self._place].copy_(sent[self._place])
            if finish is not None:
                finish()

        return Work(works, end)

    def _peers(self) -> list[int]:
        return [rank for rank in range(self.size()) if rank != self._place]

    def _note(self, kind: str, tensor: Tensor) -> None:
        self._room.traces.note(self._name, self.members[self._place], (kind, tensor.numel(), tensor.dtype))


def _reducing(parts: Sequence[Tensor], op: Any, out: Tensor) -> Callable[[], object]:
    def reduce() -> None:
        total = fold(next(add for known, add in _REDUCTIONS.items() if op == known), parts)
        out.copy_(total / len(parts) if op == dist.ReduceOp.AVG else total)

    return reduce


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)
