"""Law 9: bytes held and bytes sent are those of the plan; in tiers, also of the plan on `meta`, before anything is made."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zero_fn as zf
from property_tests.programs import OPTIMIZERS, apply, batch, build
from property_tests.strategies import STAGES, chains, trees
from tests.simulation import axis as simulated_axis
from tests.support.groups import pretended
from tests.support.models import Layer
from tests.support.profiles import examples
from tests.support.ranks import axis
from zero_fn.runtime.slot import slot_of

MIXED = trees(dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.int64))


def measured(programs):
    """For each program that trains anything, in its second step: bytes held after backward, the plan, bytes sent, and whether
    its states have the dtype that the plan was told."""
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
        are_single = all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
        found.append((zf.memory(model, optimizer), plan, sent.nbytes, are_single))
        optimizer.step()
    return found


def backward(model, step, backwards):
    with zf.accumulate(model) if backwards > 1 else nullcontext():
        for microbatch in range(backwards):
            model(batch(10 * step + microbatch, axis().get_local_rank()).detach()).sum().backward()


PROGRAMS = st.one_of(
    st.tuples(MIXED, chains(precise=True), st.integers(1, 3)),
    st.tuples(trees(dtypes=(torch.float32,), frozen=False), chains(), st.integers(1, 3)),
)


@pytest.mark.parametrize("n", [3, pytest.param(2, marks=pytest.mark.nightly)])
@examples(dev=4, ci=45, deep=2_250)
@given(programs=st.lists(PROGRAMS, min_size=5, max_size=6))
def test_bytes_held_and_sent_are_the_plan_and_its_padding(ranks, n, programs):
    for answers in ranks(n).run(measured, programs):
        for held, plan, sent_nbytes, has_planned_states in answers:
            assert held.parameters == plan.memory.parameters + plan.padding.parameters
            assert held.gradients == plan.memory.gradients + plan.padding.gradients
            assert sent_nbytes == plan.sent_nbytes
            if has_planned_states:
                assert held.optimizer == plan.memory.optimizer + plan.padding.optimizer
                assert held.total == plan.memory.total + plan.padding.total


class Repeated(nn.Module):
    """Its first layer runs twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in (*self.layers, self.layers[0]):
            x = layer(x).tanh()
        return x


@pytest.mark.parametrize("frozen", [None, 0, 1, 2])
@pytest.mark.parametrize("precise", [False, True])
def test_bytes_sent_are_the_plan_when_a_unit_runs_twice_or_is_frozen(ranks, precise, frozen):
    """The gradients of a unit that runs twice are summed before they travel; frozen units may need no backward."""

    def sent_and_planned():
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
def test_more_sharding_never_needs_more_memory(n, tree, chain):
    """Without padding, which may be more than a tiny parameter."""
    with pretended(n) as mesh:
        totals = [total(mesh, tree, chain, stage) for stage in STAGES]
    assert totals == sorted(totals, reverse=True)


def total(mesh, tree, chain, stage):
    return zf.plan(getattr(zf, stage)(apply(chain, build(tree), mesh), mesh)).memory.total


# -- in tiers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """A model, and where its state is to rest."""

    widths: tuple[int, ...]
    frozen: frozenset[int]
    stage: str
    optimizer: str
    tiers: tuple[tuple[str, str], ...]
    fraction: float
    where: str | None
    reshard_after: str
    dtypes: dict[str, torch.dtype]
    order: tuple[int, ...]


tiers = st.dictionaries(st.sampled_from(["params", "grads", "optim"]), st.sampled_from(["nvme", "cpu"]), min_size=1)
plans = st.builds(
    Planned,
    widths=st.lists(st.sampled_from([1, 5, 17, 64, 301]), min_size=1, max_size=4).map(tuple),
    frozen=st.frozensets(st.integers(1, 6), max_size=2),
    stage=st.sampled_from(["plain", *STAGES]),
    optimizer=st.sampled_from(["adamw", "adamw, fused", "adam", "sgd", "sgd without states"]),
    tiers=tiers.map(lambda chosen: tuple(chosen.items())),
    fraction=st.sampled_from([1.0, 0.5]),
    where=st.sampled_from([None, "0.*"]),
    reshard_after=st.sampled_from(["forward", "backward"]),
    dtypes=st.fixed_dictionaries({}, optional=dict.fromkeys(("compute", "grads"), st.just(torch.bfloat16))),
    order=st.permutations(range(3)).map(tuple),
)


def planned_and_made(case, path):
    """The plan on meta, that of what was made, what it holds after two steps, and the plan then; or what was refused."""
    with torch.device("meta"):
        model = nn.Sequential(*(Layer(12, width) for width in case.widths))
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number not in case.frozen)
    chosen = {kind: zf.nvme(path) if tier == "nvme" else zf.cpu() for kind, tier in case.tiers}
    if "optim" in chosen:
        chosen["fraction"] = case.fraction
    transforms = (
        lambda m: m if case.stage == "plain" else getattr(zf, case.stage)(m, simulated_axis()),
        lambda m: zf.offload(m, where=case.where, reshard_after=case.reshard_after, **chosen),
        lambda m: zf.precision(m, **({"compute": torch.float32} | case.dtypes)) if case.dtypes else m,
    )
    for number in case.order:
        model = transforms[number](model)
    try:
        planned = zf.plan(model, OPTIMIZERS[case.optimizer](list(model.parameters())))
    except zf.errors.TierError as error:  # parameters in a tier, and no tier for the states
        return error.summary
    model = zf.materialize(model, "cpu")
    optimizer = OPTIMIZERS[case.optimizer](list(model.parameters()))
    if any(slot_of(parameter).kind.must_be_streamed for parameter in model.parameters()):
        optimizer = zf.streamed(optimizer)
    made = zf.plan(model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 12)).float().square().mean().backward()
        optimizer.step()
    return planned, made, zf.memory(model, optimizer), zf.plan(model, optimizer)


@examples(dev=25, ci=300, deep=5_000)
@given(case=plans)
def test_what_is_planned_on_meta_is_what_is_held(simulated, case):
    with tempfile.TemporaryDirectory() as path:
        answers = simulated(2).run(planned_and_made, case, path)
    for answer in answers:
        if isinstance(answer, str):
            assert "no tier" in answer
            continue
        planned, made, held, later = answer
        assert made == planned
        assert held.total == later.memory.total + later.padding.total
        assert held.tiers == later.memory.tiers == planned.memory.tiers
