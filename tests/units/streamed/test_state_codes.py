"""Faults beside states in 8 bits: disks, gradients that only some ranks have, options that change, copies."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_fn as zf
from tests.promises.test_states8bit import OPTIMIZERS, Blocks, _made, _now, _train, _unequal
from tests.support.on_ranks import on_ranks
from tests.support.ranks import Ranks, axis
from tests.support.seeds import seed_generator
from tests.units.storage.disks import failing


@pytest.mark.parametrize("is_half_way", [True, False])
@on_ranks(2)
def test_a_disk_that_fails_in_a_step_on_one_rank_is_told_on_all(folder, is_half_way):
    """States that are loaded again mend it, to the bit: also codes in memory, some of which have changed."""
    model, optimizer = _made("zero3, disk", folder)
    expected, stock = _made("zero3, disk", folder)
    _train(model, optimizer, 0)
    _train(expected, stock, 0, 1)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    breaks, told = dist.get_rank() == 1, "states of AdamW" if dist.get_rank() else "failed on rank 1 of axis"
    with failing(reads=not is_half_way, where=breaks), pytest.raises(zf.errors.StorageError, match=told):
        _train(model, optimizer, 1)
    for act in (optimizer.step, optimizer.state_dict):
        with pytest.raises(zf.errors.StateError, match="whose step failed half-way"):
            act()
    model.zero_grad()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    _train(model, optimizer, 1)
    assert not _unequal(_now(model, optimizer), _now(expected, stock))


@on_ranks(2)
def test_a_step_that_fails_while_it_is_tried_is_taken_again(folder):
    expected, stock = _made("zero3", "")
    _train(expected, stock, 0)
    model, _ = _made("zero3", "")
    model = zf.offload(model, grads=zf.nvme(folder))
    optimizer = zf.states8bit(OPTIMIZERS["AdamW"]([*model.parameters()]))
    told = "Reading from gradients" if dist.get_rank() else "A step of a streamed optimizer failed on rank 1"
    with failing(writes=False, where=dist.get_rank() == 1), pytest.raises(zf.errors.StorageError, match=told):
        _train(model, optimizer, 0)
    optimizer.step()
    assert not _unequal(_now(model, optimizer), _now(expected, stock))


def _torn(has_none):
    """Each rank has the gradient of another of two weights of one shape; or one rank has none."""
    model = zf.shard_params(nn.Sequential(nn.Linear(90, 90, bias=False), nn.Linear(90, 90, bias=False)), axis())
    optimizer = zf.states8bit(OPTIMIZERS["AdamW"]([*model.parameters()]))
    assert len(optimizer.states.divided) == 2
    model(torch.ones(4, 90)).sum().backward()
    model[dist.get_rank()].weight.grad = None
    if has_none and dist.get_rank():
        optimizer.zero_grad()
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    with pytest.raises((zf.errors.DisagreementError, zf.errors.LostRankError)) as caught:
        optimizer.step()
    assert all(torch.equal(a.to_local(), b) for a, b in zip(model.parameters(), before, strict=True))
    return type(caught.value).__name__


@pytest.mark.parametrize("has_none", [False, True])
def test_ranks_with_gradients_of_different_parameters_are_told(has_none):
    """Once the largest values of one weight were taken for those of another."""
    ranks = Ranks()  # they lose one another
    try:
        assert "DisagreementError" in ranks(2).run(_torn, has_none)
    finally:
        ranks.close()


@on_ranks(2)
def test_a_state_that_options_leave_out_is_kept_once_it_comes():
    """Once a step without momentum looked for momentum that was to be coded."""
    found = []
    for whole in (True, False):
        seed_generator(0)
        model = Blocks() if whole else zf.shard_params(Blocks(), axis())
        optimizer = zf.states8bit(torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))
        for step, momentum in enumerate((0.0, 0.9, 0.0, 0.5)):
            optimizer.param_groups[0]["momentum"] = momentum
            _train(model, optimizer, step)
        found.append(_now(model, optimizer))
    assert not _unequal(*found)


def test_what_cannot_be_stepped_is_refused_before_it_is_tried():
    columns = nn.Parameter(torch.randn(64, 100).t())
    optimizer = zf.states8bit(torch.optim.AdamW([columns], foreach=False))
    assert optimizer.states.divided
    nn.functional.embedding(torch.tensor([1, 2]), columns, sparse=True).sum().backward()
    with pytest.raises(zf.errors.PlacementError):
        optimizer.step()
    columns.grad = None
    columns.data = columns.data[:50]
    columns.grad = torch.randn_like(columns)
    with pytest.raises(zf.errors.StateError, match="has changed since"):
        optimizer.step()


def test_it_cannot_be_copied_or_pickled():
    optimizer = zf.states8bit(torch.optim.AdamW([nn.Parameter(torch.randn(64, 64))], fused=True))
    for act in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(zf.errors.StateError, match="cannot be copied or pickled"):
            act(optimizer)


def test_the_optimizer_that_was_given_is_not_used_any_more():
    optimizer = torch.optim.SGD(nn.Linear(4, 4).parameters())
    zf.states8bit(optimizer)
    with pytest.raises(zf.errors.StateError, match="was given to states8bit"):
        optimizer.step()
