"""`Numbering`: the numbers that a rank's elements have in the whole tensor, against the index arithmetic of numpy."""

from math import prod

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zero_fn.runtime.holding import numbering_of
from zero_fn.values.box import Box
from zero_fn.values.numbering import Numbering


@st.composite
def numberings(draw):
    """Any box of any tensor, in any order of dims."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    starts = tuple(draw(st.integers(0, size)) for size in shape)
    sizes = tuple(draw(st.integers(0, size - start)) for size, start in zip(shape, starts, strict=True))
    return Numbering(shape, Box(starts, sizes), tuple(draw(st.permutations(range(len(shape))))))


def _in_memory(of):
    """The numbers as numpy lays them out."""
    whole = np.arange(prod(of.shape)).reshape(of.shape)
    ranges = zip(of.box.starts, of.box.sizes, strict=True)
    held = whole[tuple(slice(start, start + size) for start, size in ranges)]
    found = held.transpose(of.order).reshape(-1).tolist()
    return found


@given(numberings(), st.data())
def test_numbers_and_runs_are_those_of_numpy(of, data):
    every = _in_memory(of)
    start = data.draw(st.integers(0, len(every)))
    stop = data.draw(st.integers(start, len(every)))
    assert of.numbers(start, stop).tolist() == every[start:stop]
    begins, numels = of.runs(start, stop)
    assert [begin + at for begin, numel in zip(begins, numels, strict=True) for at in range(numel)] == every[start:stop]
    assert (numels > 0).all()
    assert not every or of.is_in_order == (every == sorted(every))


def test_runs_are_as_long_as_rows_allow():
    whole, columns, rows = Box((0, 0), (4, 6)), Box((0, 2), (4, 3)), Box((1, 0), (2, 6))
    found = [Numbering((4, 6), box, (0, 1)).run_numel for box in (whole, columns, rows)]
    assert found == [24, 3, 12]
    assert Numbering((4, 6), columns, (1, 0)).run_numel == 1
    assert Numbering((4, 1), Box((1, 0), (2, 1)), (1, 0)).run_numel == 2  # of one column no order is another


def test_a_plain_parameter_is_numbered_as_it_lies_in_memory():
    image = nn.Parameter(torch.arange(24.0).view(2, 3, 2, 2).to(memory_format=torch.channels_last))
    stored = image.detach().as_strided((24,), (1,))
    assert numbering_of(image).numbers(0, 24).tolist() == stored.tolist()
    assert not numbering_of(image).is_in_order
