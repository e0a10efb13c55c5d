"""Folders of torch.distributed.checkpoint, as FSDP2 writes them, are read at any number of ranks and stage."""

import pickle
import shutil
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard

import zero_fn as zf
from tests.support.profiles import PROFILE
from tests.support.ranks import axis
from tests.support.wholes import full
from tests.units.checkpoint.damage import flipped
from tests.units.checkpoint.test_torch_files import CALLED, Calls, trap
from zero_fn.errors import CheckpointError, StorageError


def _built(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False))
    model.register_buffer("seen", torch.arange(3.0) + seed)
    return model


def _adamw(model, lr):
    first, *others = model.parameters()
    return torch.optim.AdamW([{"params": [first], "weight_decay": 0.3}, {"params": others}], lr=lr)


def _step(model, optimizer):
    model(torch.arange(10.0).view(2, 5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _everything(model, optimizer):
    found = {name: full(value).tolist() for name, value in model.state_dict().items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = next(n for n, p in model.named_parameters() if p is parameter)
            found[f"{name}: options"] = (group["lr"], group["weight_decay"])
            found |= {f"{name}: {key}": full(value).tolist() for key, value in optimizer.state[parameter].items()}
    return found


def _fsdp2_saves(folder):
    """Two steps of FSDP2, saved in the ways that people use; what was saved, and what there is after one more step."""
    model = _built(0)
    for module in (model[0], model):
        fully_shard(module, mesh=axis())
    optimizer = _adamw(model, 0.01)
    for _ in range(2):
        _step(model, optimizer)
    weights, states = get_state_dict(model, optimizer)
    other = {"step": 2, "sampler": {"order": [3, 1], "noise": torch.arange(4.0), "device": torch.device("cpu")}}
    dcp.save({"model": weights, "optimizer": states, **other}, checkpoint_id=f"{folder}/nested")
    flat = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({"app": {"model": flat[0], "optim": flat[1]}}, checkpoint_id=f"{folder}/flat")
    dcp.save(weights, checkpoint_id=f"{folder}/lone")
    dcp.save({"ema": {f"module.{name}": value for name, value in weights.items()}}, checkpoint_id=f"{folder}/renamed")
    saved = _everything(model, optimizer)
    _step(model, optimizer)
    return saved, _everything(model, optimizer)


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dcp")
    return folder, *ranks(2).run(_fsdp2_saves, str(folder))[0]


STAGES = {"plain": lambda model, _: model, "zero1": zf.zero1, "zero3": zf.zero3}


def _goes_on(stage, folder, kind):
    model = STAGES[stage](_built(5), axis() if stage != "plain" else None)
    optimizer = _adamw(model, 0.5)
    extra = zf.load(f"{folder}/{kind}", model, optimizer)
    loaded = _everything(model, optimizer)
    _step(model, optimizer)
    return loaded, _everything(model, optimizer), extra


def _near(one, other):
    return one.keys() == other.keys() and all(
        torch.allclose(torch.tensor(value), torch.tensor(other[name]), atol=1e-5) for name, value in one.items()
    )


@pytest.mark.parametrize(
    ("size", "stage", "kind"),
    [(1, "plain", "flat"), (2, "zero3", "nested"), (3, "zero1", "flat"), (3, "zero3", "nested")],
)
def test_training_goes_on_where_fsdp2_has_stopped(ranks, size, stage, kind, saved):
    folder, before, after = saved
    for loaded, stepped, extra in ranks(size).run(_goes_on, stage, str(folder), kind):
        assert loaded == before
        assert _near(stepped, after)
        if kind == "nested":
            assert extra["step"] == 2
            assert extra["sampler"]["order"] == [3, 1]
            assert extra["sampler"]["device"] == ("cpu",), "what it was made with"
            assert extra["sampler"]["noise"].tolist() == [0, 1, 2, 3]


def _model_of(saved):
    return {name: value for name, value in saved[1].items() if ":" not in name}


def test_a_lone_state_dict_is_a_model(saved):
    model = _built(5)
    zf.load(saved[0] / "lone", model)
    assert {name: value.tolist() for name, value in model.state_dict().items()} == _model_of(saved)


def test_names_are_mapped(saved):
    model = _built(5)
    zf.load(saved[0] / "renamed", model, rename={r"^module\.": ""})
    assert {name: value.tolist() for name, value in model.state_dict().items()} == _model_of(saved)


def test_of_several_models_the_first_that_was_saved_is_meant(tmp_path):
    """On every rank: nothing else tells one from another where none is called `model`."""
    models = {name: _built(seed) for seed, name in enumerate("hgfedcba")}
    dcp.save({name: model.state_dict() for name, model in models.items()}, checkpoint_id=tmp_path / "a", no_dist=True)
    first, *_ = dcp.FileSystemReader(tmp_path / "a").read_metadata().planner_data.values()
    model = _built(99)
    zf.load(tmp_path / "a", model)
    expected = models[first[0]].state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_a_model_without_states_says_so(saved):
    model = _built(5)
    with pytest.raises(CheckpointError, match="no states of an optimizer"):
        zf.load(saved[0] / "lone", model, _adamw(model, 0.1))


def test_metadata_that_runs_code_is_refused(saved, tmp_path):
    copy = Path(shutil.copytree(saved[0] / "lone", tmp_path / "copy"))
    (copy / ".metadata").write_bytes(pickle.dumps({"a": Calls(trap, 1)}))
    CALLED.clear()
    with pytest.raises(CheckpointError, match="trap"):
        zf.load(copy, _built(1))
    assert CALLED == []


@pytest.mark.parametrize("what", ["another offset", "more bytes"])
def test_an_entry_that_reaches_into_another_is_found(what, saved, tmp_path):
    """It would give a tensor the values of another of its shape: their checksums are right, and `.metadata` has none."""
    copy = Path(shutil.copytree(saved[0] / "lone", tmp_path / "copy"))
    said = dcp.FileSystemReader(copy).read_metadata()
    stored = {index.fqn: entry for index, entry in said.storage_data.items() if entry.relative_path == "__0_0.distcp"}
    weight, bias = stored["1.weight"], stored["1.bias"]
    if what == "another offset":
        weight.offset, weight.length = bias.offset, bias.length
    else:
        weight.length = bias.offset + bias.length - weight.offset
    (copy / ".metadata").write_bytes(pickle.dumps(said))
    with pytest.raises(CheckpointError, match="overlap"):
        zf.load(copy, _built(5))


@pytest.mark.parametrize("table", ["planner_data", "state_dict_metadata", "storage_data", "all"])
def test_a_state_whose_name_was_damaged_is_not_lost(table, saved, tmp_path):
    """It was taken for `extra`, or for nothing, and the other states of its parameter were loaded."""
    copy = Path(shutil.copytree(saved[0] / "nested", tmp_path / "copy"))
    said = dcp.FileSystemReader(copy).read_metadata()
    name = "optimizer.state.0.weight.step"
    raw = pickle.dumps(said)
    if table == "all":  # a name stands once in a pickle
        raw = raw.replace(name.encode(), name.encode().replace(b"0", b"2"))
    elif table == "planner_data":
        said.planner_data[name] = ("nptimizer", *said.planner_data[name][1:])
    else:
        found = getattr(said, table)
        for key in [key for key in found if name in (key, getattr(key, "fqn", ""))]:
            del found[key]
    (copy / ".metadata").write_bytes(raw if table == "all" else pickle.dumps(said))
    model = _built(5)
    before = {name: value.tolist() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"metadata(.|\n)*not what torch writes"):
        zf.load(copy, model, _adamw(model, 0.1))
    assert {name: value.tolist() for name, value in model.state_dict().items()} == before


def test_every_flipped_bit_is_found_or_harmless(saved, tmp_path):
    copy = Path(shutil.copytree(saved[0] / "lone", tmp_path / "copy"))
    found, flips = 0, 100 if PROFILE == "dev" else 500
    before = {name: value.tolist() for name, value in _built(5).state_dict().items()}
    for path in sorted(copy.iterdir()):
        for _ in flipped([path], flips // 3, Random(0)):
            model = _built(5)
            try:
                zf.load(copy, model)
            except (CheckpointError, StorageError):  # the name of a file may have changed
                found += 1
                assert {name: value.tolist() for name, value in model.state_dict().items()} == before
            else:
                assert {name: value.tolist() for name, value in model.state_dict().items()} == _model_of(saved)
    assert found > flips / 6
