"""Whatever is wrong with a checkpoint is found before anything changes, and said with its place."""

import gc
import json
import os
import random
import shutil
import tracemalloc
from collections import Counter, OrderedDict, defaultdict
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_fn as zf
from tests.support.ranks import axis
from tests.units.checkpoint.damage import flip, flipped, instead
from zero_fn.checkpoint.format import files
from zero_fn.checkpoint.format.files import StoredBox, TensorFile, TensorReader
from zero_fn.runtime.box import Box

FLIPS = 200


def run_of(value):
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    optimizer = torch.optim.SGD(model.parameters(), lr=value, momentum=0.9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
            optimizer.state[parameter] = {"momentum_buffer": torch.full_like(parameter, value)}
    return model, optimizer


def values_of(model, optimizer):
    states = [state["momentum_buffer"] for state in optimizer.state.values()]
    return [torch.tensor(optimizer.param_groups[0]["lr"]), *model.state_dict().values(), *states]


def saved(folder):
    """Saves a checkpoint; its files."""
    zf.save(folder / "step-1", *run_of(1.5), extra={"step": 1, "noise": torch.arange(7)})
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_every_flipped_bit_is_found_and_nothing_has_changed(tmp_path):
    paths = saved(tmp_path)
    model, optimizer = run_of(2.5)
    before = [value.clone() for value in values_of(model, optimizer)]
    for path in flipped(paths, FLIPS, random.Random(0)):
        with pytest.raises(zf.CheckpointError) as caught:
            zf.load(tmp_path / "step-1", model, optimizer)
        assert path.name in str(caught.value)
    assert all(torch.equal(one, other) for one, other in zip(before, values_of(model, optimizer), strict=True))
    zf.load(tmp_path, model, optimizer)
    assert torch.equal(model[0].weight, torch.full((5, 3), 1.5))


def test_files_are_closed_after_a_load_whether_it_failed_or_not(tmp_path):
    path = next(path for path in saved(tmp_path) if path.suffix == ".safetensors")
    gc.collect()  # of tests before
    opened = len(os.listdir("/proc/self/fd"))
    for raw in (path.read_bytes(), flip(path)):
        with instead(path, raw), suppress(zf.CheckpointError):
            zf.load(tmp_path, *run_of(2.5))
        gc.collect()  # of what raised while it was opened
        assert len(os.listdir("/proc/self/fd")) == opened


def test_damage_names_file_tensor_and_rank(ranks, tmp_path):
    def case():
        model = zf.zero3(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), axis())
        zf.save(tmp_path / "step-1", model)
        if dist.get_rank() == 0:
            path = tmp_path / "step-1" / "model" / "00001-0.safetensors"
            path.write_bytes(flip(path))
        dist.barrier()
        before = [parameter.to_local().clone() for parameter in model.parameters()]
        with pytest.raises(zf.CheckpointError) as caught:
            zf.load(tmp_path, model)
        assert all(torch.equal(a, b.to_local()) for a, b in zip(before, model.parameters(), strict=True))
        return str(caught.value)

    first, second = ranks(2).run(case)
    assert "00001-0.safetensors" in second
    assert "1.bias" in second
    assert "rank" in second
    assert "failed on rank 1" in first
    assert "00001-0.safetensors" in first


def test_a_damaged_one_is_not_passed_over_in_silence(tmp_path):
    saved(tmp_path)
    zf.save(tmp_path / "step-2", *run_of(2.0))
    (tmp_path / "step-2" / "rank-00000.json").unlink()
    with pytest.raises(zf.StorageError, match="step-2"):
        zf.load(tmp_path, *run_of(1.0))
    zf.load(tmp_path / "step-1", *run_of(1.0))


def test_files_of_another_checkpoint_are_refused(tmp_path):
    saved(tmp_path)
    zf.save(tmp_path / "step-2", *run_of(2.0))
    shutil.copy(tmp_path / "step-2" / "rank-00000.json", tmp_path / "step-1" / "rank-00000.json")
    with pytest.raises(zf.CheckpointError, match="belongs to another checkpoint"):
        zf.load(tmp_path / "step-1", *run_of(1.0))


def test_once_says_that_the_model_is_partly_loaded(tmp_path):
    saved(tmp_path)
    path = tmp_path / "step-1" / "optimizer" / "00000-0.safetensors"
    path.write_bytes(flip(path))
    model, optimizer = run_of(2.5)
    with pytest.raises(zf.CheckpointError) as caught:
        zf.load(tmp_path, model, optimizer, verify="once")
    assert "partly loaded" in caught.value.__notes__[0]
    assert torch.equal(model[0].weight, torch.full((5, 3), 1.5))


# -- what does not fit -------------------------------------------------------------------------------------------------


def test_all_that_does_not_fit_is_listed_before_anything_changes(tmp_path):
    saved(tmp_path)
    model = nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=7.0, momentum=0.9)
    before = model[0].bias.detach().clone()
    with pytest.raises(zf.CheckpointError) as caught:
        zf.load(tmp_path, model, optimizer, extra={"schedule": object()})
    for line in (
        "0.weight: [5, 3] in the checkpoint, [6, 3] here",
        "0.bias: [5] in the checkpoint, [6] here",
        "1.weight: [5] in the checkpoint, [2, 6] here",
        "1.running_mean: in the checkpoint, and not in the model",
        "extra['schedule']: not in the checkpoint",
    ):
        assert line in str(caught.value)
    with pytest.raises(zf.CheckpointError, match=r"0\.weight: \[5, 3\] in the checkpoint"):
        zf.load(tmp_path, model, strict=False)
    assert torch.equal(model[0].bias, before)
    assert optimizer.param_groups[0]["lr"] == 7.0


def test_names_may_be_changed_left_out_and_missing(tmp_path):
    saved(tmp_path)
    model, optimizer = run_of(2.5)
    named = nn.Module()
    named.enter, named.norm = model[0], model[1]
    rename = {r"^0\.": "enter.", r"^1\.": "norm."}
    zf.load(tmp_path, named, optimizer, rename=rename)
    assert all(bool((p == 1.5).all()) for p in named.parameters())
    assert all(bool((s["momentum_buffer"] == 1.5).all()) for s in optimizer.state.values())
    assert optimizer.param_groups[0]["lr"] == 1.5
    larger = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    with pytest.raises(zf.CheckpointError, match=r"2\.weight: not in the checkpoint"):
        zf.load(tmp_path, larger)
    zf.load(tmp_path, larger, strict=False)
    assert bool((larger[0].weight == 1.5).all())
    smaller = nn.Sequential(nn.Linear(3, 5))
    zf.load(tmp_path, smaller, strict=False)
    assert bool((smaller[0].weight == 1.5).all())
    norm = run_of(2.5)[0]
    zf.load(tmp_path, norm, where="1.*")
    assert bool((norm[1].weight == 1.5).all())
    assert bool((norm[0].weight == 2.5).all())


def test_only_loads_a_part(tmp_path):
    saved(tmp_path)
    model, optimizer = run_of(2.5)
    assert zf.load(tmp_path, model, optimizer, only="model") == {}
    assert bool((model[0].weight == 1.5).all())
    assert optimizer.param_groups[0]["lr"] == 2.5
    assert set(zf.load(tmp_path, only="extra")) == {"step", "noise"}


def test_elements_that_share_memory_are_refused_before_anything_changes(tmp_path):
    def model(value):
        made = nn.Linear(2, 2)
        nn.init.constant_(made.weight, value)
        made.register_buffer("mask", torch.full((1, 3), value).expand(2, 3))
        return made

    zf.save(tmp_path / "step-1", model(1.0))
    other = model(0.0)
    with pytest.raises(zf.CheckpointError, match="mask: expanded here"):
        zf.load(tmp_path, other)
    assert torch.equal(other.weight, torch.zeros(2, 2))
    other.mask = other.mask.contiguous()
    zf.load(tmp_path, other)
    assert torch.equal(other.mask, torch.ones(2, 3))


def test_bits_are_not_lost_in_smaller_dtypes(tmp_path):
    saved(tmp_path)
    model = run_of(1.0)[0]
    with pytest.raises(zf.CheckpointError, match="bits would be lost"):
        zf.load(tmp_path, model.bfloat16())
    zf.save(tmp_path / "step-2", model)
    wide = run_of(7.0)[0]
    zf.load(tmp_path, wide)
    assert torch.equal(wide[0].weight, torch.ones(5, 3))


# -- what cannot be saved ----------------------------------------------------------------------------------------------


class _Own(nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}packed"] = torch.zeros(2)


class _Counting(nn.Linear):
    def get_extra_state(self):
        return 3


def _foreign():
    return {"model": nn.Linear(2, 2), "optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"extra": {"a": [1, {"b": object()}]}}, r"extra\['a'\]\[1\]\['b'\] cannot be saved"),
        ({"extra": {"f": print}}, r"extra\['f'\] cannot be saved"),
        ({"extra": {"d": {"e": defaultdict(int)}}}, r"extra\['d'\]\['e'\] cannot be saved"),
        ({"extra": {"s": type("Steps", (list,), {})()}}, r"extra\['s'\] cannot be saved"),
        ({"extra": {"z": torch.zeros(2, dtype=torch.complex128)}}, "dtype that safetensors does not have"),
        ({"model": nn.Linear(2, 2, device="meta")}, "on meta"),
        ({"model": _Own(2, 2)}, "in its own way"),
        ({"model": nn.Sequential(_Counting(2, 2))}, "in its own way"),
        (_foreign(), "a parameter that the model does not have"),
        ({"keep": 0}, "numbers from 1 on"),
        ({"folder": ".hidden"}, "no name for a checkpoint"),
    ],
)
def test_what_cannot_be_saved_is_refused_with_its_path(arguments, words, tmp_path):
    with pytest.raises(zf.CheckpointError, match=words):
        zf.save(tmp_path / arguments.get("folder", "a"), **{k: v for k, v in arguments.items() if k != "folder"})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        -(2**70),
        1.5,
        float("-inf"),
        "é",
        b"\x00\xff",
        [1, [2]],
        (1, (2, "a")),
        {"a": {"b": 1}},
        {1: 2, (3, 4): 5},
        {"$tuple": 1},
        {"$tensor": [1], "x": 2},
        {"$counter": [["a", 1]]},
        Counter({4: 2, "a": 1}),
        OrderedDict(b=1, a=[OrderedDict()]),
        torch.arange(3),
        {"t": [torch.tensor(True)]},
    ],
)
def test_values_come_back_as_they_were(value, tmp_path):
    zf.save(tmp_path / "a", extra={"x": value})
    found = zf.load(tmp_path)["x"]
    assert repr(found) == repr(value)
    assert type(found) is type(value)


def test_nan_comes_back(tmp_path):
    zf.save(tmp_path / "a", extra={"x": float("nan")})
    assert zf.load(tmp_path)["x"] != zf.load(tmp_path)["x"]


# -- made by hand ------------------------------------------------------------------------------------------------------


PART = "rank-00000.json"


def _nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


def _first(body, kind="model"):
    found = body["files"][kind][0]
    return found


def _box(body, kind="model", name="0.bias"):
    found = _first(body, kind)["tensors"][name]
    return found


def _tried(parent, raw, file):
    """Whether a load of `step-1`, of which a file is replaced, is refused and changes nothing, or loads what was saved."""
    model, optimizer = run_of(2.5)
    before = [value.clone() for value in values_of(model, optimizer)]
    try:
        with instead(parent / "step-1" / file, raw):
            assert len(zf.checkpoints(parent)) == 2
            zf.load(parent / "step-1", model, optimizer)
    except (zf.CheckpointError, zf.StorageError):
        assert all(torch.equal(one, other) for one, other in zip(before, values_of(model, optimizer), strict=True))
        return True
    else:
        assert torch.equal(model[0].weight, torch.full((5, 3), 1.5))
        return False


def _refused(parent, raw, file):
    """It is refused, and takes no memory."""
    tracemalloc.start()
    try:
        assert _tried(parent, raw, file)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made_by_hand")
    zf.save(folder / "step-0", *run_of(1.5))
    saved(folder)
    return folder


@pytest.mark.parametrize(
    ("file", "change"),
    [
        (PART, lambda body: body["files"].update({"../../etc": body["files"].pop("model")})),
        (PART, lambda body: _first(body).update(begin=-8)),
        (PART, lambda body: _box(body).update(sizes=[4])),
        (PART, lambda body: _box(body).update(sizes=[5, 1])),
        (PART, lambda body: _box(body).update(starts=[1])),
        (PART, lambda body: _box(body).update(shape=[1 << 62])),
        (PART, lambda body: _box(body).update(shape=[0, 1 << 62], starts=[0, 0], sizes=[0, 1 << 62], xxh3="")),
        (PART, lambda body: _box(body).update(dtype=["F32"])),
        (PART, lambda body: _box(body).update(offset=10**9)),
        (PART, lambda body: _box(body, "optimizer", "0.bias/momentum_buffer").update(shape=[1 << 62])),
        (PART, lambda body: _box(body, "optimizer", "0.bias/momentum_buffer").update(shape=[1 << 58])),
        (PART, lambda body: _box(body, "extra", "extra['noise']").update(shape=[1 << 45])),
        (PART, lambda body: body["extra"].update(step={"$tensor": "x"})),
        (PART, lambda body: body["extra"].update(step={"$tensor": []})),
        (PART, lambda body: body["extra"].update(step={"$number": "zz"})),
        (PART, lambda body: body["extra"].update(step={"$number": "0x1p99999"})),
        (PART, lambda body: body["extra"].update(step={"$bytes": 5})),
        (PART, lambda body: body["extra"].update(step={"$tuple": 5})),
        (PART, lambda body: body["extra"].update(step={"$items": [[[1], 2]]})),
        (PART, lambda body: body["extra"].update(step={"$counter": [1]})),
        (PART, lambda body: body["extra"].update(step=_nested(700))),
        (PART, lambda body: body["groups"][0].update(options={"$number": "0x1p0"})),
        (PART, lambda body: body["groups"][0]["options"].update(params=[])),
        (PART, lambda body: body.update(values={"0.bias": 5})),
        (PART, lambda body: body.update(buffers={"1.running_mean": 5})),
        (PART, lambda body: body.update(buffers={"1.running_mean": {"$tensor": "extra['noise']"}})),
        ("manifest.json", lambda body: body.update(version=99)),
        ("manifest.json", lambda body: body.update(ranks=2)),
        ("manifest.json", lambda body: body.update(ranks=3_000_000)),
        ("manifest.json", lambda body: body.update(ranks=10**12)),
        ("manifest.json", lambda body: body.update(saved_at_ns=1 << 63)),
    ],
)
def test_what_was_made_by_hand_is_a_typed_error(file, change, parent):
    """Its digest is right, since whoever makes a file can sign it."""
    body = json.loads((parent / "step-1" / file).read_text())["body"]
    change(body)
    _refused(parent, files._signed(json.dumps(body)), file)


@pytest.mark.parametrize("file", ["manifest.json", PART])
@pytest.mark.parametrize("text", ["[1]", "5", "null", "{}", "[" * 100_000 + "]" * 100_000])
def test_what_is_no_manifest_at_all_is_a_typed_error(text, file, parent):
    _refused(parent, files._signed(text), file)


def _nodes(value):
    """Everything in JSON, each with what holds it."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(item, dict | list):
            yield from _nodes(item)


INSTEAD = [None, True, -1, 0, 7, 1 << 40, 1 << 70, 1.5, "", "x", [], {}, [[1]], {"$tensor": "x"}, {"a": {}}]


@pytest.mark.parametrize("file", ["manifest.json", PART])
def test_whatever_a_manifest_says_is_loaded_or_a_typed_error(file, parent):
    """Each entry is something else, or is left out."""
    choose, whole = random.Random(0), (parent / "step-1" / file).read_text()
    tried = 0
    for number in range(len(list(_nodes(json.loads(whole)["body"])))):
        for change in (*choose.sample(INSTEAD, 1), ...):
            body = json.loads(whole)["body"]
            holder, key = list(_nodes(body))[number]
            if change is ...:
                del holder[key]
            else:
                holder[key] = change
            tried += _tried(parent, files._signed(json.dumps(body)), file)
    assert tried > 10


WEIGHT = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "header",
    [
        [1],
        {"weight": 1},
        {"weight": {}},
        {"weight": {**WEIGHT, "shape": [2, 2.0]}},
        {"weight": {**WEIGHT, "shape": [-2, -2]}},
        {"weight": {**WEIGHT, "shape": [True, 4]}},
        {"weight": {**WEIGHT, "shape": 4}},
        {"weight": {**WEIGHT, "shape": [0, 1 << 62, 1 << 62], "data_offsets": [0, 0]}},
        {"weight": {**WEIGHT, "shape": [1 << 40, 1 << 40]}},
        {"weight": {**WEIGHT, "data_offsets": [0]}},
        {"weight": {**WEIGHT, "data_offsets": [0.0, 16.0]}},
        {"weight": {**WEIGHT, "data_offsets": [16, 32]}},
        {"weight": {**WEIGHT, "data_offsets": [-16, 0]}},
        {"weight": {**WEIGHT, "data_offsets": [-1, 15]}},
        {"weight": {**WEIGHT, "dtype": "X"}},
        {"weight": {**WEIGHT, "dtype": ["F32"]}},
        {"weight": WEIGHT, "x": _nested(700)},
        1 << 40,
        -1,
    ],
)
def test_headers_of_safetensors_that_were_made_by_hand_are_typed_errors(header, tmp_path):
    text = b"" if isinstance(header, int) else json.dumps(header).encode()
    length = header % (1 << 64) if isinstance(header, int) else len(text)
    (tmp_path / "model.safetensors").write_bytes(length.to_bytes(8, "little") + text + bytes(16))
    model = nn.Linear(2, 2, bias=False)
    before = model.weight.detach().clone()
    with pytest.raises(zf.CheckpointError):
        zf.load_pretrained(model, tmp_path)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize(
    "index",
    [
        "[1]",
        "5",
        "{}",
        '{"weight_map": ["a"]}',
        '{"weight_map": {"weight": 5}}',
        '{"weight_map": {"weight": ["a"]}}',
        '{"weight_map": {"weight": "a\\u0000b"}}',
        '{"weight_map": {"weight": ""}}',
        '{"weight_map": {"weight": "../../../../etc/passwd"}}',
        "[" * 100_000,
    ],
)
def test_indices_of_safetensors_that_were_made_by_hand_are_typed_errors(index, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises((zf.CheckpointError, zf.StorageError)):
        zf.load_pretrained(nn.Linear(2, 2), tmp_path)


def test_a_tensor_of_several_blocks_has_a_digest_for_each(tmp_path):
    model = nn.Linear(700, 700, bias=False)
    zf.save(tmp_path / "step-1", model)
    loaded = nn.Linear(700, 700, bias=False)
    zf.load(tmp_path, loaded)
    assert torch.equal(loaded.weight, model.weight)
    file = next((tmp_path / "step-1" / "model").iterdir())
    for at, block in ((-1, "1048576 to 1960000"), (-1_500_000, "0 to 1048576")):
        with instead(file, flip(file, at)), pytest.raises(zf.CheckpointError, match=f"bytes {block} of its part"):
            zf.load(tmp_path, loaded)


@pytest.mark.parametrize(("first", "last"), [(10, 90_001), (40_000, 40_010), (32_768, 70_000)])
def test_a_part_that_begins_or_ends_within_a_chunk_is_read(first, last, tmp_path):
    values = torch.arange(100_000, dtype=torch.int32)
    box = StoredBox("values", torch.int32, (100_000,), Box((0,), (100_000,)))
    file = TensorFile(tmp_path / "a", [box], "a test")
    file.append(box, values)
    says = file.finish()
    out = torch.empty(last - first, dtype=torch.int32)
    TensorReader(tmp_path / "a", says["begin"], says["nbytes"], says["xxh3"]).read(box, first, last, out)
    assert torch.equal(out, values[first:last])
