"""Schedules are values: printed here and compared with golden files; the laws are in property_tests/test_schedule_laws.py.

`schedules/golden/*.txt` hold three kinds of schedules of a root with three blocks, one event a line:

    forward_*, backward_*    what the pure functions make of a trace
    zero*                    what a rank really does in its second step under each recipe

    SNAPSHOTS=write python -m pytest tests/units/values/test_schedule.py  # writes them again; read the difference
"""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import zero_fn as zf
from tests.support.groups import alone
from tests.support.snapshot import assert_matches
from zero_fn.runtime.gradients import Gradients
from zero_fn.runtime.passes import BackwardPass, Script
from zero_fn.runtime.run import Run
from zero_fn.runtime.settling import Settling
from zero_fn.runtime.unit import Unit, unit_of
from zero_fn.values.schedule import (
    Await,
    Enter,
    Exit,
    Reduce,
    Reshard,
    Settle,
    Unshard,
    Use,
    backward_schedule,
    backward_trace,
    forward_schedule,
    limit_reductions,
    points,
    prefetch,
)

GOLDEN = Path(__file__).parent / "schedules" / "golden"
NAMES = ("root", "block 0", "block 1", "block 2")


def text(events, names=None):
    """A schedule as text, an event a line."""
    lines = []
    indent = 0
    for event in events:
        unit = event.use.unit if isinstance(event, Enter | Exit) else event.unit
        name = names[unit] if names else str(unit)
        if isinstance(event, Enter | Exit) and event.use.number:
            name += f"#{event.use.number}"
        indent -= isinstance(event, Exit)
        lines.append(f"{'  ' * indent}{type(event).__name__.lower()} {name}")
        indent += isinstance(event, Enter)
    return "\n".join(lines)


def trace_of(brackets):
    """A trace from digits and parentheses: `0(1()2())` is unit 0 around units 1 and 2."""
    trace = []
    counts = {}
    open_uses = []
    for sign in brackets:
        if sign.isdigit():
            unit = int(sign)
            use = Use(unit, counts.get(unit, 0))
            counts[unit] = use.number + 1
        elif sign == "(":
            open_uses.append(use)
            trace.append(Enter(use))
        else:
            trace.append(Exit(open_uses.pop()))
    return tuple(trace)


CHAIN = "0(1()2()3())"
TRACES = {
    "chain": CHAIN,
    "nested": "0(1(2())3())",  # block 1 is inside block 0
    "shared": "0(1()2()1()3())",  # block 0 runs twice
    "alone": "1()",  # a block called without its root
}


# -- golden ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("name", TRACES)
def test_forward_schedule_is_golden(name, depth):
    events = prefetch(forward_schedule(trace_of(TRACES[name]), keeps_last=True), depth=depth)
    assert_matches(GOLDEN / f"forward_{name}_prefetch_{depth}.txt", text(events, NAMES))


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("name", TRACES)
def test_backward_schedule_is_golden(name, depth):
    events = backward_schedule(backward_trace(trace_of(TRACES[name])), reduces=lambda _: True)
    events = limit_reductions(prefetch(events, depth=depth), limit=2)
    assert_matches(GOLDEN / f"backward_{name}_prefetch_{depth}.txt", text(events, NAMES))


def test_forward_schedule_of_inference_is_golden():
    events = forward_schedule(trace_of(CHAIN), keeps_last=False)
    assert_matches(GOLDEN / "forward_chain_inference.txt", text(events, NAMES))


def test_backward_schedule_of_an_accumulated_microbatch_is_golden():
    events = backward_schedule(backward_trace(trace_of(CHAIN)), reduces=lambda _: False)
    assert_matches(GOLDEN / "backward_chain_accumulating.txt", text(events, NAMES))


class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.inlet = nn.Linear(2, 2)
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


@pytest.fixture(scope="module")
def axis():
    with alone() as mesh:
        yield mesh


RECIPES = {
    "zero0": zf.replicate,
    "zero1": zf.shard_optimizer,
    "zero2": zf.shard_grads,
    "zero3": zf.shard_params,
    "zero3_until_backward": lambda module, mesh: zf.shard_params(module, mesh, reshard_after="backward"),
    "zero1_bf16": lambda module, mesh: zf.precision(zf.shard_optimizer(module, mesh)),
}


@pytest.mark.parametrize(("recipe", "depth"), [*((recipe, 1) for recipe in RECIPES), ("zero3", 0), ("zero3", 2)])
def test_second_step_of_a_recipe_is_golden(axis, monkeypatch, recipe, depth):
    model = RECIPES[recipe](Root(), axis)
    zf.runtime.registry.runs_of(model, verb="test")[0].depth = depth
    done = record(monkeypatch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        done.clear()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    name = recipe if depth == 1 else f"{recipe}_prefetch_{depth}"
    assert_matches(GOLDEN / f"{name}.txt", text(done, NAMES))


@pytest.mark.parametrize("recipe", ["zero0", "zero1", "zero2", "zero3"])
def test_an_accumulated_step_of_a_recipe_is_golden(axis, monkeypatch, recipe):
    model = RECIPES[recipe](Root(), axis)
    model(torch.ones(1, 2)).sum().backward()
    done = record(monkeypatch)
    with zf.accumulate(model):
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
    assert_matches(GOLDEN / f"{recipe}_accumulating_2.txt", text(done, NAMES))


def record(monkeypatch):
    """From now on, the events that units live through, in a list. What changes nothing is left out."""
    done = []

    def note(kind, name, event_of):
        method = getattr(kind, name)

        def noted(*args, **how):
            done.extend(event_of(*args))
            return method(*args, **how)

        monkeypatch.setattr(kind, name, noted)

    def note_unit(name, event, changes):
        note(Unit, name, lambda unit: [event(unit.index)] if changes(unit.gather) else [])

    def entered(run, unit, door, method):
        use = enter(run, unit, door, method)
        done.append(Enter(use.key))
        return use

    enter = Run.enter
    monkeypatch.setattr(Run, "enter", entered)
    note_unit("unshard", Unshard, lambda gather: gather.is_at_rest)
    note_unit("await_gathered", Await, lambda gather: gather.pending is not None)
    note_unit("reshard", Reshard, lambda gather: not gather.is_at_rest)
    note(Run, "leave", lambda run, use: [Exit(use.key)])
    note(Settling, "settle", lambda settling, unit, under_way: [Settle(unit.index)])
    note(Gradients, "reduce", lambda gradients: [Reduce(unit_of(gradients._slots[0]).index)])
    return done


# -- by example ------------------------------------------------------------------------------------------------------


def test_a_unit_inside_itself_is_gathered_once():
    trace = (Enter(Use(0)), Enter(Use(0, 1)), Exit(Use(0, 1)), Exit(Use(0)))
    assert text(forward_schedule(trace, keeps_last=False)) == (
        "unshard 0\nawait 0\nenter 0\n  enter 0#1\n  exit 0#1\nexit 0\nreshard 0"
    )


@pytest.mark.parametrize("name", list(TRACES))
def test_points_are_the_schedule_cut_at_its_brackets(name):
    events = prefetch(forward_schedule(trace_of(TRACES[name]), keeps_last=True), depth=1)
    cut = points(events)
    joined = [event for point in cut for event in (*point.before, point.bracket, *point.after)]
    assert joined == list(events)
    assert not any(isinstance(event, Await | Enter | Exit) for point in cut for event in point.after)


def test_a_use_that_a_rank_passes_through_is_left_once_backward_has_reached_a_later_one():
    first, second = Use(0), Use(1)
    script = Script([Enter(first), Exit(first), Enter(second), Exit(second)], frozenset({0, 1}), ahead=tuple)
    ending = None
    backward = BackwardPass(script, ending, awaited={first}, passed_only={second}, waiting=set(), keeps_graph=False)

    actions = backward.actions()

    def done():
        return list(iter(partial(next, actions), None))

    backward.enter(1, second, recomputes=False)
    assert done() == [Unshard(1), Await(1)]
    backward.enter(0, first, recomputes=True)  # by a checkpoint, ahead of backward
    assert done() == []
    backward.enter(0, first, recomputes=False)
    assert done() == [Reshard(1), Reduce(1), Unshard(0), Await(0)]


def test_a_recomputation_that_does_not_know_its_use_is_of_the_next_one():
    first, second = Use(0), Use(0, 1)
    script = Script([Enter(first), Exit(first), Enter(second), Exit(second)], frozenset(), ahead=tuple)
    ending = None
    backward = BackwardPass(
        script, ending, awaited={first, second}, passed_only=set(), waiting=set(), keeps_graph=False
    )
    assert backward.enter(0, None, recomputes=True) == second
    assert backward.enter(0, None, recomputes=True) == first
    assert backward.enter(0, None, recomputes=True) is None
