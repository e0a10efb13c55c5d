"""Control messages: bits that are or-ed over ranks, such as which uses a backward runs and which gradients exist."""

from __future__ import annotations

from collections.abc import Sequence

from zero_fn.transport.agree import Bits
from zero_fn.transport.line import Line

__all__ = ["Control"]


class Control:
    """The control messages of one transformed module."""

    def __init__(self, transport: Line) -> None:
        self._transport = transport
        self._unread: list[Bits] = []

    def any(
        self,
        local: list[bool],
        what: str,
        *,
        check: str = "",
        second: Sequence[bool] = (),
    ) -> list[bool]:
        """Ors bits over ranks.

        Args:
            local: The bits of this rank. If all are set, the host does not wait for the message.
            what: What the bits mean, in the words of an error.
            check: A text that must be equal on all ranks.
            second: More bits, appended to the result, but only if some of `local` are set on no rank.

        Returns:
            The union of `local`, and perhaps that of `second`.
        """
        message = Bits(self._transport, [*local, *second], what, check=check)
        if all(local):
            self._unread.append(message)  # the result is known: the host need not wait for it now
            return local
        union = message.read()
        return union[: len(local)] if all(union[: len(local)]) else union

    def finish_unread(self) -> None:
        """Waits for the messages that nobody had to read."""
        unread, self._unread = self._unread, []
        for message in unread:
            message.finish_unread()
