"""Laws of checkpoints: boxes cover what they say, what was saved anywhere is loaded anywhere, a save that fails has not
begun. Files that are damaged: tests/units/checkpoint/test_damage.py; saves that are killed: test_atomic.py there."""

from __future__ import annotations

import errno
import tempfile
from dataclasses import replace
from math import prod

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, example, given
from hypothesis import strategies as st

import zero_fn as zf
from property_tests.programs import Leaf, Link, Node, Tree, World, build
from property_tests.strategies import FLOATS, chains, trees, worlds
from tests.support.profiles import examples
from tests.support.wholes import full
from tests.units.checkpoint.test_atomic import before_each_call
from tests.units.checkpoint.worlds import differing, everything
from zero_fn.checkpoint.format import contents
from zero_fn.values.box import Box, Holding, ranges, spans, whole_box
from zero_fn.values.chained_optimizer import as_one

SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)
FULL = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


def numbered(shape):
    return torch.arange(prod(shape), dtype=torch.int32).view(shape)


@given(SHAPES, st.data())
def test_spans_are_the_elements_in_order(shape, data):
    first = data.draw(st.integers(0, prod(shape)))
    last = data.draw(st.integers(first, prod(shape)))
    found = [box.of(numbered(shape)).reshape(-1) for box in spans(shape, first, last)]
    assert torch.cat([torch.empty(0, dtype=torch.int32), *found]).tolist() == list(range(first, last))


@given(SHAPES, st.integers(1, 40))
def test_ranges_are_all_elements(shape, most):
    found = list(ranges(shape, most))
    assert [i for first, last in found for i in range(first, last)] == list(range(prod(shape)))
    assert all(0 < last - first <= most for first, last in found)


@given(FULL, st.data())
def test_what_two_boxes_share_is_what_both_have(shape, data):
    def box():
        starts = [data.draw(st.integers(0, size - 1)) for size in shape]
        return Box(tuple(starts), tuple(data.draw(st.integers(1, n - s)) for n, s in zip(shape, starts, strict=True)))

    one, other = box(), box()
    mine = set(one.of(numbered(shape)).reshape(-1).tolist()) & set(other.of(numbered(shape)).reshape(-1).tolist())
    meet = one.meet(other)
    assert mine == (set() if meet is None else set(meet.of(numbered(shape)).reshape(-1).tolist()))
    if meet is not None:
        assert one.around(meet.within(one)) == meet


@given(SHAPES, st.integers(1, 5), st.integers(0, 9), st.sampled_from([1, 1 << 16]))
def test_replicas_write_each_element_once(shape, size, ordinal, itemsize):
    written = []
    writers = 0
    for rank in range(size):
        own = Holding(shape, whole_box(shape), (rank, size)).own(ordinal, itemsize, (0, 1))
        if own is not None:
            writers += 1
            written += own.of(numbered(shape)).reshape(-1).tolist()
    assert sorted(written) == list(range(prod(shape)))
    assert writers >= 1, "a tensor without elements has a name, too"


# -- over ranks --------------------------------------------------------------------------------------------------------


MODELS = trees(dtypes=(*FLOATS, torch.int64, torch.bool))
ONE = ((Link("shard_params"), "dp"),)
REFUSALS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EACCES)


def made(tree, world, folder, seed, optimizers=1):
    """The model and its optimizer at rest in a world; several optimizers share the parameters."""
    model = build(tree, seed)
    model.register_buffer("seen", torch.arange(3.0) + seed)
    model = world.placed(model, folder)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    dealt = filter(None, (trained[at::optimizers] for at in range(optimizers)))
    found = [torch.optim.AdamW(part, lr=0.1 + seed, amsgrad=True) for part in dealt]
    if world.tiers:
        tier = [] if "optim" in world.tiers else [zf.cpu()]
        found = [zf.streamed(optimizer, *tier) for optimizer in found]
    return model, as_one(found)


def stepped(model, optimizer):
    """A step whose gradients are other for each element."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    optimizer.zero_grad()


def saved(folder, tree, world, optimizers=1):
    """Saves a model that has been trained, and returns all that it has."""
    model, optimizer = made(tree, world, folder, 0, optimizers)
    stepped(model, optimizer)
    zf.save(f"{folder}/runs/step-1", model, optimizer, extra={"step": 1})
    zf.save_pretrained(model, f"{folder}/hf")
    return everything(model, optimizer)


def loaded(folder, tree, world, optimizers, expected):
    """Loads that into another model, and returns what differs."""
    model, optimizer = made(tree, world, folder, 1, optimizers)
    stepped(model, optimizer)
    zf.load(f"{folder}/runs", model, optimizer, verify="once")
    wrong = differing(expected, everything(model, optimizer))
    stepped(model, optimizer)
    zf.load_pretrained(model, f"{folder}/hf")
    found = {name: full(value) for name, value in model.state_dict().items()}
    return wrong + differing({name: expected[name] for name in found}, found)


def has_optimizer(tree):
    return any(parameter.requires_grad for parameter in build(tree).parameters())


MIXED = Tree(Node((Leaf((3,), (0,)), Leaf((8, 4, 3, 3), (0, 2, 3, 1)), Leaf((5, 3), (1, 0)), Leaf((2, 2), (0, 1)))))
SHARDED, ON_DISK = World(1, ONE), World(1, ONE, {"params": "nvme", "optim": "nvme"})
LONG = 1 << 20
WORLDS = worlds(sizes=st.sampled_from([1, 2, 3, 4, (2, 2)]), chain=st.just(()) | chains(precise=True))


@examples(dev=8, ci=400, deep=20_000)
@example(MIXED, World(), ON_DISK, (1, 1), False, LONG)
@example(MIXED, ON_DISK, ON_DISK, (1, 1), True, LONG)
@example(MIXED, ON_DISK, replace(ON_DISK, ranks=2), (2, 3), False, 1)
@given(
    MODELS,
    WORLDS,
    WORLDS,
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.booleans(),
    st.sampled_from([1, 7, LONG]),
)
def test_what_was_saved_in_any_world_is_loaded_in_any_other(simulated, tree, there, here, optimizers, is_turned, run):
    """Also where parameters lie in another order of dims than they did, other optimizers share them, and rows are longer than
    a run of what is read at once."""
    assume(has_optimizer(tree))
    read = replace(tree, root=tree.root.turned()) if is_turned else tree
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(contents, "_RUN_NUMEL", run)
        expected = simulated(there.ranks).run(saved, folder, tree, there, optimizers[0])[0]
        for wrong in simulated(here.ranks).run(loaded, folder, read, here, optimizers[1], expected):
            assert wrong == []


# -- interrupted -------------------------------------------------------------------------------------------------------


def refused_at(point, rank, code, second):
    """The disk of a rank refuses its call number `point` of the second save."""
    seen = [0]

    def act(_, name):
        if second and dist.get_rank() == rank and name != "close":
            seen[0] += 1
            if seen[0] == point:
                raise OSError(code, f"refused {name}")

    return act


def interrupted(folder, tree, second):
    """The second save of a model that has changed: how it ended, and what differs after it and once the newest is loaded."""
    model, optimizer = made(tree, SHARDED, folder, 0)
    states = []
    for number in (1, 2):
        stepped(model, optimizer)
        states.append(everything(model, optimizer))
        if number == 1:
            zf.save(f"{folder}/step-1", model, optimizer)
    told = ""
    second.append(True)
    try:
        zf.save(f"{folder}/step-2", model, optimizer)
    except zf.errors.StorageError as error:
        told = str(error)
    second.clear()
    wrong = differing(states[1], everything(model, optimizer))
    stepped(model, optimizer)  # training goes on
    zf.load(folder, model, optimizer)
    wrong += differing(states[0 if told else 1], everything(model, optimizer))
    zf.save(f"{folder}/step-3", model, optimizer)
    return told, wrong


@examples(dev=7, ci=250, deep=10_000)
@given(trees(dtypes=FLOATS), st.integers(2, 3), st.integers(1, 30), st.integers(0, 2), st.sampled_from(REFUSALS))
def test_a_save_that_a_disk_refuses_on_one_rank_is_told_on_all_and_has_not_begun(simulated, tree, n, point, rank, code):
    assume(has_optimizer(tree))
    rank, second = rank % n, list[bool]()
    with tempfile.TemporaryDirectory() as folder:
        with before_each_call(refused_at(point, rank, code, second)):
            said = simulated(n).run(lambda: interrupted(folder, tree, second), may_leave_messages=True)
        assert all(wrong == [] for _, wrong in said), "a save changes nothing"
        for other, (told, _) in enumerate(said):
            assert bool(told) == bool(said[0][0]), "every rank is told, or none"
            assert not told or errno.errorcode[code] in told
            assert not told or other == rank or f"failed on rank {rank}" in told
        expected = [1, 3] if said[0][0] else [1, 2, 3]
        assert [each.step for each in zf.checkpoints(folder)] == expected, "nothing else is left"
