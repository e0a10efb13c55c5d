"""Configs as people have them are taken as they are, with the arguments of a Trainer beside them; and train.

`public_configs.json` has the shapes of those that libraries around transformers ship, as of August 2026:

transformers   tests/units/deepspeed, and the documentation
accelerate     examples/deepspeed_config_templates, tests/units/deepspeed, an example of long sequences
trl            accelerate_configs, as the dict that accelerate's DeepSpeedPlugin makes of the YAML
axolotl        deepspeed_configs
LLaMA-Factory  examples/deepspeed
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_fn as zf
from tests.support.groups import alone
from tests.support.ranks import Ranks, axis
from tests.units.deepspeed.test_setup import built, loss_of
from zero_fn.integrations.trainer_config import settings_for, values_of

PUBLIC: dict[str, Any] = json.loads(Path(__file__).with_name("public_configs.json").read_text())
_REFUSED = "LLaMA-Factory z2, tensor parallel"


class Arguments:
    """What the arguments of a Trainer say, on two ranks."""

    per_device_train_batch_size, gradient_accumulation_steps, max_grad_norm = 2, 1, 1.0
    learning_rate, weight_decay, adam_beta1, adam_beta2, adam_epsilon = 3e-5, 3e-7, 0.8, 0.999, 1e-8
    fp16_full_eval = bf16_full_eval = False
    mixed_precision = "no"  # of bf16, fp16 and the launcher

    @staticmethod
    def get_warmup_steps(steps: int) -> int:
        """A tenth of the training."""
        return steps // 10


def _arguments(config: dict[str, Any]) -> Any:
    """Those that a user of the config gives: with the dtype that it asks for."""

    class Own(Arguments):
        mixed_precision = next((name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled") is True), "no")

    if config.get("scheduler", {}).get("params", {}).get("warmup_num_steps") == 500:
        Own.get_warmup_steps = staticmethod(lambda steps: 500)  # type: ignore[method-assign]
    return Own


def _autos(config: dict[str, Any], values: Any, path: str = "") -> dict[str, Any]:
    found = {}
    for name, value in config.items():
        if isinstance(value, dict):
            found |= _autos(value, values, f"{path}{name}.")
        elif value == "auto" and f"{path}{name}" in values:
            found[f"{path}{name}"] = values[f"{path}{name}"]
    return found


def _trained() -> list[str]:
    """Each config, read as a Trainer reads it and by `from_deepspeed`; one step of a small model."""
    found = []
    for name, config in PUBLIC.items():
        if name == _REFUSED:
            continue
        args = _arguments(config)
        settings = settings_for(config, args, axis(), 100)
        assert settings.micro_batch_size == 2
        auto = {"train_micro_batch_size_per_gpu": 2, **_autos(config, values_of(args, 2, 100))}
        setup = zf.from_deepspeed(
            built(), config, axis(), auto=auto, optimizer=None if "optimizer" in config else _adamw
        )
        before = next(setup.model.parameters()).full_tensor().clone()  # type: ignore[operator]
        setup.optimizer.param_groups[0]["lr"] = 0.1
        setup.scaled(loss_of(setup.model, 0, 0)).backward()
        assert setup.step() is not None, name
        assert not torch.equal(next(setup.model.parameters()).full_tensor(), before), name  # type: ignore[operator]
        found.append(name)
    return found


def _adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def test_32_of_33_public_configs_are_taken_as_they_are(ranks: Ranks) -> None:
    assert len(PUBLIC) == 33
    for found in ranks(2).run(_trained):
        assert len(found) == 32


def test_the_other_one_asks_for_tensor_parallelism_and_is_told_so_alone() -> None:
    with alone() as mesh, pytest.raises(zf.ConfigError, match=r"entry +: tensor_parallel(.|\n)*parallelize_module"):
        settings_for(PUBLIC[_REFUSED], Arguments, mesh["dp"], 100)


def _contradicted(**changes: Any) -> tuple[str, ...]:
    config = {**PUBLIC["accelerate stage 2"], **changes}

    class Fp16(Arguments):
        mixed_precision = "fp16"

    with alone() as mesh, pytest.raises(zf.ConfigError) as caught:
        settings_for(config, Fp16, mesh["dp"], 100)
    return tuple(str(line) for line in caught.value.facts.values())


def test_values_that_contradict_the_arguments_are_named_with_both() -> None:
    assert _contradicted(gradient_clipping=0.5, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=2) == (
        "train_micro_batch_size_per_gpu = 4, and per_device_train_batch_size is 2",
        "gradient_accumulation_steps = 2, and gradient_accumulation_steps is 1",
        "gradient_clipping = 0.5, and max_grad_norm is 1.0",
    )
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.8, 0.999]}}
    assert _contradicted(optimizer=optimizer, fp16={"enabled": False}) == (
        "fp16.enabled = false, and fp16 is true",
        "optimizer.params.lr = 0.001, and learning_rate is 3e-05",
    )
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": 7, "warmup_num_steps": 3}}
    assert _contradicted(scheduler=scheduler) == (
        "scheduler.params.warmup_num_steps = 3, and warmup_steps is 10",
        "scheduler.params.total_num_steps = 7, and the steps of the training is 100",
    )
