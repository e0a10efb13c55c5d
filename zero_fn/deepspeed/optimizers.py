"""The section `optimizer`: a stock optimizer of torch,
or one that DeepSpeed has, with DeepSpeed's defaults.

[Note: what Adam is] A config writes "Adam" or the name of a class, FusedAdam or DeepSpeedCPUAdam:
each is torch's fused one, stepped where its states rest. DeepSpeed's Adam decays weights as AdamW
does, unless `adam_w_mode` is false. The default of its `weight_decay` is 0, but 0.01 with
`torch_adam`, which makes DeepSpeed use torch's AdamW.

What looks at whole tensors is stepped by owners (`whole_where_needed`).
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero_fn.deepspeed.entries import Entries, said_by, shown
from zero_fn.deepspeed.muon_lamb_lion import Lamb, Lion, muon_with_adam
from zero_fn.errors import ConfigError
from zero_fn.owners import ByOwner, by_owner
from zero_fn.runtime.elementwise import is_of_bitsandbytes, looks_at_whole_tensors
from zero_fn.runtime.slot import slot_of
from zero_fn.streamed import Streamed, streamed
from zero_fn.values.chained_optimizer import ChainedOptimizer, Optimizers, as_one
from zero_fn.values.tiers import IN_MEMORY, Tiers

__all__ = ["Stock", "finished", "stock_of", "whole_where_needed"]

_Kind = Callable[..., Optimizer]
_PARAMS = "optimizer.params"
_OF_ADAM = ("adam_w_mode", "torch_adam", "bias_correction", "fp32_optimizer_states")
_OWN: Mapping[str, _Kind] = {
    "adagrad": torch.optim.Adagrad,
    "muon": muon_with_adam,
    "lamb": Lamb,
    "lion": Lion,
}
_OF_MUP = {"muadam": "MuAdam", "muadamw": "MuAdamW", "musgd": "MuSGD"}
_REMOVED = (
    '"type": "AdamW": DeepSpeed has removed it, too; "zero_quantized_gradients": '
    "true sends gradients in 4 bits"
)


@dataclass(frozen=True, slots=True)
class Stock:
    """A class of optimizers, or a function that makes one, with options.
    Called with a model, it makes the optimizer."""

    make: Callable[..., Optimizer]
    options: Mapping[str, Any]

    def __call__(self, model: nn.Module) -> Optimizer:
        """The optimizer over the parameters of a model."""
        return self.over(model.parameters(), [model])

    def over(self, params: Any, models: Iterable[nn.Module]) -> Optimizer:
        """The optimizer over parameters of some models, or groups of them."""
        if self.make is muon_with_adam:
            return muon_with_adam(params, models, **self.options)
        return self.make(params, **self.options)


def whole_where_needed(optimizer: Optimizer) -> Optimizer:
    """`by_owner` of an optimizer that looks at whole tensors and has parameters in shards;
    any other as it is."""
    if isinstance(optimizer, ChainedOptimizer):
        return optimizer.wrapped_by(whole_where_needed)
    slots = [
        slot_of(parameter) for group in optimizer.param_groups for parameter in group["params"]
    ]
    if (
        getattr(optimizer, "steps_wholes", False)
        or is_of_bitsandbytes(type(optimizer))
        or not looks_at_whole_tensors(optimizer)
        or not any(slot is not None and slot.path.is_spread for slot in slots)
    ):
        return optimizer
    return by_owner(optimizer)


def finished(optimizer: Optimizers, tiers: Tiers) -> Optimizer:
    """An optimizer as a config has it stepped: by owners if it needs whole tensors,
    streamed if anything is offloaded."""
    optimizer = as_one(optimizer)
    if isinstance(optimizer, ChainedOptimizer):
        return optimizer.wrapped_by(lambda member: finished(member, tiers))
    if isinstance(optimizer, Streamed):
        return optimizer
    owned = whole_where_needed(optimizer)
    if isinstance(owned, ByOwner) and tiers.fraction != 1:
        raise ConfigError(
            "A DeepSpeed config leaves a part of whole tensors' states on the device.",
            entry="zero_optimization.offload_optimizer.ratio",
            got=tiers.fraction,
            optimizer=type(optimizer).__name__,
            fix='"ratio": 1.0: states of whole tensors rest in their tier or outside it',
        )
    return owned if tiers == IN_MEMORY else streamed(owned, elementwise=type(owned) is Lion)


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
        wants = f"what {_named(kind)} takes: {str(error)[:200]}"
        raise entries.refused(
            _PARAMS, wants, f"other values than {shown(dict(stock.options))}"
        ) from error
    return replace(stock, make=_of_mup(entries) or kind)


def _kind(entries: Entries) -> tuple[_Kind, dict[str, Any]]:
    """The class, and the options whose defaults are DeepSpeed's. [Note: what Adam is]"""
    name = entries["optimizer.type"] or ""
    small = name.lower().removeprefix("deepspeed").removeprefix("cpu").removeprefix("fused")
    if small in ("adam", "adamw"):
        if not entries[f"{_PARAMS}.bias_correction"]:
            fix = "one of yours: optimizer=lambda model: Mine(model.parameters())"
            raise entries.refused(
                f"{_PARAMS}.bias_correction", "true: Adam of torch corrects its moments", fix
            )
        is_decoupled = small == "adamw" or entries[f"{_PARAMS}.adam_w_mode"]
        decay = 0.01 if entries[f"{_PARAMS}.torch_adam"] and is_decoupled else 0.0
        kind = torch.optim.AdamW if is_decoupled else torch.optim.Adam
        return kind, {"lr": 1e-3, "weight_decay": decay, "fused": True}
    if small in _OF_MUP:
        return getattr(torch.optim, _OF_MUP[small].removeprefix("Mu")), {"lr": 1e-3}
    found = getattr(torch.optim, name, None)
    if small in _OWN:
        return _OWN[small], {}
    if isinstance(found, type) and issubclass(found, Optimizer) and found is not Optimizer:
        return found, {}
    instead = '"type": "AdamW"; or one of yours: optimizer=lambda model: Mine(model.parameters())'
    raise entries.refused(
        "optimizer.type",
        "an optimizer of torch.optim by its name",
        _REMOVED if small in ("onebitadam", "zerooneadam", "onebitlamb") else instead,
    )


def _of_mup(entries: Entries) -> Callable[..., Optimizer] | None:
    """The function of the package mup for an optimizer of its,
    over a model whose base shapes the program has set."""
    name = _OF_MUP.get((entries["optimizer.type"] or "").lower())
    if name is None:
        return None
    try:
        return getattr(import_module("mup"), name)  # type: ignore[no-any-return]
    except ImportError as error:
        raise entries.refused(
            "optimizer.type", f"the package mup: {error}", "pip install mup"
        ) from error


def _options(entries: Entries, kind: _Kind) -> dict[str, Any]:
    is_adam = kind in (torch.optim.Adam, torch.optim.AdamW)
    taken = inspect.signature(kind).parameters
    known = [name for name in taken if name not in ("params", "defaults")]
    # Others are read in `_kind`, or refused already unless they have their default.
    given = {
        name: value
        for name, value in entries.given_under(_PARAMS).items()
        if name != "max_grad_norm" and not (is_adam and name in _OF_ADAM)
    }
    for name, value in given.items():
        path, near = f"{_PARAMS}.{name}", difflib.get_close_matches(name, known, n=1, cutoff=0.75)
        if name not in known:
            entries.refused(path, f"an option of {_named(kind)}", (*near, "remove it")[0])
        elif not _is_like(value, default := taken[name].default):
            wants = f"{len(default)} numbers" if isinstance(default, tuple) else "a number"
            wants = "true or false" if isinstance(default, bool) else wants
            meant = said_by(value)
            can_be_meant = _is_like(meant, default)
            fix = f'"{name}": {shown(meant)}' if can_be_meant else f"{wants}, or remove it"
            entries.refused(path, wants, fix)
    return {
        name: tuple(value) if isinstance(value := entries[f"{_PARAMS}.{name}"], list) else value
        for name in given
    }


def _named(kind: _Kind) -> str:
    return (
        f"{'torch.optim' if kind.__module__.startswith('torch.') else 'DeepSpeed'}.{kind.__name__}"
    )


def _is_like(value: object, default: object) -> bool:
    """Whether a value has the type of a default. (torch accepts `lr=True`,
    and fails on `"0.1"` only in the first step.)"""
    if isinstance(default, tuple):
        is_list = isinstance(value, list | tuple) and len(value) == len(default)
        return is_list and all(map(_is_like, value, default))  # type: ignore[call-overload]
    if default is None and (value is None or isinstance(value, bool)):
        return True
    if isinstance(default, str):
        return isinstance(value, str)
    if isinstance(value, bool) or isinstance(default, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    return isinstance(value, int | float) and math.isfinite(value)
