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

    def __init__(self, works: Sequence[Sent | Received], finish: Callable[[], object] | None = None) -> None:
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
    """The backend "simulated"."""

    def __init__(self, room: Room, name: str, rank: int, members: Sequence[int]) -> None:
        """A group of ranks.

        Args:
            room: Of the case that runs now.
            name: The same on all its ranks.
            rank: Of this rank in the group.
            members: All its ranks, counted in the whole world.
        """
        super().__init__(rank, len(members))  # type: ignore[call-arg]
        self._room, self._name, self._place, self._members = room, name, rank, list(members)

    def size(self) -> int:
        return len(self._members)

    def rank(self) -> int:
        return self._place

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def name(self) -> str:
        return self.getBackendName()

    def getBackendName(self) -> str:
        return "simulated"

    @property
    def pg_name(self) -> str:
        return self._name

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def members(self) -> list[int]:
        """Its ranks, counted in the whole world."""
        return self._members

    def __repr__(self) -> str:
        return f"SimulatedGroup({self._name!r}, rank {self._place} of {self._members})"

    # -- point to point ---------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> Any:
        (tensor,) = tensors
        return self._send(tensor, dstRank, tag)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> Any:
        (tensor,) = tensors
        return self._receive(tensor, srcRank, tag)

    def _send(self, tensor: Tensor, target: int, tag: object) -> Sent:
        address = (self._name, self._members[self._place], self._members[target], tag)
        return self._room.wires.send(address, tensor)

    def _receive(self, into: Tensor, source: int, tag: object) -> Received:
        address = (self._name, self._members[source], self._members[self._place], tag)
        return self._room.wires.receive(address, into)

    # -- collectives ------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        return self._joined([self._allreduce(tensor, op) for tensor in _listed(tensors)])

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        (tensor,) = _listed(tensors)
        root = opts.rootRank
        self._note("broadcast", tensor)
        if self._place == root:
            return Work([self._send(tensor, rank, "broadcast") for rank in self._peers()])
        return Work([self._receive(tensor, root, "broadcast")])

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        (out,), root = _listed(output_tensors), opts.rootRank
        self._note("scatter", out)
        if self._place != root:
            return Work([self._receive(out, root, "scatter")])
        (pieces,) = input_tensors
        out.copy_(pieces[root])
        return Work([self._send(pieces[rank], rank, "scatter") for rank in self._peers()])

    def barrier(self, opts: Any = None) -> Work:
        return self.allreduce([torch.ones(1, dtype=torch.uint8)])

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        self._note("all_gather_single", input)
        pieces = output.view(-1).chunk(self.size()) if output.numel() else [output] * self.size()
        return self._all_gather(list(pieces), input.reshape(-1), "all_gather_single")

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        return self._joined(
            [self.all_gather_single(output, piece) for output, piece in zip(outputs, inputs, strict=True)]
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        works = []
        for pieces, own in zip(output_tensors, input_tensors, strict=True):
            self._note("allgather", own)
            works.append(self._all_gather(pieces, own, "allgather"))
        return self._joined(works)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        self._note("reduce_scatter_single", output)
        pieces = input.reshape(-1).chunk(self.size()) if input.numel() else [input] * self.size()
        works: list[Sent | Received] = []
        parts = [pieces[self._place]] * self.size()
        for rank in self._peers():
            parts[rank] = torch.empty_like(pieces[self._place])
            works.append(self._send(pieces[rank], rank, "reduce_scatter_single"))
            works.append(self._receive(parts[rank], rank, "reduce_scatter_single"))
        return Work(works, lambda: output.view(-1).copy_(self._reduced(parts, op)))

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        return self._joined(
            [self.reduce_scatter_single(output, whole, opts) for output, whole in zip(outputs, inputs, strict=True)]
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _allreduce(self, tensor: Tensor, op: Any) -> Work:
        self._note("allreduce", tensor)
        works: list[Sent | Received] = []
        parts = [tensor] * self.size()
        for rank in self._peers():
            parts[rank] = torch.empty_like(tensor)
            works.append(self._send(tensor, rank, "allreduce"))
            works.append(self._receive(parts[rank], rank, "allreduce"))
        return Work(works, lambda: tensor.copy_(self._reduced(parts, op)))

    def _all_gather(self, pieces: list[Tensor], own: Tensor, tag: str) -> Work:
        works: list[Sent | Received] = []
        for rank in self._peers():
            works.append(self._send(own, rank, tag))
            works.append(self._receive(pieces[rank], rank, tag))

        def place() -> None:
            pieces[self._place].copy_(own.view(pieces[self._place].shape))

        return Work(works, place)

    def _reduced(self, parts: Sequence[Tensor], op: Any) -> Tensor:
        total = fold(next(add for known, add in _REDUCTIONS.items() if op == known), parts)
        return total / len(parts) if op == dist.ReduceOp.AVG else total

    def _peers(self) -> list[int]:
        return [rank for rank in range(self.size()) if rank != self._place]

    def _note(self, kind: str, tensor: Tensor) -> None:
        self._room.traces.note(self._name, self._members[self._place], (kind, tensor.numel(), tensor.dtype))

    @staticmethod
    def _joined(works: Sequence[Work]) -> Work:
        def wait() -> None:
            for work in works:
                work.wait()

        return Work([], wait)


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)
