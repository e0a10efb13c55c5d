"""A DeepSpeed config in a ZeroTrainer: what it says beside the arguments, the numbers of replicas, runs that go on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import zero_fn as zf
from tests.outside.integrations.worlds import (
    OWN,
    Counting,
    Overflowing,
    arguments,
    configured,
    llama,
    lora,
    needs,
    numbers,
    on_two_ranks,
    place,
    require_close,
    start,
    zero,
)


@on_two_ranks
def test_a_config_trains_to_the_numbers_of_replicas(folder: str) -> None:
    from transformers import Trainer

    start()
    wanted = numbers(Trainer(model=llama(), args=arguments(folder), train_dataset=Counting()))
    host, disk = {"device": "cpu"}, {"device": "nvme", "nvme_path": folder}
    for config in (zero(1), zero(2, offload_optimizer=host), zero(3, offload_optimizer=disk, offload_param=disk)):
        ours = configured(folder, config)
        require_close(numbers(ours), wanted)
        assert zf.is_transformed(ours.model)
        assert ours.settings.micro_batch_size == 2
    microbatches = {"gradient_accumulation_steps": 2, "max_steps": 2}
    wanted = numbers(Trainer(model=llama(), args=arguments(folder, **microbatches), train_dataset=Counting()))
    require_close(numbers(configured(folder, zero(3), **microbatches)), wanted)


@on_two_ranks
def test_stages_2_and_3_of_a_config_hold_no_whole_gradients_between_microbatches(folder: str) -> None:
    """And what a rank holds of gradients between two microbatches."""
    from transformers import TrainerCallback

    class Holding(TrainerCallback):  # type: ignore[misc]
        def on_substep_end(self, *_: Any, model: nn.Module, **__: Any) -> None:
            held.append(zf.held(model).gradients)

    for stage, times in ((1, 1), (2, 3), (3, 3)):
        calls = []
        for microbatches in (1, 3):
            held: list[int] = []
            ours = configured(folder, zero(stage), gradient_accumulation_steps=microbatches, max_steps=1)
            ours.add_callback(Holding())
            with zf.traffic() as sent:
                ours.train()
            calls.append(sent.calls["reduce-scatter"])
            shards = zf.plan(ours.model).held.gradients
            assert len(held) == microbatches - 1
            assert stage == 1 or all(nbytes < 1.2 * shards for nbytes in held), (held, shards)
        assert calls[0] > 0
        assert calls[1] == times * calls[0], (stage, calls)


@on_two_ranks
def test_a_config_brings_its_optimizer_rates_and_masters(folder: str) -> None:
    """Optimizer and scheduler of the config, on weights of 16 bits; resumed to the bit, on a disk too."""
    options = {"save_strategy": "steps", "save_steps": 2, "bf16": True, "warmup_steps": 2, "max_steps": 5}
    disk = {"device": "nvme", "nvme_path": folder}
    narrow = {"stage3_gather_16bit_weights_on_model_save": True}  # see below: the run goes on from float32 all the same
    for config in ({**zero(2), **OWN}, {**zero(3, offload_optimizer=disk, **narrow), **OWN}):
        ours = configured(folder, config, llama().bfloat16(), **options)
        wanted = numbers(ours)
        rates = [value for name, value in wanted if name == "learning_rate"]
        assert rates == pytest.approx([0.0, 0.0, 0.01, 0.01, 0.01 * 2 / 3]), "DeepSpeed's, logged after a step"
        assert all(parameter.dtype == torch.float32 for parameter in ours.model.parameters())
        assert type(ours.optimizer.optimizer) is (zf.Streamed if ours._finish else torch.optim.AdamW)
        again = configured(folder, config, llama().bfloat16(), **options)
        assert numbers(again, resume_from_checkpoint=f"{folder}/checkpoint-2") == wanted


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@on_two_ranks
def test_a_step_that_overflows_is_skipped(folder: str, dtype: str) -> None:
    """A step that overflows on one rank is skipped on both, and moves no rate."""
    options = {dtype: True, "max_steps": 3, "save_strategy": "steps", "save_steps": 1, "warmup_steps": 0}
    options["remove_unused_columns"] = False
    config = {**zero(2), "gradient_clipping": 0.5}
    ours = configured(folder, config, Overflowing(llama(), 2, 1), **options)
    values: list[list[torch.Tensor]] = []
    own = ours.training_step

    def seen(*args: Any) -> Any:
        values.append([parameter.full_tensor() for parameter in ours.model.parameters()])
        return own(*args)

    ours.training_step = seen
    ours.train()
    first, second, third = values
    assert not all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(second, third, strict=True))
    assert ours.lr_scheduler.last_epoch == 2
    assert ours.skipped_steps == 1
    again = configured(folder, config, Overflowing(llama(), 9, 1), **options)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    assert again.skipped_steps == 1, "it is not counted anew"
    assert (ours.accelerator.scaler is not None) == (dtype == "fp16")
    if dtype == "fp16":
        assert ours.accelerator.scaler.get_scale() == 128.0
        assert Path(folder, "checkpoint-3", "scaler.pt").is_file()


def _in_files(folder: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: value for path in Path(folder).glob("*.safetensors") for name, value in load_file(path).items()}


@pytest.mark.parametrize(
    ("entry", "dtype", "is_asked", "build"),
    [
        ("stage3_gather_16bit_weights_on_model_save", "bf16", True, llama),
        pytest.param("stage3_gather_fp16_weights_on_model_save", "fp16", True, lora, marks=needs("peft")),
        ("gather_16bit_weights_on_model_save", None, True, llama),
        ("stage3_gather_16bit_weights_on_model_save", "bf16", False, llama),
    ],
    ids=["bf16", "fp16 and adapters", "float32", "not asked for"],
)
@on_two_ranks
def test_a_config_saves_in_16_bits_if_it_computes_in_them_and_says_so(
    folder: str, entry: str, dtype: str | None, is_asked: bool, build: Callable[[], nn.Module]
) -> None:
    options = {dtype: True} if dtype else {}
    ours = configured(folder, zero(3, **{entry: is_asked}), build(), **options)
    ours.save_model(f"{folder}/out")
    found = _in_files(f"{folder}/out")
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype or "", torch.float32)
    wanted = {p.full_tensor().to(narrow if is_asked else torch.float32) for p in ours.model.parameters()}
    assert found and {value.dtype for value in found.values()} == {value.dtype for value in wanted}
    assert all(any(torch.equal(value, other) for other in wanted) for value in found.values())


@on_two_ranks
def test_a_config_without_a_dtype_computes_in_that_of_the_arguments(folder: str) -> None:
    config: dict[str, Any] = {"zero_optimization": {"stage": 3}}
    for options, wanted in (({"bf16": True}, torch.bfloat16), ({"bf16_full_eval": True}, None), ({}, None)):
        assert configured(folder, config, **options).settings.compute == wanted
    with pytest.raises(zf.ConfigError, match=r"fp16\.enabled = true, and fp16 is false"):
        configured(folder, {**config, "fp16": {"enabled": True}}, bf16=True)
    for said in (True, "auto"):  # under the other name that DeepSpeed has for it
        named = {**config, "bfloat16": {"enabled": said}}
        assert configured(folder, named, bf16=True).settings.compute == torch.bfloat16
    with patch.dict(os.environ, ACCELERATE_MIXED_PRECISION="bf16"):  # as `accelerate launch` sets it
        for each in (config, {**config, "bf16": {"enabled": "auto"}}):
            assert configured(folder, each).settings.compute == torch.bfloat16


@on_two_ranks
def test_a_config_that_cannot_be_followed_is_refused(folder: str) -> None:
    from zero_fn.integrations.transformers import ZeroTrainer

    with pytest.raises(zf.ConfigError, match=r"contradicts the arguments(.|\n)*gradient_clipping = 2\.0"):
        configured(folder, {**zero(3), "gradient_clipping": 2.0})
    with pytest.raises(zf.ConfigError, match="total_num_steps = 9, and the steps of the training is 4"):
        scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": 1}}
        configured(folder, {**zero(3), "scheduler": scheduler})
    with pytest.raises(zf.ConfigError, match="another way to place"):
        ZeroTrainer(model=llama(), args=arguments(folder), train_dataset=Counting(), deepspeed=zero(3), place=place())
    by_epochs = configured(
        folder,
        {**zero(3), "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": 1}}},
        max_steps=-1,
        num_train_epochs=1,
    )
    with pytest.raises(zf.ConfigError, match="total_num_steps = 9, and the steps of the training is 8"):
        by_epochs.train()
