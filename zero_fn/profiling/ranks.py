"""Rank 0 hears from all ranks what they have noted, and tells all what it has found.

Their clocks are set right before.

[Note: clocks] Ranks of one host have one clock. Clocks of two hosts differ by an unknown number; it
lies between bounds that each message gives: it came after it was sent. The rounds that were fastest
give the narrowest.
"""

from __future__ import annotations

import pickle
import zlib
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zero_fn.transport.rank0_messages import LONGEST_S, broadcast, gather, meeting_group, scatter

__all__ = ["Ranks"]

_ROUNDS = 8


class Ranks:
    """All ranks of the process group.

    Making it, and each method, is a collective of all of them; each waits.

    Raises:
        LostRankError: A rank has ended, or does not come.
    """

    def __init__(self) -> None:
        group = self._group
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        self.offsets = self._offsets()
        """On rank 0: how far the clock of each rank is ahead of that of rank 0, in nanoseconds."""

    @property
    def _group(self) -> ProcessGroup | None:
        return meeting_group()  # asked for each time: a save in the background may have begun

    def collect(self, found: Any) -> list[Any]:
        """On rank 0 what each rank has found; on the others nothing.

        Pickled, as by torch's collectives of objects.
        """
        if self._group is None:
            return [found]
        message = _packed(found)
        longest = int(self._longest(message.numel()))
        rows = gather(
            self._group,
            torch.cat([message, message.new_zeros(longest - message.numel())]),
            LONGEST_S,
        )
        return [_unpacked(row) for row in rows]

    def tell(self, found: Any) -> Any:
        """What rank 0 has found, on all ranks."""
        if self._group is None:
            return found
        message = _packed(found)
        room = torch.zeros(
            self._longest(message.numel() if self.rank == 0 else 0), dtype=torch.uint8
        )
        if self.rank == 0:
            room[: message.numel()] = message
        return _unpacked(broadcast(self._group, room))

    def _longest(self, nbytes: int) -> int:
        assert self._group is not None
        rows = gather(self._group, _number(nbytes), LONGEST_S)
        longest = int(rows.view(torch.int64).max()) if self.rank == 0 else 0
        return int(
            scatter(self._group, _number(longest).repeat(self.size, 1), LONGEST_S).view(torch.int64)
        )

    def _offsets(self) -> list[int]:
        """[Note: clocks]"""
        if self._group is None:
            return [0]
        least, most = torch.full((self.size,), -(2**62)), torch.full((self.size,), 2**62)
        for _ in range(_ROUNDS):
            sent = gather(self._group, _number(perf_counter_ns()), LONGEST_S)
            came, told = perf_counter_ns(), perf_counter_ns()
            scatter(self._group, torch.zeros(self.size, 8, dtype=torch.uint8), LONGEST_S)
            heard = gather(self._group, _number(perf_counter_ns()), LONGEST_S)
            if self.rank == 0:
                least = torch.maximum(least, sent.view(torch.int64).view(-1) - came)
                most = torch.minimum(most, heard.view(torch.int64).view(-1) - told)
        if self.rank:
            return []
        bounds = zip(least.tolist(), most.tolist(), strict=True)
        return [0 if low <= 0 <= high else (low + high) // 2 for low, high in bounds]


def _number(value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.int64).view(torch.uint8)


def _packed(found: Any) -> Tensor:
    packed = zlib.compress(pickle.dumps(found), 1)
    return torch.frombuffer(
        bytearray(len(packed).to_bytes(8, "little") + packed), dtype=torch.uint8
    )


def _unpacked(row: Tensor) -> Any:
    data = row.numpy().tobytes()
    return pickle.loads(zlib.decompress(data[8 : 8 + int.from_bytes(data[:8], "little")]))
