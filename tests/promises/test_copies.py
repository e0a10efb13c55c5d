"""Averages; a deep copy is an independent sharded model; pickling one refuses with advice."""

import copy
import io
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import zero_fn as zf
from tests.support.messages import refused
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.ranks import axis
from tests.support.wholes import full
from tests.support.worlds import ALL, WIDTH, Tower, as_replicas, noise
from zero_fn.values.dtensors import local_of


@as_replicas()
def test_deep_copies_train_on_their_own(world):
    model = world.build(Tower)
    fresh = copy.deepcopy(model)  # before the first forward
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    world.train(model, optimizer, 0, 1)
    model(noise(4, WIDTH, seed=3)).sum().backward()
    world.reduce(model)
    twin, its_optimizer = copy.deepcopy((model, optimizer))  # with gradients and states
    world.note_model(twin)
    optimizer.zero_grad()
    its_optimizer.step()
    its_optimizer.zero_grad()
    again = copy.deepcopy(copy.deepcopy(twin))
    world.train(model, optimizer, 10, 11)
    world.train(twin, its_optimizer, 20, 21)
    for each in (fresh, again):
        world.train(each, torch.optim.SGD(each.parameters(), lr=1e-2), 30, 31)
    world.note_model(model, fresh, twin, again)


@as_replicas()
def test_a_deep_copy_of_a_part_trains_beside_the_whole(world):
    model = world.build(Tower)
    block = copy.deepcopy(model.blocks[1])
    optimizer = torch.optim.SGD([*model.parameters(), *block.parameters()], lr=1e-2)
    for step in range(2):
        loss = block(torch.ones(1, 7)).sum() + model(noise(4, WIDTH, seed=step)).square().mean()
        loss.backward()
        world.reduce(model, block)
        world.note_model(model, block)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
@on_ranks(2)
def test_single_parameters_and_gradients_are_copied_and_saved_without_their_unit(stage):
    """They lie in the memory of a unit: torch raised, or took all of it along into each copy and file."""
    torch.manual_seed(0)
    model = STAGES[stage](Tower(), axis())
    model(noise(2, WIDTH, seed=0)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        for tensor in (parameter.detach(), parameter.grad):
            file = io.BytesIO()
            torch.save(tensor, file)
            assert local_of(tensor).untyped_storage().nbytes() == local_of(tensor).nbytes, name
            file.seek(0)
            for twin in (copy.deepcopy(tensor), torch.load(file, weights_only=False)):
                assert type(twin) is type(tensor), name
                assert torch.equal(local_of(twin), local_of(tensor)), name
                local_of(twin).zero_()
    assert any(bool(parameter.grad.any()) for parameter in model.parameters() if parameter.grad is not None)


@on_ranks(2)
def test_pickle_and_torch_save_refuse_with_advice():
    for stage in ALL:
        torch.manual_seed(0)
        model = STAGES[stage](Tower(), axis())
        for whole in (model, {"model": model}, model.blocks[0]):
            for act in (pickle.dumps, lambda each: torch.save(each, io.BytesIO())):
                with refused("forward_is_pickled"):
                    act(whole)
        model(noise(2, WIDTH, seed=0)).sum().backward()  # none the worse


class Grouped(nn.Module):
    """Holds a process group, as layers of sequence and expert parallelism do, as an attribute and in a function."""

    def __init__(self):
        super().__init__()
        self.inner, self.group = nn.Linear(3, 3), axis().get_group()
        self.add_up = partial(dist.all_reduce, group=self.group)

    def forward(self, x):
        total = x.clone()
        self.add_up(total)
        dist.all_reduce(total, group=self.group)
        return self.inner(total)


@on_ranks(2)
def test_process_groups_of_a_module_are_shared_by_its_copy():
    """It could not be copied."""
    model = Grouped()
    twin = zf.shard_params(model, axis())
    assert twin.group is model.group and torch.equal(twin(torch.ones(2, 3)), model(torch.ones(2, 3)))


# -- averages ---------------------------------------------------------------------------------------------------------


def _normed():
    return nn.Sequential(nn.Linear(WIDTH, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))


class Shadow:
    """Averages parameters by `_foreach` operations, as the `EMAModel` of diffusers does."""

    def __init__(self, model):
        self.module = model  # which has the average at the end
        self.shadow = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def update_parameters(self, model):
        parameters = [*model.parameters()]
        torch._foreach_sub_(self.shadow, torch._foreach_sub(self.shadow, parameters), alpha=0.1)

    def end(self):
        torch._foreach_copy_([p.data for p in self.module.parameters()], self.shadow)


AVERAGES = {
    "shadow": Shadow,
    "swa": lambda model: AveragedModel(model, multi_avg_fn=get_swa_multi_avg_fn()),
    "with buffers": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
}


@pytest.mark.parametrize("kind", AVERAGES)
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
@on_ranks(2)
def test_averages_of_parameters_and_buffers_are_those_of_a_plain_model(stage, kind):
    torch.manual_seed(0)
    found = []
    for model in (plain := _normed(), STAGES[stage](copy.deepcopy(plain), axis())):
        average, optimizer = AVERAGES[kind](model), torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            batch = torch.arange(4.0 * WIDTH).view(4, WIDTH).sin() + step  # the same on all ranks
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
        if kind == "shadow":
            average.end()
        average.module.eval()
        output = average.module(torch.ones(3, WIDTH)).detach()
        found.append([output, *(full(value) for value in average.module.state_dict().values())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
