"""Folders of models that DeepSpeed has cut by pipelines, tensor parallelism or experts are read as of whole models."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zero_fn as zf
from tests.support.ranks import Ranks, axis
from tests.support.wholes import full
from tests.units.checkpoint.made_by_deepspeed import HERE, STEPS, adamw
from tests.units.checkpoint.parts_by_deepspeed import KINDS, Cut, Middle
from tests.units.checkpoint.test_of_deepspeed import loaded_with_stand_ins
from zero_fn.checkpoint.others.find import opened
from zero_fn.errors import CheckpointError

GOLDEN: dict[str, dict[str, list[str]]] = json.loads((HERE / "golden_parts.json").read_text())
RENAME = {r"^(tied_modules\.embed|0|3)\.": "embed.", r"^1\.": "middle.", r"^2\.": "last."}
"""Of the pipeline. Without ZeRO DeepSpeed names tied layers, too, by their number."""


def _fresh(kind: str) -> tuple[nn.Module, dict[str, str]]:
    """The whole model with other values than in the folder, and what names in the folder are in it."""
    pipeline = nn.ModuleDict({"embed": nn.Linear(5, 5), "middle": Middle(), "last": nn.Linear(7, 5)})
    model = Cut() if kind.startswith("tensor") else pipeline
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(3)
    return model, RENAME if kind.startswith("pipeline") else {}


def _values(encoded: str) -> Tensor:
    return torch.from_numpy(numpy.frombuffer(base64.b64decode(encoded), dtype=numpy.float32).copy())


def _wrong(kind: str, model: nn.Module, optimizer: Optimizer | None, rename: dict[str, str]) -> list[str]:
    """The parameters and moments that are not, to the bit, those that DeepSpeed had."""
    renamed, wrong = zf.checkpoint.loading.renamed_by(rename), []
    expected = {renamed(name): list(map(_values, values)) for name, values in GOLDEN[kind].items()}
    for name, p in (*model.named_parameters(), *model.named_buffers()):
        if not p.requires_grad:
            wrong += [name] if full(p).tolist() != ([1.0] * 7 if "weight" in name else [*range(7)]) else []
        else:
            states = optimizer.state[p] if optimizer is not None else {}
            found = [full(p), *(full(states[each]) for each in ("exp_avg", "exp_avg_sq") if each in states)]
            if len(found) != (1 if optimizer is None else 3) or (optimizer is not None and int(states["step"]) != 2):
                wrong.append(f"{name} has no states")
            pairs = zip(found, expected[name], strict=optimizer is not None)
            wrong += [name for value, same in pairs if not torch.equal(value.float().flatten(), same)]
    return wrong


def _loaded(stage: str, folder: str, kind: str) -> list[str]:
    model, rename = _fresh(kind)
    model = {"plain": lambda m, _: m, "zero1": zf.zero1, "zero3": zf.zero3}[stage](model, axis())
    optimizer = None if "plain" in kind else adamw(model)
    extra = zf.load(f"{folder}/{kind}", model, optimizer, rename=rename, only=None if optimizer else "model")
    wrong = _wrong(kind, model, optimizer, rename)
    return wrong if optimizer is None or extra["epoch"] == 3 else ["no epoch", *wrong]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if (HERE / kind).exists()])
@pytest.mark.parametrize(("size", "stage"), [(1, "plain"), (3, "zero1"), (3, "zero3")])
def test_parts_are_read_as_the_whole_on_other_ranks(ranks: Ranks, size: int, stage: str, kind: str) -> None:
    assert ranks(size).run(_loaded, stage, str(HERE), kind) == [[]] * size


def _said_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], object]
) -> Path:
    """A copy of a folder of tensor parallelism, in which something else is said of how parameters are cut."""
    copy = Path(shutil.copytree(HERE / "tensor_zero1" / f"global_step{STEPS}", tmp_path / "copy"))
    for path in copy.glob("mp_rank*"):
        said = loaded_with_stand_ins(path, monkeypatch)
        change(said["universal_checkpoint_info"])
        torch.save(said, path)
    return copy


def test_patterns_of_names_say_how_parameters_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(info: dict[str, Any]) -> None:
        maps = info["affine_map"]["params"]
        for pattern in [each for each in maps if "fused" not in each]:
            del maps[pattern]
        info |= {"vocabulary_parameter_patterns": [r"^wide\.weight$"], "original_vocab_size": 5}

    copy = _said_otherwise(tmp_path, monkeypatch, change)
    source, names = opened(copy, str), list(GOLDEN["tensor_zero1"])
    for name in names:
        values = source.whole(("model", name))
        assert torch.equal(values.flatten(), _values(GOLDEN["tensor_zero1"][name][0])[: values.numel()]), name
        assert values.numel() == _values(GOLDEN["tensor_zero1"][name][0]).numel() - 5 * (name == "wide.weight")


_SCALED = r"^norm\.bias$"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda info: info.pop("affine_map"), "fused.weight"),
        (lambda info: info["affine_map"].update(version=2), "later version"),
        (lambda info: info.update(affine_map=None, parameter_to_average_patterns=["wide"]), "wide.weight"),
        (lambda info: info["affine_map"]["params"][_SCALED]["ranks"][0]["pieces"][0].update(scale=0.5), "norm.bias"),
    ],
)
def test_cuts_that_are_not_read_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], object], why: str
) -> None:
    copy = _said_otherwise(tmp_path, monkeypatch, change)
    with pytest.raises(CheckpointError, match=why):
        zf.load(copy, _fresh("tensor_zero1")[0], only="model")
