"""Folders of models that DeepSpeed has cut by pipelines, tensor parallelism or experts are read as of whole models."""

import base64
import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import zero_fn as zf
from tests.support.ranks import axis
from tests.support.wholes import full
from tests.units.checkpoint.made_by_deepspeed import HERE, STEPS, adamw
from tests.units.checkpoint.parts_by_deepspeed import KINDS, Middle
from zero_fn.checkpoint.loading import renamed_by
from zero_fn.checkpoint.others.find import opened
from zero_fn.errors import CheckpointError

RENAME = {
    "pipeline": {r"^(tied_modules\.embed|0|3)\.": "embed.", r"^1\.": "middle.", r"^2\.": "last."},
    "experts": {r"1\.deepspeed_moe\.(experts.deepspeed_experts\.|gate\.wg)": "gate", r"gate(?=\d)": "expert"},
}  # without ZeRO, tied layers have numbers, too


def _golden(kind):
    found = json.loads((HERE / kind / "golden.json").read_text())
    return {
        name: torch.frombuffer(bytearray(base64.b64decode(each)), dtype=torch.float32) for name, each in found.items()
    }


def _fresh(kind):
    pipeline = {"embed": nn.Linear(5, 5), "middle": Middle(), "last": nn.Linear(7, 5)}
    experts = {
        "0": nn.Linear(5, 5),
        "gate": nn.Linear(5, 4, bias=False),
        **{f"expert{n}": nn.Linear(5, 5) for n in range(4)},
    }
    cut = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 6), nn.Linear(6, 5), nn.Linear(5, 6))
    model = cut if "tensor" in kind else nn.ModuleDict(experts if "experts" in kind else pipeline)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(3)
    return model


def _wrong(stage, folder, kind):
    """What is not, to the bit, as DeepSpeed had it."""
    model = {"plain": lambda m, _: m, "zero1": zf.zero1, "zero3": zf.zero3}[stage](_fresh(kind), axis())
    optimizer, rename = None if "plain" in kind else adamw(model), RENAME.get(kind.partition("_")[0])
    extra = zf.load(f"{folder}/{kind}", model, optimizer, rename=rename, only=None if optimizer else "model")
    wrong = [] if optimizer is None or extra["epoch"] == 3 else ["epoch"]
    expected = {renamed_by(rename)(name): values for name, values in _golden(kind).items()}
    for name, p in (*model.named_parameters(), *model.named_buffers()):
        states = optimizer.state[p] if optimizer is not None and p.requires_grad else {}
        found = [full(each).float().flatten() for each in (p, *states.values()) if each.numel() > 1 or each is p]
        untrained = torch.ones(7) if "weight" in name else torch.arange(7.0)
        if not torch.equal(torch.cat(found), expected[name] if p.requires_grad else untrained):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "stage"), [(1, "plain"), (3, "zero1"), (3, "zero3")])
def test_parts_are_read_as_the_whole_on_other_ranks(ranks, size, stage, kind):
    assert ranks(size).run(_wrong, stage, str(HERE), kind) == [[]] * size


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


@pytest.mark.parametrize(
    ("change", "why"),
    [
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
    ],
)
def test_cuts_that_are_not_read_are_refused(tmp_path, change, why):
    with pytest.raises(CheckpointError, match=why):
        zf.load(_said_otherwise(tmp_path, change), _fresh("tensor_zero1"), only="model")
