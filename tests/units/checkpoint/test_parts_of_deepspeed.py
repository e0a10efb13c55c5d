"""Folders of models that DeepSpeed has cut into stages of a pipeline are read as of whole models."""

from __future__ import annotations

import base64
import json

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zero_fn as zf
from tests.support.ranks import Ranks, axis
from tests.support.wholes import full
from tests.units.checkpoint.made_by_deepspeed import HERE, adamw
from tests.units.checkpoint.parts_by_deepspeed import KINDS, Middle

GOLDEN: dict[str, dict[str, list[str]]] = json.loads((HERE / "golden_parts.json").read_text())
RENAME = {r"^(tied_modules\.embed|0|3)\.": "embed.", r"^1\.": "middle.", r"^2\.": "last."}
"""Of the pipeline. Without ZeRO DeepSpeed names tied layers, too, by their number."""


def _fresh(kind: str) -> tuple[nn.Module, dict[str, str]]:
    """The whole model with other values than in the folder, and what names in the folder are in it."""
    model = nn.ModuleDict({"embed": nn.Linear(5, 5), "middle": Middle(), "last": nn.Linear(7, 5)})
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(3)
    return model, RENAME


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
