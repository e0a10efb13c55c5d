"""Laws of values, without a mesh: homes, layouts, units.

Homes and assignments form a join-semilattice: why transforms compose in any order (laws 2, 3 and 4). Shards partition a
parameter, are those of torch, and keep its order in memory (law 5, as arithmetic). Units partition the parameters, and every
anchor contains its own.
"""

import einops
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

import zero_fn as zf
from property_tests.programs import Block, build
from property_tests.strategies import homes, memory_orders, shapes, trees
from tests.support.profiles import examples
from zero_fn.errors import LayoutError
from zero_fn.values.assignment import Assignment
from zero_fn.values.home import Home, Stage
from zero_fn.values.layout import (
    ALIGNMENT_NBYTES,
    TOLERATED_PADDING_NUMEL,
    aligned_offsets,
    is_shardable,
    shard_layout,
)
from zero_fn.values.units import anchors_of, distinct_parameters, innermost_common

# -- homes --------------------------------------------------------------------------------------------------------------


def assignments():
    named = st.dictionaries(st.sampled_from(["a", "b", "c.d"]), homes())
    anchors = st.sampled_from([None, None, ("",), ("", "c")])
    outputs = st.dictionaries(st.sampled_from(["", "c"]), st.sampled_from([torch.float32, torch.float16]))
    return st.builds(Assignment, named, anchors=anchors, outputs=outputs)


TRIPLES = st.one_of(st.tuples(homes(), homes(), homes()), st.tuples(assignments(), assignments(), assignments()))


def result(compute):
    """What a join gives; all refusals are the same."""
    try:
        return compute()
    except LayoutError:
        return "refused"


@given(TRIPLES)
def test_join_is_idempotent_commutative_and_associative_and_nothing_changes_nothing(triple):
    a, b, c = triple
    nothing = type(a)()
    assert a.join(a) == nothing.join(a) == a.join(nothing) == a
    assert result(lambda: a.join(b)) == result(lambda: b.join(a))
    assert result(lambda: a.join(b).join(c)) == result(lambda: a.join(b.join(c)))


@given(homes(compatible=True), homes(compatible=True))
def test_join_is_monotone(one, other):
    """A join asks for all that each side asks for; that it absorbs what it contains, the three laws above say."""
    joined = one.join(other)
    assert joined.stage >= one.stage
    assert joined.reshard_after >= one.reshard_after
    assert one.compute is None or joined.compute == one.compute
    assert one.reduce is None or joined.reduce == one.reduce
    assert one.grads is None or joined.grads == one.grads


@given(assignments(), st.sampled_from(["", "layers", "layers.0"]), st.sampled_from(["a", "b", "c.d", "e"]))
def test_an_assignment_seen_from_above_gives_every_parameter_the_same_home(assignment, prefix, fqn):
    assert assignment.below(prefix).home(f"{prefix}.{fqn}".lstrip(".")) == assignment.home(fqn)


@given(
    homes(), st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
)
def test_a_sum_is_never_narrower_than_what_is_summed_unless_asked(home, resting):
    computed, summed = home.compute_dtype(resting), home.sum_dtype(resting)
    assert computed == (home.compute or resting if resting.is_floating_point else resting)
    assert resting.is_floating_point or summed == resting
    assert home.reduce is not None or summed.itemsize >= computed.itemsize
    assert Home(Stage.PARAMS).join(home).sum_dtype(resting) == summed


@given(homes(), st.sampled_from([torch.float32, torch.int64, torch.complex64]))
def test_gradients_rest_as_their_parameter_unless_asked(home, resting):
    wanted = home.grads if resting == torch.float32 else None
    assert home.gradient_dtype(resting) == (wanted or resting)


# -- layouts ------------------------------------------------------------------------------------------------------------

many = examples(dev=200, ci=2_000, deep=20_000)  # arithmetic is cheap
RANKS = st.integers(1, 8)


@st.composite
def parameters(draw):
    """A tensor with a row to cut, whose elements are all different, in any order in memory."""
    shape = draw(shapes(min_size=1).filter(is_shardable))
    order = draw(memory_orders(len(shape)))
    stored = torch.arange(torch.Size(shape).numel()).view([shape[dim] for dim in order])
    return stored.permute(sorted(range(len(order)), key=order.__getitem__))


def of_any(law):
    """A law of any parameter over any number of ranks."""
    return many(given(parameters(), RANKS)(law))


def layout_for(parameter, n):
    return shard_layout(parameter.shape, parameter.stride(), n)


def local(parameter, layout, rank):
    start, rows = layout.owned_rows(rank)
    return parameter.narrow(layout.dim, start, rows)


@of_any
def test_every_element_is_owned_by_the_rank_to_which_torch_gives_it(parameter, n):
    """By `DTensor`'s own cut, after which checkpoints name shapes, those of empty shards, too."""
    layout = layout_for(parameter, n)
    cut, _ = Shard(layout.dim)._split_tensor(parameter, n, with_padding=False)
    for rank in range(n):
        own = local(parameter, layout, rank)
        assert own.shape == layout.local_shape(rank) == cut[rank].shape
        assert layout.owned_numel(rank) == own.numel()
        assert torch.equal(own, cut[rank])


@of_any
def test_shards_concatenate_to_the_padded_whole(parameter, n):
    """Each is one range of it, and the padding, which is less than a row for every rank, is at its end."""
    layout = layout_for(parameter, n)
    flat = torch.full((layout.padded_numel,), -1)
    for rank in range(n):
        own = local(parameter, layout, rank)
        start = rank * layout.shard_numel
        part = flat[start : start + own.numel()]
        part.as_strided(own.shape, layout.strides_of(tuple(own.shape)), start).copy_(own)
        assert part.numel() == own.numel() and (part != -1).all()
    assert torch.equal(flat.as_strided(tuple(parameter.shape), layout.stride, 0), parameter)
    rows = einops.rearrange(flat, "(rows row) -> rows row", row=layout.row_numel)
    assert (rows[layout.rows :] == -1).all()
    assert torch.equal(rows[: layout.rows].reshape(-1), parameter.permute(layout.order).reshape(-1))
    assert 0 <= layout.padded_numel - layout.numel < n * layout.row_numel


@of_any
def test_strides_survive_when_the_outermost_dim_is_cut(parameter, n):
    layout = layout_for(parameter, n)
    strides = parameter.stride()
    by_stride = sorted(range(parameter.ndim), key=lambda dim: -strides[dim])
    if n == 1 or parameter.shape[by_stride[0]] >= n:
        for dim, size in enumerate(parameter.shape):
            assert size == 1 or layout.stride[dim] == parameter.stride(dim)


@of_any
@example(torch.zeros(1, 2, 4), 3)
@example(torch.zeros(2, 1, 4), 3)
def test_a_layout_is_found_again_from_its_own_strides(parameter, n):
    """So that a transform of a transformed module cuts where the first one cut."""
    layout = layout_for(parameter, n)
    again = shard_layout(layout.shape, layout.stride, n)
    assert again.dim == layout.dim
    # Where a dim has one index, its stride means nothing and may differ.
    long = [dim for dim, size in enumerate(layout.shape) if size > 1]
    assert [again.stride[dim] for dim in long] == [layout.stride[dim] for dim in long]


@many
@given(st.lists(st.sampled_from([2, 3, 5, 8, 64, 1000, 4096]), min_size=1, max_size=4), st.data(), RANKS)
def test_another_dim_than_the_outermost_is_cut_where_padding_would_be_large(stored, data, n):
    order = data.draw(memory_orders(len(stored)))
    parameter = torch.empty(stored, device="meta").permute(sorted(range(len(order)), key=order.__getitem__))
    layout = layout_for(parameter, n)
    rows = stored[0]
    if (n - rows) * (parameter.numel() // rows) <= TOLERATED_PADDING_NUMEL:
        assert (layout.stride, layout.rows) == (parameter.stride(), rows)
    else:
        assert layout.rows >= n or layout.rows == max(stored)


@many
@given(st.lists(st.integers(0, 500)), st.sampled_from([1, 2, 4, 8, 16]))
def test_offsets_are_aligned_and_ranges_are_disjoint(numels, itemsize):
    *offsets, end = aligned_offsets(numels, itemsize)
    assert len(offsets) == len(numels)
    assert all(offset * itemsize % ALIGNMENT_NBYTES == 0 for offset in (*offsets, end))
    ends = [offset + numel for offset, numel in zip(offsets, numels, strict=True)]
    assert all(before <= after for before, after in zip(ends, [*offsets, end][1:], strict=True))
    waste = end - sum(numels)
    assert waste * itemsize < max(len(numels), 1) * ALIGNMENT_NBYTES


@many
@given(shapes(), RANKS)
def test_what_is_not_shardable_is_a_scalar_or_empty(shape, n):
    tensor = torch.empty(shape)
    assert is_shardable(shape) is (tensor.ndim > 0 and tensor.numel() > 0)


# -- units --------------------------------------------------------------------------------------------------------------

CHOICES = st.sampled_from(
    [None, "*", ("*", Block), Block, zf.by_size(nbytes=1), zf.by_size(nbytes=100), zf.by_size(nbytes=2000)]
)


@given(trees(), CHOICES)
def test_units_partition_the_parameters(tree, units):
    """Anchors are modules in the order of registration, the root first; each is the innermost that has its parameters."""
    model = build(tree)
    anchors, modules = anchors_of(model, units), dict(model.named_modules())
    assert anchors[0] == ""
    assert anchors == sorted(set(anchors), key=list(modules).index)
    for one in distinct_parameters(model):
        owner = innermost_common(anchors, (name for name, _ in one.places))
        assert owner in anchors
        assert holds_everywhere(modules[owner], owner, one.places)
        for inner in anchors:
            if inner.startswith(f"{owner}." if owner else "") and inner != owner:
                assert not holds_everywhere(modules[inner], inner, one.places)


def holds_everywhere(anchor, name, places):
    """Whether every place is in the module or below it, seen from the module itself."""
    below = {
        (f"{name}.{inner}".strip("."), attribute)
        for inner, module in anchor.named_modules()
        for attribute in module._parameters
    }
    return set(places) <= below


@given(trees())
def test_every_parameter_is_found_once_with_all_its_places(tree):
    model = build(tree)
    named = distinct_parameters(model)
    assert [(one.fqn, id(one.parameter)) for one in named] == [(name, id(p)) for name, p in model.named_parameters()]
    found = {place: one.parameter for one in named for place in one.places}
    for name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            assert found.pop((name, attribute)) is parameter
    assert not found


@given(trees(), st.integers(1, 3000))
def test_units_by_size_are_large_enough(tree, nbytes):
    model = build(tree)
    anchors = anchors_of(model, zf.by_size(nbytes=nbytes))
    first_seen = dict.fromkeys(anchors, 0)
    for one in distinct_parameters(model):
        # A tied parameter counts where it is met first by children before parents: at most once, in any of its places.
        for anchor in {innermost_common(anchors, [name]) for name, _ in one.places}:
            first_seen[anchor] += one.parameter.numel() * one.parameter.element_size()
    assert all(total >= nbytes for anchor, total in first_seen.items() if anchor)
