"""What tests of kernels share: numbers of all kinds, whose bits are compared, and the way without kernels."""

import math
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from zero_fn.kernels import Library, compiler, library

__all__ = ["any_floats", "drawn", "needs_kernels", "same", "spoiled", "threads", "with_kernels", "without_kernels"]

needs_kernels = pytest.mark.skipif(library().functions is None, reason=str(library()))
SPECIAL = (math.nan, -math.nan, math.inf, -math.inf, 3e38, -1e30, -0.0, 1e-45, -1e-40)


def drawn(*shape, seed, spread=2.0):
    """Numbers of both signs and many sizes."""
    generator = torch.Generator().manual_seed(seed)
    signs, sizes = torch.randn(2, *shape, generator=generator)
    return signs * sizes.mul(spread).exp()


def any_floats(numel, *, seed):
    """Of random bits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (numel,), generator=generator).to(torch.int32).view(torch.float32)


def spoiled(rows, seed):
    """The same with zeros, and in every other row one that is special; some rows are tiny, or zero."""
    generator = torch.Generator().manual_seed(seed)
    rows[torch.rand(rows.shape, generator=generator) < 0.1] = 0.0
    for number in range(0, len(rows), 2):
        at = int(torch.randint(rows.shape[1], (), generator=generator))
        rows[number, at] = SPECIAL[(seed + number) % len(SPECIAL)]
    rows[3::4] *= 1e-32 if seed % 2 else 0.0
    return rows


def same(one, other):
    """The same bits, but for those inside a NaN."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.element_size()]
    known = torch.ones_like(one, dtype=torch.bool)
    if one.is_floating_point():
        known = ~(one.isnan() & other.isnan())
    return one.dtype == other.dtype and torch.equal(one.view(bits)[known], other.view(bits)[known])


def with_kernels(functions):
    """Inside, the kernels are these."""
    return patch.object(compiler, "library", lambda: Library(functions, "for this test"))


def without_kernels():
    """Inside, what kernels do is done by torch."""
    return with_kernels(None)


@contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
