"""A whole DeepSpeed config as one value, which is the same on every rank that reads the same config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from zero_fn.deepspeed.entries import Entries, RefusedEntry, TakenEntry, filled
from zero_fn.deepspeed.loss_scale import Scaler, scaler_of
from zero_fn.deepspeed.optimizers import Stock, stock_of
from zero_fn.deepspeed.rates import Warmup, warmup_of
from zero_fn.values.tiers import IN_MEMORY, Tier, Tiers, cpu, nvme
from zero_fn.values.wire import Wire, int4, int8

__all__ = ["Settings", "Sharding", "settings_of"]

_ZERO = "zero_optimization"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Sharding:
    """What the section `zero_optimization` asks for."""

    stage: int = 0  # 0: replicas
    secondary: int = 1  # ranks over which a second copy of the parameters is sharded (hpZ of ZeRO++); 1: none
    persist_numel: int = 0  # parameters of at most so many elements stay whole
    tiers: Tiers = IN_MEMORY
    gather: Wire | None = None  # the format in which all parameters travel; or frozen ones alone; and gradients
    gather_frozen: Wire | None = None
    scatter: Wire | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """What a config asks for."""

    micro_batch_size: int  # samples, on each rank
    accumulation_steps: int  # microbatches of a step
    compute: torch.dtype | None  # of gathered parameters; None: the dtype at rest
    reduce: torch.dtype  # of gradient sums
    grads: torch.dtype | None  # of gradients at rest; None: that of their parameters
    saved: torch.dtype | None  # in which a Trainer saves its model; None: that at rest
    scaler: Callable[[str], Scaler] | None  # made for a type of device; None unless `compute` is float16
    skips_overflow: bool  # whether a step is skipped if its gradients are not finite
    max_norm: float  # to which gradients are clipped; 0: not clipped
    sharding: Sharding
    stock: Stock | None  # makes the optimizer from a model; None, as for the scheduler: the config has none
    scheduler: Callable[[Optimizer], Warmup] | None
    outcomes: tuple[TakenEntry, ...]  # of each entry, in the order of the config


def settings_of(config: Mapping[str, object], ranks: int, auto: Mapping[str, object] | None = None) -> Settings:
    """Reads and checks every entry of a config for so many ranks that share a batch. `auto` has values for its `"auto"`.

    Raises:
        ConfigError: Entries are unknown, have wrong values, contradict others, or ask for what is not done here. Lists all.
    """
    entries = Entries(filled(config, auto or {}))
    parts: dict[str, Callable[[Entries], Any]] = {
        "batch_sizes": partial(_batch_sizes, ranks=ranks),
        "compute": _compute,
        "reduce": _reduce,
        "grads": _grads,
        "scaler": scaler_of,
        "sharding": _sharding,
        "stock": stock_of,
        "scheduler": warmup_of,
    }
    found: dict[str, Any] = {}
    for name, part in parts.items():
        with suppress(RefusedEntry):  # `close` raises all errors at once
            found[name] = part(entries)
    entries.close()
    micro_batch_size, accumulation_steps = found.pop("batch_sizes")
    clipping = "gradient_clipping"
    default = TakenEntry(clipping, "not given", f"{entries[clipping]:g}, DeepSpeed's default, in setup.step()")
    is_narrow = any(entries[f"{_ZERO}.stage3_gather_{name}_weights_on_model_save"] for name in ("16bit", "fp16"))
    checked = {torch.float16: True, torch.bfloat16: entries["bf16.check_grad_overflow"]}
    return Settings(
        micro_batch_size,
        accumulation_steps,
        **found,
        saved=found["compute"] if is_narrow else None,
        skips_overflow=checked.get(found["compute"], False),
        max_norm=entries[clipping],
        outcomes=(*entries.outcomes, *([] if entries.is_given(clipping) else [default])),
    )


def _batch_sizes(entries: Entries, ranks: int) -> tuple[int, int]:
    """Samples of a microbatch, and microbatches of a step. Of the three numbers in the config, two give the third."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole, micro, steps = given = tuple(entries[name] for name in names)
    left = [name for name in names[1:] if entries.is_auto(name)]
    if left and given.count(None) > 1:
        entries.autos.extend(left)
        raise RefusedEntry(left[0])
    if whole is None and micro is None:
        raise entries.refused(names[1], "the samples of a microbatch, on each rank", f'"{names[1]}": 8')
    if micro is None:
        micro = whole // (ranks * (steps or 1))
    if steps is None:
        steps = (whole or micro * ranks) // (micro * ranks) if micro else 0
    if micro * steps == 0 or (whole is not None and whole != micro * steps * ranks):
        micro, steps = max(micro, 1), max(steps, 1)
        wants = f"train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps {steps} x {ranks} ranks"
        raise entries.refused(names[0], wants, f'"{names[0]}": {micro * steps * ranks}')
    return micro, steps


def _compute(entries: Entries) -> torch.dtype | None:
    """The dtype in flight."""
    if entries["bf16.enabled"] and entries["fp16.enabled"]:
        raise entries.refused("fp16.enabled", "one dtype, and bf16.enabled is true", '"fp16": {"enabled": false}')
    return torch.bfloat16 if entries["bf16.enabled"] else torch.float16 if entries["fp16.enabled"] else None


def _reduce(entries: Entries) -> torch.dtype:
    """The dtype of gradient sums."""
    name = entries["communication_data_type"] or "fp32"
    if name != "fp32" and not (entries["bf16.enabled"] or entries["fp16.enabled"]):
        wants = "fp32: gradients are sent in the dtype of the computation"
        raise entries.refused("communication_data_type", wants, '"bf16": {"enabled": true}; or remove it')
    if name != "fp32" and entries[f"{_ZERO}.zero_quantized_gradients"]:
        wants = "fp32: what travels in 4 bits is summed in float32"
        raise entries.refused("communication_data_type", wants, '"communication_data_type": "fp32"')
    return _DTYPES[name]


def _grads(entries: Entries) -> torch.dtype | None:
    """The dtype of gradients at rest."""
    path = "data_types.grad_accum_dtype"
    if entries[path] == "fp32":
        return None
    if not entries["bf16.enabled"]:
        wants = '"fp32": only bf16 computes gradients that may rest in 16 bits'
        raise entries.refused(path, wants, '"bf16": {"enabled": true}; or remove it')
    return torch.bfloat16


def _sharding(entries: Entries) -> Sharding:
    """The section `zero_optimization`."""
    stage, secondary = entries[f"{_ZERO}.stage"], entries[f"{_ZERO}.zero_hpz_partition_size"]
    states, params = _tier(entries, f"{_ZERO}.offload_optimizer"), _tier(entries, f"{_ZERO}.offload_param")
    fraction = entries[f"{_ZERO}.offload_optimizer.ratio"]
    persist_numel = entries[f"{_ZERO}.stage3_param_persistence_threshold"]
    wrong = []
    if secondary > 1 and stage != 3:
        wrong.append(entries.refused(f"{_ZERO}.zero_hpz_partition_size", "1 below stage 3", '"stage": 3'))
    if states is not None and stage == 0:
        wants = "none: at stage 0 these are states of replicas"
        wrong.append(entries.refused(f"{_ZERO}.offload_optimizer.device", wants, '"stage": 2'))
    if params is not None and stage != 3:
        instead = '"stage": 3; or leave it out, and call zf.offload(model, params=tier), at any stage'
        wrong.append(entries.refused(f"{_ZERO}.offload_param.device", "none below stage 3, as in DeepSpeed", instead))
    if wrong:
        raise wrong[0]
    if states is None or fraction == 0:
        states, fraction = None, 1.0
    # Parameters in a tier are stepped on the host, so their states rest there too, unless the config says otherwise.
    optim = states or (cpu() if params is not None else None)
    grads = states if entries[f"{_ZERO}.offload_optimizer.gradients"] else None
    gather, frozen = (entries[f"{_ZERO}.zero_quantized_{name}weights"] for name in ("", "nontrainable_"))
    return Sharding(
        stage,
        secondary,
        persist_numel if stage == 3 else 0,
        Tiers(params, grads, optim, fraction),
        gather=int8() if gather else None,
        gather_frozen=int8() if frozen and not gather else None,
        scatter=int4() if entries[f"{_ZERO}.zero_quantized_gradients"] else None,
    )


def _tier(entries: Entries, section: str) -> Tier | None:
    device, path = entries[f"{section}.device"], f"{section}.nvme_path"
    if device == "none":
        return None
    if device == "cpu":
        return cpu(pinned=entries[f"{section}.pin_memory"])
    if not entries.is_given(path):
        raise entries.refused(path, "a folder of a local disk", '"nvme_path": "/local_nvme"')
    return nvme(entries[path])
