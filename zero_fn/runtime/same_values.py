"""Do all ranks that should hold the same values hold them?"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero_fn.agreement import Exchanges, agree
from zero_fn.hierarchy import Hierarchy, Links
from zero_fn.runtime.slot import Slot

__all__ = ["agree_on_values"]


def agree_on_values(
    transport: Links,
    what: str,
    rows: Sequence[tuple[Slot, str]],
    *,
    device: torch.device,
    why: str,
    fix: str,
) -> None:
    """`agree`, where some parameters are the same along one of two data axes only: experts that lie on the other.

    Communicates 16 bytes to each peer, twice if there are such parameters. Waits.

    Args:
        transport: Of the module or unit.
        what: What the rows describe.
        rows: One line for each parameter, in the same order on every rank.
        device: Where messages are made.
        why: What would go wrong.
        fix: How to mend it.

    Raises:
        DisagreementError: Names the first two ranks and the first row that differ.
    """
    by_axis: dict[int | None, list[str]] = {None: []}
    for slot, row in rows:
        is_alone = slot.path.route is not None and slot.path.route.is_alone
        by_axis.setdefault(slot.path.route.first if slot.path.route is not None and is_alone else None, []).append(row)
    for number, chosen in sorted(by_axis.items(), key=lambda item: -1 if item[0] is None else item[0]):
        links: Exchanges = transport
        if number is not None:
            assert isinstance(transport, Hierarchy), "a tensor leaves an axis out where there are two"
            links = transport.member(number)
        agree(links, what, chosen, device=device, why=why, fix=fix)
