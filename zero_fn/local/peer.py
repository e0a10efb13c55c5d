"""One rank, seen from the process that asked for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zero_fn.local.fork_server import Child
from zero_fn.local.rank import Outcome

__all__ = ["Peer"]

_TAIL_LINES = 20
_WORDS_LINES = 10  # before those of Python


@dataclass(slots=True)
class Peer:
    """A rank and what it has reported so far.

    Attributes:
        outcome: Of the function it runs, once reported.
        exit_code: Once it ended; negative for a signal.
        heard_nbytes: Bytes of its output file that belong to earlier functions.
    """

    rank: int
    child: Child
    output: Path
    stacks: Path
    outcome: Outcome | None = None
    exit_code: int | None = None
    has_ended: bool = False
    heard_nbytes: int = 0

    @property
    def is_done(self) -> bool:
        return self.outcome is not None or self.has_ended

    @property
    def has_died(self) -> bool:
        return self.has_ended and (self.outcome is None or (self.outcome.is_value and self.exit_code != 0))

    @property
    def has_raised(self) -> bool:
        return self.outcome is not None and not self.outcome.is_value

    def new_output(self) -> str:
        """The last lines that the rank printed during the current function; empty if its output is shown elsewhere.

        Of one that was killed by compiled code: what that said, and the innermost frames, which Python writes first.
        """
        if not self.output.exists():
            return ""
        with self.output.open("rb") as file:
            file.seek(self.heard_nbytes)
            lines = file.read().decode(errors="replace").splitlines()
        fatal = next((at for at, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
        begin = len(lines) - _TAIL_LINES if fatal is None else fatal - _WORDS_LINES
        return "\n".join(lines[max(begin, 0) :][: _TAIL_LINES + _WORDS_LINES])
