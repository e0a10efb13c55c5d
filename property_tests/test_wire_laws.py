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
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zero_fn as zf
from property_tests.programs import Leaf, Node, Tree, batch, build
from property_tests.strategies import memory_orders, schedules
from tests.simulation import axis
from tests.support.profiles import examples
from zero_fn.storage.tier_storage import DiskStorage
from zero_fn.values.mesh import root_of
from zero_fn.values.wire import Wire

VERBS = ("replicate", "shard_optimizer", "shard_grads", "shard_params")


class Case(NamedTuple):
    tree: Tree
    compute: torch.dtype
    gather: Wire | None
    scatter: Wire | None
    steps: int


class World(NamedTuple):
    """A pair of ranks is a grid. Transforms, and the axis of each; formats are asked for before, or after them."""

    ranks: int | tuple[int, int]
    links: tuple[tuple[str, str], ...]
    asks_first: bool


_ROWS = st.sampled_from([(31,), (32,), (64,), (65,), (100,), (256,), (300,), (3, 64), (12, 9), (2, 40)])


@st.composite
def _cases(draw):
    found = []
    for _ in range(draw(st.integers(1, 4))):
        shape = (draw(st.integers(0, 9)), *draw(_ROWS))
        order = draw(st.just(tuple(range(len(shape)))) | memory_orders(len(shape)))
        dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float64]))
        found.append(Leaf(shape, order, dtype, trained=draw(st.integers(0, 4)) > 0))
    tree = Tree(Node(tuple(found[:2]), (Node(tuple(found[2:])),)), ties=draw(st.sampled_from([(), ((0, 1),)])))
    codes, blocks = st.sampled_from(["int4", "int8"]), st.sampled_from([32, 48, 256])
    ints = st.builds(Wire, codes, blocks, is_symmetric=st.booleans(), rotates=st.booleans())
    wires = ints | st.builds(Wire, st.sampled_from(["float8_e4m3fn", "float8_e5m2"]), blocks)
    differences = st.builds(Wire, codes, blocks, is_difference=st.just(True))
    gather = draw(st.none() | wires | differences)
    compute = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    return Case(tree, compute, gather, draw(wires if gather is None else st.none() | wires), draw(st.integers(1, 3)))


@st.composite
def _worlds(draw):
    case = draw(_cases())
    ranks = draw(st.integers(1, 8) | st.sampled_from([(2, 2), (2, 3), (3, 2), (2, 4)]))
    axes = ["dp"] if isinstance(ranks, int) else ["dp", "outer"]
    differs = case.gather is not None and case.gather.is_difference
    links = [(draw(st.sampled_from(VERBS[: 3 if differs else 4])), name) for name in axes]
    if differs and len(links) == 2 and links[1][0] != "replicate" and draw(st.booleans()):
        links[0] = ("shard_params", "dp")  # the outer axis keeps the part inside
    return case, World(ranks, tuple(draw(st.permutations(links))), draw(st.booleans()))


def _placed(case, world):
    formats = {"compute": case.compute, "gather": case.gather}
    formats |= {} if case.scatter is None else {"reduce": case.scatter}
    model = build(case.tree)
    model = zf.precision(model, **formats) if world.asks_first else model
    for verb, name in world.links:
        mesh = axis() if isinstance(world.ranks, int) else root_of(axis())[name]
        model = getattr(zf, verb)(model, mesh)
    return model if world.asks_first else zf.precision(model, **formats)


def _trained(case, world):
    """What forwards gave, and whole parameters after each step."""
    model = _placed(case, world)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    seen = []
    for step in range(case.steps):
        output = model(batch(step, dist.get_rank()))
        output.float().sum().backward()
        seen.append(output.detach())
        with torch.no_grad():
            for parameter in trained:
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        with zf.unsharded(model):
            seen += [parameter.detach().clone() for parameter in model.parameters()]
    return seen


def _first_seen(case, world):
    """What the first forward gives, of the same input on all ranks."""
    with torch.no_grad():
        found = _placed(case, world)(batch(0))
    return found


@examples(dev=40, ci=600, deep=30_000)
@given(drawn=_worlds(), schedule=schedules, transport=st.sampled_from(["exchange", "native"]))
def test_every_mixture_computes_what_replicas_compute(simulated, drawn, schedule, transport):
    case, world = drawn
    # Sums go over the axis first that shards most: replicas that shard one state at most go the same way.
    most = max(world.links, key=lambda link: (VERBS.index(link[0]), link[1] == "dp"))[1]
    verbs = {name: "shard_optimizer" if name == most == "outer" else "replicate" for _, name in world.links}
    whole = world._replace(links=tuple((verb, name) for name, verb in verbs.items()), asks_first=False)
    wanted = simulated(world.ranks, transport=transport).run(_trained, case, whole)
    found = simulated(world.ranks, schedule=schedule, transport=transport).run(_trained, case, world)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@examples(dev=20, ci=300, deep=10_000)
@given(drawn=_worlds())
def test_what_is_gathered_does_not_depend_on_the_number_of_ranks(simulated, drawn):
    case, world = drawn
    (wanted,) = simulated(1).run(_first_seen, case, World(1, (("replicate", "dp"),), asks_first=False))
    for found in simulated(world.ranks).run(_first_seen, case, world):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


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
def _offloaded(draw, *, fails):
    nodes = []
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
        draw(st.sampled_from(VERBS)),
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
        except zf.StorageError:
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


@examples(dev=30, ci=1_000, deep=30_000)
@given(case=_offloaded(fails=False), schedule=schedules)
def test_codes_on_a_disk_are_those_of_host_memory(simulated, case, schedule):
    """In any order of units, which were fetched ahead in another one, and after edits that outdate what was fetched."""
    wanted = simulated(case.ranks).run(_passed, case, zf.cpu())
    with tempfile.TemporaryDirectory() as folder:
        found = simulated(case.ranks, schedule=schedule).run(_passed, case, zf.nvme(folder))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@examples(dev=40, ci=2_000, deep=60_000)
@given(case=_offloaded(fails=True), schedule=schedules)
def test_a_read_that_fails_is_told_on_all_ranks_and_spoils_nothing(simulated, case, schedule):
    """A pass raises on every rank, or is right on every rank; and so is each pass after it."""
    wanted = simulated(case.ranks).run(_passed, case, zf.cpu())
    with tempfile.TemporaryDirectory() as folder, _reads_that_fail():
        found = simulated(case.ranks, schedule=schedule).run(_passed, case, zf.nvme(folder))
    for passes in zip(*found, strict=True):
        assert len({one is None for one in passes}) == 1, "some ranks were told"
    for ours, theirs in zip(found, wanted, strict=True):
        for one, other in zip(ours, theirs, strict=False):
            assert one is None or torch.equal(one, other)
