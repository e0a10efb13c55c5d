"""The one error that explains what became of a function on ranks.

[Note: whose fault]
One failure makes others: peers of a dead rank see a closed connection, peers of a rank that raised wait for it. So
after the first failure the others get `GRACE_S` to report, and then blame goes, in this order, to a rank that died, to
the rank that raised first (the clock is the machine's; that it lost another rank is no first error if another rank raised
too), to the ranks that did not return in time.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import TypeVar

from zero_fn.errors import LostRankError, StateError
from zero_fn.local.peer import Peer
from zero_fn.local.sending import loads, sentence
from zero_fn.local.stacks import innermost, stacks_of

__all__ = ["GRACE_S", "RankDied", "RankHung", "RankTraceback", "judge"]

E = TypeVar("E", bound=BaseException)

GRACE_S = 1.0
"""Longer than a rank takes to see whom it lost."""


class RankDied(StateError):
    """A rank ended, by a signal or by exiting, before it returned a value."""


class RankHung(StateError):
    """Ranks did not return in time; the message says where they were."""


class RankTraceback(Exception):
    """The traceback of a rank as text: the `__cause__` of the exception that the rank raised."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


def judge(peers: Sequence[Peer], timeout_s: float | None) -> None:
    """Raises the one error that explains the others, if there is any. [Note: whose fault]

    Args:
        peers: All ranks.
        timeout_s: Seconds they were given; None for no limit.

    Raises:
        RankDied: A rank ended before it returned.
        RankHung: The time is over.
        Exception: Whatever the first rank that raised has raised; its traceback is the `__cause__`.
    """
    died = [peer for peer in peers if peer.has_died]
    raised = [peer for peer in peers if peer.has_raised]
    stuck = [peer for peer in peers if not peer.is_done]
    if died:
        raise _death(died[0], peers)
    if raised:
        first = min(raised, key=_guilt)
        error, cause = _raised(first, peers)
        raise error from cause
    if stuck:
        raise _hang(stuck, peers, timeout_s)


def _guilt(peer: Peer) -> tuple[bool, float]:
    """Less for the rank to blame."""
    assert peer.outcome is not None, f"rank {peer.rank} has no outcome"
    return isinstance(loads(peer.outcome.pickled), LostRankError), peer.outcome.at_s


_EXIT = ("the function or a library ended the process", "return a value instead of exiting")
_OUTSIDE = ("somebody ended it from outside", "see the logs of the system")
_SIGNALS = {
    int(signal.SIGKILL): ("often the kernel, because memory ran out (see dmesg)", "fewer ranks or a smaller model"),
    int(signal.SIGABRT): ("compiled code gave up", "its last words are in what the rank printed"),
    int(signal.SIGSEGV): ("a fault in compiled code", "the Python stack is in what the rank printed"),
}


def _death(peer: Peer, peers: Sequence[Peer]) -> RankDied:
    code = peer.exit_code
    if code is None:
        how, (why, fix) = "was lost with the fork server", _OUTSIDE
    elif code < 0:
        how, (why, fix) = f"was killed by {signal.Signals(-code).name}", _SIGNALS.get(-code, _OUTSIDE)
    else:
        how, (why, fix) = f"exited with code {code}", _EXIT
    after = "after" if peer.outcome is not None else "before"
    error = RankDied(
        f"Rank {peer.rank} of {len(peers)} {how} {after} it returned.",
        rank=peer.rank,
        pid=peer.child.pid,
        exit_code=code,
        why=why,
        fix=fix,
    )
    return _with_output(error, peer)


def _raised(peer: Peer, peers: Sequence[Peer]) -> tuple[BaseException, RankTraceback]:
    assert peer.outcome is not None, f"rank {peer.rank} has no outcome"
    cause = RankTraceback(peer.outcome.traceback)
    error: BaseException = loads(peer.outcome.pickled)
    if len(peers) > 1:
        error.add_note(f"Raised on rank {peer.rank} of {len(peers)}; {_elsewhere(peer, peers)}.")
    return _with_output(error, peer), cause


def _elsewhere(blamed: Peer, peers: Sequence[Peer]) -> str:
    words = {
        "also raised": [p.rank for p in peers if p.has_raised and p is not blamed],
        "had returned": [p.rank for p in peers if p.outcome is not None and p.outcome.is_value],
        "still ran": [p.rank for p in peers if not p.is_done],
    }
    return "; ".join(f"{_ranks(ranks)} {what}" for what, ranks in words.items() if ranks)


def _with_output(error: E, peer: Peer) -> E:
    if printed := peer.new_output():
        error.add_note(f"The last lines that rank {peer.rank} printed:\n{printed}")
    return error


def _hang(stuck: Sequence[Peer], peers: Sequence[Peer], timeout_s: float | None) -> RankHung:
    assert timeout_s is not None, "without a limit nobody is late"
    stacks = stacks_of(stuck)
    error = RankHung(
        sentence(f"{_ranks([peer.rank for peer in stuck])} of {len(peers)} did not return within {timeout_s:g} s."),
        **{f"rank_{rank}": innermost(stack) for rank, stack in stacks.items()},
        returned=_ranks([peer.rank for peer in peers if peer.outcome is not None]) or "none",
        fix="call the same collectives in the same order on every rank; if it only needs longer, raise timeout_s",
    )
    for rank, stack in stacks.items():
        error.add_note(f"Rank {rank}, most recent call first:\n{stack}")
    return error


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
