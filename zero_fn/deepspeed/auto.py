"""What stands for `"auto"` in a DeepSpeed config: what a program says, under the names that
TrainingArguments have for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from zero_fn.deepspeed.entries import leaves_of

__all__ = ["ARGUMENTS", "BATCHES", "DEFAULTS", "left_to", "values_of"]

BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

ARGUMENTS: Mapping[str, str] = {
    BATCHES[0]: "per_device_train_batch_size x gradient_accumulation_steps x ranks",
    BATCHES[1]: "per_device_train_batch_size",
    BATCHES[2]: "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "adam_beta1, adam_beta2",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "the steps of the training",
}
"""Entries that may be `"auto"`, with the arguments that then decide."""

DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_grad_norm": 1.0,
    "bf16": True,
    "fp16": False,
    "learning_rate": 5e-5,
    "adam_beta1, adam_beta2": [0.9, 0.999],
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
    "warmup_steps": 0,
    "the steps of the training": 1000,
}
"""The defaults of TrainingArguments, in bfloat16, for 1000 steps."""


def values_of(
    said: Mapping[str, Any], config: Mapping[str, object], ranks: int | None = None
) -> dict[str, Any]:
    """The values of a program's arguments, by the paths of entries; None where it has none.

    `ranks` are those that have batches of their own; without them the size of the whole batch
    follows from other entries.
    """
    values = {path: said.get(argument) for path, argument in ARGUMENTS.items()}
    own: Mapping[str, Any] = dict(leaves_of(config))
    micro, steps = (
        own[path] if isinstance(own.get(path), int) else values[path] for path in BATCHES[1:]
    )
    if ranks is not None and micro is not None and steps is not None:
        values[BATCHES[0]] = micro * steps * ranks
    return {**values, "scheduler.params.warmup_min_lr": 0}


def left_to(
    values: Mapping[str, object], config: Mapping[str, object], may_lack: Collection[str] = ()
) -> dict[str, object]:
    """Of a program's values, those that a config leaves to it:
    `"auto"`, or missing if it may be."""
    said = {path: value for path, value in leaves_of(config) if value is not None}
    return {
        path: value
        for path, value in values.items()
        if value is not None and said.get(path, "auto" if path in may_lack else None) == "auto"
    }
