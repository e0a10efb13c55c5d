"""What ranks compare before their first gather: layouts,
the values from which each cut its shards, and values of replicas.

[Note: what several ranks hold] Parameters that several ranks hold whole are never gathered, so
nothing would ever show that they differ: made on `meta` and drawn from other seeds, edited on one
rank, or loaded from other files. A shard that only one rank holds may be anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from zero_fn.errors import StorageError
from zero_fn.runtime.parameter_kind import dtypes_text
from zero_fn.runtime.unit import Unit
from zero_fn.tiers.tier_tensor import TierTensor, in_memory
from zero_fn.transport.agree import Outcome, agree, agree_along
from zero_fn.transport.line import Line
from zero_fn.values.digests import content_digests

__all__ = ["agree_on_units"]


def agree_on_units(transport: Line, units: Sequence[Unit]) -> None:
    """Compares layouts, initial values, and parameters that several ranks hold,
    which are read once, also from their tier.

    Communicates 16 bytes for each comparison, and axis, to each peer; waits.

    Raises:
        DisagreementError: Ranks differ. Raised on every rank.
        StorageError: A disk failed on this rank or another. Raised on every rank.
    """
    slots = [(unit, slot) for unit in units for slot in unit.slots]
    agree(
        transport,
        "layouts",
        [
            f"{slot} in unit {unit.name or 'root'!r}, {slot.stages_text}, {dtypes_text(slot.kind)}"
            for unit, slot in slots
        ],
        why="the next all-gather would hang or mix parameters",
        fix="build and transform the same module on every rank",
    )
    agree_along(
        transport,
        "initial values",
        [
            ([hop.axis for hop in slot.path.hops], f"{slot}, sum of bits {slot.initial}")
            for _, slot in slots
        ],
        why="each rank cut its shard from another tensor",
        fix="torch.manual_seed(0) before building the model on every rank, "
        "or load the same state_dict",
    )
    # [Note: what several ranks hold]
    shared = [
        (slot, alike)
        for _, slot in slots
        if (alike := [hop.axis for hop in slot.path.hops if hop.layout is None])
    ]
    digests: list[int] = []
    failure: StorageError | None = None
    try:
        digests = content_digests(in_memory(slot.flat) for slot, _ in shared)
    except StorageError as error:
        failure = error
    may_fail = any(
        isinstance(slot.flat, TierTensor) and slot.flat.record.shelf.may_fail for slot, _ in shared
    )
    if (
        may_fail
        and (failed := Outcome(transport, failure, "Reading parameters").failed_on_any_rank())
        is not None
    ):
        raise failed
    agree_along(
        transport,
        "values of the same parameter",
        [
            (alike, f"{slot}, sum of bits {each}")
            for (slot, alike), each in zip(shared, digests, strict=True)
        ],
        why="what rests whole on several ranks is never gathered, "
        "so each would train a model of its own",
        fix="torch.manual_seed(0) before what draws or edits values on every rank, "
        "or load the same state_dict",
    )
