"""Faults beside states in 8 bits: disks, gradients that only some ranks have, options that change, copies."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_fn as zf
from tests.promises.test_states8bit import WIDTH, Blocks
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.ranks import Ranks, axis
from tests.support.seeds import seed_generator
from tests.support.wholes import fulls
from tests.support.worlds import noise
from tests.units.storage.disks import failing


def _made(stage: str) -> tuple[nn.Module, Any]:
    seed_generator(0)
    model = STAGES[stage](Blocks(), axis())
    return model, zf.states8bit(torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False))


def _backward(model: nn.Module, seed: int) -> None:
    model.zero_grad()
    model(noise(4, WIDTH, seed=seed)).square().mean().backward()


def _now(model: nn.Module, optimizer: Any) -> list[Tensor]:
    states = optimizer.state_dict()["state"].values()
    return [value.clone() for value in fulls([*model.parameters(), *(each for own in states for each in own.values())])]


# -- disks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_half_way", [True, False])
@on_ranks(2)
def test_a_disk_that_fails_in_a_step_on_one_rank_is_told_on_all(folder: str, is_half_way: bool) -> None:
    """States that are loaded again mend it, to the bit: also codes that are in memory, which some chunks have changed."""
    model, optimizer = _made("zero3")
    optimizer = zf.streamed(optimizer, zf.nvme(folder), buffer="24KiB")
    _backward(model, 0)
    optimizer.step()
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    before = _now(model, optimizer)
    _backward(model, 1)
    breaks, told = dist.get_rank() == 1, "states of AdamW" if dist.get_rank() else "failed on rank 1 of axis"
    with failing(reads=not is_half_way, where=breaks), pytest.raises(zf.StorageError, match=told):
        optimizer.step()
    for act in (optimizer.step, optimizer.state_dict):
        with pytest.raises(zf.StateError, match="whose step failed half-way"):
            act()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert all(map(torch.equal, _now(model, optimizer), before))
    expected, stock = _made("zero3")
    for seed in (0, 1):
        _backward(expected, seed)
        stock.step()
    _backward(model, 1)
    optimizer.step()
    assert all(map(torch.equal, _now(model, optimizer), _now(expected, stock)))


@on_ranks(2)
def test_a_step_that_fails_while_it_is_tried_is_taken_again(folder: str) -> None:
    expected, stock = _made("zero3")
    seed_generator(0)
    model = zf.offload(zf.zero3(Blocks(), axis()), grads=zf.nvme(folder))
    optimizer = zf.states8bit(torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False))
    for each in (model, expected):
        _backward(each, 0)
    told = "Reading from gradients" if dist.get_rank() else "A step of a streamed optimizer failed on rank 1"
    with failing(where=dist.get_rank() == 1), pytest.raises(zf.StorageError, match=told):
        optimizer.step()
    optimizer.step()
    stock.step()
    assert all(map(torch.equal, _now(model, optimizer), _now(expected, stock)))


# -- ranks -------------------------------------------------------------------------------------------------------------


class _Twins(nn.Module):
    """Two weights of the same shape, whose blocks ranks share."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(90, 90, bias=False), nn.Linear(90, 90, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.other(self.one(x))
        return out


def _torn(stage: str, has_none: bool) -> str:
    """Each rank has the gradient of another weight; or one rank has none."""
    model: Any = STAGES[stage](_Twins(), axis())
    optimizer = zf.states8bit(torch.optim.AdamW(model.parameters(), foreach=False))
    assert len(optimizer.states.divided) == 2 or stage == "replicate"
    model(noise(4, 90, seed=0)).sum().backward()
    (model.one if dist.get_rank() else model.other).weight.grad = None
    if has_none and dist.get_rank():
        optimizer.zero_grad()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises((zf.DisagreementError, zf.LostRankError)) as caught:
        optimizer.step()
    assert all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(model.parameters(), before, strict=True))
    return type(caught.value).__name__


@pytest.mark.parametrize(("stage", "has_none"), [("zero1", False), ("zero3", False), ("zero3", True)])
def test_ranks_with_gradients_of_different_parameters_are_told(stage: str, has_none: bool) -> None:
    ranks = Ranks()  # they lose one another
    try:
        assert "DisagreementError" in ranks(2).run(_torn, stage, has_none)
    finally:
        ranks.close()


# -- options, groups, copies ---------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_state_that_options_leave_out_is_kept_once_it_comes() -> None:
    """Once a step without momentum looked for momentum that was to be coded."""
    found = []
    for stage in ("replicate", "zero3"):
        seed_generator(0)
        model = STAGES[stage](Blocks(), axis())
        optimizer = zf.states8bit(torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))
        for seed, momentum in enumerate((0.0, 0.9, 0.0, 0.5)):
            optimizer.param_groups[0]["momentum"] = momentum
            _backward(model, seed)
            optimizer.step()
        found.append(_now(model, optimizer))
    assert all(map(torch.equal, *found))


def test_what_cannot_be_stepped_is_refused_before_it_is_tried() -> None:
    columns = nn.Parameter(torch.randn(64, 100).t())
    optimizer = zf.states8bit(torch.optim.AdamW([columns], foreach=False))
    assert optimizer.states.divided
    nn.functional.embedding(torch.tensor([1, 2]), columns, sparse=True).sum().backward()
    with pytest.raises(zf.PlacementError, match="Sparse gradients"):
        optimizer.step()
    columns.grad = None
    columns.data = columns.data[:50]
    columns.grad = torch.randn_like(columns)
    with pytest.raises(zf.StateError, match="has changed since"):
        optimizer.step()


def test_it_cannot_be_copied_or_pickled() -> None:
    optimizer = zf.states8bit(torch.optim.AdamW([nn.Parameter(torch.randn(64, 64))], fused=True))
    for act in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(zf.StateError, match="cannot be copied or pickled"):
            act(optimizer)
