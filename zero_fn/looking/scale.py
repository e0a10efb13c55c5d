"""What becomes of a step on more and more ranks: where padding and latency
begin to cost, and what answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from zero_fn.planning.activations import Compute
from zero_fn.planning.configurations import Configuration, Training, configurations, shapes_of
from zero_fn.planning.models import PlannedModel

__all__ = ["ScaleRow", "first_to_bite", "rank_counts", "scale"]

# Files of a checkpoint: what the rank has written, its parameters, its states
# (docs/checkpoint-format.md).
_FILES_OF_A_RANK = 3
_MESSAGES_OF_A_RANK = 4  # of a save: two to rank 0, and two back, of 640 bytes
_MANY_FILES = 100_000
_LARGE_BATCH = 4e6  # tokens


@dataclass(frozen=True)
class ScaleRow:
    """One number of ranks.

    Attributes:
        ranks: Devices.
        one: ZeRO-3 over one axis of all ranks.
        best: The fastest that fits, over one axis or two.
        padding: The part of the bytes that a rank sends with `one` that uneven cuts add.
        files: Files of a checkpoint.
        messages: Messages of a save to rank 0 and from it.
    """

    ranks: int
    one: Configuration
    best: Configuration
    padding: float
    files: int
    messages: int


def rank_counts(ranks: int) -> list[int]:
    """8, 64, and then by four, to those that were asked for."""
    return sorted({8, ranks, *(64 * 4**power for power in range(20) if 64 * 4**power < ranks)})


def scale(
    model: PlannedModel, training: Training, compute: Sequence[Compute | None], ranks: Sequence[int]
) -> list[ScaleRow]:
    """A row for each number of ranks, with nothing in a tier and the
    same microbatches on each rank."""
    found: list[ScaleRow] = []
    meshes = [mesh for count in ranks for mesh in shapes_of(count, training.machine.per_node)]
    every = configurations(model, replace(training, host=None, disk=None), compute, meshes)
    for count in ranks:
        rows = [row for row in every if row.ranks == count]
        one = min(
            (row for row in rows if row.proposal.transform == "shard_params"),
            key=lambda row: row.nbytes,
        )
        found.append(
            ScaleRow(
                count,
                one,
                rows[0],
                0.0,
                1 + _FILES_OF_A_RANK * count,
                _MESSAGES_OF_A_RANK * (count - 1),
            )
        )
    # What each would send to infinitely many ranks: the least of these has no padding.
    wholes = [row.one.sent * row.ranks / (row.ranks - 1) if row.ranks > 1 else inf for row in found]
    return [
        replace(row, padding=whole / min(wholes) - 1 if row.one.sent else 0.0)
        for row, whole in zip(found, wholes, strict=True)
    ]


def first_to_bite(rows: Sequence[ScaleRow]) -> Iterator[str]:
    """Sentences: from how many ranks on something costs more than it should, in this order."""
    tokens = next((row for row in rows if row.one.tokens > _LARGE_BATCH), None)
    if tokens:
        yield (
            f"batch: from {tokens.ranks:,} ranks on a step has more than 4 million tokens, "
            "whatever the mesh"
        )
    latency = next(
        (
            row.one
            for row in rows
            if row.one.proposal.bound == "collectives"
            and row.one.latency > 0.1 * row.one.proposal.step_s
        ),
        None,
    )
    if latency:
        share, ranks = latency.latency / latency.proposal.step_s, latency.mesh[0][1]
        yield (
            f"latency: from {ranks:,} ranks on a step of ZeRO-3 over one axis waits for it, "
            f"{share:.0%} of the step or more"
        )
    padding = next((row for row in rows if row.padding > 0.05), None)
    if padding:
        yield (
            f"padding: from {padding.ranks:,} ranks on ZeRO-3 over one axis sends "
            f"{padding.padding:.0%} more, or more"
        )
    files = next((row for row in rows if row.files > _MANY_FILES), None)
    if files:
        yield (
            f"files: from {files.ranks:,} ranks on a checkpoint has {files.files:,} files, or more"
        )
