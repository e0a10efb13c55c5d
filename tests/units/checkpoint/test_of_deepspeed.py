"""Folders that DeepSpeed has written are read at any world size and stage, those of models that it has cut as of whole ones.

That training goes on as DeepSpeed's own does is in `tests/promises/test_resume.py`; damaged ones are in `test_damage.py`.
"""

import base64
import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import zero_fn as zf
from tests.support.messages import refusals, refused
from tests.support.ranks import axis
from tests.support.wholes import full
from tests.units.checkpoint.made_by_deepspeed import HERE, PARTS, STEPS, Middle, adamw, built, changed_by
from tests.units.checkpoint.worlds import differing, everything
from zero_fn.checkpoint.loading import renamed_by
from zero_fn.checkpoint.others.find import opened
from zero_fn.checkpoint.others.torch_files import Foreign
from zero_fn.errors import CheckpointError


def _fresh():
    """A whole model and its optimizer with other values than in the folders."""
    model = changed_by(built(), 3)
    return model, adamw(model)


def _is_as_saved(kind, model):
    golden = json.loads((HERE / "golden.json").read_text())[kind]["saved"]
    return all(model.get_parameter(name).flatten().tolist() == values for name, values in golden.items())


def test_states_go_into_a_streamed_optimizer():
    found = []
    for stream in (lambda optimizer: optimizer, lambda optimizer: zf.streamed(optimizer, zf.cpu())):
        model, optimizer = _fresh()
        optimizer = stream(optimizer)
        zf.load(HERE / "zero2", model, optimizer)
        found.append(everything(model, optimizer))
    assert differing(*found) == []


def test_only_the_model_is_read():
    model, optimizer = _fresh()
    zf.load(HERE / "zero3" / "global_step2", model, optimizer, only="model")
    assert not optimizer.state
    assert _is_as_saved("zero3", model)


def test_missing_files_of_a_rank_are_told(tmp_path):
    copy = Path(shutil.copytree(HERE / "zero2", tmp_path / "copy"))
    (copy / "global_step2" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    held = _fresh()
    before = everything(*held)
    with pytest.raises(CheckpointError, match="ranks have written"):
        zf.load(copy, *held)
    assert differing(before, everything(*held)) == []


def test_checkpoints_of_two_kinds_in_one_folder_are_told_apart(tmp_path):
    copy = Path(shutil.copytree(HERE / "zero2", tmp_path / "copy"))
    model, optimizer = _fresh()
    zf.save(copy / "step-1", model, optimizer)
    with refused("checkpoints_of_two_kinds"):
        zf.load(copy, model, optimizer)
    zf.load(copy / "global_step2", model, optimizer)
    assert _is_as_saved("zero2", model)


# -- made here ---------------------------------------------------------------------------------------------------------


def _written(folder, *, also=None, states=None, **said):
    """The files of one rank and one parameter of two elements, as DeepSpeed names them."""
    state = {"step": 4, "exp_avg": torch.full((2,), 0.5), "exp_avg_sq": torch.full((2,), 0.25)}
    base = {"state": {0: state}, "param_groups": [{"lr": 0.5, "params": [0]}]}
    optimizer = {
        "partition_count": 1,
        "single_partition_of_fp32_groups": [torch.ones(2)],
        "base_optimizer_state": base if states is None else states,
        **said,
    }
    module = {"module": {"bias": torch.ones(2)}, "buffer_names": [], "param_shapes": [{"bias": torch.Size([2])}]}
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt", also):
        if name is not None:
            torch.save({**module, "shared_params": {}, "optimizer_state_dict": optimizer}, folder / name)


def _one_bias():
    model = nn.Module()
    model.bias = nn.Parameter(torch.zeros(2))
    return model, torch.optim.AdamW(model.parameters())


def _loaded(folder, **how):
    _written(folder, **how)
    model, optimizer = _one_bias()
    zf.load(folder, model, optimizer)
    return model, optimizer


def test_numbers_of_steps_may_be_plain(tmp_path):
    """As the optimizers that DeepSpeed brings have them."""
    model, optimizer = _loaded(tmp_path)
    state = optimizer.state[model.bias]
    assert (state["step"], state["exp_avg"].tolist(), state["exp_avg_sq"].tolist()) == (4, [0.5] * 2, [0.25] * 2)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_the_model_of_states_that_are_not_read_is_read(tmp_path):
    with refused("deepspeed_with_elastic_states"):
        _loaded(tmp_path, states=[])
    model, _ = _one_bias()
    zf.load(tmp_path, model, only="model")
    assert model.bias.tolist() == [1, 1]


test_refusals = refusals(
    {
        "deepspeed_with_tensor_parallelism": lambda folder: _loaded(folder, also="mp_rank_01_model_states.pt"),
        "deepspeed_with_other_objects": lambda folder: _loaded(folder, clip_grad=nn.Linear(1, 1)),
        "deepspeed_without_correction_of_bias": lambda folder: _loaded(
            folder, states={"state": {}, "param_groups": [{"lr": 0.1, "bias_correction": False, "params": []}]}
        ),
    }
)


def test_states_that_are_numbers_are_values_of_their_parameter(tmp_path):
    found = Foreign(tmp_path, "model.{}".format)
    for state, value in (("step", 3), ("seen", 4), ("scale", 0.5)):
        found.add_state("weight", state, value)
    assert found.values_of("model.weight") == {"seen": 4, "scale": 0.5}  # steps are tensors


# -- models in parts ---------------------------------------------------------------------------------------------------


RENAME = {
    "pipeline": {r"^(tied_modules\.embed|0|3)\.": "embed.", r"^1\.": "middle.", r"^2\.": "last."},
    "experts": {r"1\.deepspeed_moe\.(experts.deepspeed_experts\.|gate\.wg)": "gate", r"gate(?=\d)": "expert"},
}  # without ZeRO, tied layers have numbers, too


def _golden(kind):
    found = json.loads((HERE / kind / "golden.json").read_text())
    return {
        name: torch.frombuffer(bytearray(base64.b64decode(each)), dtype=torch.float32) for name, each in found.items()
    }


def _joined(kind):
    """The whole model, with other values."""
    pipeline = {"embed": nn.Linear(5, 5), "middle": Middle(), "last": nn.Linear(7, 5)}
    experts = {
        "0": nn.Linear(5, 5),
        "gate": nn.Linear(5, 4, bias=False),
        **{f"expert{n}": nn.Linear(5, 5) for n in range(4)},
    }
    cut = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 6), nn.Linear(6, 5), nn.Linear(5, 6))
    return changed_by(cut if "tensor" in kind else nn.ModuleDict(experts if "experts" in kind else pipeline), 3)


def _wrong(stage, kind):
    """What is not, to the bit, as DeepSpeed had it."""
    model = {"plain": lambda m, _: m, "zero1": zf.shard_optimizer, "zero3": zf.shard_params}[stage](
        _joined(kind), axis()
    )
    optimizer, rename = None if "plain" in kind else adamw(model), RENAME.get(kind.partition("_")[0])
    extra = zf.load(HERE / kind, model, optimizer, rename=rename, only=None if optimizer else "model")
    wrong = [] if optimizer is None or extra["epoch"] == 3 else ["epoch"]
    expected = {renamed_by(rename)(name): values for name, values in _golden(kind).items()}
    for name, p in (*model.named_parameters(), *model.named_buffers()):
        states = optimizer.state[p] if optimizer is not None and p.requires_grad else {}
        found = [full(each).float().flatten() for each in (p, *states.values()) if each.numel() > 1 or each is p]
        untrained = torch.ones(7) if "weight" in name else torch.arange(7.0)
        if not torch.equal(torch.cat(found), expected[name] if p.requires_grad else untrained):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize(("size", "stage"), [(1, "plain"), (3, "zero1"), (3, "zero3")])
def test_parts_are_read_as_the_whole_on_other_ranks(ranks, size, stage, kind):
    assert ranks(size).run(_wrong, stage, kind) == [[]] * size


def _said_otherwise(tmp_path, change):
    copy = Path(shutil.copytree(HERE / "tensor_zero1" / f"global_step{STEPS}", tmp_path / "copy"))
    for path in copy.glob("mp_rank*"):
        said = torch.load(path, weights_only=False)
        change(said["universal_checkpoint_info"], said)
        torch.save(said, path)
    return copy


def test_patterns_of_names_say_how_parameters_are_cut(tmp_path):
    def change(info, _):
        maps = info["affine_map"]["params"]
        info["affine_map"]["params"] = {pattern: maps[pattern] for pattern in maps if "1" in pattern}
        info |= {"vocabulary_parameter_patterns": [r"^3\.weight$"], "original_vocab_size": 5}

    source = opened(_said_otherwise(tmp_path, change), str)
    for name, values in _golden("tensor_zero1").items():
        found = source.whole(("model", name)).flatten()
        assert torch.equal(found, values[: len(values) // 3 - 5 * (name == "3.weight")]), name


UNREAD = [
    (lambda info, _: info.pop("affine_map"), "1.weight"),
    (lambda _, said: said.update(ds_autoep_layers=[{}]), "AutoEP"),
    (lambda info, _: info["affine_map"].update(version=2), "0.weight"),
    (
        lambda info, _: info.update(affine_map={}, parameter_with_sub_params=[], parameter_to_average_patterns="3"),
        "3.weight",
    ),
    (
        lambda info, _: info["affine_map"]["params"]["^0\\.bias$"]["ranks"][0]["pieces"][0].update(scale=0.5),
        "0.bias",
    ),
]


@pytest.mark.parametrize(("change", "why"), UNREAD)
def test_cuts_that_are_not_read_are_refused(tmp_path, change, why):
    with pytest.raises(CheckpointError, match=why):
        zf.load(_said_otherwise(tmp_path, change), _joined("tensor_zero1"), only="model")
