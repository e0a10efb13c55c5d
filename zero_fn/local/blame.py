"""The one error that explains what became of a function on ranks.

[Note: whose fault] One failure makes others: peers of a dead rank see a closed connection, peers of a rank that raised wait
for it. So after the first failure the others get `GRACE_S` to report. Then blame goes to a rank that died; or else to the
rank that raised first, but not for having lost another rank if one raised something else; or else to those that are late.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from zero_fn.errors import LostRankError, StateError
from zero_fn.local.peer import Peer
from zero_fn.local.sending import loads

__all__ = ["GRACE_S", "RankDied", "RankHung", "RankTraceback", "judge"]

GRACE_S = 1.0
"""Longer than a rank takes to see whom it lost."""

_STACKS_S = 1.0
_SHOWN_LINES = 20
_LIBRARIES = tuple(f'File "{path}/' for path in (Path(__file__).parents[1], Path(torch.__file__).parent))


class RankDied(StateError):
    """A rank ended, by a signal or by exiting, before it returned a value."""


class RankHung(StateError):
    """Ranks did not return in time; the message says where they were."""


class RankTraceback(Exception):
    """The traceback of a rank as text: the `__cause__` of the exception that the rank raised."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def judge(peers: Sequence[Peer], timeout_s: float | None) -> None:
    """Raises the one error that explains the others, if there is any. [Note: whose fault]"""
    raised: list[tuple[bool, float, Peer, BaseException, str]] = []
    for peer in peers:
        if peer.report is None and peer.exit_code is not None:
            raise _with_output(_death(peer, peer.exit_code, len(peers)), peer)
        if peer.report is not None and not peer.report.is_value:
            error = loads(peer.report.pickled, f"What rank {peer.rank} raised")
            raised.append((isinstance(error, LostRankError), peer.report.at_s, peer, error, peer.report.traceback))
    if raised:
        *_, peer, error, traceback = min(raised, key=lambda entry: entry[:2])
        error.add_note(f"Raised on rank {peer.rank} of {len(peers)}.")
        raise _with_output(error, peer) from RankTraceback(traceback)
    if not all(peer.is_done for peer in peers):
        raise _hang(peers, timeout_s)


_CAUSES = {
    -signal.SIGKILL: "often the kernel, because memory ran out (see dmesg)",
    -signal.SIGABRT: "compiled code gave up; its last words are in what the rank printed",
    -signal.SIGSEGV: "a fault in compiled code; the Python stack is in what the rank printed",
}


def _death(peer: Peer, code: int, n: int) -> RankDied:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return RankDied(
        f"Rank {peer.rank} of {n} {how} before it returned.",
        rank=peer.rank,
        pid=peer.pid,
        exit_code=code,
        why=_CAUSES.get(code, "the function, a library or somebody outside ended the process"),
        fix="return a value instead of exiting; with too little memory, fewer ranks or a smaller model",
    )


def _with_output(error: BaseException, peer: Peer) -> BaseException:
    """Adds what a rank printed last, as far as it was not shown, and how the report of a fault in compiled code begins."""
    printed = peer.files["out"].read() + peer.files["err"].read()
    before, fatal, stack = printed.partition("Fatal Python error")
    if lines := before.splitlines()[-_SHOWN_LINES:] + (fatal + stack).splitlines()[:_SHOWN_LINES]:
        error.add_note("\n".join((f"The last lines that rank {peer.rank} printed:", *lines)))
    return error


def _hang(peers: Sequence[Peer], timeout_s: float | None) -> RankHung:
    assert timeout_s is not None, "without a limit nobody is late"
    late = [peer for peer in peers if not peer.is_done]
    for peer in late:
        os.kill(peer.pid, signal.SIGUSR1)  # its faulthandler writes where it is
    time.sleep(_STACKS_S)
    stacks = {f"rank_{peer.rank}": peer.files["stacks"].read() for peer in late}
    error = RankHung(
        f"{len(late)} of {len(peers)} ranks did not return within {timeout_s:g} s.",
        **{rank: _place(stack) for rank, stack in stacks.items()},
        fix="call the same collectives in the same order on every rank; if it only needs longer, raise timeout_s",
    )
    for rank, stack in stacks.items():
        error.add_note(f"{rank}, most recent call first:\n{stack}")
    return error


def _place(stack: str) -> str:
    """The innermost frame of the main thread outside torch and zero_fn, of a text of faulthandler."""
    frames = [line.strip() for line in stack.split("\n\n")[-1].splitlines() if "File" in line]
    outside = [frame for frame in frames if not frame.startswith(_LIBRARIES)]
    return (outside or frames or ["unknown: it did not answer SIGUSR1"])[0]
