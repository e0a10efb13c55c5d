"""A whole DeepSpeed config as one value, which is the same on every rank that reads the same config."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from zero_fn.deepspeed.entries import Entries, RefusedEntry, TakenEntry, filled
from zero_fn.deepspeed.keys import KEYS
from zero_fn.deepspeed.loss_scale import Scaler, scaler_of
from zero_fn.deepspeed.optimizers import Stock, stock_of
from zero_fn.deepspeed.rates import Rates, rates_of
from zero_fn.deepspeed.reporter import Reporting, reporting_of
from zero_fn.values.tiers import IN_MEMORY, Tier, Tiers, cpu, nvme
from zero_fn.values.wire import Wire, int4, int8

__all__ = ["Computing", "Cuts", "Settings", "Sharding", "settings_of"]

_ZERO, _CLIPPING = "zero_optimization", "gradient_clipping"
_NARROW = ("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")
_PARKS = "activation_checkpointing.cpu_checkpointing"
_RECOMPUTES = ("activation_checkpointing.partition_activations", "pipeline.activation_checkpoint_interval")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_EXPERTS = {
    "moe_expert_parallel_size": None,
    "moe.ep_size": "moe.enabled",
    "expert_parallel.autoep_size": "expert_parallel.enabled",
}


@dataclass(frozen=True, slots=True)
class Cuts:
    """Over how many ranks a model is cut beside ZeRO."""

    tensor: int = 1  # ranks that share a batch, over which its own plan cuts a model
    sequence: int = 1  # ranks that share a batch, over which the program cuts sequences
    experts: int = 1
    stages: int = 1  # of a pipeline


@dataclass(frozen=True, slots=True)
class Sharding:
    """What the section `zero_optimization` asks for."""

    stage: int = 0  # 0: replicas
    secondary: int = 1  # ranks over which a second copy of the parameters is sharded (hpZ of ZeRO++); 1: none
    persist_numel: int = 0  # parameters of at most so many elements stay whole
    persist_most: int = 0  # elements of all of them
    leaves: tuple[str, ...] = ()  # classes, names and ends of names of modules that are gathered as wholes
    tiers: Tiers = IN_MEMORY
    gather: Wire | None = None  # the format in which all parameters travel; or frozen ones alone; and gradients
    gather_frozen: Wire | None = None
    scatter: Wire | None = None


@dataclass(frozen=True, slots=True)
class Computing:
    """How a model computes."""

    compute: torch.dtype | None  # of gathered parameters; None: the dtype at rest
    reduce: torch.dtype  # of gradient sums
    grads: torch.dtype | None  # of gradients at rest; None: that of their parameters
    rest: torch.dtype | None  # of trained parameters at rest; None: float32, and that of the model for frozen ones
    saved: torch.dtype | None  # in which a Trainer saves its model; None: that at rest
    buffers: torch.dtype | None  # of floating point buffers; None: as they are
    keeps_wide: tuple[str, ...] | None  # words in names of buffers that stay as they are; None: those of the model
    autocast: torch.dtype | None  # of torch.autocast around forwards
    recomputes: bool  # whether blocks are computed again in backward
    parks: bool  # whether what they keep is on the host
    compiles: Mapping[str, Any] | None  # options with which units are compiled


@dataclass(frozen=True, slots=True)
class Settings:
    """What a config asks for."""

    micro_batch_size: int  # samples, on each rank
    accumulation_steps: int  # microbatches of a step
    computing: Computing
    scaler: Callable[[str], Scaler] | None  # made for a type of device; None unless float16 is computed
    skips_overflow: bool  # whether a step is skipped if its gradients are not finite
    max_norm: float  # to which gradients are clipped; 0: not clipped
    sums: bool  # whether gradients are summed over ranks, and not averaged
    sharding: Sharding
    cuts: Cuts
    stock: Stock | None  # makes the optimizer from a model; None, as for the scheduler: the config has none
    scheduler: Callable[[Optimizer], Rates] | None
    reporting: Reporting | None  # what is printed and logged
    in_background: bool  # whether checkpoints are written in the background
    outcomes: tuple[TakenEntry, ...]  # of each entry, in the order of the config

    def loss_factor(self, mesh: DeviceMesh) -> int:
        """What a loss is multiplied with, where ranks average gradients that DeepSpeed adds up: over these ranks, that have
        batches of their own, and over parts of sequences."""
        return (mesh.size() if self.sums else 1) * self.cuts.sequence


def settings_of(
    config: Mapping[str, object],
    ranks: int,
    auto: Mapping[str, object] | None = None,
    *,
    others: Mapping[str, int] | None = None,
    makes: bool = True,
) -> Settings:
    """Reads and checks every entry of a config for so many ranks.

    `auto` has values for its `"auto"`. `others` are the sizes of other axes that there are beside these ranks: "tensor",
    "sequence" and "stages"; over what is not there, the ranks are divided (with None they may not be). Without `makes` the
    section `optimizer` is not followed.

    Raises:
        ConfigError: Entries are unknown, have wrong values, contradict others, or ask for what is not done here. Lists all.
    """
    entries = Entries(filled(config, auto or {}))
    parts: dict[str, Callable[[Entries], Any]] = {
        "cuts": partial(_cuts, ranks=ranks, others=others),
        "batch_sizes": partial(_batch_sizes, ranks=ranks, others=others or {}),
        "computing": _computing,
        "scaler": scaler_of,
        "skips_overflow": lambda entries: entries["fp16.enabled"] or _checks_bf16(entries),
        "max_norm": lambda entries: entries[_CLIPPING],
        "sums": lambda entries: entries["gradient_allreduce_op"] == "sum",
        "sharding": _sharding,
        "stock": stock_of if makes else lambda _: None,
        "scheduler": rates_of,
        "reporting": reporting_of,
        "in_background": lambda entries: entries["checkpoint.writer.decoupled"],
    }
    found: dict[str, Any] = {}
    for name, part in parts.items():
        with suppress(RefusedEntry):  # `close` raises all errors at once
            found[name] = part(entries)
    entries.close()
    default = TakenEntry(_CLIPPING, "not given", f"{entries[_CLIPPING]:g}, DeepSpeed's default, in setup.step()")
    found["outcomes"] = (*entries.outcomes, *([] if entries.is_given(_CLIPPING) else [default]))
    micro_batch_size, accumulation_steps = found.pop("batch_sizes")
    return Settings(micro_batch_size, accumulation_steps, **found)


def _batch_sizes(entries: Entries, ranks: int, others: Mapping[str, int]) -> tuple[int, int]:
    """Samples of a microbatch, and microbatches of a step. Of the three numbers in the config, two give the third."""
    cuts = _cuts(entries, ranks, others)
    for kind, size in (("tensor", cuts.tensor), ("sequence", cuts.sequence)):
        ranks //= 1 if kind in others else size
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


def _cuts(entries: Entries, ranks: int, others: Mapping[str, int] | None) -> Cuts:
    """The sizes of other kinds of parallelism, against the axes that there are."""
    sizes = {
        "tensor_parallel.autotp_size": "tensor",
        "tensor_parallel.tp_size": "tensor",
        "tensor_parallel.tp.tp_size": "tensor",
        "sequence_parallel_size": "sequence",
        "pipeline_parallel.pp_size": "stages",
    }
    found, wrong = Cuts(), []
    for path, kind in sizes.items():
        if (size := entries[path]) in (0, 1):
            continue
        if others is None:
            fix = "zf.from_deepspeed(model, config, mesh) and a loop of your own; or remove it"
            wrong.append(entries.refused(path, "1: here each rank has batches of its own", fix))
        elif kind in others and size != others[kind]:
            wrong.append(entries.refused(path, f"{others[kind]}, the ranks of that axis", f'"{path}": {others[kind]}'))
        elif kind == "stages" and kind not in others:
            fix = 'zf.from_deepspeed(part, config, mesh["dp"], pipeline=mesh["pp"]) (docs/guides/pipelines.md)'
            wrong.append(entries.refused(path, "a part of the model, and the axis of the parts", fix))
        elif kind not in others and ranks % size:
            wrong.append(entries.refused(path, f"a divisor of {ranks} ranks", f'"{path}": {ranks}'))
        found = replace(found, **{kind: size})
    for path, switch in _EXPERTS.items():
        if entries[path] > 1 and (switch is None or entries[switch]):
            found = replace(found, experts=entries[path])
    routes = [path for path in entries.given_under("expert_parallel") if f"expert_parallel.{path}" not in KEYS]
    if routes and entries["expert_parallel.enabled"]:
        fix = "remove it: the layer of the model routes (docs/guides/experts.md)"
        wrong.append(entries.refused(f"expert_parallel.{routes[0]}", "no options of routing", fix))
    if wrong:
        raise wrong[0]
    return found


def _computing(entries: Entries) -> Computing:
    """Dtypes, and what else says how the model computes."""
    parts: dict[str, Callable[[Entries], Any]] = {
        "compute": _compute,
        "reduce": _reduce,
        "grads": _grads,
        "rest": _rest,
        "saved": lambda entries: _compute(entries) if any(entries[f"{_ZERO}.{name}"] for name in _NARROW) else None,
        "buffers": lambda entries: _DTYPES.get(entries["data_types.buffer_dtype"]),
        "keeps_wide": _keeps_wide,
        "autocast": _autocast,
        "recomputes": lambda entries: any(entries[path] for path in (*_RECOMPUTES, _PARKS)) or False,
        "parks": lambda entries: entries[_PARKS],
        "compiles": _compiles,
    }
    found, wrong = {}, []
    for name, part in parts.items():
        try:
            found[name] = part(entries)
        except RefusedEntry as refused:
            wrong.append(refused)
    if wrong:
        raise wrong[0]
    return Computing(**found)


def _compute(entries: Entries) -> torch.dtype | None:
    """The dtype in flight."""
    if entries["bf16.enabled"] and entries["fp16.enabled"]:
        raise entries.refused("fp16.enabled", "one dtype, and bf16.enabled is true", '"fp16": {"enabled": false}')
    own = "bf16" if entries["bf16.enabled"] else "fp16" if entries["fp16.enabled"] else "fp32"
    asked = entries["data_types.param_dtype"] or own
    if asked != own and (own, asked) != ("fp32", "bf16"):
        wants, fix = f'"{own}", in which the model computes', f'"{asked}": {{"enabled": true}}; or remove it'
        raise entries.refused("data_types.param_dtype", wants, fix)
    return None if asked == "fp32" else _DTYPES[asked]


def _checks_bf16(entries: Entries) -> bool:
    return bool(entries["bf16.enabled"] and entries["bf16.check_grad_overflow"])


def _rest(entries: Entries) -> torch.dtype | None:
    """The dtype of trained parameters at rest: float32, unless both they and their states are to be narrow."""
    masters, states = entries["bf16.bf16_master_weights_and_grads"], entries["bf16.bf16_optimizer_states"]
    if masters != states:
        said = str(masters).lower()
        fix = f'"bf16_optimizer_states": {said}'
        raise entries.refused("bf16.bf16_optimizer_states", f"{said}: states have the dtype of their masters", fix)
    return torch.bfloat16 if masters and entries["bf16.enabled"] else None


def _autocast(entries: Entries) -> torch.dtype | None:
    if not entries["torch_autocast.enabled"]:
        return None
    if entries["torch_autocast.dtype"].endswith("16") and "b" not in entries["torch_autocast.dtype"]:
        fix = '"torch.bfloat16"; or "fp16": {"enabled": true}'
        raise entries.refused("torch_autocast.dtype", "bfloat16: float16 needs a loss scale", fix)
    return torch.bfloat16


def _keeps_wide(entries: Entries) -> tuple[str, ...] | None:
    path = "data_types.keep_in_fp32_modules"
    return None if entries[path] == "auto" else _words(entries, path)


def _words(entries: Entries, path: str) -> tuple[str, ...]:
    found = entries[path] or []
    if not isinstance(found, list) or not all(isinstance(each, str) and each for each in found):
        raise entries.refused(path, "a list of text", f'"{path.rpartition(".")[2]}": ["..."]')
    return tuple(found)


def _compiles(entries: Entries) -> Mapping[str, Any] | None:
    is_asked = entries["compile.deepcompile"] or entries["compile.enabled"] or entries["compile.disable"] is False
    return {"backend": entries["compile.backend"], **(entries["compile.kwargs"] or {})} if is_asked else None


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
    states = _tier(entries, f"{_ZERO}.offload_optimizer", f"{_ZERO}.cpu_offload")
    params = _tier(entries, f"{_ZERO}.offload_param", f"{_ZERO}.cpu_offload_param")
    fraction = entries[f"{_ZERO}.offload_optimizer.ratio"]
    persist_numel = entries[f"{_ZERO}.stage3_param_persistence_threshold"]
    wrong = []
    if secondary > 1 and stage != 3:
        wrong.append(entries.refused(f"{_ZERO}.zero_hpz_partition_size", "1 below stage 3", '"stage": 3'))
    if states is not None and stage == 0:
        wants = "none: at stage 0 these are states of replicas"
        wrong.append(entries.refused(f"{_ZERO}.offload_optimizer.device", wants, '"stage": 2'))
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
        entries[f"{_ZERO}.stage3_model_persistence_threshold"],
        tuple(word for kind in ("classes", "names", "name_suffixes") for word in _leaves(entries, kind)),
        Tiers(params, grads, optim, fraction),
        gather=int8() if gather else None,
        gather_frozen=int8() if frozen and not gather else None,
        scatter=int4() if entries[f"{_ZERO}.zero_quantized_gradients"] else None,
    )


def _leaves(entries: Entries, kind: str) -> Iterator[str]:
    """Modules that are wholes, as `units=` names them: a class by its last name, an end of a name by a pattern."""
    for word in _words(entries, f"{_ZERO}.leaf_module.{kind}"):
        yield {"classes": f"class {word.rpartition('.')[2]}", "names": word, "name_suffixes": f"*{word}"}[kind]


def _tier(entries: Entries, section: str, older: str) -> Tier | None:
    device, path = entries[f"{section}.device"], f"{section}.nvme_path"
    if entries[older]:  # of DeepSpeed before 0.4, which still reads it
        if entries.is_given(section):
            raise entries.refused(older, f"not both it and {section.rpartition('.')[2]}", "remove it")
        return cpu(pinned=entries[f"{_ZERO}.cpu_offload_use_pin_memory"])
    if device == "none":
        return None
    if device == "cpu":
        return cpu(pinned=entries[f"{section}.pin_memory"])
    if not entries.is_given(path):
        raise entries.refused(path, "a folder of a local disk", '"nvme_path": "/local_nvme"')
    return nvme(entries[path])
