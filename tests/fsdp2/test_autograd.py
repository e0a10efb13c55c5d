"""By intent, `test_fully_shard_autograd.py` of FSDP2. Said elsewhere:

test_unused_forward_output     acceptance/test_outputs.py::test_g24_outputs_may_be_nested_in_anything
test_unused_forward_module     acceptance/test_unused.py::test_g04_what_no_rank_uses_has_no_gradient
unused on some ranks only      acceptance/test_unused.py::test_g05_a_rank_that_does_not_use_a_parameter_contributes_zero
gradient penalty               acceptance/test_functional.py::test_g20_a_gradient_penalty_on_the_input_trains
torch.autograd.grad            acceptance/test_functional.py::test_g21_autograd_grad_gives_resting_gradients
dataclasses in 16 bits         distributed/test_verbs.py::test_precision_casts_tensors_in_dataclasses
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.fsdp2.models import DIM, Mlp, run_all, train
from tests.support.ranks import Ranks
from tests.support.worlds import World

Pair = namedtuple("Pair", ["x", "note"])


@dataclass
class Box:
    x: Tensor
    note: str


class Wrapping(nn.Module):
    """Passes on a container with a tensor and something that is none."""

    def __init__(self, container: str) -> None:
        super().__init__()
        self.inner, self.container = Mlp(), container

    def forward(self, given: Any) -> Any:
        x = given
        if isinstance(given, dict | list | tuple):
            x = given["x"] if isinstance(given, dict) else given[0]
        elif isinstance(given, Box):
            x = given.x
        y = self.inner(x)
        made = {"dict": {"x": y, "n": 1}, "list": [y, None], "tuple": Pair(y, "a"), "box": Box(y, "b")}
        return made[self.container]


def activations_that_are_no_tensors(world: World) -> None:
    kinds = ("dict", "list", "tuple", "box")
    model = world.build(lambda: nn.Sequential(*(Wrapping(kind) for kind in kinds)))
    train(world, model, lambda model, x: model(x).x.square().mean())


class TwoHeads(nn.Module):
    """Which of its heads is computed is asked for; which enters the loss is another question."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = Mlp(), nn.ModuleList(nn.Linear(DIM, 3) for _ in range(3))

    def forward(self, x: Tensor, wanted: list[int]) -> list[Tensor]:
        x = self.trunk(x)
        return [self.heads[number](x) for number in wanted]


def heads_and_outputs_are_used_in_turn(world: World) -> None:
    model = world.build(TwoHeads)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, wanted in enumerate(([0, 1], [1, 2], [0, 1, 2], [2])):
        outputs = model(torch.full((2, DIM), 0.1 * step + 0.1), wanted)
        world.step(model, optimizer, outputs[-1].square().mean())


def test_graphs_of_any_shape_are_those_of_replicas(ranks: Ranks) -> None:
    assert ranks(2).run(run_all, (activations_that_are_no_tensors, heads_and_outputs_are_used_in_turn)) == [[], []]
