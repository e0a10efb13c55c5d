"""Law 5 as arithmetic: shards partition a parameter, are those of torch, and keep its order in memory."""

from __future__ import annotations

import einops
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from property_tests.strategies import axis_sizes, memory_orders, shapes
from tests.support.profiles import examples
from zero_fn.values.layout import (
    ALIGNMENT_NBYTES,
    TOLERATED_PADDING_NUMEL,
    ShardLayout,
    aligned_offsets,
    is_shardable,
    shard_layout,
)

many = examples(dev=200, ci=2_000, deep=20_000)  # arithmetic is cheap


@st.composite
def parameters(draw: st.DrawFn) -> torch.Tensor:
    """A tensor with a row to cut, whose elements are all different, in any order in memory."""
    shape = draw(shapes(min_size=1).filter(is_shardable))
    order = draw(memory_orders(len(shape)))
    stored = torch.arange(torch.Size(shape).numel()).view([shape[dim] for dim in order])
    return stored.permute(sorted(range(len(order)), key=order.__getitem__))


def layout_for(parameter: torch.Tensor, n: int) -> ShardLayout:
    return shard_layout(parameter.shape, parameter.stride(), n)


def local(parameter: torch.Tensor, layout: ShardLayout, rank: int) -> torch.Tensor:
    start, rows = layout.owned_rows(rank)
    return parameter.narrow(layout.dim, start, rows)


@many
@given(parameters(), axis_sizes())
def test_every_element_is_owned_by_exactly_one_rank(parameter: torch.Tensor, n: int) -> None:
    layout = layout_for(parameter, n)
    owned = torch.cat([local(parameter, layout, rank).reshape(-1) for rank in range(n)])
    assert sorted(owned.tolist()) == list(range(parameter.numel()))
    assert [layout.owned_numel(rank) for rank in range(n)] == [local(parameter, layout, r).numel() for r in range(n)]


@many
@given(parameters(), axis_sizes())
def test_shards_are_those_of_torch(parameter: torch.Tensor, n: int) -> None:
    """`DTensor` and its checkpoints cut with `torch.chunk`; ranks beyond its chunks own nothing."""
    layout = layout_for(parameter, n)
    chunks = parameter.chunk(n, dim=layout.dim)
    for rank in range(n):
        own = local(parameter, layout, rank)
        assert own.shape == layout.local_shape(rank)
        assert torch.equal(own, chunks[rank]) if rank < len(chunks) else own.numel() == 0


@many
@given(parameters(), axis_sizes())
def test_shards_concatenate_to_the_padded_whole(parameter: torch.Tensor, n: int) -> None:
    layout = layout_for(parameter, n)
    flat = torch.full((layout.padded_numel,), -1)
    for rank in range(n):
        own = local(parameter, layout, rank)
        start = rank * layout.shard_numel
        flat[start : start + own.numel()] = own.permute(layout.order).reshape(-1)
    whole = flat.as_strided(tuple(parameter.shape), layout.stride, 0)
    assert torch.equal(whole, parameter)
    rows = einops.rearrange(flat, "(rows row) -> rows row", row=layout.row_numel)
    assert (rows[layout.rows :] == -1).all()
    assert torch.equal(rows[: layout.rows].reshape(-1), parameter.permute(layout.order).reshape(-1))


@many
@given(parameters(), axis_sizes())
def test_strides_survive_when_the_outermost_dim_is_cut(parameter: torch.Tensor, n: int) -> None:
    layout = layout_for(parameter, n)
    strides = parameter.stride()
    by_stride = sorted(range(parameter.ndim), key=lambda dim: -strides[dim])
    if n == 1 or parameter.shape[by_stride[0]] >= n:
        for dim, size in enumerate(parameter.shape):
            assert size == 1 or layout.stride[dim] == parameter.stride(dim)


@many
@given(parameters(), axis_sizes())
def test_a_shard_is_one_contiguous_range_of_the_whole(parameter: torch.Tensor, n: int) -> None:
    layout = layout_for(parameter, n)
    whole = torch.arange(layout.padded_numel)
    for rank in range(n):
        start = rank * layout.shard_numel
        shape, stride = layout.local_shape(rank), layout.strides_of(layout.local_shape(rank))
        elements = whole.as_strided(shape, stride, start).reshape(-1)
        assert sorted(elements.tolist()) == list(range(start, start + layout.owned_numel(rank)))


@many
@given(parameters(), axis_sizes())
@example(torch.zeros(1, 2, 4), 3)
@example(torch.zeros(2, 1, 4), 3)
def test_a_layout_is_found_again_from_its_own_strides(parameter: torch.Tensor, n: int) -> None:
    """So that a transform of a transformed module cuts where the first one cut."""
    layout = layout_for(parameter, n)
    again = shard_layout(layout.shape, layout.stride, n)
    assert again.dim == layout.dim
    # Where a dim has one index, its stride means nothing and may differ.
    long = [dim for dim, size in enumerate(layout.shape) if size > 1]
    assert [again.stride[dim] for dim in long] == [layout.stride[dim] for dim in long]


@many
@given(parameters(), axis_sizes())
def test_padding_is_less_than_a_row_for_every_rank(parameter: torch.Tensor, n: int) -> None:
    layout = layout_for(parameter, n)
    assert 0 <= layout.padded_numel - layout.numel < n * layout.row_numel


@many
@given(st.lists(st.sampled_from([2, 3, 5, 8, 64, 1000, 4096]), min_size=1, max_size=4), st.data(), axis_sizes())
def test_another_dim_than_the_outermost_is_cut_where_padding_would_be_large(
    stored: list[int], data: st.DataObject, n: int
) -> None:
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
def test_offsets_are_aligned_and_ranges_are_disjoint(numels: list[int], itemsize: int) -> None:
    *offsets, end = aligned_offsets(numels, itemsize)
    assert len(offsets) == len(numels)
    assert all(offset * itemsize % ALIGNMENT_NBYTES == 0 for offset in (*offsets, end))
    ends = [offset + numel for offset, numel in zip(offsets, numels, strict=True)]
    assert all(before <= after for before, after in zip(ends, [*offsets, end][1:], strict=True))
    waste = end - sum(numels)
    assert waste * itemsize < max(len(numels), 1) * ALIGNMENT_NBYTES


@many
@given(shapes(), axis_sizes())
def test_what_is_not_shardable_is_a_scalar_or_empty(shape: tuple[int, ...], n: int) -> None:
    tensor = torch.empty(shape)
    assert is_shardable(shape) is (tensor.ndim > 0 and tensor.numel() > 0)
