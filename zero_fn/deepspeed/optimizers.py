"""The section `optimizer`: a stock optimizer of torch, with DeepSpeed's defaults.

[Note: what Adam is] A config writes "Adam" or the name of a class, FusedAdam or DeepSpeedCPUAdam: each is torch's fused
one, stepped where its states rest. DeepSpeed's Adam decays weights as AdamW does, unless `adam_w_mode` is false. The
default of its `weight_decay` is 0, but 0.01 with `torch_adam`, which makes DeepSpeed use torch's AdamW.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero_fn.deepspeed.entries import Entries, shown
from zero_fn.deepspeed.keys import KEYS

__all__ = ["Stock", "stock_of"]

_PARAMS = "optimizer.params"
_OTHERS = {
    "lion": "an elementwise one of another library: optimizer=lambda model: Lion(model.parameters(), lr=1e-4)",
    "lamb": "AdamW; its norms of whole tensors are not those of shards",
    "muon": "AdamW; or at stage 0, where matrices are whole: optimizer=lambda model: torch.optim.Muon(...)",
    "muadam": "optimizer=lambda model: MuAdam(model.parameters(), lr=1e-3), of the package mup",
    "muadamw": "optimizer=lambda model: MuAdamW(model.parameters(), lr=1e-3), of the package mup",
    "musgd": "optimizer=lambda model: MuSGD(model.parameters(), lr=1e-1), of the package mup",
    **dict.fromkeys(
        ("onebitadam", "zerooneadam", "onebitlamb"),
        '"type": "AdamW": nothing travels compressed here, and DeepSpeed 0.19.8 has removed it, too',
    ),
}
"""Optimizers of DeepSpeed that torch does not have, by their names in small letters, and what to write instead."""


@dataclass(frozen=True, slots=True)
class Stock:
    """A class of torch.optim with options. Called with a model, it makes the optimizer."""

    kind: type[Optimizer]
    options: Mapping[str, Any]

    def __call__(self, model: nn.Module) -> Optimizer:
        """The optimizer over the parameters of a model."""
        return self.kind(model.parameters(), **self.options)


def stock_of(entries: Entries) -> Stock | None:
    """Reads the section; None if the config has none.

    Raises:
        RefusedEntry: torch has no such optimizer, or the optimizer does not take these options.
    """
    if not entries.is_given("optimizer"):
        return None
    kind, defaults = _kind(entries)
    stock = Stock(kind, {**defaults, **_options(entries, kind)})
    try:  # on a module that is thrown away: wrong options are refused before the model is sharded
        stock(nn.Linear(1, 1))
    except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        wants = f"what torch.optim.{kind.__name__} takes: {str(error)[:200]}"
        raise entries.refused(_PARAMS, wants, f"other values than {shown(dict(stock.options))}") from error
    return stock


def _kind(entries: Entries) -> tuple[type[Optimizer], dict[str, Any]]:
    """The class, and the options whose defaults are DeepSpeed's. [Note: what Adam is]"""
    name = entries["optimizer.type"] or ""
    small = name.lower().removeprefix("deepspeed").removeprefix("cpu").removeprefix("fused")
    if small in ("adam", "adamw"):
        is_decoupled = small == "adamw" or entries[f"{_PARAMS}.adam_w_mode"]
        decay = 0.01 if entries[f"{_PARAMS}.torch_adam"] and is_decoupled else 0.0
        kind = torch.optim.AdamW if is_decoupled else torch.optim.Adam
        return kind, {"lr": 1e-3, "weight_decay": decay, "fused": True}
    found = torch.optim.Adagrad if small == "adagrad" else getattr(torch.optim, name, None)
    if small in _OTHERS or not (isinstance(found, type) and issubclass(found, Optimizer)) or found is Optimizer:
        instead = '"type": "AdamW"; or one of yours: optimizer=lambda model: Mine(model.parameters())'
        raise entries.refused("optimizer.type", "an optimizer of torch.optim by its name", _OTHERS.get(small, instead))
    return found, {}


def _options(entries: Entries, kind: type[Optimizer]) -> dict[str, Any]:
    is_adam = kind in (torch.optim.Adam, torch.optim.AdamW)
    taken = inspect.signature(kind).parameters
    known = [name for name in taken if name not in ("params", "defaults")]
    options, wrong = {}, []
    for name, value in entries.given_under(_PARAMS).items():
        path = f"{_PARAMS}.{name}"
        if path in KEYS and (is_adam or name == "max_grad_norm"):
            continue  # read in `_kind`, or refused already unless it has its default
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            wrong.append(entries.refused(path, f"an option of torch.optim.{kind.__name__}", (*near, "remove it")[0]))
        elif not _is_like(value, default := taken[name].default):
            wants = f"{len(default)} numbers" if isinstance(default, tuple) else "a number"
            wants = "true or false" if isinstance(default, bool) else wants
            wrong.append(entries.refused(path, wants, f'"{name}": {shown(default)}' if default else "remove it"))
        options[name] = tuple(value) if isinstance(value, list) else value
    if wrong:
        raise wrong[0]
    return options


def _is_like(value: object, default: object) -> bool:
    """Whether a value has the type of a default. (torch accepts `lr=True`, and fails on `"0.1"` only in the first step.)"""
    if isinstance(default, tuple):
        is_list = isinstance(value, list | tuple) and len(value) == len(default)
        return is_list and all(map(_is_like, value, default))  # type: ignore[call-overload]
    if default is None and (value is None or isinstance(value, bool)):
        return True
    if isinstance(value, bool) or isinstance(default, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    return isinstance(value, int | float) and math.isfinite(value)
