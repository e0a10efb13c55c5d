"""Laws of optimizers: how tensors are cut, where they rest and where they were saved changes no number.

With `zf.by_owner` each tensor is stepped whole, by its owner; with `zf.states8bit` states are codes of blocks. The oracle is
the same over plain tensors of one process.
"""

from __future__ import annotations

import tempfile
from functools import partial
from typing import NamedTuple

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

import zero_fn as zf
from property_tests.programs import Leaf, Link, Node, Tree, World, build
from property_tests.strategies import schedules, small_trees, trees, worlds
from tests.promises.test_by_owner import OPTIMIZERS as OF_WHOLE_TENSORS
from tests.promises.test_states8bit import OPTIMIZERS as OF_ELEMENTS
from tests.support.profiles import examples
from tests.support.versions import IS_2_11
from zero_fn.runtime.slot import slot_of
from zero_fn.streamed import state_codes
from zero_fn.tiers.tier_tensor import in_memory
from zero_fn.values.dtensors import local_of

# Fused ones round the ends of shards otherwise; Adagrad of torch 2.11 cannot step a group that came later.
CODED = [name for name in OF_ELEMENTS if "fused" not in name and not (IS_2_11 and name == "Adagrad")]
OWNED = ["Adafactor", "AdamW, foreach", "Lamb", "Muon with AdamW", "SGD", "SOAP"]
TRANSPORTS = st.sampled_from(["exchange", "native"])


class Case(NamedTuple):
    """What is trained, by what, and how."""

    tree: Tree
    name: str  # of the optimizer
    steps: list[int]  # bits say which parameters have gradients
    joins: int = -1  # before which step every second parameter comes, in a group with another learning rate
    spoilt: float = 0.0  # what one element of a gradient is in the first step


STEPS = st.lists(st.integers(0, 2**12 - 1), max_size=2).map(lambda others: [-1, *others])


def _begun(case, make, model, begin):
    """The optimizer of a model before a step, and the groups that it does not have yet."""
    optimizer = make[case.name]([parameter for parameter in model.parameters() if parameter.requires_grad])
    later = []
    for group in optimizer.param_groups:
        odd = group["params"][1::2]
        later.append({**group, "params": odd, "lr": 3e-2})
        del group["params"][1::2]
        for parameter in odd:
            optimizer.state.pop(parameter, None)  # Adagrad has some from the first
    later = [group for group in later if group["params"]]
    if case.joins < begin:
        later = _join(optimizer, later)
    return optimizer, later


def _join(optimizer, groups):
    for group in groups:
        optimizer.add_param_group(group)
    return []


def _step(case, model, optimizer, number):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    generator = torch.Generator().manual_seed(number)
    for at, parameter in enumerate(trained):
        values = torch.randn(parameter.shape, generator=generator)
        values *= torch.randn(parameter.shape, generator=generator).mul(3).exp()
        values.masked_fill_(torch.rand(parameter.shape, generator=generator) < 0.1 * at, 0.0)
        if case.spoilt and number == 0 and values.numel() > 700:
            values.view(-1)[700] = case.spoilt
        grad = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype).copy_(values)
        parameter.grad = grad if case.steps[number] >> at % 12 & 1 else None
    optimizer.step()


def _now(model, optimizer):
    """The name, the parameter and the value of each parameter and, of an optimizer, of each state."""
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        yield name, parameter, parameter
    if optimizer is None:
        return
    saved, names = optimizer.state_dict(), {id(parameter): name for name, parameter in named.items()}
    for group, rows in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        for parameter, number in zip(group["params"], rows["params"], strict=True):
            for state, value in saved["state"].get(number, {}).items():
                yield f"{state} of {names[id(parameter)]}", parameter, torch.as_tensor(value)


def _values(model, optimizer=None):
    """What one process has."""
    return {name: value.detach().clone() for name, _, value in _now(model, optimizer)}


def _unlike(expected, model, optimizer=None):
    """What this rank has that is not its part of what one process has."""
    found, wrong = set(), []
    for name, parameter, value in _now(model, optimizer):
        slot, own = slot_of(parameter), expected.get(name)
        found.add(name)
        if own is not None and slot is not None and (value is parameter or name.split()[0] in state_codes.MOMENTS):
            own = slot.path.owned(own)
        local = in_memory(local_of(value)).detach()
        if own is None or own.shape != local.shape or not torch.allclose(local, own, rtol=0, atol=0, equal_nan=True):
            wrong.append(name)
    return [*wrong, *(expected.keys() - found)]


# -- owners -------------------------------------------------------------------------------------------------------------

OWNED_CASES = st.builds(
    Case, trees(dtypes=(torch.float32, torch.float32, torch.float64)), st.sampled_from(OWNED), STEPS
)


def _stepped_whole(case, world, wrap=lambda optimizer: optimizer):
    model = world.placed(build(case.tree))
    optimizer = wrap(_begun(case, OF_WHOLE_TENSORS, model, 0)[0])
    for number in range(len(case.steps)):
        _step(case, model, optimizer, number)
    return model


@examples(dev=25, ci=2_000, deep=100_000)
@given(OWNED_CASES, worlds(states=()), st.sampled_from([1, 300, 1 << 20]), schedules, TRANSPORTS)
def test_owners_step_as_one_process(simulated, case, world, batch, schedule, transport):
    """Trees of any shapes and strides, transforms that leave some parameters plain, groups, batches of any size, gradients of
    some parameters."""
    try:
        expected = _values(_stepped_whole(case, World()))
    except (IndexError, RuntimeError, ValueError, ZeroDivisionError):  # some take no scalars, and some no empty tensors
        assume(False)

    def unlike():
        return _unlike(expected, _stepped_whole(case, world, partial(zf.by_owner, batch=batch)))

    for wrong in simulated(world.ranks, schedule=schedule, transport=transport).run(unlike):
        assert wrong == []


# -- states in 8 bits ---------------------------------------------------------------------------------------------------

MOVES = {
    "stay": lambda own, _: own,
    "read": lambda own, _: own.state_dict() and own,
    "load": lambda own, _: own.load_state_dict(own.state_dict()) or own,
    "to the host": lambda own, _: zf.streamed(own, zf.cpu()),
    "half to a disk, late": lambda own, path: zf.streamed(own, zf.nvme(path), fraction=0.5, finish="forward"),
    "in pieces": lambda own, path: zf.streamed(own, zf.nvme(path), buffer="16KiB"),
}
"""What is done with an optimizer before a step."""

_ROWS = st.sampled_from([1, 64, 128, 252, 256, 257, 300, 512])
_SHAPES = st.one_of(
    st.tuples(st.integers(0, 9), _ROWS),
    st.tuples(st.sampled_from([4, 16, 24, 40]), st.sampled_from([64, 128])),  # several rows to a block
    st.tuples(st.sampled_from([2, 7, 64]), st.integers(1, 4), st.integers(1, 9)),
    st.integers(1, 1500).map(lambda numel: (numel,)),
    st.sampled_from([(), (5000,), (20, 256), (64, 4, 2), (256, 3), (4, 1, 256)]),
)
"""Rows are around a block of 256 elements: ranks have whole blocks, parts of some, one row or nothing."""


CODED_CASES = st.builds(
    Case,
    small_trees(_SHAPES),
    st.sampled_from(CODED),
    STEPS,
    st.integers(-1, 1),
    st.sampled_from([0.0, 0.0, torch.inf, torch.nan]),
)


def _trained(case, world, moves, folder, begin, end, *, codes=True):
    """A model and its optimizer after some steps. They come from a checkpoint, unless they begin."""
    model = world.placed(build(case.tree), folder)
    optimizer, later = _begun(case, OF_ELEMENTS, model, begin)
    optimizer = zf.states8bit(optimizer) if codes else optimizer
    if begin:
        zf.load(f"{folder}/saved", model, optimizer)
    for number in range(begin, end):
        if number == case.joins:
            later = _join(optimizer, later)
        optimizer = MOVES[moves[number]](optimizer, folder)
        _step(case, model, optimizer, number)
    return model, optimizer


STAYS = ["stay"] * 3
COLUMNS = Tree(Node((Leaf((300,), (0,)), Leaf((20, 256), (1, 0))), (Node(()),)))
REPLICAS = World(2, ((Link("replicate"), "dp"),))


# A parameter of divided blocks, which has no states yet, could not be added.
@example(Case(COLUMNS, "AdamW", [-1, -1], 1), REPLICAS, REPLICAS, STAYS, 2, True, False, (), "exchange")
@examples(dev=12, ci=1_500, deep=70_000)
@given(
    CODED_CASES,
    worlds(),
    worlds(),
    st.lists(st.sampled_from(sorted(MOVES)), min_size=3, max_size=3),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    schedules,
    TRANSPORTS,
)
def test_states_in_8_bits_are_those_of_one_process_and_are_loaded_in_any_world(
    simulated, case, there, here, moves, saved_at, codes, is_turned, schedule, transport
):
    """Parameters of any size are coded here. They are loaded also where parameters lie in another order of dims, and into an
    optimizer that keeps states in float32, which has the same numbers until it steps."""
    middle = min(saved_at, len(case.steps))
    end, root = len(case.steps) if codes else middle, case.tree.root
    read = case._replace(tree=Tree(root.turned())) if is_turned else case
    here = here if codes else World(here.ranks, here.links)
    leaves = (*root.leaves, *root.children[0].leaves)
    is_in_order = not is_turned and all(leaf.order == tuple(sorted(leaf.order)) for leaf in leaves)
    if not is_in_order or {"params", "grads"} & {*there.tiers, *here.tiers}:
        # A piece that is not in order is not saved, and parcels are stepped at once.
        moves = ["stay" if move == "in pieces" else move for move in moves]
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(state_codes, "_LEAST_NUMEL", 1)
        first, last = (_values(*_trained(case, World(), STAYS, "", 0, step)) for step in (middle, end))

        def save():
            model, optimizer = _trained(case, there, moves, folder, 0, middle)
            wrong = _unlike(first, model, optimizer)
            zf.save(f"{folder}/saved", model, optimizer)
            return wrong

        def load():
            return _unlike(last, *_trained(read, here, moves, folder, middle, end, codes=codes))

        for world, act in ((there, save), (here, load)):
            for wrong in simulated(world.ranks, schedule=schedule, transport=transport).run(act):
                assert wrong == []
