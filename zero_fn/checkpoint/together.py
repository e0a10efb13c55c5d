"""Ranks agree, in one message each: on what they are about to do, on how it went, and on whom it failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_fn import errors
from zero_fn.errors import CheckpointError, DisagreementError, ZeroError
from zero_fn.transport.agreement import digest
from zero_fn.transport.meeting import LONGEST_S, broadcast, meet, meeting_group
from zero_fn.transport.waiting import deadline

__all__ = ["Said", "Together", "digest_of"]

_MESSAGE_NBYTES = 640


def digest_of(values: object) -> bytes:
    """16 bytes that differ when the text of the values does."""
    return digest([repr(values)])


@dataclass(frozen=True)
class Said:
    """What a rank says.

    Attributes:
        same: A digest of what must be the same on every rank.
        kind: A digest of what makes ranks of one kind.
        text: Anything short.
    """

    same: bytes
    kind: bytes
    text: str


class Together:
    """All ranks of the program, or this process alone.

    Attributes:
        rank, size: Of this one, and how many there are.
    """

    def __init__(self) -> None:
        self._group = meeting_group()
        self.rank, self.size = (0, 1) if self._group is None else (self._group.rank(), self._group.size())

    def agree(
        self,
        doing: str,
        failure: Exception | None,
        *,
        same: object = None,
        kind: object = None,
        text: str = "",
        consequence: str = "on this one nothing was changed",
        waits_for_disks: bool = False,
    ) -> Sequence[Said]:
        """What each rank says. One message of 640 bytes to each peer; waits.

        Args:
            doing: What ranks do together, for errors.
            failure: What went wrong on this rank.
            same: What must be the same on every rank.
            kind: What tells kinds of ranks apart.
            text: At most 500 bytes for the others.
            consequence: What a failure elsewhere means here.
            waits_for_disks: Whether the others may take long.

        Raises:
            ZeroError: The failure of this rank; or one of its class that tells of that of another.
            DisagreementError: Ranks were given different arguments.
            LostRankError: A rank has ended, or did not come.
        """
        own = Said(digest_of(same), digest_of(kind), text)
        if self._group is None:
            if failure is not None:
                raise failure
            return [own]
        if failure is not None:
            own = Said(own.same, own.kind, f"{type(failure).__name__}\n{failure}")
        raw = bytes([failure is not None]) + own.same + own.kind + own.text.encode()[: _MESSAGE_NBYTES - 33]
        message = torch.frombuffer(bytearray(raw.ljust(_MESSAGE_NBYTES, b"\0")), dtype=torch.uint8)
        found = meet(self._group, message, LONGEST_S if waits_for_disks else deadline())
        rows = [bytes(row.tolist()) for row in found]
        if failure is not None:
            raise failure
        said = [Said(row[1:17], row[17:33], row[33:].rstrip(b"\0").decode(errors="ignore")) for row in rows]
        failed = [rank for rank, row in enumerate(rows) if row[0]]
        if failed:
            raise _told(doing, failed, said[failed[0]].text, consequence)
        other = next((rank for rank, row in enumerate(said) if row.same != said[0].same), None)
        if other is not None:
            raise DisagreementError(
                f"{doing}: ranks 0 and {other} were given different arguments.",
                here=f"rank {self.rank}",
                why="every rank writes or reads its part of one checkpoint",
                fix="call it with the same folder and options on every rank",
            )
        return said

    def from_first(self, values: Tensor) -> Tensor:
        """What rank 0 has, in memory of the host. A broadcast; waits.

        Raises:
            LostRankError: A rank has ended, or did not come.
        """
        values = values.detach().cpu().contiguous()
        return values if self._group is None else broadcast(self._group, values.clone())

    def union(self, bits: Sequence[bool]) -> list[bool]:
        """Which of these are true on any rank. One message of a byte for each to each peer; waits."""
        if self._group is None or not bits:
            return list(bits)
        rows = meet(self._group, torch.tensor(bits, dtype=torch.uint8), deadline())
        return [bool(bit) for bit in rows.amax(0).tolist()]


def _told(doing: str, ranks: list[int], text: str, consequence: str) -> ZeroError:
    """The failure of another rank, as one of this."""
    name, _, words = text.partition("\n")
    kind = getattr(errors, name, CheckpointError)
    kind = kind if isinstance(kind, type) and issubclass(kind, ZeroError) else CheckpointError
    summary, *facts = words.split("\n")
    error: ZeroError = kind(
        f"{doing} failed on rank {', '.join(map(str, ranks))}: {summary}",
        there="; ".join(" ".join(fact.split()) for fact in facts),
        here=consequence,
        fix="see the error of that rank; checkpoints that were complete are as they were",
    )
    return error
