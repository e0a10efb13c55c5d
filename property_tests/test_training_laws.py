"""Law 6: whatever a program does, it gives what plain replicas give, to the bit, in every stage; so a stage is a decision on
memory, and never changes a number.

Programs over real layers run on simulated ranks and on gloo ranks. Trees of parameters on 8 to 64 ranks:
test_many_ranks_laws.py.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zero_fn as zf
from property_tests.programs import Link, Model, Part
from property_tests.rules import (
    Accumulate,
    Backward,
    Copy,
    Edit,
    Evaluate,
    Fail,
    Load,
    Program,
    Step,
    Transform,
    differences,
    run_program,
)
from property_tests.strategies import programs, schedules
from tests.support.profiles import examples
from tests.support.ranks import axis


def check(
    simulated,
    program,
    n=2,
    schedule=(),
    timing="late",
    transport="exchange",
):
    """Runs a program and its replicas, and compares them after every rule."""
    seen = simulated(n, schedule=schedule, timing=timing, transport=transport).run(
        run_program, program, may_leave_messages=any(isinstance(rule, Fail) for rule in program.rules)
    )
    rows = [seen] if isinstance(n, int) else [seen[:2], seen[2:]]
    for row in rows:
        found = differences(program, row)
        assert not found, "\n".join(found)


def any_program_on(*meshes, max_rules=6):
    """What is drawn for a test of whole programs."""
    timings, transports = st.sampled_from(["early", "late"]), st.sampled_from(["exchange", "native"])
    n = st.sampled_from(meshes)
    return given(program=programs(max_rules=max_rules), n=n, schedule=schedules, timing=timings, transport=transports)


# Four tests, not one: processes that share the tests share them out one by one.


@examples(dev=30, ci=6_000, deep=400_000)
@any_program_on(1, 2, 2, 2)
def test_any_program_gives_what_replicas_give_on_two_ranks(simulated, **drawn):
    check(simulated, **drawn)


@examples(dev=9, ci=4_500, deep=300_000)
@any_program_on(3, 3, (2, 2))
def test_any_program_gives_what_replicas_give_on_three_ranks(simulated, **drawn):
    check(simulated, **drawn)


@examples(dev=8, ci=4_500, deep=300_000)
@any_program_on(4, 5, 8)
def test_any_program_gives_what_replicas_give_on_many_ranks(simulated, **drawn):
    check(simulated, **drawn)


@examples(dev=6, ci=400, deep=20_000)
@any_program_on(1, 2, 3, max_rules=15)
def test_any_long_program_gives_what_replicas_give(simulated, **drawn):
    check(simulated, **drawn)


def _on_gloo(several):
    return [run_program(program, axis) for program in several]


@examples(dev=3, ci=100, deep=5_000)
@given(st.lists(programs(max_rules=4), min_size=2, max_size=3), st.sampled_from([2, 2, 3]))
def test_any_program_gives_what_replicas_give_on_gloo_ranks(ranks, several, n):
    by_rank = ranks(n).run(_on_gloo, several)
    for program, *seen in zip(several, *by_rank, strict=True):
        found = differences(program, seen)
        assert not found, "\n".join([str(program), *found])


# -- found here ---------------------------------------------------------------------------------------------------------


def case(model, chain, *rules, n=2, schedule=(), timing="late"):
    """A program, and ranks on which it was wrong."""
    return Program(model, (Link(chain),) if isinstance(chain, str) else chain, rules), n, schedule, timing


PARTS = {"units": "parts.?"}
ONE = Backward(together=False)
TIED = (Backward(), Backward(forwards=2, together=False), Step(), Backward(forwards=3))
EMPTY_SHARD = Model(1, (Part("linear", 1),))


def in_stages(
    name,
    model,
    *rules,
    verbs=("replicate", "shard_params"),
    options=None,
    n=2,
    timing="late",
):
    """The same program in some stages."""
    return {f"{name}, {verb}": case(model, (Link(verb, options or {}),), *rules, n=n, timing=timing) for verb in verbs}


def tied_expert(wrap):
    """The first of two experts is tied to the head: where it is chosen, its layer computes no gradient of its own."""
    return Model(2, (Part("routed", 2, wrap=wrap), Part("linear", 3)), ties=((6, 0), (7, 0)), output="pair", twice=0)


def _recomputed(kind):
    parts = (Part("embedding", 2), Part(kind, 2, wrap="reentrant"), Part("mlp", 1, wrap="reentrant"), Part(kind, 1))
    return Model(1, parts, ties=((37, 0),), output="dict")


def _nested_weighted():
    inside = (Part("weighted", 5, wrap="reentrant"), Part("weighted", 6, wrap="reentrant"))
    return Model(1, (Part("weighted", 1), Part("nest", 6, wrap="reentrant", children=inside)), twice=1)


def _frozen_checkpointed():
    nest = Part("nest", 7, wrap="reentrant", children=(Part("embedding", 5),))
    parts = (Part("norm", 5, True, "checkpoint"), Part("linear", 2, True), nest, Part("norm", 7, True))
    return Model(3, parts, ties=((19, 6), (3, 4)), output="pair", twice=1, double=True)


def _around_two_units():
    inside = Part("nest", children=(Part("routed"), Part("routed", 2)), wrap="checkpoint")
    parts = (Part("mlp", 2), Part("nest", 2, True, children=(Part("routed"), inside)))
    return Model(2, parts, ties=((21, 0), (3, 3), (21, 0)))


def _tied_under_reentrant():
    inside = (Part("mlp", 1, wrap="reentrant"), Part("norm", 7, wrap="reentrant"), Part("conv", 7, wrap="reentrant"))
    parts = (Part("linear", 2), Part("nest", children=inside), Part("weighted", 7, True, "reentrant"), Part("mlp", 2))
    return Model(3, parts, ties=((16, 5), (18, 7)))


def _tied_frozen_experts():
    routed, mlp = Part("routed", 2), Part("mlp", 2)
    nested = Part("nest", 2, wrap="checkpoint", children=(routed,))
    last = Part("nest", 2, wrap="checkpoint", children=(routed, routed))
    parts = (Part("mlp", 3), Part("nest", 2, True, "", (nested, mlp)), Part("nest", 2, True, "", (routed, mlp, last)))
    return Model(3, parts, ties=((36, 4), (0, 0)))


def _failing_beside_experts(name, options):
    head = {"where": "head.*"}
    chain = (
        Link("shard_optimizer", {"units": "*inside.?", **head}),
        Link("shard_optimizer", options),
        Link("replicate", head),
    )
    failed = Fail("backward", 1)
    several = (ONE, failed, ONE), (Step(), Backward(), Step(), Evaluate("no_grad"), failed)
    timings = ("early", "late")
    return {
        f"{name}, {number}, {timing}": case(_tied_frozen_experts(), chain, *rules, n=3, timing=timing)
        for number, rules in enumerate(several)
        for timing in timings
    }


FOUND = {
    # The outputs of the unit were opaque, so nothing told that backward had come; the recomputation then entered the unit
    # anew, whose hooks left fewer tensors to the checkpoint than in forward.
    "a checkpoint is the first that backward meets of its unit": case(
        Model(5, (Part("recurrent", 2, wrap="checkpoint"),), output="opaque"),
        "shard_params",
        *(Backward(), Step(), Backward(retain=True)),
    ),
    # The weight belongs to the unit around, which backward had not come to and whose module is not called: the recomputed
    # forward saw the shard.
    **{
        f"{name}, {kind}": found
        for kind in ("odd", "attention")
        for name, found in in_stages(
            "a recomputation reads a weight that is tied to one outside",
            _recomputed(kind),
            *(Backward(output=1), Step(), Backward(), Backward(output=1), Step()),
        ).items()
    },
    # Parameters are kept, so that no saved tensor is asked for first: only the outputs tell that backward came.
    **{
        f"a hook reads parameters before its module is recomputed, {output}": case(
            Model(5, (Part("weighted", 2, wrap="checkpoint"),), output=output), "shard_grads", Backward()
        )
        for output in ("record", "opaque")
    },
    # The weight of `expert0` belongs to the unit of the root, which output 1 uses only on ranks that chose this expert. The
    # second backward of several forwards was on no schedule, so what it reduced depended on the rank.
    **in_stages(
        "an expert tied to another unit is skipped in the second of two backwards",
        Model(2, (Part("routed", 2), Part("linear", 1)), ties=((0, 2),), output="dict"),
        *(Backward(), Backward(forwards=2, together=False, output=1)),
    ),
    # The first checkpoint inside put its unit at rest, and the hook of the next one reads before its module is called.
    **in_stages(
        "hooks read parameters in reentrant checkpoints inside another",
        _nested_weighted(),
        *(Backward(output=1), Backward(output=1)),
        options={**PARTS, "donate": True},
    ),
    # The unit of the tied weights was entered in three layers; when one ran again it was taken for a part of another, whose
    # hooks hand other tensors to the checkpoint.
    "frozen checkpointed layers beside ties into reentrant checkpoints": case(
        _frozen_checkpointed(),
        (
            Link("shard_params", {"units": "*", "where": ("*weight*", "head.bias")}),
            Link("shard_params", {"where": "head.*", "persist_below": 40}),
        ),
        *(ONE, Step(), Step(), Backward(together=False, unused=True), Backward()),
        n=3,
        timing="early",
    ),
    # A frozen layer is passed only where an expert is tied to a trained weight. Its second use was forgotten after the
    # first backward, which may pass it or not, and then gathered by the ranks alone that do pass it.
    "ties of skipped experts in later backwards": case(
        Model(1, (Part("routed", 3, True, "checkpoint"), Part("routed", 2)), ties=((5, 0), (19, 4)), output="opaque"),
        (Link("shard_optimizer", {"where": "head.*"}), Link("shard_params", {"reshard_after": "backward"})),
        Accumulate(
            (
                Backward(forwards=2, together=False, output=1, retain=True),
                Backward(forwards=2, together=False, output=0),
            )
        ),
        Evaluate(),
        Accumulate((Backward(forwards=3, output=0), ONE)),
        *(Backward(forwards=3, together=False, output=1), Step(clip=1.0)),
        n=3,
        schedule=(2, 6),
        timing="early",
    ),
    # A rank that had nothing to reduce in a unit ran ahead of its backward, which then gathered the unit once more.
    **in_stages("experts that are tied to another unit", tied_expert(""), *TIED, options=PARTS),
    **in_stages("experts that are tied to another unit on 3 ranks", tied_expert(""), *TIED, options=PARTS, n=3),
    **in_stages("experts below a checkpoint that are tied", tied_expert("checkpoint"), *TIED, options=PARTS),
    **in_stages("the same on 3 ranks", tied_expert("checkpoint"), *TIED, options=PARTS, n=3),
    # Its weight is tied to that of its neighbour, its bias to that of the head. It entered the unit of one of them only,
    # and the unit of the other, a list of modules, is not called: the forward raised ShardedAccessError.
    **in_stages(
        "a layer whose parameters belong to two other units",
        Model(2, (Part("linear", 3), Part("linear", 2)), ties=((0, 0), (4, 0))),
        *(Backward(), Step(), Backward(forwards=2)),
        options={"units": "*"},
    ),
    # A checkpoint around two units entered the first of them; the schedule took it that backward had passed the other,
    # and the recomputation of that one for the use of an earlier forward. A rank that then came to a frozen expert
    # gathered it alone.
    "a recomputation ahead of backward is not taken for an earlier forward": case(
        _around_two_units(), (Link("shard_params", {"units": "*inside.?"}),), Backward(forwards=3, unused=True)
    ),
    # A unit was resharded after the first checkpoint inside it: a retained graph was on no schedule.
    "ties under reentrant checkpoints in later backwards": case(
        _tied_under_reentrant(),
        "shard_params",
        Backward(forwards=2, together=False, output=0),
        Backward(forwards=3, together=False, output=0, retain=True),
        n=4,
    ),
    # torch has no maximum of an empty shard: one rank raised alone.
    "clipping to the largest element of an empty shard": case(
        EMPTY_SHARD, "shard_optimizer", Backward(), Step(clip=0.1, norm=float("inf"))
    ),
    # Names showed gathered tensors until the next forward, and deepcopy refuses those.
    "a model is copied right after it failed in backward": case(
        Model(2, (Part("dropped", 6), Part("odd", 6, wrap="reentrant"), Part("mixed", 4)), twice=0),
        (Link("shard_params", {**PARTS, "reshard_after": "backward"}),),
        *(Backward(), Fail("backward", 2), Copy()),
    ),
    # `unsharded` called the model in use until its next forward.
    **{
        f"a verb right after a backward that raised, {after}": case(
            Model(5, (Part("routed", 2), Part("recurrent", 7), Part("conv", 1, frozen=True)), output="opaque"),
            "shard_optimizer",
            *(Fail("backward"), after, Backward(), Step()),
            n=4,
        )
        for after in (Edit(), Load((Link("shard_params"),)), Transform((Link("shard_grads"),)))
    },
    # Its local gradients were silently added to the sum of the block.
    **in_stages(
        "accumulate forgets what a backward that raised before it left",
        Model(3, (Part("embedding"), Part("mlp", 5)), output="pair", twice=0),
        *(Fail("backward", 3), Accumulate((Backward(forwards=2, output=1),)), Step()),
    ),
    # The memory of the copy was once made in that forward, as inference tensors, which autograd refuses for ever.
    **in_stages(
        "a copy trains after its first forward was in inference mode",
        Model(2, (Part("linear", 1),)),
        *(Copy(), Evaluate("inference_mode"), Backward(), Step()),
        verbs=("replicate", "shard_optimizer", "shard_params"),
    ),
    # Frozen experts, one of them tied to a weight that is trained: ranks that chose it had issued its reduction when the
    # backward raised in the layer before; the others, which only pass through, had waited to see it passed.
    **_failing_beside_experts("a backward raised beside an expert that trains on some ranks", {}),
    **_failing_beside_experts("the same, of the head alone", {"where": "head.*", "persist_below": 0}),
    # It had raised on those ranks only: an error of the program, which all ranks are told of.
    **in_stages(
        "a backward raised in a layer that trains on some ranks",
        Model(5, (Part("routed", 3, True), Part("linear", 1), Part("linear", 1)), ties=((30, 0),)),
        *(Fail("backward"), Load((Link("shard_params"),)), Evaluate("no_grad"), Backward(), Fail("backward")),
        verbs=("replicate", "shard_optimizer", "shard_params"),
        n=3,
        timing="early",
    ),
}
"""Programs that were wrong once, or raised."""


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_here_stays_right(simulated, name):
    check(simulated, *FOUND[name])


def test_experts_that_are_tied_to_another_unit_below_a_reentrant_checkpoint_raise_on_every_rank(
    simulated,
):
    """What a reentrant checkpoint computes is on no schedule: its unit is reduced by the ranks whose nested backward comes to
    a parameter of it, and nothing tells beforehand which do. So they part, and each one says at which collective."""
    program = Program(tied_expert("reentrant"), (Link("shard_params", PARTS),), (Backward(),) * 4)
    report = simulated(2).report(run_program, program)
    errors = [outcome.error for outcome in report.outcomes]
    assert all(isinstance(error, zf.errors.LostRankError | zf.errors.DisagreementError) for error in errors), report
    assert any("unit parts.0" in str(error) for error in errors)
