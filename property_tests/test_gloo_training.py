"""Law 6 for whole programs, with real messages: the programs of `test_simulated_training.py` on gloo ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from property_tests.on_ranks import Seen, run_program
from property_tests.replicas import differences
from property_tests.rules import Program
from property_tests.strategies_of_programs import programs
from tests.support.profiles import examples
from tests.support.ranks import Ranks, axis


def run_programs(several: list[Program]) -> list[list[Seen]]:
    return [run_program(program, axis) for program in several]


@examples(dev=5, ci=100, deep=5_000)
@given(st.lists(programs(max_rules=4), min_size=3, max_size=4), st.sampled_from([2, 2, 3]))
def test_programs_on_gloo_ranks_give_what_replicas_give(ranks: Ranks, several: list[Program], n: int) -> None:
    by_rank = ranks(n).run(run_programs, several)
    for program, *seen in zip(several, *by_rank, strict=True):
        found = differences(program, seen)
        assert not found, "\n".join([str(program), *found])
