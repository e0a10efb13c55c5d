"""States that are loaded by torch's own means: those of whole parameters are sharded, other stages go on, and a file with the
shards of one rank is for no other. Its checkpoints: `axes/test_checkpoints.py`."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import zero_fn as zf
from tests.support.models import Language, Odd
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES, loss_of, parameters
from tests.support.ranks import axis
from tests.support.wholes import full

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def _built(stage: str, build: type[Language], streamed: bool = False) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = STAGES[stage](build(), axis())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, zf.streamed(optimizer, zf.cpu()) if streamed else optimizer


def _step(model: nn.Module, optimizer: Any, seed: int) -> None:
    loss_of(model, seed).backward()
    optimizer.step()
    optimizer.zero_grad()


def _same(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = parameters(one), parameters(other)
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("what", ["model", "optimizer", "first", "streamed"])
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
@on_ranks(2)
def test_shards_of_another_rank_are_refused(stage: str, what: str, folder: str) -> None:
    """Of a file of the own rank, and of rank 0's; before a first step, too."""
    model, optimizer = _built(stage, Odd, what == "streamed")
    _step(model, optimizer, 0)
    rank, state = dist.get_rank(), model if what == "model" else optimizer
    torch.save(state.state_dict(), f"{folder}/{rank}.pt")
    dist.barrier()
    said = r"holds the shard of another rank[\s\S]*torch.distributed.checkpoint" if rank else "failed on rank 1"
    for is_own in (True, False):
        loaded = torch.load(f"{folder}/{rank if is_own else 0}.pt", weights_only=True)
        state = torch.optim.AdamW(model.parameters(), lr=0.01) if what == "first" else state
        is_refused = not is_own and (rank == 1 or what == "streamed")
        with pytest.raises(zf.ZeroError, match=said) if is_refused else nullcontext():
            state.load_state_dict(loaded)
            if what == "first":
                state.step()
        dist.barrier()


def _whole_states(optimizer: Any) -> dict[str, Any]:
    state_dict = optimizer.state_dict()
    states = {number: {name: full(value) for name, value in of.items()} for number, of in state_dict["state"].items()}
    return {**state_dict, "state": states}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
@on_ranks(2)
def test_states_of_whole_parameters_are_sharded(stage: str, streamed: bool) -> None:
    """Whether states of the plain module, and those of the stage, give the same step."""
    model, optimizer = _built(stage, Odd, streamed)
    _step(model, optimizer, 0)
    plain = Odd()
    plain.load_state_dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
    alone = torch.optim.AdamW(plain.parameters(), lr=0.01)
    alone.load_state_dict(_whole_states(optimizer))
    twin, other = _built(stage, Odd, streamed)
    _step(twin, other, 0)
    other.load_state_dict(alone.state_dict())
    for stepped, its in ((model, optimizer), (twin, other)):
        _step(stepped, its, 1)
    assert _same(model, twin)


@pytest.mark.parametrize(
    ("stage", "kind", "whole"),  # NAdam has a second number for each parameter
    [("zero1", torch.optim.NAdam, False), ("zero3", torch.optim.AdamW, False), ("zero3", torch.optim.NAdam, True)],
)
@on_ranks(2)
def test_states_that_were_loaded_move_to_a_tier(stage: str, kind: type[torch.optim.Optimizer], whole: bool) -> None:
    """Whether states that were loaded are stepped alike by the optimizer and by the streamed one that takes them over."""
    models = []
    for streams in (False, True):
        model, _ = _built(stage, Language)
        saved: dict[str, Any] | None = None
        for seed in range(3):
            optimizer: Any = kind(model.parameters())
            if saved is not None:
                optimizer.load_state_dict(saved)
            if streams:
                optimizer = zf.streamed(optimizer, zf.cpu())
            _step(model, optimizer, seed)
            saved = _whole_states(optimizer) if whole else optimizer.state_dict()
        models.append(model)
    assert _same(*models)


@pytest.mark.parametrize("stage", ["replicate", "zero2"])
@on_ranks(2)
def test_states_of_rank_0_go_to_other_stages_whole(stage: str) -> None:
    """The state of rank 0, whole and on the host, given to another stage, and to plain modules."""
    first, optimizer = _built("zero3", Language)
    for number in range(2):
        _step(first, optimizer, number)
    values = get_model_state_dict(first, options=WHOLE)
    states = copy.deepcopy(get_optimizer_state_dict(first, optimizer, options=WHOLE))  # numbers of steps alias
    assert bool(values) == (dist.get_rank() == 0)
    values = {name: value.clone() for name, value in values.items()}
    second, other = _built(stage, Language)
    set_model_state_dict(second, dict(values), options=FROM_RANK_0)  # which it changes
    set_optimizer_state_dict(second, other, states, options=FROM_RANK_0)
    assert _same(first, second)
    for model, its in ((first, optimizer), (second, other)):
        _step(model, its, 5)
    assert _same(first, second)
    if dist.get_rank() == 0:
        Language().load_state_dict(values)
