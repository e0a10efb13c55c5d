"""What faults may do: a delay nothing; a lost message or rank an error, or nothing; never other numbers and never a hang.

A hang cannot hide here: when no rank can go on, the simulator says so at once.
"""

from hypothesis import given
from hypothesis import strategies as st

import zero_fn as zf
from property_tests.modules import Model, Part
from property_tests.programs import Link
from property_tests.rules import Accumulate, Backward, Evaluate, Program, Step, run_program, same
from property_tests.strategies import backwards, chains_for, faults, models, schedules, steps
from tests.simulation import Fault
from tests.support.profiles import examples
from zero_fn.transport.exchange import REDUCE

timings = st.sampled_from(["early", "late"])


@st.composite
def trainings(draw):
    """Programs that train: every rank needs the others until the end."""
    model = draw(models())
    rule = st.one_of(
        backwards(),
        steps(),
        st.builds(Accumulate, st.lists(backwards(), min_size=1, max_size=2).map(tuple)),
        st.just(Evaluate()),
    )
    return Program(model, draw(chains_for(model)), tuple(draw(st.lists(rule, min_size=1, max_size=5))))


def is_same(one, other):
    return one.held.keys() == other.held.keys() and all(
        same(a.values, b.values) and same(a.grad, b.grad)
        for a, b in zip(one.held.values(), other.held.values(), strict=True)
    )


def assert_right_or_told(report, expected):
    """Every rank that ended with numbers has the right ones."""
    for outcome, values in zip(report.outcomes, expected, strict=True):
        if outcome.value is not None:
            assert all(map(is_same, outcome.value, values)), f"wrong numbers, and nobody said so\n{report}"
        elif not outcome.was_killed:
            is_told = isinstance(outcome.error, zf.LostRankError | zf.DisagreementError)
            by_torch = any(
                text in str(outcome.error) for text in ("Timed out", "Connection closed")
            )  # in clip_grad_norm_
            assert is_told or by_torch, report


@examples(dev=20, ci=3_000, deep=100_000)
@given(trainings(), st.integers(2, 4), schedules, timings, st.data())
def test_a_delay_changes_no_bit(
    simulated,
    program,
    n,
    schedule,
    timing,
    data,
):
    delays = data.draw(st.lists(faults(n, kinds=("delay",)), min_size=1, max_size=4))
    expected = simulated(n).run(run_program, program)
    values = simulated(n, schedule=schedule, timing=timing, faults=delays).run(run_program, program)
    assert all(
        is_same(a, b) for one, other in zip(values, expected, strict=True) for a, b in zip(one, other, strict=True)
    )


@examples(dev=30, ci=5_000, deep=200_000)
@given(trainings(), st.integers(2, 4), schedules, timings, st.data())
def test_a_lost_message_or_rank_ends_in_an_error_or_in_the_right_numbers(
    simulated,
    program,
    n,
    schedule,
    timing,
    data,
):
    fault = data.draw(faults(n, kinds=("drop", "kill")))
    expected = simulated(n).run(run_program, program)
    report = simulated(n, schedule=schedule, timing=timing, faults=[fault]).report(run_program, program)
    assert_right_or_told(report, expected)
    if fault.kind == "kill":
        assert report.outcomes[fault.rank].was_killed == bool(report.happened)


TRAINING = (Backward(), Step(), Backward(), Step())


@examples(dev=30, ci=1_000, deep=20_000)
@given(st.integers(2, 4), st.integers(0, 30), st.integers(0, 3), st.sampled_from(["shard_grads", "shard_params"]))
def test_nan_in_one_gradient_message_reaches_every_rank_alike(simulated, n, at, rank, verb):
    """It is in the shard of one rank after the step, and in what every rank gathers after that."""
    chain = (Link(verb),)
    program = Program(Model(3, (Part("mlp", 5), Part("mlp", 4))), chain, TRAINING)
    report = simulated(n, faults=[Fault("nan", rank % n, at, tag=REDUCE)]).report(run_program, program)
    values = [outcome.value for outcome in report.outcomes if outcome.value is not None]
    assert len(values) == n
    poisoned = [[name for name, held in seen[1].held.items() if _has_nan(held)] for seen in values]
    if not any(poisoned):  # the message was one of the second step, or held nothing
        return
    for seen in values:
        # The rows of the head have gradients of their own; everything before it has not.
        inner = [held for name, held in seen[-1].held.items() if not name.startswith("head")]
        assert all(held.values.isnan().all() for held in inner)


def _has_nan(held):
    return bool(held.values.isnan().any())
