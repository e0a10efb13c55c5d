"""Folders of torch.distributed.checkpoint are read as what they hold, under other names too.

That training goes on where FSDP2 has stopped, at any number of ranks and stage, is in `tests/promises/test_resume.py`;
damaged ones are in `test_damage.py`.
"""

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import zero_fn as zf
from tests.support.messages import refused
from tests.units.checkpoint.test_torch_files import CALLED, Calls, trap
from tests.units.checkpoint.worlds import differing, everything
from zero_fn.errors import CheckpointError


def _built(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False))
    model.register_buffer("seen", torch.arange(3.0) + seed)
    return model


def _adamw(model, lr):
    first, *others = model.parameters()
    return torch.optim.AdamW([{"params": [first], "weight_decay": 0.3}, {"params": others}], lr=lr)


def _is_same(model, other):
    return all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.fixture
def model():
    return _built(0)


@pytest.fixture
def lone(model, tmp_path):
    """A state dict, saved as it is."""
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "lone", no_dist=True)
    return tmp_path / "lone"


def _changed(folder, change):
    """Changes what the metadata say."""
    said = dcp.FileSystemReader(folder).read_metadata()
    change(said)
    (folder / ".metadata").write_bytes(pickle.dumps(said))


def test_what_people_save_beside_a_model_and_its_states_is_read(model, tmp_path):
    optimizer = _adamw(model, 0.01)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    sampler = {"order": [3, 1], "noise": torch.arange(4.0), "device": torch.device("cpu")}
    saved = {"app": {"model": weights, "optim": states}, "step": 2, "sampler": sampler}
    dcp.save(saved, checkpoint_id=tmp_path / "a", no_dist=True)
    other = _built(5)
    its_optimizer = _adamw(other, 0.5)
    extra = zf.load(tmp_path / "a", other, its_optimizer)
    assert differing(everything(model, optimizer), everything(other, its_optimizer)) == []
    assert extra["step"] == 2
    assert extra["sampler"]["order"] == [3, 1]
    assert extra["sampler"]["device"] == ("cpu",), "what it was made with"
    assert extra["sampler"]["noise"].tolist() == [0, 1, 2, 3]


def test_a_lone_state_dict_is_a_model_and_has_no_states(model, lone):
    other = _built(5)
    zf.load(lone, other)
    assert _is_same(model, other)
    with pytest.raises(CheckpointError, match="no states of an optimizer"):
        zf.load(lone, other, _adamw(other, 0.1))


def test_of_several_models_the_first_that_was_saved_is_meant(tmp_path):
    """On every rank: nothing else tells one from another where none is called `model`."""
    models = {name: _built(seed) for seed, name in enumerate("hgfedcba")}
    dcp.save({name: model.state_dict() for name, model in models.items()}, checkpoint_id=tmp_path / "a", no_dist=True)
    first, *_ = dcp.FileSystemReader(tmp_path / "a").read_metadata().planner_data.values()
    model = _built(99)
    zf.load(tmp_path / "a", model)
    assert _is_same(model, models[first[0]])


def test_metadata_that_runs_code_is_refused(lone):
    (lone / ".metadata").write_bytes(pickle.dumps({"a": Calls(trap, 1)}))
    CALLED.clear()
    with pytest.raises(CheckpointError, match="trap"):
        zf.load(lone, _built(1))
    assert CALLED == []


def test_what_was_written_through_extensions_is_refused(lone):
    def compressed(said):
        for info in said.storage_data.values():
            info.transform_descriptors = ["stream.zstd"]

    _changed(lone, compressed)
    with refused("checkpoint_of_torch_with_extensions"):
        zf.load(lone, _built(1))


@pytest.mark.parametrize("what", ["another offset", "more bytes"])
def test_an_entry_that_reaches_into_another_is_found(what, lone):
    """It would give a tensor the values of another of its shape: their checksums are right, and `.metadata` has none."""

    def reach(said):
        stored = {index.fqn: entry for index, entry in said.storage_data.items()}
        weight, bias = stored["1.weight"], stored["1.bias"]
        if what == "another offset":
            weight.offset, weight.length = bias.offset, bias.length
        else:
            weight.length = bias.offset + bias.length - weight.offset

    _changed(lone, reach)
    with pytest.raises(CheckpointError, match="overlap"):
        zf.load(lone, _built(5))


@pytest.mark.parametrize("table", ["planner_data", "state_dict_metadata", "storage_data", "all"])
def test_a_state_whose_name_was_damaged_is_not_lost(table, model, tmp_path):
    """It was taken for `extra`, or for nothing, and the other states of its parameter were loaded."""
    weights, states = get_state_dict(model, _adamw(model, 0.1))
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=tmp_path / "a", no_dist=True)
    name, metadata = "optimizer.state.0.weight.step", tmp_path / "a" / ".metadata"

    def lose(said):
        if table == "planner_data":
            said.planner_data[name] = ("nptimizer", *said.planner_data[name][1:])
            return
        found = getattr(said, table)
        for key in [key for key in found if name in (key, getattr(key, "fqn", ""))]:
            del found[key]

    if table == "all":  # a name stands once in a pickle
        metadata.write_bytes(metadata.read_bytes().replace(name.encode(), name.encode().replace(b"0", b"2")))
    else:
        _changed(tmp_path / "a", lose)
    other = _built(5)
    with pytest.raises(CheckpointError, match=r"metadata(.|\n)*not what torch writes"):
        zf.load(tmp_path / "a", other, _adamw(other, 0.1))
    assert _is_same(other, _built(5))
