"""A process group over the wires: every collective that DTensor, zero_fn and torch's clipping call.

A collective sends all its messages when it is called and receives when its work is waited for. Sums are made in the order
of the ranks, so a collective gives the same bits on every rank and in every run.
"""

from __future__ import annotations

from functools import reduce as fold

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["SimulatedGroup"]

_REDUCTIONS = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
}


class Work(dist.Work):
    """The work of some sends and receives, and what is done when they are over."""

    def __init__(self, works, finish=None):
        super().__init__()
        self._works, self._finish = works, finish

    def wait(self, timeout=None):
        """Waits once; a second wait returns at once."""
        works, finish = self._works, self._finish
        self._works, self._finish = (), None
        for work in works:
            work.wait()
        if finish is not None:
            finish()
        return True

    def is_completed(self):
        return not self._works


class SimulatedGroup(dist.ProcessGroup):
    """The backend "simulated". `name` is the same on all ranks; `members` are its ranks, counted in the whole world.

    `room` has the wires and the traces of the case that runs now.
    """

    def __init__(self, room, name, rank, members):
        super().__init__(rank, len(members))
        self._room, self._name, self._place, self.members = room, name, rank, list(members)

    def size(self):
        return len(self.members)

    def rank(self):
        return self._place

    def _get_backend(self, device):
        return self

    def name(self):
        return "simulated"

    getBackendName = name

    @property
    def group_name(self):
        return self._name

    pg_name = group_name

    def __repr__(self):
        return f"SimulatedGroup({self._name!r}, rank {self._place} of {self.members})"

    # -- point to point ---------------------------------------------------------------------------------------------

    def send(self, tensors, dstRank, tag=0):
        (tensor,) = tensors
        return self._room.wires.send((self._name, self.members[self._place], self.members[dstRank], tag), tensor)

    def recv(self, tensors, srcRank, tag=0):
        (tensor,) = tensors
        return self._room.wires.receive((self._name, self.members[srcRank], self.members[self._place], tag), tensor)

    # -- collectives ------------------------------------------------------------------------------------------------

    def allreduce(self, tensors, opts=None):
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        works = []
        for tensor in _listed(tensors):
            parts = [torch.empty_like(tensor) for _ in self.members]
            finish = _reducing(parts, op, tensor)
            works.append(self._exchange("allreduce", tensor, [tensor] * self.size(), parts, finish))
        return Work(works)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors, opts=None):
        (tensor,) = _listed(tensors)
        self._note("broadcast", tensor)
        if self._place == opts.rootRank:
            return Work([self.send([tensor], rank, "broadcast") for rank in self._peers()])
        return Work([self.recv([tensor], opts.rootRank, "broadcast")])

    def scatter(self, output_tensors, input_tensors, opts=None):
        (out,) = _listed(output_tensors)
        self._note("scatter", out)
        if self._place != opts.rootRank:
            return Work([self.recv([out], opts.rootRank, "scatter")])
        (pieces,) = input_tensors
        out.copy_(pieces[self._place])
        return Work([self.send([pieces[rank]], rank, "scatter") for rank in self._peers()])

    def barrier(self, opts=None):
        return self.allreduce([torch.ones(1, dtype=torch.uint8)])

    def allgather(self, output_tensors, input_tensors, opts=None):
        return Work([self._all_gather(*pair, "allgather") for pair in zip(output_tensors, input_tensors, strict=True)])

    def all_gather_single(self, output, input, opts=None):
        pieces = output.view(-1).chunk(self.size()) if output.numel() else [output] * self.size()
        return self._all_gather(pieces, input.reshape(-1), "all_gather_single")

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        return Work([self.all_gather_single(*pair) for pair in zip(outputs, inputs, strict=True)])

    def reduce_scatter_single(self, output, input, opts=None):
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        pieces = input.reshape(-1).chunk(self.size()) if input.numel() else [input] * self.size()
        parts = [torch.empty_like(pieces[self._place]) for _ in self.members]
        return self._exchange("reduce_scatter_single", output, pieces, parts, _reducing(parts, op, output.view(-1)))

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        return Work([self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    def all_to_all_single(self, out, own, out_sizes, sizes, opts=None):
        # Sizes differ between ranks: none is noted.
        return self._exchange("all_to_all_single", own[:0], own.split(sizes), out.split(out_sizes))

    # Their names before torch 2.13.
    alltoall_base = all_to_all_single
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _all_gather(self, pieces, own, kind):
        return self._exchange(kind, own, [own.view(piece.shape) for piece in pieces], pieces)

    def _exchange(
        self,
        kind,
        noted,
        sent,
        received,
        finish=None,
    ):
        """Sends one tensor to each rank and receives one from each; that of this rank is written at the end, as gloo does."""
        self._note(kind, noted)
        works = []
        for rank in self._peers():
            works += [self.send([sent[rank]], rank, kind), self.recv([received[rank]], rank, kind)]

        own = sent[self._place]
        own = own.clone() if self._room.wires.timing == "early" else own

        def end():
            received[self._place].copy_(own)
            if finish is not None:
                finish()

        return Work(works, end)

    def _peers(self):
        return [rank for rank in range(self.size()) if rank != self._place]

    def _note(self, kind, tensor):
        self._room.traces.note(self._name, self.members[self._place], (kind, tensor.numel(), tensor.dtype))


def _reducing(parts, op, out):
    def reduce():
        total = fold(next(add for known, add in _REDUCTIONS.items() if op == known), parts)
        out.copy_(total / len(parts) if op == dist.ReduceOp.AVG else total)

    return reduce


def _listed(tensors):
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)
