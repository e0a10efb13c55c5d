"""Whatever a program does between steps, a model in tiers and its streamed optimizer give the bits of the same in memory."""

from itertools import starmap

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from property_tests.streamed_programs import Placed, places, programs, trained
from tests.support.profiles import examples

ALL = frozenset(["params", "grads", "optim"])


def check(simulated, tmp_path_factory, placed, program, n):
    path = str(tmp_path_factory.getbasetemp())
    ranks = simulated(n if placed.outer is None else (2, 2))
    expected, found = ranks.run(trained, placed, program, None), ranks.run(trained, placed, program, path)
    for ours, theirs in zip(found, expected, strict=True):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            done = program[number] if number < len(program) else "the end"
            assert len(one) == len(other), done
            assert all(starmap(torch.equal, zip(one, other, strict=True))), done


# The count that NAdam keeps beside each parameter was taken for a state of a scalar one.
@example(
    Placed("zero1", "nadam", frozenset(["optim"]), where="blocks.*"),
    [("backward", 0), ("step", 0), ("stream_what_has_stepped", 0), ("backward", 1), ("step", 0)],
    1,
)
# A copy in bfloat16 that was waited for twice, before and after an edit, counted as one of what was edited.
@example(
    Placed("plain", "adamw", ALL, compute=torch.bfloat16, finish="forward"),
    [
        ("backward_of_a_penalty", 3),
        ("step", 0),
        ("swap", 0),
        ("backward_of_a_penalty", 4),
        ("read_gradients", 0),
        ("step", 0),
    ],
    1,
)
# A chunk that was stepped in one buffer was taken from another one, with its states of before, after a step without some.
@example(
    Placed("plain", "sgd", frozenset(["params"]), buffer="64KiB"),
    [("backward", 0), ("step", 0), ("backward", 1), ("drop_gradients", 1), ("step", 0), ("backward", 2), ("step", 0)],
    1,
)
# Rank 1 has no rows of a unit, whose sums of 16 bits are between two axes: it took the plan of one axis for all.
@example(
    Placed("zero1", "sgd", frozenset(["params"]), "replicate", options={"units": "blocks.*"}, round="stochastic"),
    [("assign_gradients", 1)],
    2,
)
@examples(dev=3, ci=1_000, deep=40_000)
@given(places, programs, st.integers(1, 2))
def test_any_program_gives_the_bits_of_the_same_in_memory(simulated, tmp_path_factory, placed, program, n):
    check(simulated, tmp_path_factory, placed, program, n)


@pytest.mark.nightly
@examples(dev=60, ci=60, deep=60)
@given(places, programs, st.integers(1, 2))
def test_many_programs_give_the_bits_of_the_same_in_memory(simulated, tmp_path_factory, placed, program, n):
    check(simulated, tmp_path_factory, placed, program, n)
