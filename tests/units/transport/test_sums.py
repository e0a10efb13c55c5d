"""What one rank adds up: its pieces and those of its peers, in the order of the ranks, wherever they lie."""

import pytest
import torch

from zero_fn.transport.direct_exchange import ReducePlan
from zero_fn.transport.segment import Contribution

SIZE = 4


def in_order(parts, dtype):
    """The mean, one rank after another."""
    total = torch.zeros_like(parts[0], dtype=dtype)
    for part in parts:
        total += part.to(dtype)
    return total / len(parts)


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("numel", [1, 1 << 17, 3 * (1 << 17) + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 3])
def test_a_sum_is_that_of_the_ranks_in_their_order(rank, numel, dtype, columns):
    """Also of what is transposed, with a stride between the elements of a row. In the place of an addend: the collectives."""
    torch.manual_seed(numel)
    parts = [torch.randn(columns * numel, dtype=torch.float64).mul(100).to(dtype) for _ in range(SIZE)]
    rows, out = torch.zeros(columns, SIZE * numel, dtype=dtype).t(), torch.full((columns * numel,), torch.nan)
    rows[rank * numel : (rank + 1) * numel] = parts[rank].view(numel, columns)
    plan = ReducePlan([Contribution(rows, numel, out, torch.float32)], [out], rank, SIZE)
    before = [part.clone() for part in parts]
    plan.add([rows], [out], {peer: [part] for peer, part in enumerate(parts) if peer != rank})
    assert torch.equal(out, in_order(before, torch.float32))
    assert all(map(torch.equal, parts, before)), "what peers sent is only read"
