"""What a Trainer saves: files that anybody reads, and runs that go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import zero_fn as zf
from tests.outside.integrations.worlds import (
    Counting,
    arguments,
    gpt2,
    import_all,
    llama,
    mixtral,
    numbers,
    on_two_ranks,
    require_close,
    start,
    zero_trainer,
)
from tests.support.ranks import Ranks, axis

pytest.importorskip("transformers", reason="the extra [transformers] is not installed")
pytest.importorskip("accelerate", reason="the extra [transformers] is not installed")


@pytest.mark.parametrize("build", [llama, gpt2, mixtral])
@on_two_ranks
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(folder: str, build: Callable[[], nn.Module]) -> None:
    """Two of four steps again, from the checkpoint. With adapters: `test_adapters.py`; at other stages: below."""
    options = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    first = zero_trainer(folder, build, "zero3", **options)
    wanted = numbers(first)
    values = {name: p.full_tensor() for name, p in first.model.named_parameters()}
    second = zero_trainer(folder, build, "zero3", **options)
    found = numbers(second, resume_from_checkpoint=f"{folder}/checkpoint-2")
    assert found == wanted
    assert all(torch.equal(p.full_tensor(), values[name]) for name, p in second.model.named_parameters())


def _half(folder: str, stage: str, microbatches: int, **resumed: str) -> list[tuple[str, float]]:
    batch = 4 // (microbatches * torch.distributed.get_world_size())
    options = {"gradient_accumulation_steps": microbatches, "per_device_train_batch_size": batch}
    saves = {} if resumed else {"save_strategy": "steps", "save_steps": 2}
    return numbers(zero_trainer(folder, llama, stage, **options, **saves), **resumed)


@pytest.mark.parametrize(("n", "stage", "microbatches"), [(1, "zero1", 1), (1, "zero3", 2), (2, "zero2", 2)])
def test_a_run_resumes_on_other_ranks_and_at_another_stage(
    prepared: Ranks, tmp_path: Path, n: int, stage: str, microbatches: int
) -> None:
    wanted = prepared(2).run(_half, str(tmp_path), "zero3", 1)[0]
    prepared(n, deadline_s=240).run(import_all)
    again = {"resume_from_checkpoint": f"{tmp_path}/checkpoint-2"}
    found = prepared(n).run(_half, str(tmp_path), stage, microbatches, **again)[0]
    require_close(found, wanted)


@pytest.mark.parametrize("build", [llama, gpt2, mixtral])
@on_two_ranks
def test_a_saved_model_is_read_by_from_pretrained(folder: str, build: Callable[[], nn.Module]) -> None:
    """What `save_model` writes is what the model holds, and `from_pretrained` reads it on every rank at once."""
    ours = zero_trainer(folder, build, "zero3", **{})
    ours.train()
    with patch("zero_fn.integrations.transformers.whole_state", side_effect=AssertionError("the model is whole")):
        for _ in range(2):  # the second takes the place of the first
            ours.save_model(f"{folder}/out")
    files = {path.name for path in Path(folder, "out").iterdir()}
    assert files >= {"model.safetensors", "config.json", "training_args.bin"}
    loaded = type(ours.model).from_pretrained(f"{folder}/out")
    tokens = Counting().tokens[:2]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=tokens).logits, ours.model.eval()(input_ids=tokens).logits)


@on_two_ranks
def test_the_best_model_is_loaded_at_the_end(folder: str) -> None:
    options = {
        "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "learning_rate": 0.3,
        "load_best_model_at_end": True,
    }  # fmt: skip
    ours = zero_trainer(folder, llama, "zero3", **options)
    ours.train()
    losses = [entry["eval_loss"] for entry in ours.state.log_history if "eval_loss" in entry]
    assert min(losses) < losses[-1], "the last is not the best, or the test says nothing"
    assert ours.evaluate()["eval_loss"] == pytest.approx(min(losses), rel=1e-6)


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
@on_two_ranks
def test_who_saves_tensors_by_their_memory_is_told_how_to_save(folder: str, stage: str) -> None:
    """Whoever writes a file from the memory of each tensor is told what to call; and that works."""
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from transformers import Trainer

    model: Any = zero_trainer(folder, llama, stage).model
    ways: dict[str, Callable[[], object]] = {
        "safetensors": lambda: save_file(model.state_dict(), f"{folder}/weights"),
        "transformers": lambda: model.save_pretrained(folder),
        "a plain Trainer": lambda: Trainer(model=model, args=arguments(folder)).save_model(),
        "an attribute": lambda: model.lm_head.weight.storage(),
    }
    for way in ways.values():
        if torch.distributed.get_rank() == 0:
            with pytest.raises(zf.ShardedAccessError, match="no memory that a file could be written from"):
                way()
    torch.distributed.barrier()
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if torch.distributed.get_rank() == 0:
        model.save_pretrained(f"{folder}/whole", state_dict=dict(whole))  # which it empties
        loaded = type(model).from_pretrained(f"{folder}/whole")
        assert all(torch.equal(value, whole[name]) for name, value in loaded.state_dict().items())
    assert torch.nn.Linear(2, 2).weight.storage().size() == 4


@on_two_ranks
def test_a_checkpoint_without_states_is_not_resumed_in_silence(folder: str) -> None:
    ours = zero_trainer(folder, llama, "zero3", **{"save_strategy": "steps", "save_steps": 2, "save_only_model": True})
    ours.train()
    again = zero_trainer(folder, llama, "zero3", **{})
    with pytest.raises(zf.CheckpointError, match="holds no states"):
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")


@on_two_ranks
def test_a_model_on_a_disk_is_trained_saved_and_resumed(folder: str) -> None:
    """Everything on a disk, a streamed optimizer: the numbers of replicas, saved and resumed."""
    from transformers import Trainer

    from zero_fn.integrations.transformers import ZeroTrainer

    start()
    disk = zf.nvme(folder)

    def on_disk(model: nn.Module) -> nn.Module:
        return zf.offload(zf.zero3(model, axis()), params=disk, grads=disk, optim=disk)

    options = {"save_strategy": "steps", "save_steps": 2}
    wanted = numbers(Trainer(model=llama(), args=arguments(folder, **options), train_dataset=Counting()))

    def trainer() -> ZeroTrainer:
        args = arguments(f"{folder}/ours", **options)
        return ZeroTrainer(model=llama(), args=args, train_dataset=Counting(), place=on_disk, finish=zf.streamed)

    require_close(numbers(trainer()), wanted)
    require_close(numbers(trainer(), resume_from_checkpoint=f"{folder}/ours/checkpoint-2"), wanted)
