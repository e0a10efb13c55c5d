"""A whole DeepSpeed config as one value: pure, and the same on every rank that reads the same config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from zero_fn.deepspeed.entries import Entries, Outcome
from zero_fn.deepspeed.loss_scale import LossScale, loss_scale_of
from zero_fn.deepspeed.optimizers import Stock, stock_of
from zero_fn.deepspeed.rates import Warmup, warmup_of
from zero_fn.deepspeed.sharding import COMPUTED, Sharding, sharding_of
from zero_fn.errors import ConfigError

__all__ = ["Settings", "settings_of"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_OF_THE_LOOP: dict[str, type] = {
    "steps_per_print": float,
    "wall_clock_breakdown": bool,
    "memory_breakdown": bool,
    "dump_state": bool,
    "disable_python_gc": bool,
    "dataloader_drop_last": bool,
    "log_level": str,
    "managed_gradient_accumulation": bool,
    "vocabulary_size": float,
}
"""What an engine prints and collects; the training loop is yours here."""
_LOOP = "none: the loop is yours"
_ANY_OPTIMIZER: dict[str, type] = {"zero_allow_untested_optimizer": bool, "zero_force_ds_cpu_optimizer": bool}
_DISK: dict[str, type] = {
    "block_size": float,
    "queue_depth": float,
    "intra_op_parallelism": float,
    "thread_count": float,
    "single_submit": bool,
    "overlap_events": bool,
}
_OFF = {
    "torch_autocast": '"bf16": {"enabled": true}, or torch.autocast around the forward',
    "amp": '"bf16": {"enabled": true}',
    "tensorboard": "write to it in the loop",
    "wandb": "call wandb.log in the loop",
    "csv_monitor": "write to it in the loop",
    "comet": "write to it in the loop",
    "flops_profiler": "torch.utils.flop_counter.FlopCounterMode",
    "comms_logger": "zf.traffic()",
    "autotuning": "zf.autoplan",
    "hybrid_engine": "with zf.unsharded(model): model.generate(...)",
    "data_efficiency": "a sampler of yours",
    "curriculum_learning": "a sampler of yours",
    "progressive_layer_drop": "remove it: DeepSpeed has removed it, too",
    "elasticity": "remove it: DeepSpeed has removed it, too",
    "eigenvalue": "remove it: DeepSpeed has removed it, too",
    "quantize_training": "remove it: DeepSpeed has removed it, too",
    "compression_training": "remove it: DeepSpeed has removed it, too",
    "sparse_attention": "remove it: DeepSpeed has removed it, too",
    "nebula": "torch.distributed.checkpoint",
    "datastates_config": "torch.distributed.checkpoint.async_save",
    "compile": "torch.compile(setup.model)",
    "tensor_parallel": 'parallelize_module(model, mesh["tp"], plan) before',
    "expert_parallel": "place experts on their axis before (README, Experts)",
    "pipeline": "torch.distributed.pipelining (README, In a pipeline)",
    "weight_quantization": "quantize before",
    "timers": "torch.profiler",
}
"""Sections that may be there if they are off, and what does the same."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a config asks for.

    Attributes:
        micro_batch_size: Samples of a microbatch, on each rank.
        accumulation_steps: Microbatches of a step.
        compute: The dtype in flight; None is that at rest.
        reduce: The dtype of gradient sums.
        loss_scale: How losses are scaled, for float16.
        skips_overflow: Whether a step whose gradients are not finite is skipped.
        max_norm: The norm to which gradients are clipped; 0 for any.
        sharding: Which state rests where.
        stock: The optimizer; None if the config has none.
        warmup: The learning rates; None if the config has none.
        outcomes: What became of each entry, in the order in which they were read.
    """

    micro_batch_size: int
    accumulation_steps: int
    compute: torch.dtype | None
    reduce: torch.dtype
    loss_scale: LossScale | None
    skips_overflow: bool
    max_norm: float
    sharding: Sharding
    stock: Stock | None
    warmup: Warmup | None
    outcomes: tuple[Outcome, ...]


def settings_of(config: Mapping[str, object], ranks: int) -> Settings:
    """Reads a config, every entry of it.

    Args:
        config: The JSON.
        ranks: How many share a batch.

    Raises:
        ConfigError: An entry is unknown, cannot be taken, contradicts another, or asks for what is not done here; names it.
    """
    entries = Entries(config)
    micro_batch_size, accumulation_steps = _batch(entries, ranks)
    compute, loss_scale, skips_overflow = _compute(entries)
    reduce = _reduce(entries, compute)
    max_norm = _max_norm(entries)
    sharding = sharding_of(entries.section("zero_optimization"))
    stock = stock_of(entries.section("optimizer"))
    warmup = warmup_of(entries.section("scheduler"))
    _require_nothing_else(entries)
    entries.close()
    return Settings(
        micro_batch_size,
        accumulation_steps,
        compute,
        reduce,
        loss_scale,
        skips_overflow,
        max_norm,
        sharding,
        stock,
        warmup,
        tuple(entries.outcomes),
    )


def _batch(entries: Entries, ranks: int) -> tuple[int, int]:
    """Samples of a microbatch, and microbatches of a step; of three numbers two give the third."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    became = ("samples of a step, on all ranks", "setup.micro_batch_size", "setup.accumulation_steps")
    whole, micro, steps = (
        entries.integer(name, 1, became=words, least=1) if entries.is_given(name) else None
        for name, words in zip(names, became, strict=True)
    )
    if whole is None and micro is None:
        raise entries.wrong(names[1], "the samples of a microbatch, on each rank", f'"{names[1]}": 8')
    if micro is None:
        micro = (whole or 0) // (ranks * (steps or 1))
    if steps is None:
        steps = (whole or micro * ranks) // (micro * ranks) if micro else 0
    if micro * steps == 0 or (whole is not None and whole != micro * steps * ranks):
        raise ConfigError(
            "The batch sizes of a DeepSpeed config contradict one another.",
            train_batch_size=whole,
            train_micro_batch_size_per_gpu=micro or None,
            gradient_accumulation_steps=steps or None,
            ranks=ranks,
            fix=f'"{names[0]}": {max(micro, 1) * max(steps, 1) * ranks}, which is samples x microbatches x ranks',
        )
    return micro, steps


def _compute(entries: Entries) -> tuple[torch.dtype | None, LossScale | None, bool]:
    """The dtype in flight, the scale of losses, and whether steps that overflow are skipped."""
    old = entries.section("bfloat16")
    bf16 = entries.section("bf16") or old
    fp16 = entries.section("fp16")
    is_bf16 = bf16 is not None and bf16.boolean("enabled", False, became="compute= of zf.precision")
    is_fp16 = fp16 is not None and fp16.boolean("enabled", False, became="compute= of zf.precision")
    if is_bf16 and is_fp16:
        raise ConfigError(
            "A DeepSpeed config computes in two dtypes.", bf16=True, fp16=True, fix='"fp16": {"enabled": false}'
        )
    skips = is_fp16
    if bf16 is not None:
        checks = bf16.boolean("check_grad_overflow", True, became="whether setup.step() skips what is not finite")
        skips = skips or (is_bf16 and checks)
        bf16.hints({"immediate_grad_update": bool}, COMPUTED)
        for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
            bf16.only(name, False, fix="model.bfloat16() before, for parameters and states that rest in bfloat16")
        bf16.close()
    loss_scale = loss_scale_of(fp16) if fp16 is not None else None
    compute = torch.bfloat16 if is_bf16 else torch.float16 if is_fp16 else None
    return compute, loss_scale if is_fp16 else None, skips


def _reduce(entries: Entries, compute: torch.dtype | None) -> torch.dtype:
    """The dtype of gradient sums."""
    dtypes = entries.section("data_types")
    if dtypes is not None:
        names = {"grad_accum_dtype": "fp32", "param_dtype": None, "buffer_dtype": None}
        for name, only in names.items():
            if dtypes.has(name) and (only is None or dtypes.text(name, only, became="as here") != only):
                raise dtypes.wrong(
                    name, f'"{only}", or nothing' if only else "nothing", "cast the model before, or zf.precision"
                )
            if not dtypes.has(name):
                dtypes.hints({name: str}, "nothing to set")
        dtypes.hints({"keep_in_fp32_modules": str}, "nothing to set: buffers keep their dtype")
        dtypes.close()
    if not entries.has("communication_data_type"):
        entries.hints({"communication_data_type": str}, "sums of gradients in float32")
        return torch.float32
    name = entries.text("communication_data_type", "fp32", became="reduce= of zf.precision", among=tuple(_DTYPES))
    if compute is None and name != "fp32":
        raise ConfigError(
            "A DeepSpeed config sends gradients in another dtype than it computes in.",
            entry=entries.path_of("communication_data_type"),
            got=name,
            fix='"bf16": {"enabled": true}; or remove it',
        )
    return _DTYPES[name]


def _max_norm(entries: Entries) -> float:
    """The norm to which gradients are clipped, which is an outcome even where the config does not say it."""
    name, default = "gradient_clipping", 1.0
    norm = entries.number(name, default, became=lambda norm: "in setup.step()" if norm else "none", least=0)
    if not entries.is_given(name):
        entries.outcomes.append(Outcome(name, "not given", f"{default:g}, DeepSpeed's default, in setup.step()"))
    return norm


def _require_nothing_else(entries: Entries) -> None:
    """Reads what asks for nothing here, and refuses what does."""
    entries.hints(_OF_THE_LOOP, _LOOP)
    entries.hints(_ANY_OPTIMIZER, "always: any optimizer that treats every element alone")
    entries.only("gradient_allreduce_op", "mean", fix="multiply the loss by the number of ranks")
    entries.hints({"prescale_gradients": bool, "gradient_predivide_factor": float}, "nothing to set: means over ranks")
    entries.hints({"disable_allgather": bool}, COMPUTED)
    entries.only("sparse_gradients", False, fix="nn.Embedding(..., sparse=False): gradients are reduced dense")
    activations = entries.section("activation_checkpointing")
    if activations is not None:
        activations.only(
            "partition_activations", False, fix='zf.checkpoint_activations(model, partition=mesh["tp"]) before'
        )
        activations.only("cpu_checkpointing", False, fix="zf.checkpoint_activations(model, offload=zf.cpu()) before")
        plain = {"contiguous_memory_optimization": bool, "synchronize_checkpoint_boundary": bool, "profile": bool}
        activations.hints({**plain, "number_checkpoints": float}, "nothing to set")
        activations.close()
    disk = entries.section("aio")
    if disk is not None:
        disk.hints(_DISK, "nothing to set: io_uring, or threads where the kernel has none")
        disk.only("use_gds", False, fix="remove it: what a disk reads goes through memory of the host")
        disk.close()
    checkpoint = entries.section("checkpoint")
    if checkpoint is not None:
        checkpoint.only("load_universal", False, fix="torch.distributed.checkpoint loads any mesh and stage")
        checkpoint.hints({"tag_validation": str, "use_node_local_storage": bool}, "none: torch.distributed.checkpoint")
        checkpoint.off("parallel_write", fix="torch.distributed.checkpoint writes from every rank")
        checkpoint.close()
    for name, fix in _OFF.items():
        entries.off(name, fix=fix)
