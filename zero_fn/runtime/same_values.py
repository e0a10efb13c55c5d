"""Do all ranks that should hold the same values hold them?"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero_fn.agreement import agree_along
from zero_fn.hierarchy import Links
from zero_fn.mesh import Axis

__all__ = ["agree_on_values"]


def agree_on_values(
    transport: Links,
    axes: Sequence[Axis],
    what: str,
    rows: Sequence[tuple[Sequence[Axis], str]],
    *,
    device: torch.device,
    why: str,
    fix: str,
) -> None:
    """`agree`, where ranks need not hold the same along every data axis: experts lie on one, shards are cut over some.

    Communicates 16 bytes for each axis to each peer, if there are rows. Waits.

    Args:
        transport: Of the module or unit.
        axes: Over which it is.
        what: What the rows describe.
        rows: A line for each parameter, in the same order on every rank, and the axes along which ranks have the same one.
        device: Where messages are made.
        why: What would go wrong.
        fix: How to mend it.

    Raises:
        DisagreementError: Names two ranks and the first row that differ; on every rank.
    """
    along = [[row for alike, row in rows if axis in alike] for axis in axes]
    if any(along):
        agree_along(transport, [axis.size for axis in axes], what, along, device=device, why=why, fix=fix)
