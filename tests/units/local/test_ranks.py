"""The pool of ranks that other tests stand on: it must report every way to fail, and survive it."""

import os
import random
import re
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist

import zero_fn.errors
from tests.support.ranks import axis
from zero_fn.local.blame import RankDied, RankHung, RankTraceback

SCALE = 3


class Broken(ValueError):
    """An exception that only this file knows."""

    def __init__(self, *, rank, reason):
        super().__init__(f"{reason} on rank {rank}")
        self.rank = rank


def place():
    return dist.get_rank(), dist.get_world_size()


def scaled_sum(x, *, power=1):
    x = SCALE * x * (dist.get_rank() + 1) ** power
    dist.all_reduce(x)
    return x


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
            case "skip":
                return "skipped the collective"
    dist.barrier()
    return "done"


def assert_usable(ranks):
    assert ranks(2).run(place) == [(0, 2), (1, 2)]


def test_arguments_and_globals_of_the_test_file_reach_the_ranks(ranks):
    expected = torch.full((2,), 15.0)
    assert all(torch.equal(value, expected) for value in ranks(2).run(scaled_sum, torch.ones(2), power=2))


def test_ranks_persist_and_share_one_axis(ranks):
    def axis_and_pid():
        return os.getpid(), id(axis()), str(axis())

    assert ranks(2).run(axis_and_pid) == ranks(2).run(axis_and_pid)
    assert "dp=2" in ranks(2).run(axis_and_pid)[0][2]


def test_every_case_starts_with_the_same_seed_and_one_thread(ranks):
    def draw():
        return torch.rand(()).item(), random.random(), torch.get_num_threads()

    (torch_draw, python_draw, threads), other = ranks(2).run(draw)
    assert (torch_draw, python_draw, threads) == other == ranks(2).run(draw)[0]
    assert threads == 1


def lost_before_the_other_has_raised():
    if dist.get_rank() == 0:
        raise zero_fn.errors.LostRankError("Rank 1 gave up.", fix="look there")
    time.sleep(0.2)
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
    "skip": (
        RankHung,
        "1 of 2 ranks did not return within 3 s",
        r'(?s)(?=.*barrier).*test_ranks.py", line \d+ in fail',
    ),
}
"""How a rank can fail: what is raised here, its message, and its notes."""


@pytest.mark.parametrize("how", WAYS)
def test_a_rank_that_fails_is_an_error_here_which_says_why(ranks, how):
    kind, message, note = WAYS[how]
    with pytest.raises(kind, match=message) as caught:
        ranks(2, deadline_s=3 if how == "skip" else 60).run(fail, how)
    error = caught.value
    assert re.search(note, "\n".join(getattr(error, "__notes__", [])))
    if how == "raise":
        assert error.rank == 1
        assert isinstance(error.__cause__, RankTraceback)
        assert 'raise Broken(rank=1, reason="no luck")' in str(error.__cause__)
    elif how == "zero_fn":
        assert error.fix == "mesh['dp']"
        assert "dp=2" in str(error.facts["mesh"])
    elif how == "skip":
        assert error.facts["late"] == "rank 0"
    assert_usable(ranks)


def test_only_a_failed_generation_is_replaced(ranks):
    assert_usable(ranks)
    ranks(3).run(place)
    before = dict(ranks.generations)
    with pytest.raises(Broken):
        ranks(2).run(fail, "raise")
    assert_usable(ranks)
    ranks(3).run(place)
    assert ranks.generations[2] == before[2] + 1
    assert ranks.generations[3] == before[3]


def test_warnings_of_zero_fn_are_errors_here_and_on_ranks(ranks):
    def warn():
        warnings.warn_explicit("slow path", UserWarning, "layout.py", 1, module="zero_fn.values.layout")

    with pytest.raises(UserWarning, match="slow path"):
        warn()
    with pytest.raises(UserWarning, match="slow path"):
        ranks(2).run(warn)
