"""The section `zero_optimization`: which state rests where.

[Note: what schedules itself] Sizes of buckets, distances of reuse and prefetching are computed here from the units of the
model, so entries that set them have nothing to set. They are read, checked, and said to be so.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from zero_fn.deepspeed.entries import Entries
from zero_fn.errors import ConfigError
from zero_fn.tiers import IN_MEMORY, Tier, Tiers, cpu, nvme

__all__ = ["COMPUTED", "Sharding", "sharding_of"]

COMPUTED = "nothing to set: computed from the units of the model"

_THRESHOLD = "stage3_param_persistence_threshold"
_TRANSFORMS = ("zf.replicate", "zf.shard_optimizer", "zf.shard_grads", "zf.shard_params")
_HINTS: dict[str, type] = {
    "contiguous_gradients": bool,
    "reduce_scatter": bool,
    "reduce_bucket_size": float,
    "use_multi_rank_bucket_allreduce": bool,
    "allgather_partitions": bool,
    "allgather_bucket_size": float,
    "overlap_comm": bool,
    "compute_grad_norm": bool,
    "load_from_fp32_weights": bool,
    "sub_group_size": float,
    "stage3_prefetch_bucket_size": float,
    "stage3_max_live_parameters": float,
    "stage3_max_reuse_distance": float,
    "stage3_module_granularity_threshold": float,
    "stage3_use_all_reduce_for_fetch_params": bool,
    "stage3_allgather_sequential": bool,
    "round_robin_gradients": bool,
    "parameter_alignment": bool,
    "legacy_stage1": bool,
    "memory_efficient_linear": bool,
    "override_module_apply": bool,
    "log_trace_cache_warnings": bool,
    "enable_sanity_checks": bool,
    "pipeline_loading_checkpoint": bool,
    "save_muon_momentum_buffer_in_memory": bool,
}
_SAVING: dict[str, type] = {
    "stage3_gather_16bit_weights_on_model_save": bool,
    "stage3_gather_fp16_weights_on_model_save": bool,
    "elastic_checkpoint": bool,
}
_BUFFERS: dict[str, type] = {
    "buffer_count": float,
    "buffer_size": float,
    "pipeline_read": bool,
    "pipeline_write": bool,
    "fast_init": bool,
}
_NOT_DONE: dict[str, tuple[bool | float, str]] = {
    "ignore_unused_parameters": (True, "remove it: a parameter that no rank used keeps its gradient None"),
    "zero_quantized_weights": (False, "remove it: nothing travels quantized here; bf16 halves what float32 sends"),
    "zero_quantized_gradients": (False, "remove it: nothing travels quantized here; bf16 halves what float32 sends"),
    "zero_quantized_nontrainable_weights": (False, "quantize the frozen weights before: they are sharded as they are"),
    "mics_shard_size": (-1, "zf.hybrid(model, mesh) over two axes of a mesh"),
    "mics_hierarchical_params_gather": (False, "zf.hybrid(model, mesh) over two axes of a mesh"),
    "cpu_offload": (False, '"offload_optimizer": {"device": "cpu"}'),
    "cpu_offload_param": (False, '"offload_param": {"device": "cpu"}'),
    "cpu_offload_use_pin_memory": (False, '"offload_optimizer": {"device": "cpu", "pin_memory": true}'),
    "stage3_model_persistence_threshold": (sys.maxsize, "remove it, and lower stage3_param_persistence_threshold"),
}
"""Entries with the one value that asks for nothing, and what to do in place of others."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """What the section asks for.

    Attributes:
        stage: 0 to 3; 0 is replicas.
        secondary: Ranks that share a second shard for the gathers of backward (hpZ of ZeRO++); 1 for none.
        persist_numel: Parameters of at most so many elements stay replicated.
        tiers: Where parameters, gradients and states rest.
    """

    stage: int = 0
    secondary: int = 1
    persist_numel: int = 0
    tiers: Tiers = IN_MEMORY


def sharding_of(section: Entries | None) -> Sharding:
    """Reads the section.

    Raises:
        ConfigError: An entry cannot be taken, or asks for what is not done here.
    """
    if section is None:
        return Sharding()
    stage = section.integer("stage", 0, became=lambda stage: _TRANSFORMS[stage], most=3)
    states, fraction = _states(section.section("offload_optimizer"), stage)
    params = _params(section.section("offload_param"), stage)
    secondary = section.integer(
        "zero_hpz_partition_size",
        1,
        became=lambda n: "no second shards" if n == 1 else "second shards over the inner axis of the mesh",
        least=1,
    )
    if secondary > 1 and stage != 3:
        raise section.wrong("zero_hpz_partition_size", "1 below stage 3", '"stage": 3')
    persist_numel = 0
    if section.has(_THRESHOLD):
        became = "persist_below= of zf.shard_params" if stage == 3 else "nothing to set below stage 3"
        persist_numel = section.integer(_THRESHOLD, 0, became=became)
    else:
        section.hints({_THRESHOLD: float}, "none: every parameter is sharded")
    section.hints(_HINTS, COMPUTED)
    section.hints(_SAVING, "none: save with torch.distributed.checkpoint, whole tensors with get_model_state_dict")
    for name, (value, fix) in _NOT_DONE.items():
        section.only(name, value, fix=fix)
    section.off("zenflow", fix="remove it: every gradient is used in the step it is computed for")
    section.off("zeropp_loco_param", fix="remove it: nothing travels quantized here")
    section.off("leaf_module", fix="say what is gathered together: zf.from_deepspeed(..., units=MixtralSparseMoeBlock)")
    section.close()
    # Parameters in a tier are stepped on the host; so are their states, if nothing was said of these.
    optim = states or (cpu() if params is not None else None)
    tiers = Tiers(params, states, optim, fraction)
    return Sharding(stage, secondary, persist_numel if stage == 3 else 0, tiers)


def _states(section: Entries | None, stage: int) -> tuple[Tier | None, float]:
    if section is None:
        return None, 1.0
    tier = _tier(section, "optimizer states and gradients")
    fraction = section.number("ratio", 1.0, became="fraction= of zf.offload", least=0, most=1)
    section.only("super_offload", False, fix="remove it: zf.offload needs no other mode on such machines")
    section.hints({"cpuadam_cores_perc": float}, "nothing to set: the step has the threads of torch")
    section.close()
    if tier is not None and stage == 0:
        raise ConfigError(
            "A DeepSpeed config offloads the states of replicas.", entry=section.path, got="stage 0", fix='"stage": 2'
        )
    return (tier, fraction) if fraction > 0 else (None, 1.0)


def _params(section: Entries | None, stage: int) -> Tier | None:
    if section is None:
        return None
    tier = _tier(section, "parameters")
    section.hints({"max_in_cpu": float}, "none: parameters on a disk are read from it, ahead of their unit")
    section.close()
    if tier is not None and stage != 3:
        raise ConfigError(
            "A DeepSpeed config offloads parameters below stage 3.",
            entry=section.path,
            got=f"stage {stage}",
            why="DeepSpeed does it at stage 3 only",
            fix='"stage": 3; or leave it out, and call zf.offload(model, params=tier), at any stage',
        )
    return tier


def _tier(section: Entries, what: str) -> Tier | None:
    device = section.text(
        "device",
        "none",
        became=lambda device: "on the device" if device == "none" else f"{what} in zf.{device}()",
        among=("none", "cpu", "nvme"),
    )
    path = ""
    if device != "nvme":
        section.hints({"nvme_path": str}, "not used")
    elif section.has("nvme_path"):
        path = section.text("nvme_path", "/local_nvme", became="of zf.nvme")
    else:
        raise section.wrong("nvme_path", "a folder of a local disk", '"nvme_path": "/local_nvme"')
    pinned = section.boolean("pin_memory", True, became="pinned= of zf.cpu" if device == "cpu" else "not used")
    section.hints(_BUFFERS, "nothing to set: buffers are as large as what passes through them")
    return nvme(path) if device == "nvme" else cpu(pinned=pinned) if device == "cpu" else None
