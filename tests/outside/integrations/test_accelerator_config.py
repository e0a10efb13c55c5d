"""A DeepSpeed config, or a DeepSpeedPlugin, in a ZeroAccelerator: the numbers of `from_deepspeed` with that config."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import zero_fn as zf
from tests.outside.integrations.worlds import (
    OWN,
    Counting,
    Overflowing,
    adapted,
    llama,
    needs,
    on_meta,
    on_two_ranks,
    place,
    read,
    start,
    written,
    zero,
)
from tests.support.ranks import axis

pytest.importorskip("transformers", reason="the extra [transformers] is not installed")
pytest.importorskip("accelerate", reason="the extra [transformers] is not installed")

Json = dict[str, Any]
ADAM: Json = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
SAID = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
    "optimizer.params.lr": 1e-2, "optimizer.params.weight_decay": 0.1,
    "scheduler.params.warmup_min_lr": 0, "scheduler.params.warmup_max_lr": 1e-2,
    "scheduler.params.warmup_num_steps": 1, "scheduler.params.total_num_steps": 4,
}  # fmt: skip
"""What accelerate makes of `"auto"` in the program below, by hand."""


def config(stage: int, **more: Any) -> Json:
    return {**zero(stage, **more), "optimizer": ADAM, "scheduler": OWN["scheduler"]}


def prepared_parts(said: Any, model: nn.Module, *, dtype: str = "bf16", stand_ins: bool = True, **options: Any) -> Any:
    """What a script prepares."""
    from accelerate.utils import DeepSpeedPlugin
    from accelerate.utils.deepspeed import DummyOptim, DummyScheduler

    from zero_fn.integrations.accelerate import ZeroAccelerator

    start()
    way = "deepspeed_plugin" if isinstance(said, DeepSpeedPlugin) else "deepspeed"
    ways = {} if said is None else {way: said}
    accelerator = ZeroAccelerator(cpu=True, mixed_precision=dtype, gradient_accumulation_steps=2, **ways, **options)
    loader = torch.utils.data.DataLoader(Counting(), batch_size=2)
    if stand_ins:
        optimizer: Any = DummyOptim(model.parameters(), lr=1e-2, weight_decay=0.1)
        scheduler: Any = DummyScheduler(optimizer, total_num_steps=8, warmup_num_steps=1)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step > 0))
    return accelerator, *accelerator.prepare(model, optimizer, loader, scheduler)


def trained(parts: Any, max_norm: float | None = None) -> list[float]:
    """Four steps of two microbatches; the losses, and norms if the program clips."""
    accelerator, model, optimizer, loader, scheduler = parts
    found = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if max_norm is not None and accelerator.sync_gradients:
                found.append(float(accelerator.clip_grad_norm_(model.parameters(), max_norm)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return found


def by_hand(said: Json, model: nn.Module, dtype: str = "bf16") -> tuple[list[float], list[float]]:
    """Losses and norms of `from_deepspeed`, on the batches that accelerate deals."""
    from accelerate import Accelerator

    start()
    loader = Accelerator(cpu=True).prepare(torch.utils.data.DataLoader(Counting(), batch_size=2))
    dtypes = {f"{name}.enabled": name == dtype for name in ("bf16", "fp16")}
    setup = zf.from_deepspeed(model, said, axis(), auto=SAID | dtypes)
    batches, losses, norms = iter(loader), [], []
    is_whole = said["zero_optimization"]["stage"] < 2  # at stages 2 and 3 each microbatch is reduced, as by DeepSpeed
    for _ in range(4):
        with zf.accumulate(setup.model) if is_whole else nullcontext():
            for _ in range(setup.accumulation_steps):
                loss = setup.model(**next(batches)).loss
                setup.scaled(loss).backward()
                losses.append(loss.item())
        norms.append(setup.step())
    return losses, [norm for norm in norms if norm is not None]


@on_two_ranks
def test_the_numbers_are_those_of_from_deepspeed(folder: str) -> None:
    from accelerate.utils import DeepSpeedPlugin

    from zero_fn.integrations.transformers import placed

    written(folder, dtype=torch.bfloat16)
    host, disk = {"device": "cpu"}, {"device": "nvme", "nvme_path": folder}
    for said in (config(2), config(3, offload_optimizer=host), config(3, offload_optimizer=disk, offload_param=disk)):
        losses, norms = by_hand(said, read(folder))
        parts = prepared_parts(said, read(folder))
        assert trained(parts) == losses
        accelerator, model, optimizer, _, scheduler = parts
        assert scheduler.get_last_lr() == [pytest.approx(0.01 / 2)], "one step of the config's rates a step"
        assert accelerator.gradient_accumulation_steps == 2
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
        is_away = said["zero_optimization"].keys() > {"offload_optimizer"}
        assert isinstance(optimizer.optimizer, zf.Streamed) == is_away
        wanted = [each for pair in zip(losses[::2], norms, losses[1::2], strict=True) for each in pair]
        assert trained(prepared_parts(said, read(folder)), max_norm=1.0) == wanted
        with placed(said, auto={"bf16.enabled": True, "fp16.enabled": False}):
            model = read(folder)
        parts = prepared_parts(said, model)
        assert parts[1] is model
        again = parts[0].prepare(*parts[1:])  # as after `find_executable_batch_size`
        assert all(one is other for one, other in zip(again, parts[1:], strict=True))
        assert trained(parts) == losses
        parts = prepared_parts(said, on_meta(folder))
        zf.load_pretrained(parts[1], folder)
        assert trained(parts) == losses
        plugin = DeepSpeedPlugin(hf_ds_config=said, gradient_accumulation_steps=2, gradient_clipping=1.0)
        assert trained(prepared_parts(plugin, read(folder))) == losses


@on_two_ranks
def test_fields_of_a_plugin_are_read() -> None:
    """Of a plugin without a file, from its arguments and from the environment; optimizers of the program."""
    from accelerate.utils import DeepSpeedPlugin

    said = {**zero(3, offload_optimizer={"device": "cpu"}), "gradient_clipping": 0.5, "gradient_accumulation_steps": 1}
    parts = prepared_parts(said, llama(), stand_ins=False)
    assert parts[0].gradient_accumulation_steps == 1
    wanted = trained(parts)
    environment = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        "ACCELERATE_GRADIENT_CLIPPING": "0.5",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
    }
    fields: Json = {"zero_stage": 3, "offload_optimizer_device": "cpu", "gradient_clipping": 0.5}
    plugin = DeepSpeedPlugin(gradient_accumulation_steps=1, **fields)
    assert trained(prepared_parts(plugin, llama(), stand_ins=False)) == wanted
    with patch.dict(os.environ, environment):
        parts = prepared_parts(None, llama(), stand_ins=False)
        assert trained(parts) == wanted
    assert all(isinstance(parameter, DTensor) for parameter in parts[1].parameters())
    assert isinstance(parts[2].optimizer, zf.Streamed)
    assert {value.dtype for value in parts[0].get_state_dict(parts[1]).values()} <= {torch.float32}
    parts = prepared_parts(DeepSpeedPlugin(zero3_save_16bit_model=True, **fields), llama(), stand_ins=False)
    dtypes = {value.dtype for value in parts[0].get_state_dict(parts[1]).values()}
    assert dtypes == ({torch.bfloat16} if dist.get_rank() == 0 else set())


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@on_two_ranks
def test_a_step_that_overflows_is_skipped(dtype: str) -> None:
    """A step that overflows on one rank is skipped on both, and moves no rate."""
    said = {**config(2), "optimizer": ADAM, "gradient_clipping": 0.5}
    accelerator, model, optimizer, loader, scheduler = prepared_parts(
        said, Overflowing(llama(), 4, 1), dtype=dtype, step_scheduler_with_optimizer=True
    )
    values, rates = [], []
    for _, batch in zip(range(6), loader, strict=False):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            values.append([parameter.full_tensor() for parameter in model.parameters()])
            rates.append(scheduler.scheduler.last_epoch)
    assert rates == [1, 1, 2]
    assert all(torch.equal(one, other) for one, other in zip(values[0], values[1], strict=True))
    assert (accelerator.scaler is not None) == (dtype == "fp16")


@needs("peft")
@on_two_ranks
def test_adapters_of_a_placed_base_are_saved_and_resumed(folder: str) -> None:
    from zero_fn.integrations.transformers import placed

    written(folder, dtype=torch.bfloat16)
    said = config(3, offload_optimizer={"device": "cpu"})

    def parts() -> Any:
        with placed(said, auto={"bf16.enabled": True, "fp16.enabled": False}, frozen=True):
            base = read(folder)
        return prepared_parts(said, adapted(base, "q_proj"))

    first = parts()
    trained(first)
    first[0].save_state(f"{folder}/state")
    wanted = trained(first)
    second = parts()
    second[0].load_state(f"{folder}/state")
    assert trained(second) == wanted
    assert {str(p.dtype) for p in second[1].parameters()} == {"torch.bfloat16", "torch.float32"}


@on_two_ranks
def test_what_contradicts_a_config_is_refused() -> None:
    from accelerate.utils import DeepSpeedPlugin

    from zero_fn.integrations.accelerate import ZeroAccelerator

    plugin = DeepSpeedPlugin(zero_stage=3)
    for ways in ({"deepspeed": zero(3)}, {"deepspeed_plugin": plugin}, {"deepspeed_plugins": {"a": plugin}}):
        more = {} if "deepspeed_plugins" in ways else {"place": place()}
        with pytest.raises(zf.ConfigError, match="several ways to place"):
            ZeroAccelerator(cpu=True, **ways, **more)
    with pytest.raises(zf.ConfigError, match=r"two ways to make the optimizer(.|\n)*deepspeed\.DummyOptim"):
        prepared_parts({**zero(3), "optimizer": ADAM | {"params": {"lr": 1e-3}}}, llama(), stand_ins=False)
    with pytest.raises(zf.ConfigError, match="two ways to make the scheduler"):
        prepared_parts({**zero(3), "scheduler": {"type": "WarmupLR"}}, llama(), stand_ins=False)
    with pytest.raises(zf.ConfigError, match="DummyOptim stands for the optimizer"):
        prepared_parts(zero(3), llama())
    with pytest.raises(zf.ConfigError, match="DummyScheduler stands for the scheduler"):
        prepared_parts({**zero(3), "optimizer": ADAM}, llama())
    with pytest.raises(zf.ConfigError, match="contradicts the mixed_precision"):
        prepared_parts({**config(3), "bf16": {"enabled": False}}, llama())
    with pytest.raises(zf.ConfigError, match=r"clips gradients, and the program(.|\n)*1\.0(.|\n)*0\.5"):
        trained(prepared_parts(config(3), llama()), max_norm=0.5)
    start()
    with pytest.raises(zf.ConfigError, match=r"train_micro_batch_size_per_gpu(.|\n)*auto"):
        ZeroAccelerator(cpu=True, deepspeed=zero(3)).prepare(llama())
    start()
    with pytest.raises(zf.ConfigError, match="placed in another way"):
        ZeroAccelerator(cpu=True, deepspeed=zero(3) | {"train_micro_batch_size_per_gpu": 2}).prepare(
            place("zero1")(llama())
        )
