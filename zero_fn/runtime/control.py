"""Bits that ranks tell one another while they run: what a backward passes, who has a gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zero_fn.transport.links import Links, Waits
from zero_fn.values.assignment import Assignment

__all__ = ["Control"]


class Control:
    """The control messages of one transformed module.

    Attributes:
        device: The device on which messages are made.
    """

    def __init__(self, transport: Links, assignment: Assignment) -> None:
        self._transport, axis = transport, assignment.axis
        self.device = torch.device(axis.device_type if axis is not None else "cpu")
        self._unread: list[Waits] = []
        self._notes: list[Tensor] = []

    def any(
        self,
        local: list[bool],
        what: str,
        *,
        check: str = "",
        second: Sequence[bool] = (),
        notes: Sequence[bool] = (),
    ) -> list[bool]:
        """Ors bits over ranks.

        Args:
            local: The bits of this rank. Where all are set the host does not wait.
            what: For errors.
            check: Must be equal on all ranks.
            second: More bits, which follow in what is returned; only if some of `local` are not set on any rank.
            notes: More bits, for `take_notes`.
        """
        bits = torch.tensor([*local, *second, *notes], dtype=torch.uint8, device=self.device)
        count = len(local) + len(second)
        pending = self._transport.any(bits, what, check=check)
        if notes:
            self._notes.append(bits[count:])
        if all(local):
            self._unread.append(pending)  # nothing to learn: the host need not wait for it now
            return local
        pending.wait()
        union = [bool(bit) for bit in bits[:count].tolist()]
        return union[: len(local)] if all(union[: len(local)]) else union

    def read(self) -> None:
        """Waits for messages nobody had to read: one that is dropped would be taken for the next."""
        unread, self._unread = self._unread, []
        for pending in unread:
            pending.wait()

    def take_notes(self) -> list[list[bool]]:
        """The notes of all messages since the last time, oldest first; `read` was called after them."""
        notes, self._notes = self._notes, []
        return [[bool(bit) for bit in bits.tolist()] for bits in notes]
