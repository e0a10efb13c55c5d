"""How far the clocks of all ranks are ahead of that of rank 0.

[Note: clocks] Ranks of one host have one clock. Clocks of two hosts differ by an unknown number; it
lies between bounds that each message gives: it came after it was sent. The rounds that were fastest
give the narrowest.
"""

from __future__ import annotations

from time import perf_counter_ns

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zero_fn.transport.rank0_messages import LONGEST_S, gather, scatter

__all__ = ["clock_offsets"]

_ROUNDS = 8


def clock_offsets(group: ProcessGroup | None) -> list[int]:
    """On rank 0 how far the clock of each rank is ahead of that of rank 0, in nanoseconds.

    A collective of all ranks; waits. [Note: clocks]

    Raises:
        LostRankError: A rank has ended, or does not come.
    """
    if group is None:
        return [0]
    bounds = []
    for _ in range(_ROUNDS):
        sent = _gathered(group)
        came = told = perf_counter_ns()
        scatter(group, torch.zeros(group.size(), 8, dtype=torch.uint8), LONGEST_S)
        bounds.append((sent - came, _gathered(group) - told))
    least = torch.stack([low for low, _ in bounds]).amax(0).tolist()
    most = torch.stack([high for _, high in bounds]).amin(0).tolist()
    return [
        0 if low <= 0 <= high else (low + high) // 2 for low, high in zip(least, most, strict=True)
    ]


def _gathered(group: ProcessGroup) -> Tensor:
    """On rank 0 the times of all clocks now."""
    now = torch.tensor([perf_counter_ns()]).view(torch.uint8)
    return gather(group, now, LONGEST_S).view(torch.int64).flatten()
