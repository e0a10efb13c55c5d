"""Bits that ranks tell one another while they run: what a backward passes, who has a gradient."""

from __future__ import annotations

from collections.abc import Sequence

from zero_fn.runtime.ored import Ored
from zero_fn.transport.links import Links

__all__ = ["Control"]


class Control:
    """The control messages of one transformed module."""

    def __init__(self, transport: Links) -> None:
        self._transport = transport
        self._unread: list[Ored] = []
        self._notes: list[tuple[Ored, int]] = []  # with the number of bits before the notes

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
        message = Ored(self._transport, [*local, *second, *notes], what, check=check)
        count = len(local) + len(second)
        if notes:
            self._notes.append((message, count))
        if all(local):
            self._unread.append(message)  # nothing to learn: the host need not wait for it now
            return local
        union = message.read()[:count]
        return union[: len(local)] if all(union[: len(local)]) else union

    def read(self) -> None:
        """Settles the messages that nobody had to read."""
        unread, self._unread = self._unread, []
        for message in unread:
            message.settle()

    def take_notes(self) -> list[list[bool]]:
        """The notes of all messages since the last time, oldest first; `read` was called after them."""
        notes, self._notes = self._notes, []
        return [message.read()[count:] for message, count in notes]
