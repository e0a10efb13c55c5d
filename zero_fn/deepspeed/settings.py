"""A whole DeepSpeed config as one value, which is the same on every
rank that reads the same config."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from zero_fn.deepspeed.entries import Entries, RefusedEntry, TakenEntry, filled
from zero_fn.deepspeed.keys import KEYS
from zero_fn.deepspeed.loss_scale import Scaler, scaler_of
from zero_fn.deepspeed.optimizers import Stock, stock_of
from zero_fn.deepspeed.precision import COMPUTING, TENSOR, Computing
from zero_fn.deepspeed.reporter import Reporting, reporting_of
from zero_fn.deepspeed.schedulers import Rates, rates_of
from zero_fn.values.tiers import IN_MEMORY, Tier, Tiers, cpu, nvme
from zero_fn.values.wire import Wire, int4, int8

__all__ = ["Cuts", "Settings", "Sharding", "settings_of"]

_ZERO, _CLIPPING = "zero_optimization", "gradient_clipping"
_CUTS = {
    **dict.fromkeys(TENSOR, "tensor"),
    "sequence_parallel_size": "sequence",
    "pipeline_parallel.pp_size": "stages",
}
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
    # Ranks over which a second copy of the parameters is sharded (hpZ of ZeRO++); 1: none.
    secondary: int = 1
    persist_numel: int = 0  # parameters of at most so many elements stay whole
    persist_most: int = 0  # elements of all of them
    # Classes, names and ends of names of modules that are gathered as wholes.
    leaves: tuple[str, ...] = ()
    tiers: Tiers = IN_MEMORY
    # Formats in which all parameters travel; frozen ones alone; gradients.
    gather: Wire | None = None
    gather_frozen: Wire | None = None
    scatter: Wire | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """What a config asks for."""

    micro_batch_size: int  # samples, on each rank
    accumulation_steps: int  # microbatches of a step
    computing: Computing
    # Makes a scaler for a type of device; None unless float16 is computed.
    scaler: Callable[[str], Scaler] | None
    skips_overflow: bool  # whether a step is skipped if its gradients are not finite
    max_norm: float  # to which gradients are clipped; 0: not clipped
    sums: bool  # whether gradients are summed over ranks, and not averaged
    sharding: Sharding
    cuts: Cuts
    # Makes the optimizer from a model; None, as for the scheduler: the config has none.
    stock: Stock | None
    scheduler: Callable[[Optimizer], Rates] | None
    reporting: Reporting | None  # what is printed and logged
    in_background: bool  # whether checkpoints are written in the background
    outcomes: tuple[TakenEntry, ...]  # of each entry, in the order of the config

    def loss_factor(self, mesh: DeviceMesh) -> int:
        """What a loss is multiplied with, where ranks average gradients that DeepSpeed adds up:
        over these ranks, that have batches of their own, and over parts of sequences."""
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

    `auto` has values for its `"auto"`. `others` are the sizes of other axes that there are beside
    these ranks: "tensor", "sequence" and "stages"; over what is not there, the ranks are divided
    (with None they may not be). Without `makes` the section `optimizer` is not followed.

    Raises:
        ConfigError: Entries are unknown, have wrong values, contradict others,
            or ask for what is not done here. Lists all.
    """
    entries = Entries(filled(config, auto or {}))
    parts: dict[str, Callable[[Entries], Any]] = {
        "cuts": partial(_cuts, ranks=ranks, others=others),
        "batch_sizes": partial(_batch_sizes, ranks=ranks, others=others or {}),
        **COMPUTING,
        "scaler": scaler_of,
        "skips_overflow": _skips_overflow,
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
    default = TakenEntry(
        _CLIPPING, "not given", f"{entries[_CLIPPING]:g}, DeepSpeed's default, in setup.step()"
    )
    found["outcomes"] = (*entries.outcomes, *([] if entries.is_given(_CLIPPING) else [default]))
    found["computing"] = Computing(**{name: found.pop(name) for name in COMPUTING})
    micro_batch_size, accumulation_steps = found.pop("batch_sizes")
    return Settings(micro_batch_size, accumulation_steps, **found)


def _batch_sizes(entries: Entries, ranks: int, others: Mapping[str, int]) -> tuple[int, int]:
    """Samples of a microbatch, and microbatches of a step.

    Of the three numbers in the config, two give the third.
    """
    cuts = _cuts(entries, ranks, others)
    ranks //= cuts.sequence * (1 if "tensor" in others else cuts.tensor)
    if entries["data_parallel_size"] not in (None, ranks):
        raise entries.refused(
            "data_parallel_size", f"{ranks}, the ranks with batches of their own", "remove it"
        )
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole, micro, steps = given = tuple(entries[name] for name in names)
    left = [name for name in names[1:] if entries.is_auto(name)]
    if left and given.count(None) > 1:
        entries.autos.extend(left)
        raise RefusedEntry(left[0])
    if whole is None and micro is None:
        raise entries.refused(
            names[1], "the samples of a microbatch, on each rank", f'"{names[1]}": 8'
        )
    if micro is None:
        micro = whole // (ranks * (steps or 1))
    if steps is None:
        steps = (whole or micro * ranks) // (micro * ranks) if micro else 0
    if micro * steps == 0 or (whole is not None and whole != micro * steps * ranks):
        micro, steps = max(micro, 1), max(steps, 1)
        wants = (
            f"train_micro_batch_size_per_gpu {micro} x "
            f"gradient_accumulation_steps {steps} x {ranks} ranks"
        )
        raise entries.refused(names[0], wants, f'"{names[0]}": {micro * steps * ranks}')
    return micro, steps


def _skips_overflow(entries: Entries) -> bool:
    return bool(
        entries["fp16.enabled"] or (entries["bf16.enabled"] and entries["bf16.check_grad_overflow"])
    )


def _cuts(entries: Entries, ranks: int, others: Mapping[str, int] | None) -> Cuts:
    """The sizes of other kinds of parallelism, against the axes that there are."""
    asked = {path: kind for path, kind in _CUTS.items() if entries[path] not in (0, 1)}
    found: dict[str, int] = {}
    for path, kind in asked.items():
        size, there = entries[path], (others or {}).get(kind)
        entries.refuse_if(
            path,
            (
                others is None,
                "1: here each rank has batches of its own",
                "zf.from_deepspeed(model, config, mesh) and a loop of your own; or remove it",
            ),
            (
                kind == "sequence" and there is not None,
                "one axis of all ranks that hold parameters together",
                'mesh["dp", "sp"]._flatten()',
            ),
            (
                there not in (None, size),
                f"{there}, the ranks of that axis",
                "that number, or remove it",
            ),
            (
                kind == "stages" and there is None,
                "a part of the model, and the axis of the parts",
                'zf.from_deepspeed(part, config, mesh["dp"], '
                'pipeline=mesh["pp"]) (docs/guides/pipelines.md)',
            ),
            (
                there is None and ranks % size,
                f"a divisor of {ranks} ranks",
                "such a divisor, or other ranks",
            ),
            (
                found.setdefault(kind, size) != size,
                f"{found[kind]}, as another entry of it",
                "remove one of the two",
            ),
        )
    for path, switch in _EXPERTS.items():
        if entries[path] > 1 and (switch is None or entries[switch]):
            asked[path], size = "experts", entries[path]
            entries.refuse_if(
                path,
                (
                    found.setdefault("experts", size) != size,
                    f"{found['experts']}, as another entry of it",
                    "remove one of the two",
                ),
                (
                    entries[f"{_ZERO}.zero_hpz_partition_size"] > 1,
                    "no second partition beside it",
                    '"zero_hpz_partition_size": 1',
                ),
            )
    for name in entries.given_under("expert_parallel"):
        path = f"expert_parallel.{name}"
        entries.refuse_if(
            path,
            (
                path not in KEYS and entries["expert_parallel.enabled"],
                "no options of routing",
                "remove it: the layer of the model routes (docs/guides/experts.md)",
            ),
        )
    return Cuts(**{kind: entries[path] for path, kind in asked.items()})


def _sharding(entries: Entries) -> Sharding:
    """The section `zero_optimization`."""
    stage, secondary = entries[f"{_ZERO}.stage"], entries[f"{_ZERO}.zero_hpz_partition_size"]
    states = _tier(entries, f"{_ZERO}.offload_optimizer", f"{_ZERO}.cpu_offload")
    params = _tier(entries, f"{_ZERO}.offload_param", f"{_ZERO}.cpu_offload_param")
    fraction = entries[f"{_ZERO}.offload_optimizer.ratio"]
    gather, frozen = (
        entries[f"{_ZERO}.zero_quantized_{name}weights"] for name in ("", "nontrainable_")
    )
    for name, is_wrong, wants, least in (
        ("zero_hpz_partition_size", secondary > 1 and stage != 3, "1 below stage 3", 3),
        (
            "offload_optimizer.device",
            states is not None and stage == 0,
            "none: at stage 0 these are states of replicas",
            2,
        ),
        ("zero_quantized_weights", gather and stage == 0, "false: no weights are sent", 3),
    ):
        entries.refuse_if(f"{_ZERO}.{name}", (is_wrong, wants, f'"stage": {least}'))
    if states is None or fraction == 0:
        states, fraction = None, 1.0
    # Parameters in a tier are stepped on the host, so their states rest there too,
    # unless the config says otherwise.
    optim = states or (cpu() if params is not None else None)
    grads = states if entries[f"{_ZERO}.offload_optimizer.gradients"] else None
    return Sharding(
        stage,
        secondary,
        entries[f"{_ZERO}.stage3_param_persistence_threshold"] if stage == 3 else 0,
        entries[f"{_ZERO}.stage3_model_persistence_threshold"],
        tuple(_leaves(entries)),
        Tiers(params, grads, optim, fraction),
        gather=int8() if gather else None,
        gather_frozen=int8() if frozen and not gather else None,
        scatter=int4() if entries[f"{_ZERO}.zero_quantized_gradients"] else None,
    )


def _leaves(entries: Entries) -> Iterator[str]:
    """Modules that are wholes, as `units=` names them: a class by its last name,
    an end of a name by a pattern."""
    section = f"{_ZERO}.leaf_module"
    yield from (f"class {word.rpartition('.')[2]}" for word in entries.words(f"{section}.classes"))
    yield from entries.words(f"{section}.names")
    yield from (f"*{word}" for word in entries.words(f"{section}.name_suffixes"))


def _tier(entries: Entries, section: str, older: str) -> Tier | None:
    device, path = entries[f"{section}.device"], f"{section}.nvme_path"
    if entries[older]:  # of DeepSpeed before 0.4, which still reads it
        if entries.is_given(section):
            raise entries.refused(
                older, f"not both it and {section.rpartition('.')[2]}", "remove it"
            )
        return cpu(pinned=entries[f"{_ZERO}.cpu_offload_use_pin_memory"])
    if device == "none":
        return None
    if device == "cpu":
        return cpu(pinned=entries[f"{section}.pin_memory"])
    if not entries.is_given(path):
        raise entries.refused(path, "a folder of a local disk", '"nvme_path": "/local_nvme"')
    return nvme(entries[path])
