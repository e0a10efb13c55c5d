"""Law: states in 8 bits are the same numbers however a tensor is cut, wherever they rest, and wherever they were saved.

The oracle is `zf.states8bit` over plain tensors of one process. Rows are around a block of 256 elements: ranks have whole
blocks, parts of some, one row or nothing. Parameters of any size are coded here.
"""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import zero_fn as zf
from property_tests.programs import Leaf, Link, Node, Tree, build
from property_tests.strategies import chains, memory_orders, schedules
from property_tests.test_checkpoint_laws import turned
from tests.promises.test_states8bit import OPTIMIZERS
from tests.simulation import axis
from tests.support.profiles import examples
from tests.support.versions import IS_2_11
from zero_fn.resting import local_of
from zero_fn.runtime.slot import slot_of
from zero_fn.runtime.tier_tensor import in_memory
from zero_fn.streamed import coded
from zero_fn.values.mesh import root_of


class Case(NamedTuple):
    """What is trained, by what, and how."""

    tree: Tree
    name: str  # of the optimizer
    joins: int  # before which step parameters with odd numbers come, in a group with another learning rate
    steps: list[int]  # bits say which parameters have gradients
    spoilt: float  # what one element of a gradient is in the first step


class World(NamedTuple):
    """How many ranks there are, how a model rests on them, and what is done with its optimizer before each step."""

    ranks: int | tuple[int, int]  # a pair is a grid
    links: tuple[tuple[Link, str], ...]  # transforms, and the axis of each
    tiers: dict[str, str]
    moves: list[str]


ONE = World(1, (), {}, [])
# Fused ones round the ends of shards otherwise; Adagrad of torch 2.11 cannot step a group that came later.
NAMES = [name for name in OPTIMIZERS if "fused" not in name and not (IS_2_11 and name == "Adagrad")]
LR = {False: 1e-2, True: 3e-2}


MOVES = {
    "stay": lambda own, _: own,
    "read": lambda own, _: own.state_dict() and own,
    "load": lambda own, _: own.load_state_dict(own.state_dict()) or own,
    "to the host": lambda own, _: zf.streamed(own, zf.cpu()),
    "half to a disk, late": lambda own, path: zf.streamed(own, zf.nvme(path), fraction=0.5, finish="forward"),
    "in pieces": lambda own, path: zf.streamed(own, zf.nvme(path), buffer="16KiB"),
}

_ROWS = st.sampled_from([1, 64, 128, 252, 256, 257, 300, 512])
_SHAPES = st.one_of(
    st.tuples(st.integers(0, 9), _ROWS),
    st.tuples(st.sampled_from([4, 16, 24, 40]), st.sampled_from([64, 128])),  # several rows to a block
    st.tuples(st.sampled_from([2, 7, 64]), st.integers(1, 4), st.integers(1, 9)),
    st.integers(1, 1500).map(lambda numel: (numel,)),
    st.sampled_from([(), (5000,), (20, 256), (64, 4, 2), (256, 3), (4, 1, 256)]),
)


@st.composite
def cases(draw):
    found = []
    for number in range(draw(st.integers(1, 4))):
        shape = draw(_SHAPES)
        order = draw(st.just(tuple(range(len(shape)))) | memory_orders(len(shape)))
        found.append(Leaf(shape, order, trained=number == 0 or draw(st.integers(0, 5)) > 0))
    tree = Tree(Node(tuple(found[:2]), (Node(tuple(found[2:])),)))
    name = draw(st.sampled_from(NAMES))
    steps = [-1, *draw(st.lists(st.integers(0, 2**4 - 1), max_size=2))]
    return Case(tree, name, draw(st.integers(-1, 1)), steps, draw(st.sampled_from([0.0, 0.0, torch.inf, torch.nan])))


def _whole(world):
    return world._replace(moves=["stay" if move == "in pieces" else move for move in world.moves])


@st.composite
def worlds(draw):
    ranks = draw(st.integers(1, 8) | st.sampled_from([(2, 2), (2, 3), (3, 2), (2, 4)]))
    axes = st.sampled_from(["dp"] if isinstance(ranks, int) else ["dp", "outer"])
    links = tuple((link, draw(axes)) for link in draw(chains(max_size=3)))
    states = [name for name in ("params", "grads", "optim") if draw(st.integers(0, 3)) == 0]
    tiers = {state: draw(st.sampled_from(["cpu", "nvme"])) for state in states}
    world = World(ranks, links, tiers, draw(st.lists(st.sampled_from(list(MOVES)), min_size=3, max_size=3)))
    return _whole(world) if {"params", "grads"} & tiers.keys() else world  # their parcels are stepped at once


def _made(case, world, folder, *, begin, codes):
    """The model, its optimizer, and the parameters that this one does not have yet."""
    model = build(case.tree)
    for link, name in world.links:
        model = link(model, root_of(axis())[name] if isinstance(world.ranks, tuple) else axis())
    if world.tiers:
        tiers = {state: zf.cpu() if tier == "cpu" else zf.nvme(folder) for state, tier in world.tiers.items()}
        model = zf.offload(model, **tiers)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = OPTIMIZERS[case.name](trained[::2])
    later = trained[1::2]
    if later and case.joins < begin:
        optimizer.add_param_group({"params": later, "lr": LR[True]})
        later = []
    return model, zf.states8bit(optimizer) if codes else optimizer, later


def _step(case, model, optimizer, number):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    generator = torch.Generator().manual_seed(number)
    for at, parameter in enumerate(trained):
        values = torch.randn(parameter.shape, generator=generator)
        values *= torch.randn(parameter.shape, generator=generator).mul(3).exp()
        values.masked_fill_(torch.rand(parameter.shape, generator=generator) < 0.1 * at, 0.0)
        if case.spoilt and number == 0 and values.numel() > 700:
            values.view(-1)[700] = case.spoilt
        grad = torch.empty_strided(parameter.shape, parameter.stride()).copy_(values)
        parameter.grad = grad if case.steps[number] >> at & 1 else None
    optimizer.step()


def _now(model, optimizer):
    """The name, the parameter and the value of each parameter and state."""
    saved, named = optimizer.state_dict(), dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in named.items()}
    for name, parameter in named.items():
        yield name, parameter, parameter
    for group, rows in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        for parameter, number in zip(group["params"], rows["params"], strict=True):
            for state, value in saved["state"].get(number, {}).items():
                yield f"{state} of {names[id(parameter)]}", parameter, torch.as_tensor(value)


def _trained(case, world, folder, begin, end, *, codes=True):
    """A model and its optimizer after some steps. They come from a checkpoint, unless they begin."""
    model, optimizer, later = _made(case, world, folder, begin=begin, codes=codes)
    if begin:
        zf.load(f"{folder}/saved", model, optimizer)
    for number in range(begin, end):
        if later and number == case.joins:
            optimizer.add_param_group({"params": later, "lr": LR[True]})
        optimizer = MOVES[world.moves[number] if world.moves else "stay"](optimizer, folder)
        _step(case, model, optimizer, number)
    return model, optimizer


def _expected(case, end):
    """What one process has after some steps."""
    model, optimizer = _trained(case, ONE, "", 0, end)
    return {name: value.detach().clone() for name, _, value in _now(model, optimizer)}


def _unlike(expected, model, optimizer):
    """What this rank has that is not its part of what one process has."""
    found, wrong = set(), []
    for name, parameter, value in _now(model, optimizer):
        slot, own = slot_of(parameter), expected.get(name)
        found.add(name)
        if own is not None and slot is not None and (value is parameter or name.split()[0] in coded.MOMENTS):
            own = slot.path.owned(own)
        local = in_memory(local_of(value)).detach()
        if own is None or own.shape != local.shape or not torch.allclose(local, own, rtol=0, atol=0, equal_nan=True):
            wrong.append(name)
    return [*wrong, *(expected.keys() - found)]


@contextmanager
def _coded_all():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coded, "_LEAST_NUMEL", 1)
        yield


COLUMNS = Tree(Node((Leaf((300,), (0,)), Leaf((20, 256), (1, 0))), (Node(()),)))


# A parameter of divided blocks, which has no states yet, could not be added.
@example(Case(COLUMNS, "AdamW", 1, [-1, -1], 0.0), World(2, ((Link("replicate"), "dp"),), {}, []), (), "exchange")
@examples(dev=40, ci=2_000, deep=100_000)
@given(case=cases(), world=worlds(), schedule=schedules, transport=st.sampled_from(["exchange", "native"]))
def test_states_in_8_bits_are_those_of_one_process(simulated, case, world, schedule, transport):
    end = len(case.steps)
    with _coded_all(), tempfile.TemporaryDirectory() as folder:
        expected = _expected(case, end)
        ranks = simulated(world.ranks, schedule=schedule, transport=transport)
        for wrong in ranks.run(lambda: _unlike(expected, *_trained(case, world, folder, 0, end))):
            assert wrong == []


@examples(dev=20, ci=500, deep=20_000)
@given(cases(), worlds(), worlds(), st.booleans(), st.booleans())
def test_codes_that_were_saved_in_any_world_are_loaded_in_any_other(simulated, case, there, here, codes, is_turned):
    """Also where parameters lie in another order of dims, and into an optimizer that keeps states in float32, which has the
    same numbers until it steps."""
    end, root = len(case.steps), case.tree.root
    read = case._replace(tree=Tree(turned(root))) if is_turned else case
    here = here if codes else here._replace(tiers={})
    if is_turned or any(leaf.order != tuple(sorted(leaf.order)) for leaf in (*root.leaves, *root.children[0].leaves)):
        there, here = _whole(there), _whole(here)  # a piece that is not in order is not saved
    with _coded_all(), tempfile.TemporaryDirectory() as folder:
        expected = _expected(case, end if codes else 1)

        def save():
            zf.save(f"{folder}/saved", *_trained(case, there, folder, 0, 1))

        simulated(there.ranks).run(save)
        for wrong in simulated(here.ranks).run(
            lambda: _unlike(expected, *_trained(read, here, folder, 1, end if codes else 1, codes=codes))
        ):
            assert wrong == []
