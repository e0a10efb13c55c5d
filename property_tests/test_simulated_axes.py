"""Two axes on simulated ranks: whatever order ranks run in, and whatever their backwards pass through, they stay in step.

The simulator compares the collectives of all ranks and finds messages that nobody received.
"""

from __future__ import annotations

from typing import Literal

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import zero_fn as zf
from tests.simulation import Simulated, axis
from tests.support.profiles import examples
from tests.support.programs import STAGES
from tests.support.seeds import seed_generator
from zero_fn.resting import local_of
from zero_fn.runtime.slot import slot_of
from zero_fn.values.mesh import root_of

SKIPS = st.lists(st.sets(st.integers(0, 2), max_size=2), min_size=4, max_size=4)
"""For each rank, the blocks that its loss leaves out."""


class Branches(nn.Module):
    """Three blocks after a first layer, each with an output of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 5) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        x = torch.tanh(self.first(x))
        return [torch.tanh(block(x)) for block in self.blocks]


def trained(inner: str, outer: str, skips: list[set[int]]) -> tuple[nn.Module, list[Tensor | None]]:
    """A model after two steps, with accumulated microbatches, and the last gradients, as they rest."""
    mesh = root_of(axis())
    rank = 2 * mesh["outer"].get_local_rank() + mesh["dp"].get_local_rank()
    seed_generator(0)
    model = STAGES[outer](STAGES[inner](Branches(), mesh["dp"]), mesh["outer"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grads: list[Tensor | None] = []
    for number in range(2):
        optimizer.zero_grad()
        _backward(model, number, rank, skips[rank])
        with zf.accumulate(model):
            for microbatch in range(2):
                _backward(model, 10 + microbatch, rank, skips[(rank + microbatch) % 4])
        grads = [parameter.grad for parameter in model.parameters()]
        optimizer.step()
    return model, grads


def unlike_replicas(inner: str, outer: str, skips: list[set[int]]) -> list[str]:
    """Parameters that are not this rank's part of those of replicas, to the bit. DTensor's own cuts are cached by process."""
    model, grads = trained(inner, outer, skips)
    replicas, their_grads = trained("replicate", "replicate", skips)
    found = []
    for (name, one), other, mine, theirs in zip(
        model.named_parameters(), replicas.parameters(), grads, their_grads, strict=True
    ):
        slot = slot_of(one)
        assert slot is not None
        if not torch.equal(local_of(one), slot.path.owned(local_of(other))):
            found.append(name)
        if (mine is None) != (theirs is None):
            found.append(f"whether {name} has a gradient")
        elif (
            mine is not None
            and theirs is not None
            and not torch.equal(local_of(mine), slot.path.owned(local_of(theirs)))
        ):
            found.append(f"gradient of {name}")
    return found


def _backward(model: nn.Module, seed: int, rank: int, skipped: set[int]) -> None:
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(100 * seed + rank))
    outputs = model(x)
    torch.stack([output.sum() for number, output in enumerate(outputs) if number not in skipped]).sum().backward()


@examples(dev=6, ci=40, deep=1000)
@given(
    st.sampled_from(list(STAGES)),
    st.sampled_from(list(STAGES)),
    SKIPS,
    st.lists(st.integers(0, 3), max_size=60),
    st.sampled_from(["early", "late"]),
    st.sampled_from(["exchange", "native"]),
)
def test_ranks_of_two_axes_stay_in_step(
    simulated: Simulated,
    inner: str,
    outer: str,
    skips: list[set[int]],
    schedule: list[int],
    timing: Literal["early", "late"],
    transport: Literal["exchange", "native"],
) -> None:
    case = simulated((2, 2), schedule=schedule, timing=timing, transport=transport)
    found = case.run(unlike_replicas, inner, outer, skips)
    if list(STAGES).index(inner) >= list(STAGES).index(outer):  # else sums go over the outer axis first
        assert found == [[]] * 4
