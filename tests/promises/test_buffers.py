"""Buffers. By default rank 0's are those of all ranks, as under DDP; `buffers="local"` leaves each rank its own."""

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.ao.quantization import FusedMovingAvgObsFakeQuantize
from torch.nn.parallel import DistributedDataParallel

import zero_fn as zf
from tests.axes.grids import differing
from tests.support.messages import changed, refusals
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES, parameters
from tests.support.ranks import axis
from tests.support.wholes import from_all
from tests.support.worlds import noise
from zero_fn import errors


class Normed(nn.Module):
    """Statistics of the input, of a layer, without affine parameters, without a counter; a spectral norm; odd buffers."""

    def __init__(self):
        super().__init__()
        self.first = nn.BatchNorm1d(6)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.BatchNorm1d(6, affine=False))
            for _ in range(2)
        )
        self.layers[1][3].num_batches_tracked = None
        self.last = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("wave", torch.zeros(3, dtype=torch.complex64), persistent=False)
        self.register_buffer("flags", torch.zeros(2, 5, dtype=torch.bool))
        self.register_buffer("empty", torch.zeros(0, 2))
        self.register_buffer("turned", torch.zeros(4, 3).t())
        self.register_buffer("nothing", None)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.seen += x.abs().sum().long()
                self.wave += torch.complex(x[0, :3], x[0, 3:])
                self.flags ^= x[:2, :5] > 0
                self.turned = self.turned + x[:3, :4]  # replaced, not written
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Unseen(nn.Module):
    """Its buffers change in ways that count no version."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.observed = FusedMovingAvgObsFakeQuantize()
        self.observed.fake_quant_enabled[0] = 0

    def forward(self, x):
        if self.training:
            self.mean.data.lerp_(x.detach().mean(0), 0.5)
        return self.linear(self.observed(x - self.mean))


def stepped(model, microbatches, then):
    """Buffers and parameters of this rank after each step, and what an evaluation after it gave."""
    is_ddp = isinstance(model, DistributedDataParallel)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = []
    for step in range(4):
        with nullcontext() if is_ddp else zf.accumulate(model):
            for i in range(microbatches):
                with model.no_sync() if is_ddp and i < microbatches - 1 else nullcontext():
                    model(noise(5, 6, seed=10 * step + i)).square().mean().backward()
        state = {name.removeprefix("module."): buffer.clone() for name, buffer in model.named_buffers()}
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            if then:
                state["evaluated"] = model.eval()(torch.ones(5, 6))
                model.train()
        if then == "loads" and step == 0:
            model.load_state_dict(model.state_dict())
        history.append({**state, **parameters(model)})
    return history


@pytest.mark.parametrize(
    ("module", "microbatches", "then"),
    [
        *((module, 1, "evaluates") for module in (Normed, Unseen)),
        *((module, 3, "") for module in (Normed, Unseen)),
        (Normed, 1, "loads"),  # then they were broadcast no longer
    ],
)
@on_ranks(2)
def test_buffers_are_those_of_ddp_on_every_rank(module, microbatches, then):
    """In evaluation, too, and where a model that has run is loaded."""
    plain = module()
    expected = stepped(DistributedDataParallel(copy.deepcopy(plain)), microbatches, then)
    for stage in STAGES:
        history = stepped(STAGES[stage](plain, axis()), microbatches, then)
        assert [differing(*pair) for pair in zip(expected, history, strict=True)] == [[]] * 4


def same_on_all_ranks(tensors):
    own, *others = from_all(tensors)
    return all(torch.equal(*pair) for other in others for pair in zip(own, other, strict=True))


@on_ranks(2)
def test_changes_are_looked_for_again_in_other_modes():
    """In evaluation nothing changed; in training something does, in a way that counts no version."""
    model = zf.shard_params(Unseen(), axis())
    model.eval()(noise(5, 6, seed=0)).square().mean().backward()
    model.train()(noise(5, 6, seed=1)).square().mean().backward()
    assert not same_on_all_ranks([model.mean])
    with torch.no_grad():
        model.eval()(torch.ones(5, 6))
    assert same_on_all_ranks([model.mean])


@on_ranks(2)
def test_a_change_that_begins_late_is_warned_of():
    """No message is due in which ranks could tell one another."""
    model = zf.shard_params(Normed(), axis()).eval()
    for is_late in (False, False, True):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            errors._said.clear()
            model(noise(5, 6, seed=0)).square().mean().backward()
            if is_late:
                handle = model.last.register_forward_pre_hook(lambda *_: model.seen.add_(1) and None)
                model(noise(5, 6, seed=0)).square().mean().backward()
                handle.remove()
        assert any("A forward changed a buffer" in str(one.message) for one in said) is is_late


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
@on_ranks(3)
def test_forwards_in_training_mode_that_no_backward_follows_count_too(stage):
    """They calibrate: evaluation gives what rank 0 would have alone, on all ranks."""
    alone = Normed()
    model = STAGES[stage](copy.deepcopy(alone), axis())
    with torch.no_grad():
        for number in range(3):
            for each in (alone, model):
                each(noise(5, 6, seed=number))
        output = model.eval()(torch.ones(5, 6))
    assert same_on_all_ranks([output, *model.buffers()])
    if dist.get_rank() == 0:
        assert all(map(torch.equal, model.buffers(), alone.buffers()))


@pytest.mark.parametrize("began", ["trained", "new", "frozen"])
@on_ranks(2)
def test_statistics_of_forwards_whose_graph_was_dropped_are_sent(began):
    """BatchNorm is calibrated anew by forwards in training mode whose outputs nobody wants, here with gradients enabled."""
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.BatchNorm1d(6).eval())
    model = zf.shard_params(model, axis())
    if began == "frozen":
        model[1].eval()
    if began != "new":
        model(noise(5, 6, seed=0)).sum().backward()
    model[1].train()
    held = [model(noise(5, 6, seed=number)) for number in (1, 2)]

    def evaluated():
        model[1].eval()
        with torch.no_grad():
            return model(torch.ones(5, 6))

    if dist.get_rank() == 1:
        held.clear()
    dist.barrier()
    assert not same_on_all_ranks([evaluated()]), "rank 0 may yet run a backward, which needs the values"
    held.clear()
    dist.barrier()
    assert same_on_all_ranks([evaluated(), *model.buffers()])


@pytest.mark.parametrize("stage", ["replicate", "zero3"])
@on_ranks(2)
def test_local_buffers_stay_those_of_each_rank(stage):
    """Their shapes may differ."""
    alone, plain = nn.BatchNorm1d(6), nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6))
    plain.register_buffer("table", torch.zeros(2 + dist.get_rank()))
    model = STAGES[stage](plain, axis(), buffers="local")
    model = zf.precision(zf.shard_optimizer(model, axis()), compute=torch.float32)
    for number in range(3):
        alone(noise(5, 6, seed=number))
        model(noise(5, 6, seed=number)).square().mean().backward()
    model.eval()(torch.ones(1, 6))
    assert all(map(torch.equal, model[0].buffers(), alone.buffers()))
    assert not same_on_all_ranks([model[0].running_mean])


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
@on_ranks(3)
def test_buffers_that_never_change_are_never_sent(stage):
    sent = []
    for table in (None, torch.ones(300, 6)):
        plain = nn.Linear(6, 6)
        plain.register_buffer("table", table)
        model = STAGES[stage](plain, axis())
        for number in range(3):
            with zf.traffic() as counted:
                model(noise(2, 6, seed=number)).sum().backward()
                with torch.no_grad():
                    model.eval()(noise(2, 6, seed=number))
                model.train()
                (model(noise(2, 6, seed=1)) + model(noise(2, 6, seed=2))).sum().backward()
        sent.append((counted.calls, counted.nbytes))
    assert sent[0] == sent[1]


@on_ranks(3)
def test_rank_0_gives_the_values_at_the_first_forward():
    model = zf.shard_params(Normed(), axis()).eval()
    for buffer in model.layers.buffers():
        buffer.fill_(dist.get_rank() + 1)
    for each in (model, copy.deepcopy(model)):
        each(torch.ones(5, 6))
        assert all((buffer == 1).all() for buffer in each.layers.buffers())


@pytest.mark.parametrize("stage", ["replicate", "zero3"])
@on_ranks(2)
def test_statistics_wait_while_graphs_do(stage):
    """DDP writes buffers that a waiting backward has saved, and autograd refuses them."""
    alone = nn.BatchNorm1d(6)
    model = STAGES[stage](nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6)), axis())
    for number in range(2):
        model(noise(5, 6, seed=number)).sum().backward()
        loss = model.eval()(noise(5, 6, seed=5)).square().sum()
        for seed in (6, 7):
            loss = loss + model.train()(noise(5, 6, seed=seed)).square().sum()
        loss.backward()
        for seed in (number, 6, 7):
            alone(noise(5, 6, seed=seed))
    if dist.get_rank() == 0:
        assert all(map(torch.equal, model[0].buffers(), alone.buffers()))


test_refusals = refusals(
    {
        "buffer_in_the_memory_of_a_parameter": lambda one: zf.shard_params(
            changed(lambda model: model.register_buffer("first_row", model.layers[0].weight.detach()[0])), one
        ),
    }
)
