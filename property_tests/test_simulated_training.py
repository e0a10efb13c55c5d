"""Law 6, on ranks of this process: whatever a program does, it gives what plain replicas give, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zero_fn as zf
from property_tests.modules import Model, Part
from property_tests.on_ranks import run_program
from property_tests.programs import Link
from property_tests.replicas import differences
from property_tests.rules import (
    Accumulate,
    Backward,
    Copy,
    Edit,
    Evaluate,
    Fail,
    Load,
    Optimizer,
    Program,
    Rule,
    Step,
    Transform,
)
from property_tests.strategies_of_programs import programs, schedules
from tests.simulation import Simulated
from tests.support.profiles import examples

timings = st.sampled_from(["early", "late"])
transports = st.sampled_from(["exchange", "native"])


def check(
    simulated: Simulated,
    program: Program,
    n: int | tuple[int, int] = 2,
    schedule: tuple[int, ...] = (),
    timing: Literal["early", "late"] = "late",
    transport: Literal["exchange", "native"] = "exchange",
) -> None:
    """Runs a program and its replicas, and compares them after every rule."""
    seen = simulated(n, schedule=schedule, timing=timing, transport=transport).run(
        run_program, program, may_leave_messages=any(isinstance(rule, Fail) for rule in program.rules)
    )
    rows = [seen] if isinstance(n, int) else [seen[:2], seen[2:]]
    for row in rows:
        found = differences(program, row)
        assert not found, "\n".join(found)


def any_program_on(*meshes: int | tuple[int, int]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """What is drawn for a test of whole programs."""
    return given(
        program=programs(), n=st.sampled_from(meshes), schedule=schedules, timing=timings, transport=transports
    )


# Three tests, not one: processes that share the tests share them out one by one.


@examples(dev=40, ci=6_000, deep=400_000)
@any_program_on(1, 2, 2, 2)
def test_any_program_gives_what_replicas_give_on_two_ranks(simulated: Simulated, **drawn: Any) -> None:
    check(simulated, **drawn)


@examples(dev=25, ci=4_500, deep=300_000)
@any_program_on(3, 3, (2, 2))
def test_any_program_gives_what_replicas_give_on_three_ranks(simulated: Simulated, **drawn: Any) -> None:
    check(simulated, **drawn)


@examples(dev=25, ci=4_500, deep=300_000)
@any_program_on(4, 5, 8)
def test_any_program_gives_what_replicas_give_on_many_ranks(simulated: Simulated, **drawn: Any) -> None:
    check(simulated, **drawn)


# -- found here ---------------------------------------------------------------------------------------------------------

COPIED = Program(Model(1, (Part("linear", 1),)), (Link("replicate"),), (Backward(), Copy(), Backward(), Step()))


def test_a_checkpoint_may_be_the_first_that_backward_meets_of_its_unit(simulated: Simulated) -> None:
    """The outputs of the unit were opaque, so nothing told that backward had come; the recomputation then entered the unit
    anew, whose hooks left fewer tensors to the checkpoint than in forward."""
    model = Model(5, (Part("recurrent", 2, wrap="checkpoint"),), output="opaque")
    check(simulated, Program(model, (Link("shard_params"),), (Backward(), Step(), Backward(retain=True))))


@pytest.mark.parametrize("kind", ["odd", "attention"])
def test_a_recomputation_reads_a_weight_that_is_tied_to_one_outside(
    simulated: Simulated, kind: Literal["odd", "attention"]
) -> None:
    """The weight belongs to the unit around, which backward had not come to and whose module is not called: the recomputed
    forward saw the shard."""
    parts = (Part("embedding", 2), Part(kind, 2, wrap="reentrant"), Part("mlp", 1, wrap="reentrant"), Part(kind, 1))
    model = Model(1, parts, ties=((37, 0),), output="dict")
    rules = (Backward(output=1), Step(), Backward(), Backward(output=1), Step())
    for verb in ("replicate", "shard_params"):
        check(simulated, Program(model, (Link(verb),), rules))


def test_a_hook_may_read_parameters_before_its_module_is_recomputed(simulated: Simulated) -> None:
    """Parameters are kept, so that no saved tensor is asked for first: only the outputs tell that backward came."""
    for output in ("record", "opaque"):
        model = Model(5, (Part("weighted", 2, wrap="checkpoint"),), output=output)
        check(simulated, Program(model, (Link("shard_grads"),), (Backward(),)))


def test_a_model_may_be_copied_while_it_has_gradients(simulated: Simulated) -> None:
    """`copy.deepcopy` raised once, on a gradient that is a view beyond the start of its buffer; and copied gradients, which
    the copy of a parameter never has."""
    check(simulated, COPIED)


@pytest.mark.parametrize("verb", ["replicate", "shard_params"])
def test_an_expert_tied_to_another_unit_may_be_skipped_in_the_second_of_two_backwards(
    simulated: Simulated, verb: str
) -> None:
    """The weight of `expert0` belongs to the unit of the root, which output 1 uses only on ranks that chose this expert.

    The second backward of several forwards was on no schedule, so what it reduced depended on the rank.
    """
    model = Model(2, (Part("routed", 2), Part("linear", 1)), ties=((0, 2),), output="dict")
    rules = (Backward(), Backward(forwards=2, together=False, output=1))
    check(simulated, Program(model, (Link(verb),), rules))


@pytest.mark.parametrize("verb", ["replicate", "shard_params"])
def test_hooks_may_read_parameters_in_reentrant_checkpoints_inside_another(simulated: Simulated, verb: str) -> None:
    """The first checkpoint inside put its unit at rest, and the hook of the next one reads before its module is called."""
    inside = (Part("weighted", 5, wrap="reentrant"), Part("weighted", 6, wrap="reentrant"))
    parts = (Part("weighted", 1), Part("nest", 6, wrap="reentrant", children=inside))
    chain = (Link(verb, {"units": "parts.?", "donate": True}),)
    check(simulated, Program(Model(1, parts, listed=False, twice=1), chain, (Backward(output=1), Backward(output=1))))


def test_frozen_checkpointed_layers_train_beside_ties_into_reentrant_checkpoints(simulated: Simulated) -> None:
    """The unit of the tied weights was entered in three layers; when one ran again it was taken for a part of another, whose
    hooks hand other tensors to the checkpoint."""
    nest = Part("nest", 7, wrap="reentrant", children=(Part("embedding", 5),))
    parts = (Part("norm", 5, True, "checkpoint"), Part("linear", 2, True), nest, Part("norm", 7, True))
    model = Model(3, parts, ties=((19, 6), (3, 4)), output="pair", listed=False, twice=1, double=True)
    chain = (
        Link("shard_params", {"units": "*", "where": ("*weight*", "head.bias")}),
        Link("shard_params", {"where": "head.*", "persist_below": 40}),
    )
    rules = (Backward(together=False), Step(), Step(), Backward(together=False, unused=True), Backward())
    check(simulated, Program(model, chain, rules), 3, (), "early")


def test_ties_of_skipped_experts_train_in_later_backwards(simulated: Simulated) -> None:
    """A frozen layer is passed only where an expert is tied to a trained weight. Its second use was forgotten after the first
    backward, which may pass it or not, and then gathered by the ranks alone that do pass it."""
    parts = (Part("routed", 3, True, "checkpoint"), Part("routed", 2))
    model = Model(1, parts, ties=((5, 0), (19, 4)), output="opaque", listed=False)
    chain = (Link("shard_optimizer", {"where": "head.*"}), Link("shard_params", {"reshard_after": "backward"}))
    first = (
        Backward(forwards=2, together=False, output=1, retain=True),
        Backward(forwards=2, together=False, output=0),
    )
    second = (Backward(forwards=3, output=0), Backward(together=False))
    rules = (
        Accumulate(first),
        Evaluate(),
        Accumulate(second),
        Backward(forwards=3, together=False, output=1),
        Step(clip=1.0),
    )
    check(simulated, Program(model, chain, rules), 3, (2, 6), "early")


def tied_expert(wrap: str) -> Model:
    """The first of two experts is tied to the head: where it is chosen, its layer computes no gradient of its own."""
    return Model(2, (Part("routed", 2, wrap=wrap), Part("linear", 3)), ties=((6, 0), (7, 0)), output="pair", twice=0)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("wrap", ["", "checkpoint"])
@pytest.mark.parametrize("verb", ["replicate", "shard_params"])
def test_experts_that_are_tied_to_another_unit_train(simulated: Simulated, verb: str, wrap: str, n: int) -> None:
    """A rank that had nothing to reduce in a unit ran ahead of its backward, which then gathered the unit once more."""
    rules = (Backward(), Backward(forwards=2, together=False), Step(), Backward(forwards=3))
    check(simulated, Program(tied_expert(wrap), (Link(verb, {"units": "parts.?"}),), rules), n)


def test_experts_that_are_tied_to_another_unit_below_a_reentrant_checkpoint_raise_on_every_rank(
    simulated: Simulated,
) -> None:
    """What a reentrant checkpoint computes is on no schedule: its unit is reduced by the ranks whose nested backward comes to
    a parameter of it, and nothing tells beforehand which do. So they part, and each one says at which collective."""
    program = Program(tied_expert("reentrant"), (Link("shard_params", {"units": "parts.?"}),), (Backward(),) * 4)
    report = simulated(2).report(run_program, program)
    errors = [outcome.error for outcome in report.outcomes]
    assert all(isinstance(error, zf.LostRankError | zf.DisagreementError) for error in errors), report
    assert any("unit parts.0" in str(error) for error in errors)


@pytest.mark.parametrize("verb", ["replicate", "shard_params"])
def test_a_layer_whose_parameters_belong_to_two_other_units_trains(simulated: Simulated, verb: str) -> None:
    """Its weight is tied to that of its neighbour, its bias to that of the head. It entered the unit of one of them only, and
    the unit of the other, a list of modules, is not called: the forward raised ShardedAccessError."""
    model = Model(2, (Part("linear", 3), Part("linear", 2)), ties=((0, 0), (4, 0)))
    check(simulated, Program(model, (Link(verb, {"units": "*"}),), (Backward(), Step(), Backward(forwards=2))))


def test_a_recomputation_ahead_of_backward_is_not_taken_for_an_earlier_forward(simulated: Simulated) -> None:
    """A checkpoint around two units entered the first of them; the schedule took it that backward had passed the other, and
    the recomputation of that one for the use of an earlier forward. A rank that then came to a frozen expert gathered it
    alone: LostRankError."""
    inside = Part("nest", children=(Part("routed"), Part("routed", 2)), wrap="checkpoint")
    parts = (Part("mlp", 2), Part("nest", 2, True, children=(Part("routed"), inside)))
    model = Model(2, parts, ties=((21, 0), (3, 3), (21, 0)))
    rules = (Backward(forwards=3, together=True, unused=True),)
    check(simulated, Program(model, (Link("shard_params", {"units": "*inside.?"}),), rules))


def test_ties_under_reentrant_checkpoints_train_in_later_backwards(simulated: Simulated) -> None:
    """A unit was resharded after the first checkpoint inside it: a retained graph was on no schedule."""
    inside = (Part("mlp", 1, wrap="reentrant"), Part("norm", 7, wrap="reentrant"), Part("conv", 7, wrap="reentrant"))
    parts = (Part("linear", 2), Part("nest", children=inside), Part("weighted", 7, True, "reentrant"), Part("mlp", 2))
    model = Model(3, parts, ties=((16, 5), (18, 7)))
    rules = (
        Backward(forwards=2, together=False, output=0),
        Backward(forwards=3, together=False, output=0, retain=True),
    )
    check(simulated, Program(model, (Link("shard_params"),), rules), n=4)


def test_clipping_to_the_largest_element_works_when_a_shard_is_empty(simulated: Simulated) -> None:
    """torch has no maximum of an empty shard: one rank raised alone."""
    rules = (Backward(), Step(clip=0.1, norm=float("inf")))
    check(simulated, Program(Model(1, (Part("linear", 1),)), (Link("shard_optimizer"),), rules))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("verb", ["replicate", "shard_optimizer", "shard_grads", "shard_params"])
def test_clipping_to_the_largest_element_is_exact(simulated: Simulated, n: int, verb: str) -> None:
    rules = (Backward(), Step(clip=0.01, norm=float("inf")), Backward(), Step(clip=0.01, norm=float("inf")))
    check(simulated, Program(Model(4, (Part("mlp", 6), Part("linear", 1))), (Link(verb),), rules), n=n)


def test_a_model_may_be_copied_right_after_it_failed_in_backward(simulated: Simulated) -> None:
    """Names showed gathered tensors until the next forward, and deepcopy refuses those."""
    model = Model(2, (Part("dropped", 6), Part("odd", 6, wrap="reentrant"), Part("mixed", 4)), twice=0)
    rules = (Backward(), Fail("backward", 2), Copy())
    chain = (Link("shard_params", {"units": "parts.?", "reshard_after": "backward"}),)
    check(simulated, Program(model, chain, rules))


@pytest.mark.parametrize("after", [Edit(), Load((Link("shard_params"),)), Transform((Link("shard_grads"),))])
def test_verbs_work_right_after_a_backward_that_raised(simulated: Simulated, after: Rule) -> None:
    """`unsharded` called the model in use until its next forward."""
    model = Model(5, (Part("routed", 2), Part("recurrent", 7), Part("conv", 1, frozen=True)), output="opaque")
    rules = (Fail("backward"), after, Backward(), Step())
    check(simulated, Program(model, (Link("shard_optimizer"),), rules), n=4)


@pytest.mark.parametrize("verb", ["replicate", "shard_params"])
def test_accumulate_forgets_what_a_backward_that_raised_before_it_left(simulated: Simulated, verb: str) -> None:
    """Its local gradients were silently added to the sum of the block."""
    model = Model(3, (Part("embedding"), Part("mlp", 5)), output="pair", twice=0)
    rules = (Fail("backward", 3), Accumulate((Backward(forwards=2, output=1),)), Step())
    check(simulated, Program(model, (Link(verb),), rules))


@pytest.mark.parametrize("verb", ["replicate", "shard_optimizer", "shard_params"])
def test_a_copy_trains_after_its_first_forward_was_in_inference_mode(simulated: Simulated, verb: str) -> None:
    """The memory of the copy was once made in that forward, as inference tensors, which autograd refuses for ever."""
    rules = (Copy(), Evaluate("inference_mode"), Backward(), Step())
    check(simulated, Program(Model(2, (Part("linear", 1),)), (Link(verb),), rules))


@pytest.mark.parametrize("options", [{}, {"where": "head.*", "persist_below": 0}], ids=["all", "head"])
def test_ranks_stay_in_step_after_a_backward_raised_beside_an_expert_that_trains_on_some(
    simulated: Simulated, options: dict[str, Any]
) -> None:
    """Frozen experts, one of them tied to a weight that is trained: ranks that chose it had issued its reduction when the
    backward raised in the layer before; the others, which only pass through, had waited to see it passed."""
    routed, mlp = Part("routed", 2), Part("mlp", 2)
    nested = Part("nest", 2, wrap="checkpoint", children=(routed,))
    last = Part("nest", 2, wrap="checkpoint", children=(routed, routed))
    parts = (Part("mlp", 3), Part("nest", 2, True, "", (nested, mlp)), Part("nest", 2, True, "", (routed, mlp, last)))
    model = Model(3, parts, ties=((36, 4), (0, 0)), listed=False)
    head = {"where": "head.*"}
    chain = (
        Link("shard_optimizer", {"units": "*inside.?", **head}),
        Link("shard_optimizer", options),
        Link("replicate", head),
    )
    one, failed = Backward(together=False), Fail("backward", 1)
    for rules in ((one, failed, one), (Step(), Backward(), Step(), Evaluate("no_grad"), failed)):
        for timing in ("early", "late"):
            check(simulated, Program(model, chain, rules, Optimizer("sgd", foreach=False)), 3, timing=timing)


def test_ranks_stay_in_step_after_a_backward_raised_in_a_layer_that_trains_on_some(simulated: Simulated) -> None:
    """It had raised on those ranks only: an error of the program, which all ranks are told of."""
    parts = (Part("routed", 3, True), Part("linear", 1), Part("linear", 1))
    for verb in ("replicate", "shard_optimizer", "shard_params"):
        rules = (Fail("backward"), Load((Link(verb),)), Evaluate("no_grad"), Backward(), Fail("backward"))
        check(simulated, Program(Model(5, parts, ties=((30, 0),)), (Link(verb),), rules), 3, timing="early")
