"""The collectives a step needs, over one axis. The only package that moves bytes between ranks.

Every transport speaks the same four operations:

    all-gather       "n piece -> (n piece)", in place: each rank's piece of a segment reaches all ranks
    reduce-scatter   "src (n piece) -> n piece", mean over src: each rank receives the mean of its piece
    any              "src bits -> bits", or over src: which ranks take part
    exchange         "bytes -> src bytes": small agreement between ranks
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from zero_fn.collectives.exchange import Alone
from zero_fn.collectives.native import Native
from zero_fn.collectives.same_host import SameHost
from zero_fn.collectives.segment import (
    PACKED_NBYTES,
    Contribution,
    Contributions,
    Pending,
    Route,
    Segment,
    Transport,
)
from zero_fn.mesh import Axis

__all__ = [
    "BY_BACKEND",
    "PACKED_NBYTES",
    "Alone",
    "Contribution",
    "Contributions",
    "Pending",
    "Route",
    "Segment",
    "Transport",
    "transport",
]

BY_BACKEND: dict[str, Callable[[dist.ProcessGroup, int, int], Transport]] = {"gloo": SameHost}
"""The transport of a backend, from group, rank and size; `Native` for every other."""


def transport(axis: Axis) -> Transport:
    """The transport for the backend of an axis.

    On gloo a direct exchange, through shared memory where all ranks are on one host; elsewhere, and for the memory of an
    accelerator, the backend's own collectives.
    """
    if axis.size == 1:
        return Alone()
    make = BY_BACKEND.get(axis.backend, Native) if axis.device_type == "cpu" else Native
    return make(axis.group, axis.rank, axis.size)
