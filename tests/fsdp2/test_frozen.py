"""By intent, `test_fully_shard_frozen.py` of FSDP2. Said elsewhere:

test_train_mixed_requires_grad_per_group
    acceptance/test_frozen.py::test_g09_frozen_parameters_keep_their_values_and_stale_gradients
frozen after the forward
    acceptance/test_frozen.py::test_g09_a_unit_frozen_after_the_forward_gets_no_gradient
adapters
    composition/test_adapters.py::test_only_adapters_are_reduced_and_the_base_is_sharded_in_its_dtype
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.fsdp2.models import Mlp, Stacked, run_all, train
from tests.support.ranks import Ranks
from tests.support.worlds import World


def whole_layers_are_frozen_and_thawed(world: World) -> None:
    model = world.build(Stacked)
    for number in (1, 2):
        model.layers[number].requires_grad_(False)  # type: ignore[index, operator]
    train(world, model)
    with torch.no_grad():
        world.note("evaluated", model(torch.ones(2, 6)))
    model.requires_grad_(True)
    train(world, model)


class Adding(nn.Module):
    """A frozen branch is added in place, without a graph, between uses of a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = Mlp().requires_grad_(False), nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x += self.frozen(x)
        for layer in self.trained:
            x = layer(x)
        with torch.no_grad():
            y = self.frozen(x)
        z: Tensor = self.trained[0](x) + y
        return z


def a_frozen_branch_runs_several_times(world: World) -> None:
    train(world, world.build(Adding))


def test_frozen_parts_are_those_of_replicas(ranks: Ranks) -> None:
    trials = (whole_layers_are_frozen_and_thawed, a_frozen_branch_runs_several_times)
    assert ranks(2).run(run_all, trials) == [[], []]
