"""Law 9: bytes held and bytes sent are those of the plan."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zero_fn as zf
from property_tests.programs import Chain, Tree, apply, batch, build
from property_tests.strategies import chains, trees
from tests.support.groups import pretended
from tests.support.profiles import examples
from tests.support.ranks import Ranks, axis

Program = tuple[Tree, Chain, int]

SINGLE = trees(dtypes=(torch.float32,), frozen=False)
MIXED = trees(dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.int64))
PRECISE = chains(precise=True)


def measured(programs: list[Program]) -> list[tuple[zf.Held, zf.Plan, int]]:
    """For each program that trains anything, in its second step: bytes held after backward, the plan, bytes sent."""
    found = []
    for tree, chain, backwards in programs:
        model = apply(chain, build(tree), axis())
        if not any(parameter.requires_grad for parameter in model.parameters()):
            continue
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
        model(batch(step, rank).detach()).sum().backward()
        return
    with zf.accumulate(model):
        for microbatch in range(backwards):
            model(batch(10 * step + microbatch, rank).detach()).sum().backward()


def programs_of(tree: st.SearchStrategy[Tree], chain: st.SearchStrategy[Chain]) -> st.SearchStrategy[list[Program]]:
    return st.lists(st.tuples(tree, chain, st.integers(1, 3)), min_size=5, max_size=6)


@pytest.mark.parametrize("n", [2, 3])
@examples(dev=4, ci=20, deep=1000)
@given(programs=programs_of(SINGLE, chains()))
def test_bytes_held_are_the_plan_and_its_padding(ranks: Ranks, n: int, programs: list[Program]) -> None:
    for answers in ranks(n).run(measured, programs):
        for held, plan, _ in answers:
            assert held.parameters == plan.held.parameters + plan.padding.parameters
            assert held.gradients == plan.held.gradients + plan.padding.gradients
            assert held.optimizer == plan.held.optimizer + plan.padding.optimizer


@pytest.mark.parametrize("n", [2, 3])
@examples(dev=4, ci=20, deep=1000)
@given(programs=programs_of(MIXED, PRECISE))
def test_bytes_of_mixed_dtypes_are_the_plan_and_its_padding(ranks: Ranks, n: int, programs: list[Program]) -> None:
    """But for the optimizer, whose states have the dtype of each parameter."""
    for answers in ranks(n).run(measured, programs):
        for held, plan, _ in answers:
            assert held.parameters == plan.held.parameters + plan.padding.parameters
            assert held.gradients == plan.held.gradients + plan.padding.gradients


@pytest.mark.parametrize("n", [2, 3])
@examples(dev=4, ci=20, deep=1000)
@given(programs=programs_of(MIXED, PRECISE))
def test_bytes_sent_are_the_plan(ranks: Ranks, n: int, programs: list[Program]) -> None:
    for answers in ranks(n).run(measured, programs):
        assert [sent_nbytes for _, _, sent_nbytes in answers] == [plan.sent_nbytes for _, plan, _ in answers]


class Repeated(nn.Module):
    """Its first layer runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, self.layers[0]):
            x = layer(x).tanh()
        return x


@pytest.mark.parametrize("frozen", [None, 0, 1, 2])
@pytest.mark.parametrize("precise", [False, True])
def test_bytes_sent_are_the_plan_when_a_unit_runs_twice_or_is_frozen(
    ranks: Ranks, precise: bool, frozen: int | None
) -> None:
    """The gradients of a unit that runs twice are summed before they travel; frozen units may need no backward."""

    def sent_and_planned() -> list[int]:
        model = Repeated()
        if frozen is not None:
            model.layers[frozen].requires_grad_(False)
        model = zf.shard_params(model, axis())
        if precise:
            model = zf.precision(model)
        for _ in range(2):
            with zf.traffic() as sent:
                model(torch.ones(1, 8)).sum().backward()
        return [sent.nbytes, zf.plan(model).sent_nbytes]

    for sent_nbytes, planned_nbytes in ranks(2).run(sent_and_planned):
        assert sent_nbytes == planned_nbytes


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
