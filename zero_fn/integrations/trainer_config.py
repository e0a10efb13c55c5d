"""A DeepSpeed config beside the arguments of a Trainer:
the arguments fill in its `"auto"`, and may not contradict it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

import zero_fn as zf
from zero_fn.deepspeed.entries import leaves_of, left_to, shown
from zero_fn.deepspeed.settings import Settings
from zero_fn.deepspeed.setup import agreed_settings

__all__ = ["settings_for", "values_of"]

_BATCHES = {
    "train_batch_size": "per_device_train_batch_size x gradient_accumulation_steps x ranks",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}
"""Entries that a config may leave out or set to `"auto"`, with the arguments that then decide.

So it may `bf16.enabled` and `fp16.enabled`, where the argument is true or
`accelerate launch --mixed_precision` says so, as under accelerate.
"""

_OTHERS = {
    "gradient_clipping": "max_grad_norm",
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "adam_beta1, adam_beta2",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_min_lr": "",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "the steps of the training",
}
"""Entries that a config may set to `"auto"`, with the arguments that then decide;
the least learning rate has none."""


def settings_for(config: Any, args: Any, mesh: DeviceMesh, steps: int) -> Settings:
    """Reads a config as the Trainer of transformers does: its TrainingArguments replace `"auto"`.

    `steps` are those of the training; 0 if the number is not known yet: entries of the scheduler
    are then not checked. Communicates 16 bytes per rank, to find out whether all ranks have the
    same config.
    """
    return agreed_settings(config, partial(_auto_of, args, mesh.size(), steps), mesh)


def _auto_of(
    args: Any, ranks: int, steps: int, config: Mapping[str, object]
) -> Mapping[str, object]:
    """The values of the arguments for the entries that a config leaves to them;
    other entries have to say the same."""
    values = values_of(args, ranks, steps)
    said = {path: value for path, value in leaves_of(config) if value is not None}
    others = [
        f"{path} = {shown(said[path])}, and {argument} is {shown(values[path])}"
        for path, argument in (_BATCHES | _OTHERS).items()
        if argument and said.get(path, "auto") not in ("auto", values[path])
        if steps or not path.endswith("_num_steps")
    ]
    if others:
        raise zf.errors.ConfigError(
            "A DeepSpeed config contradicts the arguments of its Trainer.",
            **{str(number): line for number, line in enumerate(others, 1)},
            fix='the same value in both; or "auto" in the config',
        )
    return left_to(values, config, {*_BATCHES, f"{args.mixed_precision}.enabled"})


def values_of(args: Any, ranks: int, steps: int) -> Mapping[str, Any]:
    """The values of a Trainer's arguments, by the path of the config entry that means the same."""
    micro, microbatches = args.per_device_train_batch_size, args.gradient_accumulation_steps
    return {
        "train_batch_size": micro * microbatches * ranks,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": microbatches,
        "gradient_clipping": args.max_grad_norm,
        "bf16.enabled": args.mixed_precision == "bf16" or args.bf16_full_eval,
        "fp16.enabled": args.mixed_precision == "fp16" or args.fp16_full_eval,
        "optimizer.params.lr": args.learning_rate,
        "optimizer.params.betas": [args.adam_beta1, args.adam_beta2],
        "optimizer.params.eps": args.adam_epsilon,
        "optimizer.params.weight_decay": args.weight_decay,
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_max_lr": args.learning_rate,
        "scheduler.params.warmup_num_steps": max(1, args.get_warmup_steps(steps)),
        "scheduler.params.total_num_steps": max(1, steps),
    }
