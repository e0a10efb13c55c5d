"""What ranks compare before they first gather: layouts, and the values each cut its shards from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from zero_fn.agreement import agree
from zero_fn.hierarchy import Links
from zero_fn.runtime.same_values import agree_on_values

if TYPE_CHECKING:
    from zero_fn.runtime.unit import Unit

__all__ = ["agree_on_units"]


def agree_on_units(transport: Links, units: Sequence[Unit], device: torch.device) -> None:
    """Compares layouts and initial values over ranks. Communicates two digests per rank to each peer; waits.

    Raises:
        DisagreementError: They differ; on every rank.
    """
    slots = [(unit, slot) for unit in units for slot in unit.slots]
    agree(
        transport,
        "layouts",
        [f"{slot} in unit {unit.name or 'root'!r}, {slot.levels_text}" for unit, slot in slots],
        device=device,
        why="the next all-gather would hang or mix parameters",
        fix="build and transform the same module on every rank",
    )
    agree_on_values(
        transport,
        "initial values",
        [(slot, f"{slot}, sum of bits {slot.initial}") for _, slot in slots],
        device=device,
        why="each rank cut its shard from another tensor",
        fix="torch.manual_seed(0) before building the model on every rank, or load the same state_dict",
    )
