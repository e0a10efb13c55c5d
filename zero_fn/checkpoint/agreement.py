"""Ranks agree, through rank 0, on what they are about to do,
and on whether it went well on each of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero_fn import errors
from zero_fn.errors import CheckpointError, DisagreementError, LostRankError, ZeroError
from zero_fn.transport.agree import digest
from zero_fn.transport.rank0_messages import (
    LONGEST_S,
    all_of,
    broadcast,
    gather,
    meeting_group,
    scatter,
)
from zero_fn.transport.waiting import deadline

__all__ = ["Agreement", "RankMeeting", "failure_of"]

_MESSAGE_NBYTES = 640

_WELL, _FAILED, _DIFFERENT = b"\0\1\2"
"""The first byte of a message."""


@dataclass(frozen=True)
class Agreement:
    """What ranks have agreed on."""

    text: str  # what `decide` has returned on rank 0
    replica: int  # index among the ranks with the same tensor names
    replicas: int  # how many these are
    have_same_names: bool  # whether these are all ranks


class RankMeeting:
    """All ranks of the program, or this process alone."""

    def __init__(self) -> None:
        self.group = meeting_group()
        self.rank, self.size = (
            (0, 1) if self.group is None else (self.group.rank(), self.group.size())
        )

    def agree(
        self,
        doing: str,
        failure: Exception | None,
        decide: Callable[[], str] = str,
        *,
        same: object = None,
        same_names: object = None,
        consequence: str = "this rank has changed nothing",
        waits_for_disks: bool = False,
    ) -> Agreement:
        """Returns once every rank has come without a failure, and rank 0 has acted for all.

        Each rank sends rank 0 a message of 640 bytes, and gets one back; waits.

        `decide` acts for all on rank 0 and returns at most 500 bytes; `same` must be equal on all
        ranks, and `same_names` on those that are replicas; `consequence` is what a failure
        elsewhere means here.
        """
        if self.group is None:
            if failure is not None:
                raise failure
            return Agreement(decide(), 0, 1, True)
        seconds = LONGEST_S if waits_for_disks else deadline()
        own = (
            [digest([repr(same)]), digest([repr(same_names)])]
            if failure is None
            else [_failed(self.rank, failure)]
        )
        rows = torch.empty(0, _MESSAGE_NBYTES, dtype=torch.uint8)
        try:
            heard = gather(
                self.group, _message(_WELL if failure is None else _FAILED, *own), seconds
            )
            if self.rank == 0:
                answers, failure = _answers([bytes(row.tolist()) for row in heard], failure, decide)
                rows = torch.stack(answers)
        except LostRankError as error:
            if self.rank == 0:
                with suppress(LostRankError):  # those that are left need not wait
                    scatter(
                        self.group,
                        _message(_FAILED, _failed(0, error)).repeat(self.size, 1),
                        seconds,
                    )
            raise
        # Rank 0 may wait as long for another.
        answer = bytes(scatter(self.group, rows, 2 * seconds).tolist())
        if failure is not None:
            raise failure
        said = answer[1:].rstrip(b"\0").decode(errors="ignore")
        if answer[0] == _FAILED:
            raise _told(doing, said, consequence)
        if answer[0] == _DIFFERENT:
            raise DisagreementError(
                f"{doing}: ranks 0 and {said} were given different arguments.",
                here=f"rank {self.rank}",
                why="every rank does its part of one whole",
                fix="call it with the same arguments on every rank",
            )
        replica, replicas, text = said.split("\n", 2)
        return Agreement(text, int(replica), int(replicas), int(replicas) == self.size)

    def from_first(self, values: Tensor) -> Tensor:
        """The values of rank 0, in memory of the host. A broadcast; waits."""
        values = values.detach().cpu().contiguous()
        return values if self.group is None else broadcast(self.group, values.clone())

    def all_of(self, value: Any) -> list[Any]:
        """The values of all ranks, as JSON has them.

        Each rank sends rank 0 its value, and gets all of them; waits.
        """
        said = json.dumps(value, separators=(",", ":")).encode()
        return [
            json.loads(text)
            for text in ([said] if self.group is None else all_of(self.group, said))
        ]

    def union(self, bits: Sequence[bool]) -> list[bool]:
        """Which of these are true on any rank.

        Each rank sends rank 0 a byte for each of them, and gets one back; waits.
        """
        if self.group is None or not bits:
            return list(bits)
        rows = gather(self.group, torch.tensor(bits, dtype=torch.uint8), deadline())
        if self.rank == 0:
            rows = rows.amax(0).repeat(self.size, 1)
        return [bool(bit) for bit in scatter(self.group, rows, 2 * deadline()).tolist()]


def failure_of(act: Callable[[], object]) -> Exception | None:
    """Does something on this rank, and returns what went wrong:
    the other ranks hear of it in `RankMeeting.agree`."""
    try:
        with torch.no_grad(), torch.device("cpu"):  # whatever the default device is
            act()
    except Exception as error:
        return error
    return None


def _message(begin: int, *parts: bytes) -> Tensor:
    raw = bytes([begin]) + b"".join(parts)
    return torch.frombuffer(
        bytearray(raw[:_MESSAGE_NBYTES].ljust(_MESSAGE_NBYTES, b"\0")), dtype=torch.uint8
    )


def _failed(rank: int, failure: Exception) -> bytes:
    return f"{rank}\n{type(failure).__name__}\n{failure}".encode()


def _answers(
    said: list[bytes], failure: Exception | None, decide: Callable[[], str]
) -> tuple[list[Tensor], Exception | None]:
    """What rank 0 answers each rank, and what went wrong on rank 0."""
    failed = [row for row in said if row[0] == _FAILED]
    if failed:
        return [_message(_FAILED, failed[0][1:])] * len(said), failure
    other = next((rank for rank, row in enumerate(said) if row[1:17] != said[0][1:17]), None)
    if other is not None:
        return [_message(_DIFFERENT, str(other).encode())] * len(said), None
    try:
        text = decide()
    except Exception as error:
        return [_message(_FAILED, _failed(0, error))] * len(said), error
    names = [row[17:33] for row in said]
    replicas, seen = Counter(names), Counter[bytes]()
    answers = []
    for each in names:
        answers.append(_message(_WELL, f"{seen[each]}\n{replicas[each]}\n{text}".encode()))
        seen[each] += 1
    return answers, None


def _told(doing: str, said: str, consequence: str) -> ZeroError:
    """The failure of another rank, as an error of this one."""
    rank, name, words = said.split("\n", 2)
    kind = getattr(errors, name, CheckpointError)
    kind = kind if isinstance(kind, type) and issubclass(kind, ZeroError) else CheckpointError
    summary, *facts = words.split("\n")
    error: ZeroError = kind(
        f"{doing} failed on rank {rank}: {summary}",
        there="; ".join(" ".join(fact.split()) for fact in facts),
        here=consequence,
        fix="see the error of that rank; checkpoints that were complete are as they were",
    )
    return error
