"""Where elements live: the arithmetic by example; the laws are in property_tests/test_value_laws.py."""

import pytest
import torch

from zero_fn.values.layout import ALIGNMENT_NBYTES, aligned_offsets, shard_layout


def in_memory(*shape):
    return torch.empty(shape, device="meta")


@pytest.mark.parametrize(
    ("parameter", "n", "order"),
    [
        (in_memory(2, 3, 7), 4, (0, 1, 2)),  # a small parameter of too few rows
        (in_memory(2, 2**17), 4, (0, 1)),  # padding of two rows that is just tolerated
        (in_memory(2, 2**18), 4, (1, 0)),  # too few rows would pad much
        (in_memory(8, 512, 4096), 64, (1, 0, 2)),  # rows of each expert stay contiguous
        (in_memory(3, 3), 8, (0, 1)),  # no dim is larger
        (in_memory(4, 100), 4, (0, 1)),  # enough rows, though another dim is larger
        (in_memory(8, 3, 5, 5).to(memory_format=torch.channels_last), 4, (0, 2, 3, 1)),
        (in_memory(6, 8)[:, ::2], 2, (0, 1)),  # elements that do not fill their memory
        (in_memory(1).expand(6, 4), 2, (0, 1)),  # elements that share their memory
    ],
)
def test_the_outermost_dim_in_memory_is_cut_unless_it_has_too_few_rows(parameter, n, order):
    layout = shard_layout(parameter.shape, parameter.stride(), n)
    assert (layout.order, layout.dim) == (order, order[0])
    sizes = [layout.shape[dim] for dim in order]
    assert [layout.stride[dim] for dim in order] == list(torch.empty(sizes, device="meta").stride())


def test_offsets_are_as_close_as_their_alignment_allows():
    assert ALIGNMENT_NBYTES == 128
    assert aligned_offsets([1, 32, 33, 0], 4) == (0, 32, 64, 128, 128)
    assert aligned_offsets([3, 2], 256) == (0, 3, 5)  # of items that are larger
