"""Whatever is wrong with a checkpoint is found before anything changes, and said with its place."""

import copy
import gc
import json
import os
import random
import shutil
import tracemalloc
from collections import Counter, OrderedDict, defaultdict
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import zero_fn as zf
from tests.support.messages import refused
from tests.support.on_ranks import on_ranks
from tests.support.ranks import axis
from tests.support.wholes import full
from tests.units.checkpoint.damage import flip, forge, instead, signed
from tests.units.checkpoint.made_by_deepspeed import HERE, adamw, built, changed_by
from tests.units.checkpoint.worlds import differing, everything
from tests.units.storage.disks import filled, reserved
from zero_fn.checkpoint.others.torch_files import Foreign, read_torch_file
from zero_fn.storage import DiskStorage
from zero_fn.storage.stored_files import FileRange, StoredFiles


def run_of(value):
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    optimizer = torch.optim.SGD(model.parameters(), lr=value, momentum=0.9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
            optimizer.state[parameter] = {"momentum_buffer": torch.full_like(parameter, value)}
    return model, optimizer


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def saved(folder):
    """Saves a checkpoint; its files."""
    zf.save(folder / "step-1", *run_of(1.5), extra={"step": 1, "noise": torch.arange(7)})
    return files_of(folder)


# -- whoever reads -----------------------------------------------------------------------------------------------------


def into(make, load):
    """Reads into a new model and its optimizer, and gives all that they hold. What is refused has changed nothing."""

    def read():
        held = make()
        before = everything(*held)
        try:
            load(*held)
        except zf.ZeroError:
            assert differing(before, everything(*held)) == []
            raise
        return everything(*held)

    return read


def own_format(folder):
    return saved(folder), into(lambda: run_of(2.5), lambda *held: zf.load(folder / "step-1", *held))


def of_dcp(folder):
    model, states = get_state_dict(*run_of(1.5))
    dcp.save({"model": model, "optimizer": states}, checkpoint_id=folder / "a", no_dist=True)
    return files_of(folder), into(lambda: run_of(2.5), lambda *held: zf.load(folder / "a", *held))


def of_deepspeed(folder):
    shutil.copytree(HERE / "zero3", folder / "zero3")

    def fresh():
        model = changed_by(built(), 3)
        return model, adamw(model)

    return sorted(folder.rglob("*.pt")), into(fresh, lambda *held: zf.load(folder / "zero3", *held))


def torch_file(folder):
    torch.save({"x": torch.arange(1000.0)}, folder / "x.pt")

    def read():
        source = Foreign(folder, str)
        try:
            found = read_torch_file(folder / "x.pt")["x"]
            source.add("model", "x", "", found.shape, found)
            return {"x": source.whole(("model", "x"))}
        finally:
            source.close()

    return files_of(folder), read


def pretrained(folder):
    save_file(run_of(1.5)[0].state_dict(), folder / "model.safetensors")
    return files_of(folder), into(lambda: run_of(2.5), lambda model, _: zf.load_pretrained(model, folder))


def files_in_place(folder):
    path = folder / "weights"
    path.write_bytes(bytes(filled(9_001).memory[:9_001].tolist()))
    stored, part = StoredFiles(zf.nvme(folder)), FileRange(str(path), 0, 9_001)
    place, memory = stored.place([part]), stored.borrow(0, part.room_nbytes)

    def read():
        stored.read(place, memory).wait()
        return {"bytes": memory.clone()}

    return [path], read


def disk_of_a_tier(folder):
    disk, slab = DiskStorage(zf.nvme(folder), "states"), filled(9_001)
    place = reserved(disk, slab.nbytes)
    disk.write(place, slab.memory).wait()

    def read():
        disk.read(place, slab.memory).wait()
        return {"bytes": slab.memory.clone()}

    return [Path(f"/proc/self/fd/{disk.files[0].fd}")], read


READERS = {
    "own format": own_format,
    "torch.distributed.checkpoint": of_dcp,
    "DeepSpeed": of_deepspeed,
    "a file of torch": torch_file,
    "pretrained": pretrained,
    "files in place": files_in_place,
    "the disk of a tier": disk_of_a_tier,
}
"""By name: a function that writes into a folder, and returns the files and what reads them."""

SURE = {"own format", "files in place", "the disk of a tier"}
"""Readers that find all: the others pass over bytes that mean nothing, as those between the records of an archive."""

HAS_NO_DIGEST_FROM = {"pretrained": 300}
"""Values that others have written without one."""


def swapped(raw, at):
    """Two words have changed places."""
    at = at % (len(raw) // 16) * 8
    return raw[:at] + raw[at + 8 : at + 16] + raw[at : at + 8] + raw[at + 16 :]


DAMAGES = {
    "a flipped bit": (60, lambda raw, at: raw[:at] + bytes([raw[at] ^ 1 << at % 8]) + raw[at + 1 :]),
    "cut": (6, lambda raw, at: raw[:at]),
    "torn": (6, lambda raw, at: raw[:at] + bytes(len(raw) - at)),
    "swapped words": (12, swapped),
}
"""By name: how often, and what becomes of bytes from one of them on."""


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("reader", READERS)
def test_whatever_befalls_a_file_is_found_before_anything_changes(reader, damage, tmp_path):
    """Or it was harmless, and all is read as it was written."""
    paths, read = READERS[reader](tmp_path)
    expected = read()
    times, change = DAMAGES[damage]
    draw, said, harmless = random.Random(0), [], 0
    for number in range(times):
        path = paths[number % len(paths)]
        whole = path.read_bytes()
        raw = change(whole, draw.randrange(HAS_NO_DIGEST_FROM.get(reader, len(whole))))
        if raw == whole:
            continue
        with instead(path, raw):
            try:
                assert differing(expected, read()) == []
                harmless += 1
            except (zf.errors.CheckpointError, zf.errors.StorageError) as error:
                said.append((path.name, str(error)))
    assert len(said) > harmless
    assert reader not in SURE or harmless == 0
    assert reader != "own format" or all(name in text for name, text in said)
    assert differing(expected, read()) == []


# -- how it is said ----------------------------------------------------------------------------------------------------


def test_files_are_closed_after_a_load_whether_it_failed_or_not(tmp_path):
    path = next(path for path in saved(tmp_path) if path.suffix == ".safetensors")
    gc.collect()  # of tests before
    opened = len(os.listdir("/proc/self/fd"))
    for raw in (path.read_bytes(), flip(path)):
        with instead(path, raw), suppress(zf.errors.CheckpointError):
            zf.load(tmp_path, *run_of(2.5))
        gc.collect()  # of what raised while it was opened
        assert len(os.listdir("/proc/self/fd")) == opened


@on_ranks(2)
def test_damage_names_file_tensor_and_rank(folder):
    path, rank = Path(folder), dist.get_rank()
    model = zf.shard_params(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), axis())
    zf.save(path / "step-1", model)
    if rank == 0:
        file = path / "step-1" / "model" / "00001-0.safetensors"
        file.write_bytes(flip(file))
    dist.barrier()
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    told = r"failed on rank 1(.|\n)*00001-0\.safetensors"
    with refused("checkpoint_is_damaged") if rank else pytest.raises(zf.errors.CheckpointError, match=told):
        zf.load(path, model)
    assert all(torch.equal(a, b.to_local()) for a, b in zip(before, model.parameters(), strict=True))


def test_a_damaged_one_is_not_passed_over_in_silence(tmp_path):
    saved(tmp_path)
    zf.save(tmp_path / "step-2", *run_of(2.0))
    (tmp_path / "step-2" / "rank-00000.json").unlink()
    with pytest.raises(zf.errors.StorageError, match="step-2"):
        zf.load(tmp_path, *run_of(1.0))
    zf.load(tmp_path / "step-1", *run_of(1.0))


def test_files_of_another_checkpoint_are_refused(tmp_path):
    saved(tmp_path)
    zf.save(tmp_path / "step-2", *run_of(2.0))
    shutil.copy(tmp_path / "step-2" / "rank-00000.json", tmp_path / "step-1" / "rank-00000.json")
    with pytest.raises(zf.errors.CheckpointError, match="belongs to another checkpoint"):
        zf.load(tmp_path / "step-1", *run_of(1.0))


def test_tensors_of_one_name_and_a_later_version_are_refused(tmp_path):
    def add(body):
        file = body["files"]["model"][0]
        other = {**file["tensors"]["0.bias"], "shape": [3], "sizes": [3], "offset": 0}
        body["files"]["model"].append({**file, "nbytes": file["begin"] + 12, "tensors": {"0.bias": other}})

    saved(tmp_path)
    forge(tmp_path / "step-1" / PART, add)
    with refused("checkpoint_of_two_tensors_of_one_name"):
        zf.load(tmp_path, *run_of(1.0))
    forge(tmp_path / "step-1" / "manifest.json", lambda body: body.update(version=99))
    with refused("checkpoint_is_of_a_later_version"):
        zf.load(tmp_path, *run_of(1.0))


def test_once_says_that_the_model_is_partly_loaded(tmp_path):
    saved(tmp_path)
    path = tmp_path / "step-1" / "optimizer" / "00000-0.safetensors"
    path.write_bytes(flip(path))
    model, optimizer = run_of(2.5)
    with pytest.raises(zf.errors.CheckpointError) as caught:
        zf.load(tmp_path, model, optimizer, verify="once")
    assert "partly loaded" in caught.value.__notes__[0]
    assert torch.equal(model[0].weight, torch.full((5, 3), 1.5))


# -- what does not fit -------------------------------------------------------------------------------------------------


def test_all_that_does_not_fit_is_listed_before_anything_changes(tmp_path):
    saved(tmp_path)
    model = nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=7.0, momentum=0.9)
    before = model[0].bias.detach().clone()
    with refused("checkpoint_does_not_fit"):
        zf.load(tmp_path, model, optimizer, extra={"schedule": object()})
    with pytest.raises(zf.errors.CheckpointError, match=r"0\.weight: \[5, 3\] in the checkpoint"):
        zf.load(tmp_path, model, strict=False)
    assert torch.equal(model[0].bias, before)
    assert optimizer.param_groups[0]["lr"] == 7.0


def test_names_may_be_changed_left_out_and_missing(tmp_path):
    saved(tmp_path)

    def has(module, value):
        return all(bool((p == value).all()) for p in module.parameters())

    model, optimizer = run_of(2.5)
    named = nn.Module()
    named.enter, named.norm = model
    zf.load(tmp_path, named, optimizer, rename={r"^0\.": "enter.", r"^1\.": "norm."})
    assert has(named, 1.5)
    assert all(bool((state["momentum_buffer"] == 1.5).all()) for state in optimizer.state.values())
    assert optimizer.param_groups[0]["lr"] == 1.5
    larger = nn.Sequential(*run_of(2.5)[0], nn.Linear(5, 1))
    with pytest.raises(zf.errors.CheckpointError, match=r"2\.weight: not in the checkpoint"):
        zf.load(tmp_path, larger)
    smaller = run_of(2.5)[0][:1]
    for module in (larger, smaller):
        zf.load(tmp_path, module, strict=False)
        assert has(module[0], 1.5)
    norm = run_of(2.5)[0]
    zf.load(tmp_path, norm, where="1.*")
    assert has(norm[1], 1.5) and has(norm[0], 2.5)


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
    with pytest.raises(zf.errors.CheckpointError, match="mask: expanded here"):
        zf.load(tmp_path, other)
    assert torch.equal(other.weight, torch.zeros(2, 2))
    other.mask = other.mask.contiguous()
    zf.load(tmp_path, other)
    assert torch.equal(other.mask, torch.ones(2, 3))


def test_bits_are_not_lost_in_smaller_dtypes(tmp_path):
    saved(tmp_path)
    model = run_of(1.0)[0]
    with pytest.raises(zf.errors.CheckpointError, match="bits would be lost"):
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


WITHOUT_A_FORM = {"e": defaultdict(int), "s": type("Steps", (list,), {})(), "a": [1, {"b": object()}]}


@pytest.mark.parametrize("values", WITHOUT_A_FORM.values())
def test_values_without_a_form_are_refused(values, tmp_path):
    with pytest.raises(zf.errors.CheckpointError):
        zf.save(tmp_path / "a", extra={"x": values})


UNSAVED = {
    "checkpoint_of_what_has_no_form": {"extra": {"state": [{"noise": print}]}},
    "checkpoint_of_an_odd_dtype": {"extra": {"z": torch.zeros(2, dtype=torch.complex128)}},
    "checkpoint_of_meta": {"model": nn.Linear(2, 2, device="meta")},
    "checkpoint_of_a_state_of_its_own": {"model": nn.Sequential(_Counting(2, 2))},
    "checkpoint_of_another_optimizer": _foreign(),
    "checkpoint_of_an_average_alone": {"extra": {"average": zf.ema(nn.Linear(2, 2))}},
    "checkpoint_keeps_none": {"keep": 0},
    "checkpoint_without_a_name": {"folder": ".step-1"},
}


@pytest.mark.parametrize("name", UNSAVED)
def test_what_cannot_be_saved_is_refused_with_its_path(name, tmp_path):
    arguments = {"folder": "step-1", **UNSAVED[name]}
    with refused(name):
        zf.save(tmp_path / arguments.pop("folder"), **arguments)
    assert list(tmp_path.iterdir()) == []


def test_what_a_module_saves_in_its_own_way_is_refused(tmp_path):
    with pytest.raises(zf.errors.CheckpointError, match="'packed'"):
        zf.save(tmp_path / "a", _Own(2, 2))


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
        float("nan"),
    ],
)
def test_values_come_back_as_they_were(value, tmp_path):
    zf.save(tmp_path / "a", extra={"x": value})
    found = zf.load(tmp_path)["x"]
    assert repr(found) == repr(value)
    assert type(found) is type(value)


# -- made by hand ------------------------------------------------------------------------------------------------------


PART = "rank-00000.json"


def _nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


def _tried(parent, raw, file):
    """Whether a load of `step-1`, of which a file is replaced, is refused and changes nothing, or loads what was saved."""
    read = into(lambda: run_of(2.5), lambda *held: zf.load(parent / "step-1", *held))
    with instead(parent / "step-1" / file, raw):
        assert len(zf.checkpoints(parent)) == 2
        try:
            assert torch.equal(read()["0.weight"], torch.full((5, 3), 1.5))
        except (zf.errors.CheckpointError, zf.errors.StorageError):
            return True
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


BIAS = "files model 0 tensors 0.bias"
STATE = "files optimizer 0 tensors 0.bias/momentum_buffer"
STEP = "extra step"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("files", lambda body: {"../../etc": body["files"]["model"], **body["files"], "model": []}),
        ("files model 0 begin", -8),
        (f"{BIAS} shape", [1 << 62]),
        (
            BIAS,
            {"dtype": "F32", "shape": [0, 1 << 62], "starts": [0, 0], "sizes": [0, 1 << 62], "offset": 0, "xxh3": ""},
        ),
        (f"{STATE} shape", [1 << 58]),
        ("files extra 0 tensors extra['noise'] shape", [1 << 45]),
        (STEP, {"$number": "0x1p99999"}),
        (STEP, _nested(700)),
        ("groups 0 options params", []),
        ("buffers", {"1.running_mean": {"$tensor": "extra['noise']"}}),
        ("ranks", 3_000_000),
        ("ranks", 10**12),
        ("saved_at_ns", 1 << 63),
    ],
)
def test_what_was_made_by_hand_is_a_typed_error(path, value, parent):
    file = "manifest.json" if path in ("ranks", "saved_at_ns") else PART
    body = json.loads((parent / "step-1" / file).read_text())["body"]
    *holders, last = path.split()
    holder = body
    for key in holders:
        holder = holder[int(key) if isinstance(holder, list) else key]
    holder[last] = value(body) if callable(value) else value
    _refused(parent, signed(body), file)


@pytest.mark.parametrize("file", ["manifest.json", PART])
@pytest.mark.parametrize("text", ["[1]", "5", "null", "{}", "[" * 100_000 + "]" * 100_000])
def test_what_is_no_manifest_at_all_is_a_typed_error(text, file, parent):
    _refused(parent, signed(text), file)


def _nodes(value):
    """Everything in JSON, each with what holds it."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(item, dict | list):
            yield from _nodes(item)


SPECIAL = [{"$tensor": "x"}, {"$tensor": []}, {"$number": "zz"}, {"$number": "0x1p0"}, {"$bytes": 5}, {"$tuple": 5}]
SPECIAL += [{"$items": [[[1], 2]]}, {"$counter": [1]}, {"0.bias": 5}, {"1.running_mean": 5}]
INSTEAD = [None, True, -1, 0, 7, 1 << 40, 1 << 70, 1.5, "", "x", [], {}, [[1]], ["F32"], [5, 1], {"a": {}}, *SPECIAL]


def _variants(whole, values):
    """JSON of which one entry after the other is something else, or is left out."""
    for number in range(len(list(_nodes(whole)))):
        for value in (*values(), ...):
            body = copy.deepcopy(whole)
            holder, key = list(_nodes(body))[number]
            if value is ...:
                del holder[key]
            else:
                holder[key] = value
            yield body


@pytest.mark.parametrize("file", ["manifest.json", PART])
def test_whatever_a_manifest_says_is_loaded_or_a_typed_error(file, parent):
    draw, whole = random.Random(0), json.loads((parent / "step-1" / file).read_text())["body"]
    tried = [_tried(parent, signed(body), file) for body in _variants(whole, lambda: draw.sample(INSTEAD, 3))]
    assert sum(tried) > 20


def _is_refused(folder):
    """Whether a folder of safetensors is refused, and then changes nothing."""
    model = nn.Linear(2, 2, bias=False)
    before = model.weight.detach().clone()
    try:
        zf.load_pretrained(model, folder)
    except (zf.errors.CheckpointError, zf.errors.StorageError):
        assert torch.equal(model.weight, before)
        return True
    return False


def _write(folder, header, length=None):
    text = json.dumps(header).encode()
    length = len(text) if length is None else length
    (folder / "model.safetensors").write_bytes(length.to_bytes(8, "little") + text + bytes(16))


HEADER = {"weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
NUMBERS = [[2, 2.0], [-2, -2], [True, 4], [0, 1 << 62, 1 << 62], [1 << 40] * 2, [0], [0.0, 16.0], [16, 32], [-1, 15]]


def test_whatever_a_header_of_safetensors_says_is_a_typed_error(tmp_path):
    for header in _variants(HEADER, lambda: [*INSTEAD, *NUMBERS]):
        _write(tmp_path, header)
        assert header == HEADER or _is_refused(tmp_path), header


@pytest.mark.parametrize(
    ("header", "length"),
    [([1], None), ({**HEADER, "x": _nested(700)}, None), ({}, 1 << 40), ({}, (1 << 64) - 1)],
)
def test_what_is_no_header_at_all_is_a_typed_error(header, length, tmp_path):
    _write(tmp_path, header, length)
    assert _is_refused(tmp_path)


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
    assert _is_refused(tmp_path)


def _loaded_in_parts(folder):
    model = zf.shard_params(nn.Linear(700, 700, bias=False), axis())
    zf.load(folder, model)
    return full(model.weight)


def test_a_tensor_of_several_blocks_has_a_digest_for_each(ranks, tmp_path):
    """Ranks read from within a block to within another."""
    model = nn.Linear(700, 700, bias=False)
    zf.save(tmp_path / "step-1", model)
    for found in ranks(3).run(_loaded_in_parts, tmp_path):
        assert torch.equal(found, model.weight)
    file = next((tmp_path / "step-1" / "model").iterdir())
    for at, block in ((-1, "1048576 to 1960000"), (-1_500_000, "0 to 1048576")):
        with (
            instead(file, flip(file, at)),
            pytest.raises(zf.errors.CheckpointError, match=f"bytes {block} of its part"),
        ):
            zf.load(tmp_path, model)
