"""Homes and assignments form a join-semilattice: why transforms compose in any order (laws 2, 3 and 4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from hypothesis import given
from hypothesis import strategies as st

from property_tests.strategies import homes
from zero_fn.errors import LayoutError
from zero_fn.values.assignment import Assignment
from zero_fn.values.home import Home, Sharded

T = TypeVar("T", Home, Assignment)


def assignments() -> st.SearchStrategy[Assignment]:
    named = st.dictionaries(st.sampled_from(["a", "b", "c.d"]), homes())
    anchors = st.sampled_from([None, None, ("",), ("", "c")])
    outputs = st.dictionaries(st.sampled_from(["", "c"]), st.sampled_from([torch.float32, torch.float16]))
    return st.builds(Assignment, named, anchors=anchors, outputs=outputs)


ANY = st.one_of(homes(), assignments())
PAIRS = st.one_of(st.tuples(homes(), homes()), st.tuples(assignments(), assignments()))
TRIPLES = st.one_of(st.tuples(homes(), homes(), homes()), st.tuples(assignments(), assignments(), assignments()))


def result(compute: Callable[[], object]) -> object:
    """What a join gives; all refusals are the same."""
    try:
        return compute()
    except LayoutError:
        return "refused"


@given(ANY)
def test_join_is_idempotent(one: T) -> None:
    assert one.join(one) == one


@given(PAIRS)
def test_join_is_commutative(pair: tuple[T, T]) -> None:
    one, other = pair
    assert result(lambda: one.join(other)) == result(lambda: other.join(one))


@given(TRIPLES)
def test_join_is_associative(triple: tuple[T, T, T]) -> None:
    a, b, c = triple
    assert result(lambda: a.join(b).join(c)) == result(lambda: a.join(b.join(c)))


@given(homes(compatible=True), homes(compatible=True))
def test_join_is_monotone(one: Home, other: Home) -> None:
    """A join asks for all that each side asks for, and absorbs what it contains."""
    joined = one.join(other)
    assert joined.sharded >= one.sharded
    assert joined.reshard_after >= one.reshard_after
    assert one.compute is None or joined.compute == one.compute
    assert one.reduce is None or joined.reduce == one.reduce
    assert one.grads is None or joined.grads == one.grads
    assert joined.join(one) == joined
    assert joined.join(other) == joined


@given(homes(compatible=True), homes(compatible=True), homes(compatible=True))
def test_join_is_the_least_home_above_both(one: Home, other: Home, above: Home) -> None:
    if above.join(one) == above and above.join(other) == above:
        assert above.join(one.join(other)) == above


@given(homes())
def test_asking_for_nothing_changes_nothing(home: Home) -> None:
    assert Home().join(home) == home == home.join(Home())


@given(assignments())
def test_an_empty_assignment_changes_nothing(assignment: Assignment) -> None:
    assert Assignment().join(assignment) == assignment == assignment.join(Assignment())


@given(assignments(), st.sampled_from(["", "layers", "layers.0"]), st.sampled_from(["a", "b", "c.d", "e"]))
def test_an_assignment_seen_from_above_gives_every_parameter_the_same_home(
    assignment: Assignment, prefix: str, fqn: str
) -> None:
    assert assignment.below(prefix).home(f"{prefix}.{fqn}".lstrip(".")) == assignment.home(fqn)


@given(
    homes(), st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
)
def test_a_sum_is_never_narrower_than_what_is_summed_unless_asked(home: Home, resting: torch.dtype) -> None:
    computed, summed = home.compute_dtype(resting), home.sum_dtype(resting)
    assert computed.is_floating_point == resting.is_floating_point
    assert home.reduce is not None or summed.itemsize >= computed.itemsize
    assert Home(Sharded.PARAMS).join(home).sum_dtype(resting) == summed


@given(homes(), st.sampled_from([torch.float32, torch.int64, torch.complex64]))
def test_gradients_rest_as_their_parameter_unless_asked(home: Home, resting: torch.dtype) -> None:
    wanted = home.grads if resting == torch.float32 else None
    assert home.gradient_dtype(resting) == (wanted or resting)
