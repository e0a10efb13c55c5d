"""Units partition the parameters, and every anchor contains its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import zero_fn as zf
from property_tests.programs import Block, Tree, build
from property_tests.strategies import trees
from zero_fn.values.units import Units, anchors_of, distinct_parameters, innermost_common

CHOICES = st.sampled_from(
    [None, "*", ("*", Block), Block, zf.by_size(nbytes=1), zf.by_size(nbytes=100), zf.by_size(nbytes=2000)]
)


@given(trees(), CHOICES)
def test_units_partition_the_parameters(tree: Tree, units: Units) -> None:
    model = build(tree)
    named = distinct_parameters(model)
    anchors = anchors_of(model, units)
    owners = [innermost_common(anchors, (name for name, _ in one.places)) for one in named]
    assert all(owner in anchors for owner in owners)
    assert [id(one.parameter) for one in named] == [id(parameter) for parameter in model.parameters()]
    assert [one.fqn for one in named] == [name for name, _ in model.named_parameters()]


@given(trees(), CHOICES)
def test_every_anchor_contains_its_parameters_and_no_inner_anchor_does(tree: Tree, units: Units) -> None:
    model = build(tree)
    anchors = anchors_of(model, units)
    modules = dict(model.named_modules())
    for one in distinct_parameters(model):
        owner = innermost_common(anchors, (name for name, _ in one.places))
        assert holds_everywhere(modules[owner], owner, one.places)
        for inner in anchors:
            if inner.startswith(f"{owner}." if owner else "") and inner != owner:
                assert not holds_everywhere(modules[inner], inner, one.places)


def holds_everywhere(anchor: object, name: str, places: tuple[tuple[str, str], ...]) -> bool:
    """Whether every place is in the module or below it, seen from the module itself."""
    below = {
        (f"{name}.{inner}".strip("."), attribute)
        for inner, module in anchor.named_modules()
        for attribute in module._parameters
    }
    return set(places) <= below


@given(trees(), CHOICES)
def test_anchors_are_modules_in_the_order_of_registration_with_the_root_first(tree: Tree, units: Units) -> None:
    model = build(tree)
    anchors = anchors_of(model, units)
    names = [name for name, _ in model.named_modules()]
    assert anchors[0] == ""
    assert anchors == sorted(set(anchors), key=names.index)


@given(trees())
def test_every_place_of_a_parameter_is_found(tree: Tree) -> None:
    model = build(tree)
    found = {place: one.parameter for one in distinct_parameters(model) for place in one.places}
    for name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            assert found.pop((name, attribute)) is parameter
    assert not found


@given(trees(), st.integers(1, 3000))
def test_units_by_size_are_large_enough(tree: Tree, nbytes: int) -> None:
    model = build(tree)
    anchors = anchors_of(model, zf.by_size(nbytes=nbytes))
    first_seen: dict[str, int] = dict.fromkeys(anchors, 0)
    for one in distinct_parameters(model):
        # A tied parameter counts where it is met first by children before parents: at most once, in any of its places.
        for anchor in {innermost_common(anchors, [name]) for name, _ in one.places}:
            first_seen[anchor] += one.parameter.numel() * one.parameter.element_size()
    assert all(total >= nbytes for anchor, total in first_seen.items() if anchor)
