"""What faults may do: a delay nothing; a lost message or rank an error, or nothing; never other numbers and never a hang.

A hang cannot hide here: when no rank can go on, the simulator says so at once.
"""

from hypothesis import given
from hypothesis import strategies as st

import zero_fn as zf
from property_tests.programs import Link, Model, Part
from property_tests.rules import Accumulate, Backward, Evaluate, Program, Step, run_program, same
from property_tests.strategies import backwards, chains_for, faults, models, schedules, steps
from tests.simulation import Fault
from tests.support.profiles import examples
from zero_fn.transport.direct_exchange import REDUCE

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
    """Whether a rank held the same after a rule."""
    pairs = zip(one.held.values(), other.held.values(), strict=True)
    return all(same(a.values, b.values) and same(c.values, d.values) for (a, c, _), (b, d, _) in pairs)


def is_told(outcome):
    """Whether a rank has heard of a fault: from zero_fn or, in `clip_grad_norm_`, from torch."""
    by_torch = any(text in str(outcome.error) for text in ("Timed out", "Connection closed"))
    return by_torch or isinstance(outcome.error, zf.errors.LostRankError | zf.errors.DisagreementError)


@examples(dev=20, ci=8_000, deep=300_000)
@given(trainings(), st.integers(2, 4), schedules, timings, st.data())
def test_a_delay_changes_no_bit_and_a_lost_message_or_rank_ends_in_an_error_or_in_the_right_numbers(
    simulated, program, n, schedule, timing, data
):
    delays = data.draw(st.lists(faults(n, kinds=("delay",)), max_size=4))
    losses = data.draw(st.lists(faults(n, kinds=("drop", "kill")), min_size=not delays, max_size=1))
    expected = simulated(n).run(run_program, program)
    case = simulated(n, schedule=schedule, timing=timing, faults=[*delays, *losses])
    report = case.report(run_program, program)
    for outcome, values in zip(report.outcomes, expected, strict=True):
        if outcome.value is not None:
            assert all(map(is_same, outcome.value, values)), f"wrong numbers, and nobody said so\n{report}"
        else:
            assert losses and (outcome.was_killed or is_told(outcome)), report
    killed = [fault.rank for fault in report.happened if fault.kind == "kill"]
    assert killed == [rank for rank, outcome in enumerate(report.outcomes) if outcome.was_killed]
    assert losses or (report.desync is None and not report.left_over), report


TRAINING = (Backward(), Step(), Backward(), Step())


@examples(dev=15, ci=1_000, deep=20_000)
@given(st.integers(2, 4), st.integers(0, 15), st.integers(0, 3), st.sampled_from(["shard_grads", "shard_params"]))
def test_nan_in_one_gradient_message_reaches_every_rank_alike(simulated, n, at, rank, verb):
    """It is in the shard of one rank after the step, and in what every rank gathers after that."""
    chain = (Link(verb),)
    program = Program(Model(3, (Part("mlp", 5), Part("mlp", 4))), chain, TRAINING)
    report = simulated(n, faults=[Fault("nan", rank % n, at, tag=REDUCE)]).report(run_program, program)
    values = [outcome.value for outcome in report.outcomes if outcome.value is not None]
    assert len(values) == n
    assert any(has_nan(held) for seen in values for held in seen[1].held.values()), "no number became NaN"
    for seen in values:
        # The rows of the head have gradients of their own; everything before it has not.
        inner = [held for name, held in seen[-1].held.items() if not name.startswith("head")]
        assert all(held.values.isnan().all() for held, _, _ in inner)


def has_nan(held):
    return bool(held[0].values.isnan().any())
