"""States that are loaded: those of whole parameters are sharded, and a file with the shards of one rank is for no other."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import zero_fn as zf
from tests.support.models import Language, Odd
from tests.support.programs import STAGES, loss_of, parameters
from tests.support.ranks import Ranks, axis
from tests.support.wholes import full


def _stepped(stage: str, streamed: bool) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = STAGES[stage](Odd(), axis())
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    if streamed:
        optimizer = zf.streamed(optimizer, zf.cpu())
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _resumed(folder: str, stage: str, own: bool, what: str) -> str:
    """What comes of loading a file of the own rank, or of rank 0."""
    model, optimizer = _stepped(stage, what == "streamed")
    rank = dist.get_rank()
    state = model if what == "model" else optimizer
    torch.save(state.state_dict(), f"{folder}/{rank}.pt")
    dist.barrier()
    loaded = torch.load(f"{folder}/{rank if own else 0}.pt", weights_only=True)
    try:
        if what == "first":  # no step yet
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            optimizer.load_state_dict(loaded)
            optimizer.step()
        else:
            state.load_state_dict(loaded)
    except zf.ZeroError as error:
        return str(error)
    finally:
        dist.barrier()
    return ""


@pytest.mark.parametrize("what", ["model", "optimizer", "first", "streamed"])
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_shards_of_another_rank_are_refused(ranks: Ranks, stage: str, what: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert ranks(2).run(_resumed, folder, stage, True, what) == [""] * 2
        first, second = ranks(2).run(_resumed, folder, stage, False, what)
    assert first == "" or (what == "streamed" and "Loading the states of an optimizer failed on rank 1" in first)
    assert "holds the shard of another rank" in second
    assert "torch.distributed.checkpoint" in second


def _from_one_process(stage: str, streamed: bool) -> bool:
    """Whether states of the plain module, and those of the stage, give the same step."""
    model, optimizer = _stepped(stage, streamed)
    plain = Odd()
    plain.load_state_dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
    alone = torch.optim.AdamW(plain.parameters(), lr=0.01)
    alone.load_state_dict(_whole_states(optimizer))
    twin, other = _stepped(stage, streamed)
    other.load_state_dict(alone.state_dict())
    for stepped, its in ((model, optimizer), (twin, other)):
        loss_of(stepped, 1).backward()
        its.step()
    ours, theirs = parameters(model), parameters(twin)
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def _whole_states(optimizer: Any) -> dict[str, Any]:
    state_dict = optimizer.state_dict()
    states = {number: {name: full(value) for name, value in of.items()} for number, of in state_dict["state"].items()}
    return {**state_dict, "state": states}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_states_of_whole_parameters_are_sharded(ranks: Ranks, stage: str, streamed: bool) -> None:
    assert ranks(2).run(_from_one_process, stage, streamed) == [True] * 2


def _moved_after_loading(stage: str, kind: type[torch.optim.Optimizer], whole: bool) -> bool:
    """Whether states that were loaded are stepped alike by the optimizer and by the streamed one that takes them over."""
    found = []
    for streams in (False, True):
        torch.manual_seed(0)
        model = STAGES[stage](Language(), axis())
        saved: dict[str, Any] | None = None
        for seed in range(3):
            optimizer: Any = kind(model.parameters())
            if saved is not None:
                optimizer.load_state_dict(saved)
            if streams:
                optimizer = zf.streamed(optimizer, zf.cpu())
            loss_of(model, seed).backward()
            optimizer.step()
            optimizer.zero_grad()
            saved = _whole_states(optimizer) if whole else optimizer.state_dict()
        found.append(parameters(model))
    ours, theirs = found
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("stage", "kind", "whole"),  # NAdam has a second number for each parameter
    [
        ("zero1", torch.optim.AdamW, True),
        ("zero1", torch.optim.NAdam, False),
        ("zero3", torch.optim.AdamW, False),
        ("zero3", torch.optim.NAdam, True),
    ],
)
def test_states_that_were_loaded_move_to_a_tier(
    ranks: Ranks, stage: str, kind: type[torch.optim.Optimizer], whole: bool
) -> None:
    assert ranks(2).run(_moved_after_loading, stage, kind, whole) == [True] * 2
