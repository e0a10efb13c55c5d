"""Laws of checkpoints: boxes cover what they say, and what any boxes were written to is read in any others."""

from __future__ import annotations

import tempfile
from collections import Counter
from itertools import accumulate, product
from math import prod
from pathlib import Path
from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import zero_fn as zf
from property_tests.programs import Leaf, Node, Tree, build
from property_tests.strategies import leaves
from tests.support.groups import alone
from tests.support.profiles import examples
from tests.units.checkpoint.worlds import differing, everything
from zero_fn.checkpoint.format.box import Box, Holding, ranges, spans, whole_box
from zero_fn.checkpoint.format.catalog import Catalog
from zero_fn.checkpoint.format.files import StoredBox, TensorFile, write_json
from zero_fn.checkpoint.format.folders import part_name, tensors_name, write_manifest
from zero_fn.checkpoint.others.of_deepspeed import _cut_all, _cut_each
from zero_fn.checkpoint.others.torch_files import TensorInFile, ZipRecord

SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)
FULL = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(prod(shape), dtype=torch.int32).view(shape)


@given(SHAPES, st.data())
def test_spans_are_the_elements_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, prod(shape)))
    last = data.draw(st.integers(first, prod(shape)))
    found = [box.of(numbered(shape)).reshape(-1) for box in spans(shape, first, last)]
    assert torch.cat([torch.empty(0, dtype=torch.int32), *found]).tolist() == list(range(first, last))


@given(SHAPES, st.integers(1, 40))
def test_ranges_are_all_elements(shape: tuple[int, ...], most: int) -> None:
    found = list(ranges(shape, most))
    assert [i for first, last in found for i in range(first, last)] == list(range(prod(shape)))
    assert all(0 < last - first <= most for first, last in found)


@given(FULL, st.data())
def test_what_two_boxes_share_is_what_both_have(shape: tuple[int, ...], data: st.DataObject) -> None:
    def box() -> Box:
        starts = [data.draw(st.integers(0, size - 1)) for size in shape]
        return Box(tuple(starts), tuple(data.draw(st.integers(1, n - s)) for n, s in zip(shape, starts, strict=True)))

    one, other = box(), box()
    mine = set(one.of(numbered(shape)).reshape(-1).tolist()) & set(other.of(numbered(shape)).reshape(-1).tolist())
    meet = one.meet(other)
    assert mine == (set() if meet is None else set(meet.of(numbered(shape)).reshape(-1).tolist()))
    if meet is not None:
        assert one.around(meet.within(one)) == meet


@given(SHAPES, st.integers(1, 5), st.integers(0, 9), st.sampled_from([1, 1 << 16]))
def test_replicas_write_each_element_once(shape: tuple[int, ...], size: int, ordinal: int, itemsize: int) -> None:
    written: list[int] = []
    writers = 0
    for rank in range(size):
        own = Holding(shape, whole_box(shape), (rank, size)).own(ordinal, itemsize, (0, 1))
        if own is not None:
            writers += 1
            written += own.of(numbered(shape)).reshape(-1).tolist()
    assert sorted(written) == list(range(prod(shape)))
    assert writers >= 1, "a tensor without elements has a name, too"


def _grid(shape: tuple[int, ...], data: st.DataObject) -> list[Box]:
    """Boxes that make up a tensor."""
    cuts = []
    for size in shape:
        parts: list[int] = []
        while sum(parts) < size:
            parts.append(data.draw(st.integers(1, size - sum(parts))))
        cuts.append(list(zip(accumulate([0, *parts[:-1]]), parts, strict=True)))
    return [Box(tuple(s for s, _ in row), tuple(n for _, n in row)) for row in product(*cuts)]


@given(FULL, st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]), st.data())
def test_any_boxes_are_read_from_any_others(shape: tuple[int, ...], dtype: torch.dtype, data: st.DataObject) -> None:
    values = torch.randint(0, 2, shape).to(dtype) if dtype == torch.bool else torch.randn(shape).mul(9).to(dtype)
    boxes = _grid(shape, data)
    with tempfile.TemporaryDirectory() as made:
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
                source.require_all(("model", "w"), box)
                out = torch.empty(box.numel, dtype=dtype)
                for first, last in ranges(box.sizes, data.draw(st.integers(1, 99))):
                    source.fill(("model", "w"), box, first, out[first:last])
                assert torch.equal(out.view(box.sizes), box.of(values))
        finally:
            source.close()


@given(st.lists(FULL, min_size=1, max_size=4), st.integers(0, 3), st.booleans())
def test_load_after_save_is_the_identity(shapes: list[tuple[int, ...]], steps: int, is_async: bool) -> None:
    def run(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Module()
        for number, shape in enumerate(shapes):
            model.register_parameter(f"p{number}", nn.Parameter(torch.randn(shape)))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1 + seed, amsgrad=bool(steps % 2))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for parameter in model.parameters():
            parameter.grad = parameter.detach().sin()
        optimizer.step()

    model, optimizer = run(0)
    for _ in range(steps):
        step(model, optimizer)
    other, its_optimizer = run(1)
    with tempfile.TemporaryDirectory() as folder:
        zf.save(f"{folder}/a", model, optimizer, background=is_async).wait()
        zf.load(folder, other, its_optimizer)
    for _ in range(2):
        step(model, optimizer)
        step(other, its_optimizer)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


STAGES = (lambda model, _: model, zf.replicate, zf.zero1, zf.zero3)
TIERS = st.sampled_from([None, "cpu", "nvme"])
MIXED = [Leaf((3,), (0,)), Leaf((8, 4, 3, 3), (0, 2, 3, 1)), Leaf((5, 3), (1, 0)), Leaf((2, 2), (0, 1))]


@examples(dev=6, ci=300, deep=10_000)
@example(MIXED, False, 0, "nvme", "nvme")
@example(MIXED, False, 3, "nvme", "nvme")
@example(MIXED, True, 2, None, "nvme")
@given(
    st.lists(leaves(dtypes=[torch.float32, torch.bfloat16], frozen=False), min_size=1, max_size=5),
    st.booleans(),
    st.integers(0, 3),
    TIERS,
    TIERS,
)
def test_a_load_gives_what_was_saved_whatever_the_strides_and_the_tiers(
    saved: list[Leaf], is_turned: bool, stage: int, params: str | None, states: str | None
) -> None:
    """Parameters share parcels of a tier, and lie there in any order of dims; `is_turned`: in another than was saved."""

    def trained(leaves: list[Leaf], seed: int, params: str | None, states: str | None) -> tuple[nn.Module, Any]:
        tiers: dict[str, Any] = {"cpu": zf.cpu(), "nvme": zf.nvme(folder)}
        model: nn.Module = STAGES[stage](build(Tree(Node(tuple(leaves))), seed), mesh)
        model = model if params is None else zf.offload(model, params=tiers[params])
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1 + seed, amsgrad=True)
        optimizer = optimizer if states is None else zf.streamed(optimizer, tiers[states])
        for parameter in model.parameters():
            parameter.grad = parameter.detach().sin()
        optimizer.step()
        return model, optimizer

    with alone() as mesh, tempfile.TemporaryDirectory() as folder:
        model, optimizer = trained(saved, 0, None, None)
        zf.save(f"{folder}/step-1", model, optimizer)
        zf.save_pretrained(model, f"{folder}/hf")
        turned = [Leaf(leaf.shape, leaf.order[::-1], leaf.dtype) for leaf in saved] if is_turned else saved
        other, its_optimizer = trained(turned, 1, params, states if params is None else states or "cpu")
        zf.save(f"{folder}/step-2", other, its_optimizer)
        expected = everything(other, its_optimizer)
        zf.load(f"{folder}/step-1", other, its_optimizer)
        assert differing(everything(model, optimizer), everything(other, its_optimizer)) == []
        zf.load(f"{folder}/step-2", other, its_optimizer)
        assert differing(expected, everything(other, its_optimizer)) == []
        zf.load_pretrained(other, f"{folder}/hf")
        assert differing(dict(model.state_dict()), dict(other.state_dict())) == []


@given(st.lists(FULL, min_size=1, max_size=4), st.integers(1, 5), st.booleans(), st.data())
def test_what_deepspeed_has_cut_is_found_once(
    shapes: list[tuple[int, ...]], ranks: int, is_cut_each: bool, data: st.DataObject
) -> None:
    group = {f"p{number}": shape for number, shape in enumerate(shapes)}
    gaps = [data.draw(st.integers(0, 3)) for _ in shapes]
    whole = sum(map(prod, shapes)) + sum(gaps)
    bytes_of_rank = ZipRecord(Path("x"), 0, 0, 0)
    begins: Counter[int] = Counter()
    found: dict[str, list[int]] = {name: [] for name in group}
    for rank in range(ranks):
        size = min(-(-whole // ranks), max(whole - rank * -(-whole // ranks), 0))
        flat = TensorInFile(bytes_of_rank, 0, torch.float32, (size,), (1,))
        cut = _cut_each([group], rank, ranks) if is_cut_each else _cut_all([group], [gaps], [flat], begins)
        for _, name, at, count, first in cut:
            found[name] += range(at, at + count)
            assert is_cut_each or first + count <= size
    assert found == {name: list(range(prod(shape))) for name, shape in group.items()}
