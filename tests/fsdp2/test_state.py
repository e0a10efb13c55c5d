"""By intent, `test_fully_shard_state.py` of FSDP2. Said elsewhere:

    test_fully_shard_deepcopy                  acceptance/test_copies.py::test_g28_deep_copies_train_on_their_own
    a copy in the middle of training           distributed/test_programs.py::test_a_deep_copy_trains_on_its_own

`fully_shard.state` is FSDP2's own matter.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import zero_fn as zf
from tests.fsdp2.models import DIM, Mlp, run_all, stack
from tests.support.ranks import Ranks, axis
from tests.support.worlds import World, noise


def containers_may_be_roots(world: World) -> None:
    """FSDP2 refuses lists and dicts: nobody calls them."""
    torch.manual_seed(0)
    listed = world.place(nn.ModuleList(Mlp() for _ in range(2)))
    named = world.place(nn.ModuleDict({"a": Mlp(), "b": Mlp()}))
    x = noise(2, DIM, seed=0)
    for module in (*listed, *named.values()):
        x = module(x)
    x.square().mean().backward()
    world.reduce(listed, named)
    world.note_model(listed, named)


def an_average_follows(world: World) -> None:
    model = world.build(stack)
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        world.step(model, optimizer, model(noise(2, DIM, seed=step)).square().mean())
        average.update_parameters(model)
    world.note("averaged", average(noise(2, DIM, seed=9)))
    world.note_model(average.module)


def _classes() -> None:
    plain = stack()
    model = zf.zero3(plain, axis())
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    part: Tensor = model[:2](noise(1, DIM, seed=0))  # a slice is a Sequential of units
    assert torch.equal(part, plain[:2](noise(1, DIM, seed=0)))
    again = zf.zero3(model, axis())
    assert torch.equal(again(noise(1, DIM, seed=0)), plain(noise(1, DIM, seed=0)))


def _all() -> list[str]:
    _classes()
    return run_all((containers_may_be_roots, an_average_follows))


def test_modules_stay_what_they_are(ranks: Ranks) -> None:
    assert ranks(2).run(_all) == [[], []]
