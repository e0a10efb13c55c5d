"""Folders that DeepSpeed has written are read at any world size and stage, and training goes on as DeepSpeed's own does."""

import json
import shutil
import sys
import types
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor, nn

import zero_fn as zf
from tests.support.profiles import PROFILE
from tests.support.ranks import axis
from tests.support.wholes import full
from tests.units.checkpoint.damage import flipped, instead
from tests.units.checkpoint.made_by_deepspeed import HERE, KINDS, STEPS, UNIVERSAL, adamw, batch, built, loss_of
from zero_fn.checkpoint.others.torch_files import Foreign
from zero_fn.errors import CheckpointError

GOLDEN = json.loads((HERE / "golden.json").read_text())
STAGES = {"plain": lambda model, _: model, "replicate": zf.replicate, "zero1": zf.zero1, "zero3": zf.zero3}


def _fresh(kind):
    """The model and its optimizer with other values and options than in the folder."""
    model = built()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(3)
    if kind.startswith("bf16"):
        model = zf.precision(model, compute=torch.bfloat16)
    return model, adamw(model)


def _values(model):
    return {name: full(p).flatten().tolist() for name, p in model.named_parameters() if p.requires_grad}


def _step(model, optimizer):
    loss_of(model, batch(STEPS)).backward()
    optimizer.step()


def _wrong(kind, model, optimizer):
    """How the model differs from that of DeepSpeed: once it is loaded, to the bit; after a step, by more than rounding."""
    golden = GOLDEN[UNIVERSAL.get(kind, kind)]
    wrong = [f"{name} as saved" for name, values in _values(model).items() if values != golden["saved"][name]]
    frozen, buffer = full(model.get_parameter("norm.weight")), full(model.get_buffer("shift"))
    if frozen.tolist() != [1.0] * 7 or buffer.tolist() != list(range(5)):
        wrong.append("what is not trained")
    _step(model, optimizer)
    near = 3e-3 if kind.startswith("bf16") else 2e-6
    for name, values in _values(model).items():
        if not torch.allclose(torch.tensor(values), torch.tensor(golden["after"][name]), rtol=0, atol=near):
            wrong.append(f"{name} after a step")
    return wrong


def _goes_on(stage, folder):
    wrong = []
    for kind in [*KINDS, *UNIVERSAL]:
        model, _ = _fresh(kind)
        model = STAGES[stage](model, axis())
        optimizer = adamw(model)
        optimizer.param_groups[1]["lr"] = 7.0
        extra = zf.load(f"{folder}/{kind}", model, optimizer)
        if optimizer.param_groups[1]["lr"] != 0.02 or (extra["epoch"], extra["global_steps"]) != (3, STEPS):
            wrong.append(f"{kind}: options, or counts of steps")
        wrong += [f"{kind}: {each}" for each in _wrong(kind, model, optimizer)]
    return wrong


@pytest.mark.parametrize(("size", "stage"), [(1, "plain"), (2, "replicate"), (3, "zero1"), (3, "zero3")])
def test_training_goes_on_where_deepspeed_has_stopped(ranks, size, stage):
    assert ranks(size).run(_goes_on, stage, str(HERE)) == [[]] * size


def test_states_go_into_a_streamed_optimizer():
    model, _ = _fresh("zero2")
    optimizer = zf.streamed(adamw(model), zf.cpu())
    zf.load(HERE / "zero2", model, optimizer)
    assert _wrong("zero2", model, optimizer) == []


def test_only_the_model_is_read():
    model, optimizer = _fresh("zero3")
    zf.load(HERE / "zero3" / "global_step2", model, optimizer, only="model")
    assert not optimizer.state
    assert _values(model) == GOLDEN["zero3"]["saved"]


def test_the_model_of_states_that_are_not_read_is_read(tmp_path, monkeypatch):
    copy = Path(shutil.copytree(HERE / "zero1", tmp_path / "copy"))
    for path in copy.rglob("*optim_states.pt"):
        found = _loaded_with_stand_ins(path, monkeypatch)
        found["optimizer_state_dict"]["base_optimizer_state"] = []
        torch.save(found, path)
    model, optimizer = _fresh("zero1")
    with pytest.raises(CheckpointError, match="elastic"):
        zf.load(copy, model, optimizer)
    zf.load(copy, model, only="model")
    assert _values(model) == GOLDEN["zero1"]["saved"]


def test_names_are_mapped():
    model = nn.ModuleDict({"inner": _fresh("zero1")[0]})
    zf.load(HERE / "zero1", model, only="model", rename={"^": "inner."})
    assert _values(model["inner"]) == GOLDEN["zero1"]["saved"]


def _without(folder, tmp_path, name):
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / "global_step2" / name).unlink()
    return copy


def test_missing_files_of_a_rank_are_told(tmp_path):
    copy = _without(HERE / "zero2", tmp_path, "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    model, optimizer = _fresh("zero2")
    before = _values(model)
    with pytest.raises(CheckpointError, match="ranks have written"):
        zf.load(copy, model, optimizer)
    assert _values(model) == before


def test_checkpoints_of_two_kinds_in_one_folder_are_told_apart(tmp_path):
    copy = Path(shutil.copytree(HERE / "zero2", tmp_path / "copy"))
    model, optimizer = _fresh("zero2")
    zf.save(copy / "step-1", model, optimizer)
    with pytest.raises(CheckpointError, match="two kinds"):
        zf.load(copy, model, optimizer)
    zf.load(copy / "global_step2", model, optimizer)
    assert _wrong("zero2", model, optimizer) == []


def test_numbers_of_steps_may_be_plain(tmp_path, monkeypatch):
    """As the optimizers that DeepSpeed brings have them."""
    copy = Path(shutil.copytree(HERE / "zero1", tmp_path / "copy"))
    for path in copy.rglob("*optim_states.pt"):
        raw = path.read_bytes()
        found = _loaded_with_stand_ins(path, monkeypatch)
        for state in found["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            state["step"] = int(state["step"])
        torch.save(found, path)
        assert path.read_bytes() != raw
    model, optimizer = _fresh("zero1")
    zf.load(copy, model, optimizer)
    assert _wrong("zero1", model, optimizer) == []


def _loaded_with_stand_ins(path, monkeypatch):
    """What is in a file, for which DeepSpeed need not be installed: fragments are of a class of that name."""

    class fragment_address:
        pass

    fragment_address.__module__ = "deepspeed.utils.tensor_fragment"
    fragment_address.__qualname__ = "fragment_address"
    module = types.ModuleType("deepspeed.utils.tensor_fragment")
    module.fragment_address = fragment_address
    scaler = types.ModuleType("deepspeed.runtime.fp16.loss_scaler")
    scaler.LossScaler = type("LossScaler", (), {"__module__": scaler.__name__})
    config = types.ModuleType("deepspeed.runtime.zero.config")
    config.ZeroStageEnum = lambda stage: stage
    parents = ["deepspeed", "deepspeed.utils", "deepspeed.runtime", "deepspeed.runtime.fp16", "deepspeed.runtime.zero"]
    for name, each in [(n, types.ModuleType(n)) for n in parents] + [(m.__name__, m) for m in (module, scaler, config)]:
        monkeypatch.setitem(sys.modules, name, each)
    found = torch.load(path, weights_only=False)
    return found


def test_every_flipped_bit_is_found_or_harmless(tmp_path):
    copy = Path(shutil.copytree(HERE / "zero3", tmp_path / "copy"))
    before, expected = _values(_fresh("zero3")[0]), GOLDEN["zero3"]["saved"]
    found, flips = 0, 15 if PROFILE == "dev" else 60
    for path in sorted(copy.rglob("*.pt")):
        for _ in flipped([path], flips, Random(0)):
            model, optimizer = _fresh("zero3")
            try:
                zf.load(copy, model, optimizer)
            except CheckpointError:
                found += 1
                assert _values(model) == before
            else:
                assert _values(model) == expected
                assert _moments(optimizer) == _moments_of_zero3()
        raw = path.read_bytes()
        with instead(path, raw[: len(raw) // 2]), pytest.raises(CheckpointError):
            zf.load(copy, *_fresh("zero3"))
    assert found > flips


def _moments(optimizer):
    return [
        value.flatten().tolist()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]


def _moments_of_zero3():
    model, optimizer = _fresh("zero3")
    zf.load(HERE / "zero3", model, optimizer)
    return _moments(optimizer)


def test_states_that_are_numbers_are_values_of_their_parameter(tmp_path):
    found = Foreign(tmp_path, "model.{}".format)
    for state, value in (("step", 3), ("seen", 4), ("scale", 0.5)):
        found.add_state("weight", state, value)
    assert found.values_of("model.weight") == {"seen": 4, "scale": 0.5}  # steps are tensors
