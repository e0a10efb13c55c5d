"""A pool of local ranks, on which other tests stand, reports every way to fail."""

import os
import re
import signal
import time

import pytest
import torch.distributed as dist

import zero_fn.errors
from tests.support.ranks import axis
from zero_fn.local.first_failure import RankDied, RankTraceback


class Broken(ValueError):
    """An exception that only this file knows."""

    def __init__(self, *, rank, reason):
        super().__init__(f"{reason} on rank {rank}")
        self.rank = rank


def _gives_up(depth):
    """As compiled code does, below more frames than the report has lines."""
    if depth:
        _gives_up(depth - 1)
    os.write(2, b"free(): invalid pointer\n")
    os.abort()


def fail(how):
    if dist.get_rank() == 1:
        match how:
            case "raise":
                raise Broken(rank=1, reason="no luck")
            case "zero_fn":
                raise zero_fn.errors.MeshError("No axis.", fix="mesh['dp']", mesh=axis())
            case "kill":
                print("going down")
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                raise SystemExit(3)
            case "give up":
                _gives_up(50)
    dist.barrier()
    return "done"


def lost_before_the_other_has_raised():
    if dist.get_rank() == 0:
        raise zero_fn.errors.LostRankError("Rank 1 gave up.", fix="look there")
    time.sleep(0.2)  # in which the first has said whom it lost
    raise Broken(rank=1, reason="nobody knows")


def test_a_rank_that_lost_another_is_not_to_blame(ranks):
    with pytest.raises(Broken, match="nobody knows on rank 1"):
        ranks(2).run(lost_before_the_other_has_raised)


WAYS = {
    "raise": (Broken, "no luck on rank 1", r"Raised on rank 1 of 2\."),
    "zero_fn": (zero_fn.errors.MeshError, "No axis", r"Raised on rank 1 of 2\."),
    "kill": (RankDied, "Rank 1 of 2 was killed by SIGKILL", "going down"),
    "exit": (RankDied, "Rank 1 of 2 exited with code 3", ""),
    "give up": (
        RankDied,
        "was killed by SIGABRT",
        r"(?s)free\(\): invalid pointer\nFatal Python error: Aborted.*in _gives_up",
    ),
}
"""How a rank can fail: what is raised here, its message, and its notes."""


@pytest.mark.parametrize("how", WAYS)
def test_a_rank_that_fails_is_an_error_here_which_says_why(ranks, how):
    kind, message, note = WAYS[how]
    with pytest.raises(kind, match=message) as caught:
        ranks(2).run(fail, how)
    error = caught.value
    assert re.search(note, "\n".join(getattr(error, "__notes__", [])))
    if how == "raise":
        assert error.rank == 1
        assert isinstance(error.__cause__, RankTraceback)
        assert 'raise Broken(rank=1, reason="no luck")' in str(error.__cause__)
    elif how == "zero_fn":
        assert error.fix == "mesh['dp']"
        assert "dp=2" in str(error.facts["mesh"])
