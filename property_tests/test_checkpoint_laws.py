"""Laws of checkpoints: boxes cover what they say, what was saved anywhere is loaded anywhere, a save that fails or is killed
has not begun, and whatever befalls a file is found before anything changes."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, product
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import nn

import zero_fn as zf
from property_tests.programs import Chain, Leaf, Link, Node, Tree, apply, build
from property_tests.strategies import FLOATS, chains, trees
from tests.simulation import Fault, axis
from tests.support.profiles import examples
from tests.support.wholes import full
from tests.units.checkpoint.test_atomic import before_each_call
from tests.units.checkpoint.worlds import differing, everything
from zero_fn.checkpoint.format import contents
from zero_fn.checkpoint.format.catalog import Catalog
from zero_fn.checkpoint.format.files import StoredBox, TensorFile, write_json
from zero_fn.checkpoint.format.folders import part_name, tensors_name, write_manifest
from zero_fn.checkpoint.others.of_deepspeed import _cut_all, _cut_each
from zero_fn.checkpoint.others.torch_files import TensorInFile, ZipRecord
from zero_fn.runtime.box import Box, Holding, ranges, spans, whole_box
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


def _grid(shape, data):
    """Boxes that make up a tensor."""
    cuts = []
    for size in shape:
        parts = []
        while sum(parts) < size:
            parts.append(data.draw(st.integers(1, size - sum(parts))))
        cuts.append(list(zip(accumulate([0, *parts[:-1]]), parts, strict=True)))
    return [Box(tuple(s for s, _ in row), tuple(n for _, n in row)) for row in product(*cuts)]


@given(FULL, st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]), st.data())
def test_any_boxes_are_read_from_any_others(shape, dtype, data):
    """Also where a row of what has no gaps is longer than a run."""
    values = torch.randint(0, 2, shape).to(dtype) if dtype == torch.bool else torch.randn(shape).mul(9).to(dtype)
    boxes = _grid(shape, data)
    with tempfile.TemporaryDirectory() as made, pytest.MonkeyPatch.context() as patch:
        folder = Path(made)
        (folder / "model").mkdir()
        for rank, box in enumerate(boxes):
            piece = StoredBox("w", dtype, shape, box)
            file = TensorFile(folder / tensors_name("model", rank, 0), [piece], "id")
            flat = box.of(values).contiguous().view(-1)
            for first, last in ranges(box.sizes, data.draw(st.integers(1, 99))):
                file.append(piece, flat[first:last])
            write_json(folder / part_name(rank), {"id": "id", "rank": rank, "files": {"model": [file.finish()]}})
        write_manifest(folder, "id", len(boxes))
        source = Catalog(folder, lambda name: name)
        try:
            for box in _grid(shape, data):
                patch.setattr(contents, "_RUN_NUMEL", data.draw(st.sampled_from([1, 1 << 20])))
                source.require_all(("model", "w"), box)
                out = torch.empty(box.numel, dtype=dtype)
                for first, last in ranges(box.sizes, data.draw(st.integers(1, 99))):
                    source.fill(("model", "w"), box, first, out[first:last])
                assert torch.equal(out.view(box.sizes), box.of(values))
        finally:
            source.close()


@given(st.lists(FULL, min_size=1, max_size=4), st.integers(1, 5), st.booleans(), st.data())
def test_what_deepspeed_has_cut_is_found_once(shapes, ranks, is_cut_each, data):
    group = {f"p{number}": shape for number, shape in enumerate(shapes)}
    gaps = [data.draw(st.integers(0, 3)) for _ in shapes]
    whole = sum(map(prod, shapes)) + sum(gaps)
    bytes_of_rank = ZipRecord(Path("x"), 0, 0, 0)
    begins = Counter()
    found = {name: [] for name in group}
    for rank in range(ranks):
        size = min(-(-whole // ranks), max(whole - rank * -(-whole // ranks), 0))
        flat = TensorInFile(bytes_of_rank, 0, torch.float32, (size,), (1,))
        cut = _cut_each([group], rank, ranks) if is_cut_each else _cut_all([group], [gaps], [flat], begins)
        for _, name, at, count, first in cut:
            found[name] += range(at, at + count)
            assert is_cut_each or first + count <= size
    assert found == {name: list(range(prod(shape))) for name, shape in group.items()}


# -- over ranks --------------------------------------------------------------------------------------------------------


MODELS = trees(dtypes=(*FLOATS, torch.int64, torch.bool))
ONE = Link("shard_params")
REFUSALS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EACCES)


@dataclass(frozen=True)
class World:
    """How many ranks there are, and how a model and its optimizer rest on them; a pair of ranks is a grid."""

    ranks: int | tuple[int, int]
    chain: Chain
    params: str | None
    states: str | None
    optimizers: int = 1  # among which parameters are dealt


@st.composite
def worlds(draw):
    """Any ranks, homes and tiers; a chain without links is a plain module on one rank."""
    chain = draw(st.just(()) | chains(precise=True))
    ranks = draw(st.sampled_from([1, 2, 3, 4, (2, 2)])) if chain else 1
    tiers = st.sampled_from([None, None, "cpu", "nvme"])
    is_sharded = any(link.verb == "shard_params" for link in chain)
    params = draw(tiers) if is_sharded else None
    streamed = tiers if params is None else tiers.filter(bool)  # what is away is stepped by a streamed optimizer
    return World(ranks, chain, params, draw(streamed) if chain else None, draw(st.integers(1, 3)))


def tier(name, folder):
    return zf.nvme(folder) if name == "nvme" else zf.cpu()


def made(tree, world, mesh, folder, seed):
    """The model and its optimizer at rest in a world."""
    model = apply(world.chain, build(tree, seed), mesh)
    model.register_buffer("seen", torch.arange(3.0) + seed)
    if world.params is not None:
        model = zf.offload(model, params=tier(world.params, folder))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    dealt = filter(None, (trained[at :: world.optimizers] for at in range(world.optimizers)))
    found = [torch.optim.AdamW(part, lr=0.1 + seed, amsgrad=True) for part in dealt]
    if world.states is not None:
        found = [zf.streamed(optimizer, tier(world.states, folder)) for optimizer in found]
    return model, as_one(found)


def stepped(model, optimizer):
    """A step whose gradients are other for each element."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    optimizer.zero_grad()


def saved(folder, tree, world, mesh):
    """Saves a model that has been trained, and returns all that it has."""
    model, optimizer = made(tree, world, mesh, folder, seed=0)
    stepped(model, optimizer)
    zf.save(f"{folder}/runs/step-1", model, optimizer, extra={"step": 1})
    zf.save_pretrained(model, f"{folder}/hf")
    return everything(model, optimizer)


def loaded(folder, tree, world, mesh, expected):
    """Loads that into another model, and returns what differs."""
    model, optimizer = made(tree, world, mesh, folder, seed=1)
    stepped(model, optimizer)
    zf.load(f"{folder}/runs", model, optimizer, verify="once")
    wrong = differing(expected, everything(model, optimizer))
    stepped(model, optimizer)
    zf.load_pretrained(model, f"{folder}/hf")
    found = {name: full(value) for name, value in model.state_dict().items()}
    return wrong + differing({name: expected[name] for name in found}, found)


def has_optimizer(tree):
    return any(parameter.requires_grad for parameter in build(tree).parameters())


def turned(node):
    """The same parameters, in the opposite order of dims in memory."""
    own = tuple(replace(leaf, order=leaf.order[::-1]) for leaf in node.leaves)
    return replace(node, leaves=own, children=tuple(map(turned, node.children)))


MIXED = Tree(Node((Leaf((3,), (0,)), Leaf((8, 4, 3, 3), (0, 2, 3, 1)), Leaf((5, 3), (1, 0)), Leaf((2, 2), (0, 1)))))
PLAIN, ON_DISK = World(1, (), None, None), World(1, (ONE,), "nvme", "nvme")


@examples(dev=15, ci=400, deep=20_000)
@example(MIXED, PLAIN, ON_DISK, False)
@example(MIXED, ON_DISK, ON_DISK, True)
@example(MIXED, replace(ON_DISK, optimizers=2), replace(ON_DISK, ranks=2, optimizers=3), False)
@given(MODELS, worlds(), worlds(), st.booleans())
def test_what_was_saved_in_any_world_is_loaded_in_any_other(simulated, tree, there, here, is_turned):
    """Also where parameters lie in another order of dims than they did."""
    assume(has_optimizer(tree))
    read = replace(tree, root=turned(tree.root)) if is_turned else tree
    with tempfile.TemporaryDirectory() as folder:
        expected = simulated(there.ranks).run(lambda: saved(folder, tree, there, axis()))[0]
        for wrong in simulated(here.ranks).run(lambda: loaded(folder, read, here, axis(), expected)):
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
    model, optimizer = made(tree, World(2, (ONE,), None, None), axis(), folder, seed=0)
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
    except zf.StorageError as error:
        told = str(error)
    second.clear()
    wrong = differing(states[1], everything(model, optimizer))
    stepped(model, optimizer)  # training goes on
    zf.load(folder, model, optimizer)
    wrong += differing(states[0 if told else 1], everything(model, optimizer))
    zf.save(f"{folder}/step-3", model, optimizer)
    return told, wrong


@examples(dev=20, ci=250, deep=10_000)
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


@examples(dev=20, ci=200, deep=10_000)
@given(st.integers(2, 4), st.integers(0, 3), st.integers(1, 12))
def test_a_save_in_which_a_rank_is_killed_has_not_begun(simulated, n, rank, at):
    """Or it was complete: the rank was killed after the last one had written."""

    def save(folder):
        model = zf.zero3(nn.Linear(8, 3), axis())
        zf.save(f"{folder}/step-1", model)
        zf.save(f"{folder}/step-2", model)

    with tempfile.TemporaryDirectory() as folder:
        report = simulated(n, faults=[Fault("kill", rank % n, at)]).report(lambda: save(folder))
        steps = [found.step for found in zf.checkpoints(folder) if found.is_complete]
        assert steps in ([], [1], [1, 2])
        for outcome in report.outcomes:  # StorageError where the folder was gone before this rank heard why
            assert isinstance(outcome.error, None | zf.LostRankError | zf.StorageError), str(report)
        with suppress(IndexError):
            zf.load(Path(folder) / f"step-{steps[-1]}", nn.Linear(8, 3))
        zf.save(f"{folder}/step-3", nn.Linear(8, 3))
        assert not [path.name for path in Path(folder).iterdir() if path.name.startswith(".")], "nothing is left over"


# -- damaged -----------------------------------------------------------------------------------------------------------


@st.composite
def damages(draw):
    """Something that befalls the files of a checkpoint; says whether they are other than before."""
    kind = draw(st.sampled_from([*["splice"] * 4, "zero", "remove", "swap", "copy"]))
    which, other, at = draw(st.integers(0, 99)), draw(st.integers(0, 99)), draw(st.floats(0, 1))
    values = draw(st.binary(max_size=40))
    lost = draw(st.sampled_from([0, len(values), 1 << 30]))  # bytes that `values` are written over

    def act(folder):
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        path, second = files[which % len(files)], files[other % len(files)]
        before = path.read_bytes()
        place = int(at * len(before))
        match kind:
            case "splice":
                after = before[:place] + values + before[place + lost :]
            case "zero":
                after = bytes(len(before))
            case "remove":
                path.unlink()
                return True
            case _:
                after = second.read_bytes()
                if kind == "swap":
                    second.write_bytes(before)
        path.write_bytes(after)
        return after != before

    return act


@examples(dev=12, ci=1_000, deep=100_000)
@given(trees(dtypes=FLOATS), st.lists(damages(), min_size=20, max_size=20), st.integers(1, 3))
def test_whatever_befalls_a_file_is_found_before_anything_changes(simulated, tree, several, n):
    assume(has_optimizer(tree))
    assume(all(parameter.numel() for parameter in build(tree).parameters()))  # a file without elements is never opened
    with tempfile.TemporaryDirectory() as made_folder:
        folder = Path(made_folder)
        world = World(n, (ONE,) if n > 1 else (), None, None)
        simulated(n).run(lambda: saved(made_folder, tree, world, axis()))
        model, optimizer = made(tree, PLAIN, None, made_folder, seed=1)
        before = everything(model, optimizer)
        shutil.copytree(folder / "runs", folder / "whole")
        for act in several:
            if act(folder / "runs" / "step-1"):
                try:
                    zf.load(folder / "runs" / "step-1", model, optimizer)
                except (zf.CheckpointError, zf.StorageError):
                    pass
                else:
                    raise AssertionError("what was damaged was loaded")
            shutil.rmtree(folder / "runs")
            shutil.copytree(folder / "whole", folder / "runs")
        assert differing(before, everything(model, optimizer)) == []
        zf.load(folder / "runs", model, optimizer)
