"""By intent, `test_zero_redundancy_optimizer.py` of torch. Said elsewhere:

test_local_optimizer_parity               distributed/test_training.py::test_stages_agree_under_every_optimizer_and_clipping
test_add_param_group, test_lr_scheduler   acceptance/test_optimizers.py::test_g31_groups_schedules_and_tensor_rates_are_exact
test_same_dense_param_type                acceptance/test_models.py::test_g47_sparse_gradients_raise_at_construction
optimizers in hooks                       acceptance/test_hooks.py::test_g23_optimizers_may_step_in_hooks_while_backward_runs
a rank that stops early                   transport/test_desync.py::test_the_others_name_a_rank_that_ended
states of a plain optimizer               distributed/test_loaded_states.py::test_states_of_whole_parameters_are_sharded
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zero_fn as zf
from tests.fsdp2.models import DIM, Mlp, Stacked, run_all
from tests.support.ranks import Ranks
from tests.support.worlds import ALL, World, differences, noise


class Narrow(nn.Module):
    """Ends in a head of one row, as a regression does; no number of ranks divides its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Mlp(7), nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(x))
        return y


def steps_take_a_closure(world: World) -> None:
    """LBFGS calls it several times, and flattens gradients and directions, whose rows the ranks do not divide."""
    for make in (torch.optim.SGD, torch.optim.LBFGS):
        model = world.build(Narrow).double()
        optimizer = make(model.parameters(), lr=0.1)

        def closure(model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(noise(2, DIM, seed=0, dtype=torch.float64)).square().mean()
            loss.backward()
            world.reduce(model)
            dist.all_reduce(value := loss.detach().clone())
            return value / dist.get_world_size()

        for _ in range(2):
            world.note("loss", optimizer.step(closure))
        world.note_model(model)


def ranks_have_other_numbers_of_batches(world: World) -> None:
    """In place of `Join`: a block takes what there is on each rank."""
    model = world.build(Stacked)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        with world.accumulate(model) if world.is_replica else zf.accumulate(model, unshard=True):
            for number in range(1 + 2 * dist.get_rank()):
                model(noise(2, DIM, seed=10 * step + number)).square().mean().backward()
        world.reduce(model)
        world.note_model(model)
        optimizer.step()
        optimizer.zero_grad()


def test_optimizers_step_as_for_replicas(ranks: Ranks) -> None:
    assert ranks(2).run(run_all, (steps_take_a_closure, ranks_have_other_numbers_of_batches)) == [[], []]


def test_lbfgs_steps_as_for_replicas_on_three_ranks(ranks: Ranks) -> None:
    """Of rows of one and of seven a rank may hold nothing."""
    assert ranks(3).run(differences, steps_take_a_closure, stages=ALL) == [[]] * 3


def _some_ranks() -> list[float]:
    """An axis of every other rank; the others do something else."""
    group = dist.new_group([0, 2])
    if dist.get_rank() not in (0, 2):
        return []
    torch.manual_seed(0)
    model = zf.zero1(Stacked(), DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",)))
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.1), []
    for _ in range(3):
        loss = model(torch.ones(2, DIM)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_an_axis_may_have_some_of_the_ranks(ranks: Ranks) -> None:
    first, none, second = ranks(3).run(_some_ranks)
    assert first == second
    assert first[-1] < first[0]
    assert none == []
