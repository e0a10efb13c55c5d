"""Law: what travels in fewer bits is the same at every stage and mixture of stages, and what is gathered does not depend on
how many ranks there are, nor on where it rests, nor on reads of a disk that failed before.

The oracle is the same format over replicas, or nearly so, which keep whole parameters. Rows are around a block: ranks have
some of them, or none; some dims lie in another order.
"""

from __future__ import annotations

import errno
import tempfile
import threading
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zero_fn as zf
from property_tests.programs import Leaf, Link, Node, Tree, World, batch, build
from property_tests.strategies import SIZES, STAGES, schedules, small_trees
from tests.simulation import axis
from tests.support.profiles import examples
from zero_fn.storage.tier_storage import DiskStorage
from zero_fn.values.wire import Wire


class Case(NamedTuple):
    tree: Tree
    compute: torch.dtype
    gather: Wire | None
    scatter: Wire | None
    steps: int
    asks_first: bool  # for formats, before transforms or after them


_ROWS = st.sampled_from([(31,), (32,), (64,), (65,), (100,), (256,), (300,), (3, 64), (12, 9), (2, 40)])
_SHAPES = st.tuples(st.integers(0, 9), _ROWS).map(lambda both: (both[0], *both[1]))
_DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float64)
_CODES, _BLOCKS = st.sampled_from(["int4", "int8"]), st.sampled_from([32, 48, 256])
_FLOATS = st.sampled_from(["float8_e4m3fn", "float8_e5m2"])
_WIRES = st.builds(Wire, _CODES, _BLOCKS, is_symmetric=st.booleans(), rotates=st.booleans()) | st.builds(
    Wire, _FLOATS, _BLOCKS
)
_DIFFERENCES = st.builds(Wire, _CODES, _BLOCKS, is_difference=st.just(True))


@st.composite
def _cases(draw):
    tree = replace(draw(small_trees(_SHAPES, _DTYPES)), ties=draw(st.sampled_from([(), ((0, 1),)])))
    compute = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    gather = draw(st.none() | _WIRES | _DIFFERENCES)
    scatter = draw(_WIRES if gather is None else st.none() | _WIRES)
    return Case(tree, compute, gather, scatter, draw(st.integers(1, 3)), draw(st.booleans()))


@st.composite
def _worlds(draw):
    case, ranks = draw(_cases()), draw(SIZES)
    axes = ["dp"] if isinstance(ranks, int) else ["dp", "outer"]
    differs = case.gather is not None and case.gather.is_difference
    verbs = [draw(st.sampled_from(STAGES[: 3 if differs else 4])) for _ in axes]
    if differs and verbs[-1] != "replicate" and len(axes) == 2 and draw(st.booleans()):
        verbs[0] = "shard_params"  # the outer axis keeps the part inside
    return case, World(ranks, tuple(draw(st.permutations([*zip(map(Link, verbs), axes, strict=True)]))))


def _placed(case, world, asks_first=False):
    formats = {"compute": case.compute, "gather": case.gather}
    formats |= {} if case.scatter is None else {"reduce": case.scatter}
    if asks_first:
        return world.placed(zf.precision(build(case.tree), **formats))
    return zf.precision(world.placed(build(case.tree)), **formats)


def _first_seen(model):
    """What the first forward gives, of the same input on all ranks."""
    with torch.no_grad():
        found = model(batch(0))
    return found


def _trained(case, world, asks_first):
    """What forwards gave, and whole parameters after each step."""
    model = _placed(case, world, asks_first)
    seen = [_first_seen(model)]
    for step in range(case.steps):
        output = model(batch(step, dist.get_rank()))
        output.float().sum().backward()
        seen.append(output.detach())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        with zf.unsharded(model):
            seen += [parameter.detach().clone() for parameter in model.parameters()]
    return seen


@examples(dev=9, ci=600, deep=30_000)
@given(drawn=_worlds(), schedule=schedules, transport=st.sampled_from(["exchange", "native"]))
def test_every_mixture_computes_what_replicas_compute_and_first_what_one_rank_computes(
    simulated, drawn, schedule, transport
):
    case, world = drawn
    # Sums go over the axis first that shards most: replicas that shard one state at most go the same way.
    most = max(world.links, key=lambda link: (STAGES.index(link[0].verb), link[1] == "dp"))[1]
    verbs = {name: "shard_optimizer" if name == most == "outer" else "replicate" for _, name in world.links}
    whole = World(world.ranks, tuple((Link(verb), name) for name, verb in verbs.items()))
    wanted = simulated(world.ranks, transport=transport).run(_trained, case, whole, False)
    found = simulated(world.ranks, schedule=schedule, transport=transport).run(_trained, case, world, case.asks_first)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    alone = World(1, ((Link("replicate"), "dp"),))
    (first,) = simulated(1).run(lambda: _first_seen(_placed(case, alone)))
    torch.testing.assert_close(found[0][0], first, rtol=0, atol=0, equal_nan=True)


# -- on a disk ---------------------------------------------------------------------------------------------------------


class Pass(NamedTuple):
    """A forward, and a backward unless parameters are changed in the forward."""

    order: tuple[int, ...]  # of blocks, by number
    edited: int  # the block whose parameters are changed
    edits_at: int  # before so many blocks have run; -1: nothing is changed
    failing: tuple[int, frozenset[int]]  # a rank, and which of its reads fail, by number


class Offloaded(NamedTuple):
    tree: Tree
    verb: str
    persist_below: int
    compute: torch.dtype
    gather: Wire
    ranks: int
    passes: list[Pass]


class Walk(nn.Module):
    """Calls its blocks in the order that it is told."""

    def __init__(self, tree):
        super().__init__()
        self.blocks = nn.ModuleList(build(Tree(node), seed) for seed, node in enumerate(tree.root.children))

    def forward(self, x, one):
        for at, number in enumerate(one.order):
            if at == one.edits_at:
                edit(self.blocks[one.edited])
            x = self.blocks[number](x)
        return x


_turn = threading.local()
"""Of a rank: how many reads it has begun in this pass, and which of them fail."""


def edit(module):
    """Changes all parameters, by reads that do not fail: such an error would be of one rank alone."""
    failing, _turn.failing = getattr(_turn, "failing", ()), ()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(-0.75)
    _turn.failing = failing


_LARGE = (1100, 1024)  # its codes are read to where they are decoded
_MATRICES = st.sampled_from([(1, 32), (4, 64), (9, 40), (33, 100), (64, 64), (130, 96), (300, 256)])


@st.composite
def _offloaded(draw):
    nodes, fails = [], draw(st.booleans())
    for _ in range(draw(st.integers(1, 4))):
        shapes = draw(st.lists(_MATRICES, min_size=1, max_size=3)) + [_LARGE] * (draw(st.integers(0, 9)) == 9)
        trains = draw(st.integers(0, 3)) == 3
        nodes.append(Node(tuple(Leaf(each, (0, 1), trained=trains and draw(st.booleans())) for each in shapes)))
    ranks, blocks, usual = draw(st.integers(1, 3)), st.integers(0, len(nodes) - 1), tuple(range(len(nodes)))
    reads = st.frozensets(st.integers(0, 11), max_size=2) | st.just(frozenset(range(100)))
    passes = []
    for _ in range(draw(st.integers(2, 5))):
        order = draw(st.just(usual) | st.lists(blocks, min_size=1, max_size=6).map(tuple))
        edits_at = draw(st.just(-1) | st.integers(0, len(order) - 1))
        failing = draw(st.integers(0, ranks - 1)), draw(reads) if fails else frozenset[int]()
        passes.append(Pass(order, draw(blocks), edits_at, failing))
    return Offloaded(
        Tree(Node((), tuple(nodes))),
        draw(st.sampled_from(STAGES)),
        draw(st.sampled_from([0, 1000, 10_000])),
        draw(st.sampled_from([torch.float32, torch.bfloat16])),
        draw(st.sampled_from([Wire("int8"), Wire("int4", 32), Wire("float8_e4m3fn")])),
        ranks,
        passes,
    )


def _passed(case, tier):
    """What each pass gave: its output and the gradient of its input, or None if a disk has failed."""
    options = {} if case.verb == "replicate" else {"persist_below": case.persist_below}
    model = getattr(zf, case.verb)(Walk(case.tree), axis(), units="blocks.*", **options)
    model = zf.offload(zf.precision(model, compute=case.compute, gather=case.gather), params=tier)
    seen = []
    for number, one in enumerate(case.passes):
        rank, failing = one.failing
        _turn.begun, _turn.failing = 0, failing if rank == dist.get_rank() else ()
        try:
            x = batch(number, dist.get_rank())
            output = model(x, one)
            if one.edits_at < 0:
                output.float().sum().backward()
            seen.append(torch.cat([output.detach().float(), x.grad if x.grad is not None else torch.empty(0)]))
        except zf.errors.StorageError:
            seen.append(None)
            if one.edits_at < 0:
                continue
            _turn.failing = ()
            return seen  # each rank, or none, has changed its parameters
    edit(model)  # so that no memory which the next world takes over is right by chance
    _turn.failing = ()
    seen.append(model(batch(0), Pass(tuple(range(len(model.blocks))), 0, -1, (0, frozenset()))).detach())
    return seen


@contextmanager
def _reads_that_fail():
    """Inside, reads of disks fail as ranks say in `_turn`, and leave noise."""
    stock = DiskStorage.read

    def read(self, place, memory):
        transfer = stock(self, place, memory)
        if getattr(_turn, "failing", ()):
            if _turn.begun in _turn.failing:
                transfer._backend.wait(transfer._requests)
                memory.fill_(77)
                transfer._requests[0].failure = transfer._requests[0]._failed(errno.EIO)
            _turn.begun += 1
        return transfer

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DiskStorage, "read", read)
        yield


@examples(dev=10, ci=2_000, deep=60_000)
@given(case=_offloaded(), schedule=schedules)
def test_codes_on_a_disk_are_those_of_host_memory_and_a_read_that_fails_is_told_on_all_ranks(simulated, case, schedule):
    """In any order of units, which were fetched ahead in another one, and after edits that outdate what was fetched. A pass
    raises on every rank, or is right on every rank; and so is each pass after it."""
    wanted = simulated(case.ranks).run(_passed, case, zf.cpu())
    with tempfile.TemporaryDirectory() as folder, _reads_that_fail():
        found = simulated(case.ranks, schedule=schedule).run(_passed, case, zf.nvme(folder))
    fails = any(one.failing[1] for one in case.passes)
    for passes in zip(*found, strict=True):
        told = {one is None for one in passes}
        assert told == {False} or (fails and told == {True}), "some ranks were told"
    for ours, theirs in zip(found, wanted, strict=True):
        assert fails or len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=False):
            assert one is None or torch.equal(one, other)
