"""Law 6: the stage is a memory decision; it never changes a bit.

Equivalence with one process on the whole batch is in `tests/distributed/`; here are random modules and chains.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import zero_fn as zf
from property_tests.programs import Chain, Link, Tree, apply, batch, build
from property_tests.strategies import chains, trees
from tests.support.profiles import examples
from tests.support.ranks import Ranks, axis

REPLICAS: Chain = (Link("replicate"),)


def trained(tree: Tree, chain: Chain, microbatches: int) -> list[Tensor]:
    """Every whole parameter and, before the last step, every whole gradient, after three steps."""
    model = apply(chain, build(tree), axis())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rank = axis().get_local_rank()
    grads: list[Tensor] = []
    for step in range(3):
        optimizer.zero_grad()
        with zf.accumulate(model):
            for microbatch in range(microbatches):
                model(batch(10 * step + microbatch, rank)).sum().backward()
        grads = [parameter.grad.full_tensor() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
    return [*(parameter.detach().full_tensor() for parameter in model.parameters()), *grads]


def differences(programs: list[tuple[Tree, Chain, int]]) -> list[int]:
    """The number of each program whose results are not bitwise those of replicas."""
    wrong = []
    for number, (tree, chain, microbatches) in enumerate(programs):
        one, other = trained(tree, chain, microbatches), trained(tree, REPLICAS, microbatches)
        if len(one) != len(other) or not all(torch.equal(a, b) for a, b in zip(one, other, strict=True)):
            wrong.append(number)
    return wrong


TREES = trees(dtypes=(torch.float32, torch.float64, torch.int64))


@pytest.mark.parametrize("n", [2, 3])
@examples(dev=4, ci=20, deep=1000)
@given(programs=st.lists(st.tuples(TREES, chains(), st.integers(1, 2)), min_size=4, max_size=5))
def test_stages_give_bitwise_the_same_parameters(ranks: Ranks, n: int, programs: list[tuple[Tree, Chain, int]]) -> None:
    assert ranks(n).run(differences, programs) == [[]] * n


def test_strides_are_those_of_the_module_when_ranks_outnumber_rows(ranks: Ranks) -> None:
    """Of 2 rows over 3 ranks, the other dim was cut once and became the outermost in memory: sums over memory changed."""

    def gathered_strides() -> tuple[int, ...]:
        seen: list[tuple[int, ...]] = []
        linear = nn.Linear(8, 2)
        linear.register_forward_pre_hook(lambda module, _: seen.append(module.weight.stride()))
        zf.shard_params(linear, axis())(torch.ones(1, 8))
        return seen[0]

    assert ranks(3).run(gathered_strides) == [(8, 1)] * 3
