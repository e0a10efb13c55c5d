"""The pool of ranks that other tests stand on: it must report every way to fail, and survive it."""

from __future__ import annotations

import os
import random
import re
import signal
import time
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import zero_fn.errors
from tests.support.ranks import Ranks, axis
from zero_fn.local.blame import RankDied, RankHung, RankTraceback

SCALE = 3


class Broken(ValueError):
    """An exception that only this file knows."""

    def __init__(self, *, rank: int, reason: str) -> None:
        super().__init__(f"{reason} on rank {rank}")
        self.rank = rank


@dataclass(frozen=True)
class Place:
    rank: int
    n: int


def place() -> Place:
    return Place(dist.get_rank(), dist.get_world_size())


def scaled_sum(x: torch.Tensor, *, power: int = 1) -> torch.Tensor:
    x = SCALE * x * (dist.get_rank() + 1) ** power
    dist.all_reduce(x)
    return x


def fail(how: str) -> str:
    if dist.get_rank() == 1:
        if how == "raise":
            raise Broken(rank=1, reason="no luck")
        if how == "zero_fn":
            raise zero_fn.errors.MeshError("No axis.", fix="mesh['dp']", mesh=axis())
        if how == "kill":
            print("going down")
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            raise SystemExit(3)
        if how == "skip":
            return "skipped the collective"
    dist.barrier()
    return "done"


def assert_usable(ranks: Ranks) -> None:
    assert ranks(2).run(place) == [Place(0, 2), Place(1, 2)]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_values_come_in_the_order_of_ranks(ranks: Ranks, n: int) -> None:
    assert ranks(n).run(place) == [Place(rank, n) for rank in range(n)]


def test_arguments_and_globals_of_the_test_file_reach_the_ranks(ranks: Ranks) -> None:
    expected = torch.full((2,), 15.0)
    assert all(torch.equal(value, expected) for value in ranks(2).run(scaled_sum, torch.ones(2), power=2))


def test_ranks_persist_and_share_one_axis(ranks: Ranks) -> None:
    def axis_and_pid() -> tuple[int, int, str]:
        return os.getpid(), id(axis()), str(axis())

    assert ranks(2).run(axis_and_pid) == ranks(2).run(axis_and_pid)
    assert "dp=2" in ranks(2).run(axis_and_pid)[0][2]


def test_every_case_starts_with_the_same_seed_and_one_thread(ranks: Ranks) -> None:
    def draw() -> tuple[float, float, int]:
        return torch.rand(()).item(), random.random(), torch.get_num_threads()

    (torch_draw, python_draw, threads), other = ranks(2).run(draw)
    assert (torch_draw, python_draw, threads) == other == ranks(2).run(draw)[0]
    assert threads == 1


@pytest.mark.parametrize("n", [2, 3])
@given(numel=st.integers(0, 5))
def test_examples_of_hypothesis_run_on_ranks(ranks: Ranks, n: int, numel: int) -> None:
    assert [value.numel() for value in ranks(n).run(scaled_sum, torch.ones(numel))] == [numel] * n


def lost_before_the_other_has_raised() -> None:
    if dist.get_rank() == 0:
        raise zero_fn.errors.LostRankError("Rank 1 gave up.", fix="look there")
    time.sleep(0.2)
    raise Broken(rank=1, reason="nobody knows")


def test_a_rank_that_lost_another_is_not_to_blame(ranks: Ranks) -> None:
    with pytest.raises(Broken, match="nobody knows on rank 1"):
        ranks(2).run(lost_before_the_other_has_raised)


def test_a_rank_that_raises_raises_here_with_its_traceback(ranks: Ranks) -> None:
    start_s = time.monotonic()
    with pytest.raises(Broken, match="no luck on rank 1") as caught:
        ranks(2).run(fail, "raise")
    assert time.monotonic() - start_s < 10
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, RankTraceback)
    assert 'raise Broken(rank=1, reason="no luck")' in str(caught.value.__cause__)
    assert caught.value.__notes__ == ["Raised on rank 1 of 2."]
    assert_usable(ranks)


def test_an_error_of_zero_fn_keeps_its_facts(ranks: Ranks) -> None:
    with pytest.raises(zero_fn.errors.MeshError) as caught:
        ranks(2).run(fail, "zero_fn")
    assert caught.value.fix == "mesh['dp']"
    assert "dp=2" in str(caught.value.facts["mesh"])
    assert_usable(ranks)


def _gives_up(depth: int) -> None:
    """As compiled code does, below more frames than the report has lines."""
    if depth:
        _gives_up(depth - 1)
    os.write(2, b"free(): invalid pointer\n")
    os.abort()


def test_a_rank_that_gives_up_says_why(ranks: Ranks) -> None:
    with pytest.raises(RankDied, match=r"was killed by SIGABRT") as caught:
        ranks(2).run(_gives_up, 50)
    notes = "\n".join(caught.value.__notes__)
    assert "free(): invalid pointer\nFatal Python error: Aborted" in notes
    assert "in _gives_up" in notes


@pytest.mark.parametrize(("how", "message"), [("kill", "was killed by SIGKILL"), ("exit", "exited with code 3")])
def test_a_rank_that_dies_is_named(ranks: Ranks, how: str, message: str) -> None:
    with pytest.raises(RankDied, match=f"Rank 1 of 2 {message}") as caught:
        ranks(2).run(fail, how)
    if how == "kill":
        assert "going down" in "\n".join(caught.value.__notes__)
    assert_usable(ranks)


def test_a_hang_says_where_each_rank_was(ranks: Ranks) -> None:
    with pytest.raises(RankHung, match=r"1 of 2 ranks did not return within 1 s") as caught:
        ranks(2, deadline_s=1).run(fail, "skip")
    assert caught.value.facts["late"] == "rank 0"
    (stack,) = caught.value.__notes__
    assert "barrier" in stack
    assert re.search(r'test_ranks.py", line \d+ in fail', stack)
    assert_usable(ranks)


def test_only_a_failed_generation_is_replaced(ranks: Ranks) -> None:
    assert_usable(ranks)
    ranks(3).run(place)
    before = dict(ranks.generations)
    with pytest.raises(Broken):
        ranks(2).run(fail, "raise")
    assert_usable(ranks)
    ranks(3).run(place)
    assert ranks.generations[2] == before[2] + 1
    assert ranks.generations[3] == before[3]


def test_executed_counts_cases_whatever_came_of_them(ranks: Ranks) -> None:
    before = ranks.executed
    assert_usable(ranks)
    with pytest.raises(Broken):
        ranks(2).run(fail, "raise")
    assert ranks.executed == before + 2


def test_warnings_of_zero_fn_are_errors_here_and_on_ranks(ranks: Ranks) -> None:
    def warn() -> None:
        warnings.warn_explicit("slow path", UserWarning, "layout.py", 1, module="zero_fn.values.layout")

    with pytest.raises(UserWarning, match="slow path"):
        warn()
    with pytest.raises(UserWarning, match="slow path"):
        ranks(2).run(warn)
