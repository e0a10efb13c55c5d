"""The section `optimizer`: a stock optimizer of torch, with the defaults that DeepSpeed has.

[Note: what Adam is] DeepSpeed's Adam decays weights as AdamW does unless `adam_w_mode` is false, and its `weight_decay` is 0
where torch's AdamW has 0.01. Its name for torch's own, `torch_adam`, changes who computes the step, and this default.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_fn.deepspeed.entries import Entries, shown
from zero_fn.errors import ConfigError

__all__ = ["Stock", "stock_of"]

_ADAMS = ("adam", "adamw")
_OTHERS = {
    "lion": "an elementwise one of another library: optimizer=lambda model: Lion(model.parameters(), lr=1e-4)",
    "lamb": "AdamW; its norms of whole tensors are not those of shards",
    "muon": "AdamW; or at stage 0, where matrices are whole: optimizer=lambda model: torch.optim.Muon(...)",
    "muadam": "optimizer=lambda model: MuAdam(model.parameters(), lr=1e-3), of the package mup",
    "muadamw": "optimizer=lambda model: MuAdamW(model.parameters(), lr=1e-3), of the package mup",
    "musgd": "optimizer=lambda model: MuSGD(model.parameters(), lr=1e-1), of the package mup",
}
"""Optimizers of DeepSpeed that torch has not, by their names in small letters, and what to do."""


@dataclass(frozen=True, slots=True)
class Stock:
    """An optimizer of torch and its options.

    Attributes:
        kind: Its class.
        options: All but the parameters.
    """

    kind: type[Optimizer]
    options: Mapping[str, Any]

    def over(self, parameters: Iterable[Tensor]) -> Optimizer:
        """The optimizer over these parameters."""
        return self.kind(parameters, **self.options)


def stock_of(section: Entries | None) -> Stock | None:
    """Reads the section; None if there is none.

    Raises:
        ConfigError: torch has no such optimizer, or it takes no such options.
    """
    if section is None:
        return None
    name = section.kind(
        became=lambda name: "Adam or AdamW of torch.optim" if name.lower() in _ADAMS else f"torch.optim.{name}",
        example="AdamW",
    )
    kind = _kind(section, name)
    section.hints({"legacy_fusion": bool}, "nothing to set")
    params = section.params()
    section.close()
    stock = _adam(params, name) if name.lower() in _ADAMS else Stock(kind, _options(params, kind))
    try:  # on a parameter of no consequence: what it refuses, it refuses before anything is sharded
        stock.over([nn.Parameter(torch.zeros(1))])
    except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        raise ConfigError(
            f"torch.optim.{stock.kind.__name__} does not take the options of a DeepSpeed config.",
            entry=params.path,
            got=shown(dict(stock.options)),
            error=str(error)[:200],
            fix=f"values that torch.optim.{stock.kind.__name__} takes",
        ) from error
    return stock


def _kind(section: Entries, name: str) -> type[Optimizer]:
    small = name.lower()
    if small in _ADAMS:
        return torch.optim.AdamW
    found = torch.optim.Adagrad if small == "adagrad" else getattr(torch.optim, name, None)
    if small in _OTHERS or not (isinstance(found, type) and issubclass(found, Optimizer)) or found is Optimizer:
        raise section.wrong(
            "type",
            "an optimizer of torch.optim by its name",
            _OTHERS.get(small, '"AdamW"; or one of yours: optimizer=lambda model: Mine(model.parameters())'),
        )
    return found


def _adam(params: Entries, name: str) -> Stock:
    """[Note: what Adam is]"""
    is_named = name.lower() == "adamw"
    is_decoupled = is_named or params.boolean(
        "adam_w_mode", True, became=lambda is_decoupled: "AdamW" if is_decoupled else "Adam"
    )
    if is_named:
        params.hints({"adam_w_mode": bool}, "always, by this name")
    is_torchs = params.boolean("torch_adam", False, became="always")
    params.only("bias_correction", True, fix="remove it: Adam of torch corrects its moments")
    params.only("fp32_optimizer_states", True, fix="remove it: states rest in the dtype of their parameter")
    kind = torch.optim.AdamW if is_decoupled else torch.optim.Adam
    decay = 0.01 if is_torchs and is_decoupled else 0.0
    return Stock(kind, {"lr": 1e-3, "weight_decay": decay, "fused": True, **_options(params, kind)})


def _options(params: Entries, kind: type[Optimizer]) -> dict[str, Any]:
    params.only("max_grad_norm", 0, fix='"gradient_clipping" of the config')
    taken = inspect.signature(kind).parameters
    known = [name for name in taken if name not in ("params", "defaults")]
    options: dict[str, Any] = params.rest(f"of torch.optim.{kind.__name__}")
    for name, value in options.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            raise params.wrong(name, f"an option of torch.optim.{kind.__name__}", near[0] if near else "remove it")
        default = taken[name].default
        if not _is_like(value, default):
            wants = f"{len(default)} numbers" if isinstance(default, tuple) else "a number"
            wants = "true or false" if isinstance(default, bool) else wants
            raise params.wrong(name, wants, f'"{name}": {shown(default)}' if default else "remove it")
        options[name] = tuple(value) if isinstance(value, list) else value
    return options


def _is_like(value: object, default: object) -> bool:
    """Whether a value of JSON is of the kind of a default. torch takes `lr=True`, and fails on `"0.1"` in the first step."""
    if isinstance(default, tuple):
        is_list = isinstance(value, list | tuple) and len(value) == len(default)
        return is_list and all(map(_is_like, value, default))  # type: ignore[call-overload]
    if default is None and (value is None or isinstance(value, bool)):
        return True
    if isinstance(value, bool) or isinstance(default, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    return isinstance(value, int | float) and math.isfinite(value)
