"""Which of several failures of ranks explains the others, as one error.

[Note: whose fault] One failure causes others: peers of a dead rank see a closed connection,
peers of a rank that raised wait for it. So after the first failure all ranks have `GRACE_S`
seconds to report. Then a rank that died is to blame; if there is none, the rank that raised
first, where `LostRankError` counts only if no rank raised anything else; if none raised, the
ranks that are late.
"""

from __future__ import annotations

import pickle
import signal
from collections.abc import Mapping

from zero_fn.errors import StateError
from zero_fn.local.rank import Report

__all__ = ["GRACE_S", "RankDied", "RankHung", "RankTraceback", "first_failure", "hung"]

GRACE_S = 1.0  # longer than a rank takes to see that a peer is lost


class RankDied(StateError):
    """A rank ended, by a signal or by exiting, before it returned a value."""


class RankHung(StateError):
    """Ranks did not return in time. Notes of the error show where they were."""


class RankTraceback(Exception):
    """The traceback of a rank, as text; the `__cause__` of the exception
    that `launch` raises for it."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def first_failure(answers: Mapping[int, Report | int], n: int) -> tuple[int, BaseException] | None:
    """The rank to blame and its error, from reports and exit codes by rank;
    None if none failed. [Note: whose fault]"""
    for rank, code in answers.items():
        if isinstance(code, int):
            how = (
                f"was killed by {signal.Signals(-code).name}"
                if code < 0
                else f"exited with code {code}"
            )
            fix = (
                "return a value instead of exiting; "
                "SIGKILL is often the kernel when memory ran out: see dmesg"
            )
            return rank, RankDied(
                f"Rank {rank} of {n} {how} before it returned.", exit_code=code, fix=fix
            )
    raised = {
        rank: report
        for rank, report in answers.items()
        if isinstance(report, Report) and not report.is_value
    }
    if not raised:
        return None
    rank = min(raised, key=lambda rank: raised[rank].guilt)
    error: BaseException = pickle.loads(raised[rank].pickled)
    error.add_note(f"Raised on rank {rank} of {n}.")
    error.__cause__ = RankTraceback(raised[rank].traceback)
    return rank, error


def hung(stacks: Mapping[int, str], n: int, timeout_s: float | None) -> RankHung:
    """The error for ranks that did not return in time, with the stack of each,
    as faulthandler prints it."""
    error = RankHung(
        f"{len(stacks)} of {n} ranks did not return within {timeout_s} s.",
        late=", ".join(f"rank {rank}" for rank in stacks),
        fix="call the same collectives in the same order on every rank; "
        "if it only needs longer, raise timeout_s",
    )
    for rank, stack in stacks.items():
        error.add_note(f"Rank {rank}, most recent call first:\n{stack}")
    return error
