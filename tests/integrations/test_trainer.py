"""The Trainer of transformers over transformed models: the numbers of DDP, files that anybody reads, runs that go on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_fn as zf
from tests.integrations.worlds import (
    Counting,
    arguments,
    gpt2,
    llama,
    lora,
    mixtral,
    numbers,
    place,
    require_close,
    start,
    zero_trainer,
)
from tests.ranks import Ranks, axis

pytest.importorskip("transformers", reason="the extra [transformers] is not installed")
pytest.importorskip("accelerate", reason="the extra [transformers] is not installed")


def _compare(
    folder: str, build: Callable[[], nn.Module], stage: str, options: dict[str, Any], tolerance: float
) -> None:
    from transformers import Trainer

    start()
    data = {"train_dataset": Counting(), "eval_dataset": Counting(8)}
    wanted = numbers(Trainer(model=build(), args=arguments(folder, **options), **data))
    ours = zero_trainer(folder, build, stage, **options)
    require_close(numbers(ours), wanted, tolerance)
    assert zf.is_transformed(ours.model)


CASES: dict[str, tuple[Callable[[], nn.Module], str, dict[str, Any], float]] = {
    "zero3": (llama, "zero3", {}, 2e-5),
    "zero1": (llama, "zero1", {}, 2e-5),
    "accumulation": (llama, "zero3", {"gradient_accumulation_steps": 2, "max_steps": 3}, 2e-5),
    "bf16": (llama, "zero3", {"bf16": True}, 2e-3),
    "checkpointing": (llama, "zero3", {"activation_checkpointing": True}, 2e-5),
    "evaluation": (llama, "zero2", {"eval_strategy": "steps", "eval_steps": 2}, 2e-5),
    "gpt2": (gpt2, "zero3", {}, 2e-5),
    "lora": (lora, "zero3", {}, 2e-5),
    "without clipping": (llama, "zero3", {"max_grad_norm": 0.0}, 2e-5),
    "mixtral": (mixtral, "zero3", {}, 2e-5),
}


@pytest.mark.parametrize("case", CASES)
def test_a_trainer_has_the_numbers_of_replicas(prepared: Ranks, tmp_path: Path, case: str) -> None:
    build, stage, options, tolerance = CASES[case]
    prepared(2).run(_compare, str(tmp_path), build, stage, options, tolerance)


def _compare_compiled(folder: str) -> None:
    from transformers import Trainer

    def small() -> nn.Module:
        return llama(num_hidden_layers=1)

    start()
    wanted = numbers(Trainer(model=small(), args=arguments(folder, max_steps=2), train_dataset=Counting()))
    try:
        ours = zero_trainer(folder, small, "zero3", max_steps=2, torch_compile=True, torch_compile_backend="eager")
        found = numbers(ours)
    finally:  # what the arguments wrote there is read by every later Trainer
        for name in [name for name in os.environ if name.startswith("ACCELERATE_DYNAMO")]:
            del os.environ[name]
    assert hasattr(ours.model_wrapped, "_orig_mod"), "the model was not compiled"
    require_close(found, wanted)


def test_a_compiled_model_has_the_numbers_of_replicas(prepared: Ranks, tmp_path: Path) -> None:
    prepared(2).run(_compare_compiled, str(tmp_path))


def _reductions(folder: str, microbatches: int) -> int:
    ours = zero_trainer(folder, llama, "zero3", gradient_accumulation_steps=microbatches, max_steps=1)
    with zf.traffic() as sent:
        ours.train()
    return sent.calls["reduce-scatter"]


def test_a_step_reduces_once_for_three_microbatches(prepared: Ranks, tmp_path: Path) -> None:
    once = prepared(2).run(_reductions, str(tmp_path), 1)
    assert once[0] > 0
    assert prepared(2).run(_reductions, str(tmp_path), 3) == once


def _hand_over(folder: str, stage: str) -> None:
    """The model that was transformed by the user, an optimizer built before the model was placed, and a stale one."""
    from transformers import Trainer

    from zero_fn.integrations.transformers import ZeroTrainer

    start()
    data = {"train_dataset": Counting()}

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    plain = llama()
    wanted = numbers(Trainer(model=plain, args=arguments(folder), optimizers=(sgd(plain), None), **data))
    model = llama()
    ours = ZeroTrainer(model=model, args=arguments(folder), optimizers=(sgd(model), None), place=place(stage), **data)
    require_close(numbers(ours), wanted)
    model = place(stage)(llama())
    ours = ZeroTrainer(model=model, args=arguments(folder), optimizers=(sgd(model), None), **data)
    require_close(numbers(ours), wanted)

    model = llama()
    stale = sgd(model)
    with pytest.raises(zf.StaleError, match="built before its model was transformed"):
        ZeroTrainer(model=place(stage)(model), args=arguments(folder), optimizers=(stale, None), **data)
    model = llama()
    stepped = sgd(model)
    model(input_ids=Counting().tokens[:2], labels=Counting().tokens[:2]).loss.backward()
    stepped.step()
    with pytest.raises(zf.StateError, match="took steps before its model was transformed"):
        ZeroTrainer(model=model, args=arguments(folder), optimizers=(stepped, None), place=place(stage), **data)


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_optimizers_of_users_follow_or_are_refused(prepared: Ranks, tmp_path: Path, stage: str) -> None:
    prepared(2).run(_hand_over, str(tmp_path), stage)


def _refused(folder: str) -> None:
    from zero_fn.integrations.transformers import ZeroTrainer

    start()
    with pytest.raises(zf.StateError, match="given a plain model"):
        ZeroTrainer(model=llama(), args=arguments(folder), train_dataset=Counting())
    with pytest.raises(zf.StateError, match="no transform has made"):
        ZeroTrainer(model=llama(), args=arguments(folder), train_dataset=Counting(), place=lambda model: model)
    with pytest.raises(zf.ConfigError, match="auto_find_batch_size"):
        ZeroTrainer(
            model=llama(), args=arguments(folder, auto_find_batch_size=True), train_dataset=Counting(), place=place()
        )
    several = ZeroTrainer(model=llama(), args=arguments(folder), train_dataset=Counting(), place=place())
    several.args._n_gpu = 2
    from zero_fn.integrations.transformers import _refuse_arguments

    with pytest.raises(zf.ConfigError, match="several devices for one process"):
        _refuse_arguments(several.args)
    adafactor = ZeroTrainer(
        model=llama(), args=arguments(folder, optim="adafactor"), train_dataset=Counting(), place=place()
    )
    with pytest.raises(zf.PlacementError):
        adafactor.train()


def test_what_cannot_work_is_refused(prepared: Ranks, tmp_path: Path) -> None:
    prepared(2).run(_refused, str(tmp_path))


def _masters(folder: str) -> None:
    """Weights that were loaded in 16 bits: replicas of masters under autocast have about the same numbers."""
    from transformers import Trainer

    from zero_fn.integrations.transformers import ZeroTrainer

    start()

    def loaded() -> nn.Module:
        return llama().bfloat16()

    def masters(model: nn.Module) -> nn.Module:
        return zf.precision(zf.zero3(model, axis()), rest=torch.float32, compute=torch.bfloat16)

    data = {"train_dataset": Counting()}
    wanted = numbers(Trainer(model=loaded().float(), args=arguments(folder, bf16=True), **data))
    ours = ZeroTrainer(model=loaded(), args=arguments(folder), place=masters, **data)
    require_close(numbers(ours), wanted, 2e-2)
    assert all(parameter.dtype == torch.float32 for parameter in ours.model.parameters())


def test_weights_of_16_bits_are_trained_with_masters(prepared: Ranks, tmp_path: Path) -> None:
    prepared(2).run(_masters, str(tmp_path))
