"""A DeepSpeed config beside the arguments of a Trainer:
the arguments fill in its `"auto"`, and may not contradict it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

import zero_fn as zf
from zero_fn.deepspeed.auto import ARGUMENTS, BATCHES, left_to, values_of
from zero_fn.deepspeed.entries import leaves_of, shown
from zero_fn.deepspeed.settings import Settings
from zero_fn.deepspeed.setup import agreed_settings

__all__ = ["settings_for"]


def settings_for(config: Any, args: Any, mesh: DeviceMesh, steps: int) -> Settings:
    """Reads a config as the Trainer of transformers does: its TrainingArguments replace `"auto"`.

    A config may also lack sizes of batches, and `bf16.enabled` or `fp16.enabled` where the argument
    is true or `accelerate launch --mixed_precision` says so, as under accelerate. `steps` are those
    of the training; 0 if the number is not known yet: entries of the scheduler are then not
    checked. Communicates 16 bytes per rank, to find out whether all ranks have the same config.
    """
    return agreed_settings(config, partial(_auto_of, args, mesh.size(), steps), mesh)


def _auto_of(
    args: Any, ranks: int, steps: int, config: Mapping[str, object]
) -> Mapping[str, object]:
    """The values of the arguments for the entries that a config leaves to them;
    other entries have to say the same."""
    arguments = {
        **{name: getattr(args, name, None) for name in ARGUMENTS.values()},
        "bf16": args.mixed_precision == "bf16" or args.bf16_full_eval,
        "fp16": args.mixed_precision == "fp16" or args.fp16_full_eval,
        "adam_beta1, adam_beta2": [args.adam_beta1, args.adam_beta2],
        "warmup_steps": max(1, args.get_warmup_steps(steps)),
        "the steps of the training": max(1, steps),
    }
    values = values_of(arguments, config, ranks)
    said = {path: value for path, value in leaves_of(config) if value is not None}
    others = [
        f"{path} = {shown(said[path])}, and {argument} is {shown(values[path])}"
        for path, argument in ARGUMENTS.items()
        if said.get(path, "auto") not in ("auto", values[path])
        if steps or not path.endswith("_num_steps")
    ]
    if others:
        raise zf.errors.ConfigError(
            "A DeepSpeed config contradicts the arguments of its Trainer.",
            **{str(number): line for number, line in enumerate(others, 1)},
            fix='the same value in both; or "auto" in the config',
        )
    return left_to(values, config, {*BATCHES, f"{args.mixed_precision}.enabled"})
