"""Strategies: models of real layers, training programs, schedules of ranks, faults."""

from __future__ import annotations

from hypothesis import strategies as st

import zero_fn as zf
from property_tests.modules import KINDS, OUTPUTS, Model, Part
from property_tests.programs import Chain, Link
from property_tests.rules import (
    Accumulate,
    Backward,
    Copy,
    Edit,
    Evaluate,
    Fail,
    Freeze,
    Load,
    Optimizer,
    Program,
    Rule,
    Step,
    Transform,
    ZeroGrad,
)
from tests.simulation import Fault

__all__ = ["backwards", "chains_for", "faults", "models", "programs", "rules", "schedules"]

schedules = st.lists(st.integers(0, 7), max_size=12).map(tuple)
"""Which rank is next; see `tests/simulation/turns.py`."""

_STAGES = ("replicate", "shard_optimizer", "shard_grads", "shard_params")


@st.composite
def parts(draw: st.DrawFn, depth: int = 2) -> Part:
    """One layer, or a nest of up to three."""
    kind = draw(st.sampled_from([*KINDS, "nest"] if depth else list(KINDS)))
    children = tuple(draw(st.lists(parts(depth - 1), min_size=1, max_size=3))) if kind == "nest" else ()
    wrap = draw(st.sampled_from(["", "", "", "checkpoint", "reentrant"]))
    return Part(kind, draw(st.integers(1, 7)), draw(st.sampled_from([False, False, False, True])), wrap, children)


_leaves = st.builds(Part, st.sampled_from(["routed", "linear", "mlp"]), st.integers(2, 3), st.booleans())
_below = st.builds(
    lambda children, is_frozen: Part("nest", 2, is_frozen, "checkpoint", tuple(children)),
    st.lists(_leaves, min_size=1, max_size=3),
    st.booleans(),
)
_around = st.builds(
    lambda children, wrap: Part("nest", 2, True, wrap, tuple(children)),
    st.lists(_leaves | _below, min_size=1, max_size=3),
    st.sampled_from(["", "checkpoint"]),
)


@st.composite
def adapted(draw: st.DrawFn) -> tuple[Part, ...]:
    """A trained layer before frozen ones, some below a checkpoint of several, of which ranks skip parts."""
    first = Part(draw(st.sampled_from(["mlp", "linear"])), draw(st.integers(2, 3)))
    return (first, *draw(st.lists(_around | _leaves, min_size=1, max_size=2)))


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Models of one to four parts.

    No ties beside skipped experts below reentrant checkpoints: the one combination that is refused at run time, see
    `test_experts_that_are_tied_to_another_unit_below_a_reentrant_checkpoint_raise_on_every_rank`.
    """
    some = st.lists(parts(), min_size=1, max_size=4).map(tuple)
    chosen = draw(st.one_of(*[some] * 7, adapted()))
    ties: tuple[tuple[int, int], ...] = ()
    kinds = Model(1, chosen).kinds()
    if not {"routed", "reentrant"} <= kinds:
        ties = tuple(draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 7)), max_size=2)))
    twice = draw(st.sampled_from([-1, -1, -1, 0, 1]))
    model = Model(
        draw(st.integers(1, 6)),
        chosen,
        ties,
        draw(st.sampled_from(OUTPUTS)),
        draw(st.booleans()),
        twice,
        draw(st.booleans()),
    )
    return model


@st.composite
def chains_for(draw: st.DrawFn, model: Model, *, max_size: int = 3) -> Chain:
    """Chains of transforms that fit a model, with every option.

    Where experts are skipped, the unit is the layer that routes: a unit that a rank does not enter is one it does not gather.
    Where a layer reads the parameters of another without calling it, both are in one unit; else that is a typed error.
    """
    choices: list[object] = [None, "parts.?"]
    if "nest" in model.kinds():
        choices += ["*inside.?", ("parts.?", "*inside.?")]
    if not model.kinds() & {"routed", "attention", "normed", "weighted", "odd"}:
        choices += ["*", zf.by_size(nbytes=1), zf.by_size(nbytes=100)]
    units = draw(st.sampled_from(choices))
    chain = []
    for number in range(draw(st.integers(1, max_size))):
        verb = draw(st.sampled_from(_STAGES))
        options: dict[str, object] = {}
        if units is not None and (number == 0 or draw(st.booleans())):
            options["units"] = units
        if draw(st.booleans()):
            options["where"] = draw(st.sampled_from(["head.*", "*", "parts.0.*", ("*weight*", "head.bias")]))
        if verb != "replicate" and draw(st.booleans()):
            options["persist_below"] = draw(st.sampled_from([0, 40, 10**6]))
        if verb == "shard_params" and draw(st.booleans()):
            options["reshard_after"] = "backward"
        if draw(st.sampled_from([False, False, True])):
            options["donate"] = True
        chain.append(Link(verb, options))
    return tuple(chain)


def backwards(*, several: bool = True) -> st.SearchStrategy[Backward]:
    """Forwards and backwards of every kind."""
    return st.builds(
        Backward,
        forwards=st.sampled_from([1, 1, 1, 2, 3] if several else [1]),
        together=st.booleans(),
        output=st.sampled_from([-1, -1, 0, 1]),
        retain=st.sampled_from([False, False, False, True]),
        unused=st.sampled_from([False, False, False, True]),
    )


def steps() -> st.SearchStrategy[Step]:
    """Optimizer steps, clipped or not."""
    norms = [0.5, 1.0, 2.0, 3.0, float("inf")]
    clips = st.sampled_from([None, None, 0.1, 1.0])
    return st.builds(Step, clip=clips, norm=st.sampled_from(norms), keeps=st.sampled_from([False, False, True]))


def rules(model: Model) -> st.SearchStrategy[Rule]:
    """One rule that fits a model."""
    chain = chains_for(model, max_size=2)
    without_units = chain.map(lambda links: tuple(Link(link.verb, _without_units(link)) for link in links))
    accumulate = st.builds(
        Accumulate,
        st.lists(backwards(), min_size=1, max_size=3).map(tuple),
        evaluates=st.booleans(),
        fails_at=st.sampled_from([-1, -1, -1, 0, 1]),
    )
    step = steps()
    fail = st.builds(Fail, st.sampled_from(["forward", "backward", "recomputation"]), st.integers(0, 3), st.booleans())
    return st.one_of(
        backwards(),
        backwards(),
        step,
        step,
        accumulate,
        st.builds(Evaluate, st.sampled_from(["no_grad", "inference_mode", "eval"])),
        st.builds(ZeroGrad, st.booleans()),
        st.builds(Freeze, st.integers(0, 3), st.booleans()),
        st.builds(Edit, st.integers(0, 20), st.booleans(), st.booleans()),
        st.builds(Load, chain),
        st.builds(Transform, without_units),
        st.just(Copy()) if "weighted" not in model.kinds() else step,
        fail,
    )


@st.composite
def programs(draw: st.DrawFn, *, max_rules: int = 6) -> Program:
    """Whole programs."""
    model = draw(models())
    optimizer = draw(st.builds(Optimizer, st.sampled_from(["sgd", "adam", "adamw"]), st.booleans(), st.booleans()))
    chain = draw(chains_for(model))
    drawn = draw(st.lists(rules(model), min_size=2, max_size=max_rules))
    return Program(model, chain, tuple(drawn), optimizer)


def faults(n: int, *, kinds: tuple[str, ...] = ("delay", "drop", "kill"), last: int = 120) -> st.SearchStrategy[Fault]:
    """One fault of one of `n` ranks, at one of its first events."""
    return st.builds(
        Fault,
        st.sampled_from(kinds),  # type: ignore[arg-type]
        st.integers(0, n - 1),
        st.integers(0, last),
        st.integers(1, 50),
    )


def _without_units(link: Link) -> dict[str, object]:
    return {name: value for name, value in link.options.items() if name != "units"}
