"""Laws of schedules: they are values, so their safety is checked without a process group."""

from hypothesis import given
from hypothesis import strategies as st

from property_tests.strategies import traces
from zero_fn.values.schedule import (
    Await,
    Enter,
    Exit,
    Fetch,
    Reduce,
    Reshard,
    Settle,
    Unshard,
    backward_schedule,
    backward_trace,
    fetch_ahead,
    forward_schedule,
    land_ahead,
    limit_reductions,
    prefetch,
)


@st.composite
def schedules(draw):
    """A trace and the forward or backward schedule of it, before prefetching."""
    trace = draw(traces())
    if draw(st.booleans()):
        return trace, forward_schedule(trace, keeps_last=draw(st.booleans()))
    reduced = draw(st.sets(st.integers(0, 4)))
    trace = backward_trace(trace)
    return trace, backward_schedule(trace, reduces=reduced.__contains__)


DEPTHS = st.integers(0, 4)
LIMITS = st.integers(1, 3)


def run(events):
    """Follows the phases of every unit and fails where a unit is used before its time; returns those left gathered."""
    gathering = set()
    gathered = set()
    running = []
    for event in events:
        match event:
            case Unshard(unit):
                assert unit not in gathering | gathered, f"{event}: it is gathered already"
                gathering.add(unit)
            case Await(unit):
                assert unit in gathering, f"{event}: nothing to wait for"
                gathering.remove(unit)
                gathered.add(unit)
            case Enter(use):
                assert use.unit in gathered, f"{event}: its unit was not awaited"
                running.append(use.unit)
            case Exit(use):
                assert running.pop() == use.unit
            case Reshard(unit):
                assert unit in gathered, f"{event}: nothing to free"
                assert unit not in running, f"{event}: it is running"
                gathered.remove(unit)
            case Reduce(unit):
                assert unit not in running, f"{event}: its gradients are not complete"
    assert not gathering, f"{gathering} were gathered and never awaited"
    return gathered


@given(schedules(), DEPTHS, LIMITS)
def test_nothing_is_used_before_it_was_awaited(schedule, depth, limit):
    run(limit_reductions(prefetch(schedule[1], depth=depth), limit=limit))


@given(traces(), DEPTHS)
def test_every_unshard_has_one_reshard_or_its_unit_is_kept_for_backward_which_leaves_nothing(trace, depth):
    freed = prefetch(forward_schedule(trace, keeps_last=False), depth=depth)
    assert run(freed) == set()
    assert run(prefetch(backward_schedule(backward_trace(trace), reduces=lambda _: True), depth=depth)) == set()
    kept = run(prefetch(forward_schedule(trace, keeps_last=True), depth=depth))
    last = max(i for i, bracket in enumerate(trace) if isinstance(bracket, Enter))
    assert kept == {bracket.use.unit for bracket in trace[last:]}


@given(schedules())
def test_a_schedule_has_the_brackets_of_its_trace_whose_backward_has_it_for_its_backward(schedule):
    trace, events = schedule
    assert tuple(event for event in events if isinstance(event, Enter | Exit)) == trace
    assert backward_trace(backward_trace(trace)) == trace


def passed(events, kind):
    """For the k-th Unshard of each unit, how many events of a kind come before it."""
    counts = {}
    seen = 0
    found = {}
    for event in events:
        if isinstance(event, Unshard):
            number = counts[event.unit] = counts.get(event.unit, -1) + 1
            found[event.unit, number] = seen
        seen += kind(event)
    return found


@given(schedules(), DEPTHS)
def test_prefetch_moves_unshards_alone_earlier_and_past_no_more_uses_than_its_depth(schedule, depth):
    before, after = schedule[1], prefetch(schedule[1], depth=depth)

    def is_other(event):
        return not isinstance(event, Unshard)

    def is_enter(event):
        return isinstance(event, Enter)

    assert list(filter(is_other, before)) == list(filter(is_other, after))
    late, early = passed(before, is_other), passed(after, is_other)
    assert late.keys() == early.keys()
    assert all(early[which] <= late[which] for which in late)
    late, early = passed(before, is_enter), passed(after, is_enter)
    assert all(late[which] - early[which] <= depth for which in late)
    for unit in range(5):
        one, other = (
            [event for event in events if isinstance(event, Unshard | Reshard) and event.unit == unit]
            for events in (before, after)
        )
        assert one == other, "never past a reshard of the same unit"


@given(schedules(), LIMITS)
def test_reductions_under_way_never_exceed_the_limit_and_each_is_settled_once_in_order(schedule, limit):
    bounded = limit_reductions(schedule[1], limit=limit)
    under_way = []
    for event in bounded:
        if isinstance(event, Reduce):
            under_way.append(event.unit)
        elif isinstance(event, Settle):
            assert under_way.pop(0) == event.unit
        assert len(under_way) <= limit
    assert under_way == []
    assert tuple(event for event in bounded if not isinstance(event, Settle)) == schedule[1]


@given(traces(), st.sets(st.integers(0, 4)))
def test_a_unit_is_reduced_once_after_its_last_use_if_it_is_reduced(trace, reduced):
    events = backward_schedule(backward_trace(trace), reduces=reduced.__contains__)
    used = {bracket.use.unit for bracket in trace}
    assert sorted(event.unit for event in events if isinstance(event, Reduce)) == sorted(used & reduced)
    for unit in used & reduced:
        last = max(i for i, event in enumerate(events) if isinstance(event, Exit) and event.use.unit == unit)
        assert events.index(Reduce(unit)) > last


@given(schedules(), st.dictionaries(st.integers(0, 4), st.integers(1, 9)))
def test_what_lands_is_fetched_in_order_and_two_fit(schedule, nbytes):
    """Beyond the memory of two of the largest only the next one is fetched, and only just before the use ahead of it."""
    _, before = schedule
    events = land_ahead(before, nbytes_of=lambda unit: nbytes.get(unit, 0))
    assert tuple(event for event in events if not isinstance(event, Fetch)) == before
    wanted = [event.unit for event in before if isinstance(event, Unshard) and event.unit in nbytes]
    assert [event.unit for event in events if isinstance(event, Fetch)] == wanted
    room = 2 * max((nbytes[unit] for unit in wanted), default=0)
    held = []
    waiting = []
    for place, event in enumerate(events):
        match event:
            case Fetch(unit):
                held.append(unit)
                waiting.append(unit)
                if sum(map(nbytes.__getitem__, held)) > room:
                    following = events[place + 1 : events.index(Unshard(unit), place)]
                    assert sum(isinstance(each, Enter) for each in following) <= 1
            case Unshard(unit) if unit in nbytes:
                assert waiting.pop(0) == unit
            case Reshard(unit) if unit in nbytes:
                assert unit not in waiting, "it would be dropped"
                held.remove(unit)
            case _:
                pass
    assert not waiting


@given(schedules(), DEPTHS, DEPTHS, st.sets(st.integers(0, 4)))
def test_what_is_away_is_fetched_once_before_each_gather_and_one_unit_at_a_time(schedule, ahead, depth, away):
    before = prefetch(schedule[1], depth=ahead)
    events = fetch_ahead(before, is_away=away.__contains__, depth=depth)
    assert tuple(event for event in events if not isinstance(event, Fetch)) == before
    fetched = []
    for event in events:
        match event:
            case Fetch(unit):
                assert unit in away
                assert not fetched, "there is one staging"
                fetched.append(unit)
            case Unshard(unit):
                assert unit not in away or fetched == [unit]
                if unit in away:
                    fetched.remove(unit)
            case Reshard(unit):
                assert unit not in fetched, "it would be dropped"
            case _:
                pass
    assert not fetched
