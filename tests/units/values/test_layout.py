"""Where elements live: the arithmetic by example; the laws are in property_tests/test_layout_laws.py."""

from __future__ import annotations

import pytest
import torch

from zero_fn.values.layout import ALIGNMENT_NBYTES, aligned_offsets, is_shardable, shard_layout


def strides_of(*shape: int) -> tuple[int, ...]:
    return torch.empty(shape).stride()


def test_rows_are_cut_over_dim_0_when_there_is_one_for_every_rank() -> None:
    layout = shard_layout((5, 3), strides_of(5, 3), 3)
    assert layout.dim == 0
    assert (layout.rows, layout.row_numel, layout.shard_rows) == (5, 3, 2)
    assert (layout.numel, layout.shard_numel, layout.padded_numel) == (15, 6, 18)
    assert [layout.owned_rows(rank) for rank in range(3)] == [(0, 2), (2, 2), (4, 1)]
    assert [layout.local_shape(rank) for rank in range(3)] == [(2, 3), (2, 3), (1, 3)]
    assert [layout.owned_numel(rank) for rank in range(3)] == [6, 6, 3]


def test_last_ranks_own_nothing_when_rows_run_out() -> None:
    layout = shard_layout((5,), (1,), 4)  # ceil(5 / 4) = 2 rows each: 2, 2, 1, 0
    assert [layout.owned_rows(rank) for rank in range(4)] == [(0, 2), (2, 2), (4, 1), (5, 0)]
    assert layout.local_shape(3) == (0,)


def test_strides_survive_when_a_small_parameter_has_too_few_rows() -> None:
    assert shard_layout((2, 3, 7), strides_of(2, 3, 7), 4).order == (0, 1, 2)
    assert shard_layout((2, 2**17), strides_of(2, 2**17), 4).order == (0, 1)  # padded by 2 rows: just tolerated


def test_another_dim_is_cut_when_too_few_rows_would_pad_much() -> None:
    wide = shard_layout((2, 2**18), strides_of(2, 2**18), 4)
    assert wide.order == (1, 0)
    assert wide.stride == (1, 2)
    experts = shard_layout((8, 512, 4096), strides_of(8, 512, 4096), 64)
    assert experts.order == (1, 0, 2)  # rows of each expert stay contiguous
    assert experts.padded_numel == experts.numel


def test_dim_0_is_cut_when_no_dim_is_larger() -> None:
    assert shard_layout((2, 2), strides_of(2, 2), 4).dim == 0
    assert shard_layout((3, 3), strides_of(3, 3), 8).order == (0, 1)


def test_a_dim_of_enough_rows_is_kept_though_another_is_larger() -> None:
    assert shard_layout((4, 100), strides_of(4, 100), 4).dim == 0


def test_outermost_dim_in_memory_is_cut_when_a_parameter_is_transposed() -> None:
    transposed = torch.empty(6, 4).t()
    layout = shard_layout(transposed.shape, transposed.stride(), 2)
    assert layout.dim == 1
    assert layout.stride == transposed.stride() == (1, 4)
    assert layout.local_shape(1) == (4, 3)
    assert layout.strides_of(layout.local_shape(1)) == (1, 4)


def test_strides_survive_when_a_parameter_is_channels_last() -> None:
    weight = torch.empty(8, 3, 5, 5).to(memory_format=torch.channels_last)
    layout = shard_layout(weight.shape, weight.stride(), 4)
    assert layout.order == (0, 2, 3, 1)
    assert layout.stride == weight.stride()


def test_contiguous_order_is_taken_when_elements_do_not_fill_their_memory() -> None:
    sparse = torch.empty(6, 8)[:, ::2]
    layout = shard_layout(sparse.shape, sparse.stride(), 2)
    assert layout.order == (0, 1)
    assert layout.stride == (4, 1)
    expanded = torch.empty(1).expand(6, 4)
    assert shard_layout(expanded.shape, expanded.stride(), 2).stride == (4, 1)


def test_one_rank_owns_everything() -> None:
    layout = shard_layout((5, 3), strides_of(5, 3), 1)
    assert layout.padded_numel == layout.numel == layout.owned_numel(0)


@pytest.mark.parametrize(
    ("shape", "expected"), [((), False), ((0,), False), ((3, 0), False), ((1,), True), ((2, 3), True)]
)
def test_scalars_and_empty_tensors_are_not_shardable(shape: tuple[int, ...], expected: bool) -> None:
    assert is_shardable(shape) is expected


def test_offsets_are_aligned_and_end_where_the_buffer_ends() -> None:
    assert ALIGNMENT_NBYTES == 128
    assert aligned_offsets([1, 32, 33, 0], 4) == (0, 32, 64, 128, 128)
    assert aligned_offsets([1, 1], 2) == (0, 64, 128)
    assert aligned_offsets([1, 9], 16) == (0, 8, 24)
    assert aligned_offsets([], 4) == (0,)


def test_items_larger_than_the_alignment_are_not_padded() -> None:
    assert aligned_offsets([3, 2], 256) == (0, 3, 5)
