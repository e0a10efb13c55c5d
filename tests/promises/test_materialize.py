"""Models that are built on meta: every stage draws the same values, and memory that nobody wrote is never trained."""

import copy
import warnings
import weakref

import pytest
import torch
from torch import Tensor, nn

import zero_fn as zf
from tests.axes.grids import differing
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES, loss_of, parameters
from tests.support.ranks import axis
from tests.support.wholes import named_fulls
from zero_fn import errors


def _step(model, optimizer):
    loss = loss_of(model, 0)
    loss.backward()
    optimizer.step()
    return loss.item()


class Positions(nn.Module):
    """Owns a buffer that only `reset_parameters` can make."""

    angles: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.empty(5), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        if not self.angles.is_meta:
            torch.arange(5, out=self.angles)

    def forward(self, x):
        return x + self.angles.unsqueeze(-1)


def _on_meta(stage):
    with torch.device("meta"):
        blocks = nn.Sequential(*(nn.Sequential(nn.LayerNorm(10), nn.Linear(10, 10)) for _ in range(3)))
        model = STAGES[stage](nn.Sequential(nn.Embedding(37, 10), Positions(), blocks, nn.Linear(10, 37)), axis())
    assert all(parameter.is_meta for parameter in model.parameters())
    assert zf.memory(model).parameters == 0
    return model


@on_ranks(3)
def test_materialize_gives_the_same_values_in_every_stage():
    """With the optimizer built before and after."""
    found = []
    for stage in STAGES:
        for is_late in (True, False):
            model = _on_meta(stage)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            torch.manual_seed(3)
            model = zf.materialize(model, "cpu")
            loss = _step(model, torch.optim.AdamW(model.parameters(), lr=0.1) if is_late else optimizer)
            found.append({**parameters(model), "loss": torch.tensor(loss)})
    assert all(differing(found[0], other) == [] for other in found[1:])


@on_ranks(2)
def test_an_optimizer_that_cannot_follow_is_refused():
    """Which somebody refers to, so that the optimizer of before does not train what they become."""
    model = _on_meta("zero3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    kept = [weakref.ref(parameter) for parameter in model.parameters()]
    zf.materialize(model, "cpu")
    with pytest.raises(zf.errors.StaleError, match="memory for what was on meta"):
        _step(model, optimizer)
    assert kept


class Table(nn.Module):
    """Sets one of its buffers."""

    used: Tensor
    left_out: Tensor

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))
        self.register_buffer("used", torch.zeros(4), persistent=False)
        self.register_buffer("left_out", torch.zeros(4), persistent=False)

    def reset_parameters(self):
        self.weight.data.normal_()
        self.used.fill_(1)


def _shared():
    """Two blocks whose linears share a weight: it belongs to the root, the biases to the blocks."""
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)))
    blocks[1][0].weight = blocks[0][0].weight
    return blocks


@on_ranks(2)
def test_materialize_names_what_nobody_wrote():
    with torch.device("meta"):
        table, shared = (
            zf.shard_params(nn.Sequential(nn.Linear(4, 4), Table()), axis()),
            zf.shard_params(_shared(), axis()),
        )
    with pytest.raises(zf.errors.StateError, match=r"1 parameters and buffers[\s\S]*first +: 1.left_out"):
        zf.materialize(table, "cpu")
    table[1].left_out.fill_(2)
    zf.materialize(table, "cpu")  # what is in memory stays
    assert table[1].left_out.tolist() == [2.0] * 4
    zf.materialize(shared, "cpu")  # the unit that came second was left with the memory as it was
    for values in named_fulls(dict(shared.named_parameters())).values():
        assert values.abs().max() < 1
        assert values.unique().numel() == values.numel()


class Rotary(nn.Module):
    """Owns a buffer that no state_dict holds."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", self.frequencies(), persistent=False)
        self.out = nn.Linear(6, 6)

    def frequencies(self):
        return 1 / 10 ** torch.arange(6.0)

    def forward(self, x):
        return self.out(x * self.inv_freq)


@pytest.mark.parametrize("kind", ["zero1", "zero3", "twin", "around"])
@on_ranks(2)
def test_what_to_empty_left_without_values_is_refused_or_warned_of(kind):
    """FSDP2's way: `to_empty`, then values; shards cannot be drawn one by one, and buffers have none. Of a copy, too, and
    where a module around the transformed one was emptied."""
    values = nn.Sequential(Rotary(), nn.Linear(6, 2)).state_dict()
    with torch.device("meta"):
        model = STAGES.get(kind, zf.shard_params)(nn.Sequential(Rotary(), nn.Linear(6, 2)), axis())
    model = copy.deepcopy(model) if kind == "twin" else model
    (nn.ModuleList([model]) if kind == "around" else model).to_empty(device="cpu")
    with pytest.raises(zf.errors.ShardedAccessError):
        model[1].reset_parameters()
    model.load_state_dict(values)
    errors._said.clear()
    written = copy.deepcopy(model)
    written[0].inv_freq.copy_(Rotary().inv_freq)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was written, and then moved to memory that nobody wrote in place
        written.double()(torch.ones(2, 6, dtype=torch.float64))
    with pytest.warns(UserWarning, match=r"hold garbage[\s\S]*0\.inv_freq"):
        model(torch.ones(2, 6))
    model[0].inv_freq = model[0].frequencies()
    model(torch.ones(2, 6)).sum().backward()
    model.double()(torch.ones(2, 6, dtype=torch.float64))
