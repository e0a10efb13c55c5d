"""Law 9: bytes held and bytes sent are those of the plan."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zero_fn as zf
from property_tests.programs import Chain, Tree, apply, batch, build
from property_tests.strategies import chains, trees
from tests.groups import pretended
from tests.ranks import Ranks, axis

Program = tuple[Tree, Chain, int]

SINGLE = trees(dtypes=(torch.float32,), frozen=False)
MIXED = trees(dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.int64))
PRECISE = chains(precise=True)


def measured(programs: list[Program]) -> list[tuple[zf.Held, zf.Plan, int]]:
    """For each program, in its second step: bytes held after backward, the plan, bytes sent."""
    found = []
    for tree, chain, backwards in programs:
        model = apply(chain, build(tree), axis())
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(2):
            optimizer.zero_grad()
            with zf.traffic() as sent:
                backward(model, step, backwards)
            if not step:
                optimizer.step()
        plan = zf.plan(model, optimizer_nbytes_per_element=8, backwards=backwards)
        found.append((zf.held(model, optimizer), plan, sent.nbytes))
        optimizer.step()
    return found


def backward(model: nn.Module, step: int, backwards: int) -> None:
    rank = axis().get_local_rank()
    if backwards == 1:
        model(batch(step, rank)).sum().backward()
        return
    with zf.accumulate(model):
        for microbatch in range(backwards):
            model(batch(10 * step + microbatch, rank)).sum().backward()


def programs_of(tree: st.SearchStrategy[Tree], chain: st.SearchStrategy[Chain]) -> st.SearchStrategy[list[Program]]:
    return st.lists(st.tuples(tree, chain, st.integers(1, 3)), min_size=5, max_size=6)


@pytest.mark.parametrize("n", [2, 3])
@settings(max_examples=4)
@given(programs=programs_of(SINGLE, chains()))
def test_bytes_held_are_the_plan_and_its_padding(ranks: Ranks, n: int, programs: list[Program]) -> None:
    for answers in ranks(n).run(measured, programs):
        for program, (held, plan, _) in zip(programs, answers, strict=True):
            assert held.parameters == plan.held.parameters + plan.padding.parameters, program
            assert held.gradients == plan.held.gradients + plan.padding.gradients, program
            assert held.optimizer == plan.held.optimizer + plan.padding.optimizer, program


@pytest.mark.parametrize("n", [2, 3])
@settings(max_examples=4)
@given(programs=programs_of(MIXED, PRECISE))
def test_bytes_of_mixed_dtypes_are_the_plan_and_its_padding(ranks: Ranks, n: int, programs: list[Program]) -> None:
    """But for the optimizer, whose states have the dtype of each parameter."""
    for answers in ranks(n).run(measured, programs):
        for program, (held, plan, _) in zip(programs, answers, strict=True):
            assert held.parameters == plan.held.parameters + plan.padding.parameters, program
            assert held.gradients == plan.held.gradients + plan.padding.gradients, program


@pytest.mark.parametrize("n", [2, 3])
@settings(max_examples=4)
@given(programs=programs_of(trees(frozen=False, dtypes=(torch.float32, torch.float64, torch.bfloat16)), PRECISE))
def test_bytes_sent_are_the_plan(ranks: Ranks, n: int, programs: list[Program]) -> None:
    for answers in ranks(n).run(measured, programs):
        for program, (_, plan, sent_nbytes) in zip(programs, answers, strict=True):
            assert sent_nbytes == plan.sent_nbytes, program


@pytest.mark.parametrize("n", [2, 8])
@given(tree=MIXED, chain=chains())
def test_more_sharding_never_needs_more_memory(n: int, tree: Tree, chain: Chain) -> None:
    """Without padding, which may be more than a tiny parameter."""
    with pretended(n) as mesh:
        totals = [total(mesh, tree, chain, stage) for stage in STAGES]
    assert totals == sorted(totals, reverse=True)


STAGES = (zf.replicate, zf.shard_optimizer, zf.shard_grads, zf.shard_params)


def total(mesh: DeviceMesh, tree: Tree, chain: Chain, stage: object) -> int:
    return zf.plan(stage(apply(chain, build(tree), mesh), mesh)).held.total  # type: ignore[operator]
