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
    zero_trainer,
)
from tests.support.ranks import Ranks


@pytest.mark.parametrize(("build", "stage"), [(llama, "disk"), (gpt2, "zero3"), (mixtral, "zero3")])
@on_two_ranks
def test_a_run_is_resumed_to_the_bit_and_its_model_read_by_from_pretrained(
    folder: str, build: Callable[[], nn.Module], stage: str
) -> None:
    """Two of four steps again, from the checkpoint; and the files of the model are what it holds, on every rank at once. With
    adapters: `test_adapters.py`; at other stages: below."""
    options = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    ours = zero_trainer(folder, build, stage, **options)
    wanted = numbers(ours)
    values = {name: p.full_tensor() for name, p in ours.model.named_parameters()}
    with patch("zero_fn.integrations.transformers.whole_state", side_effect=AssertionError("the model is whole")):
        for _ in range(2):  # the second takes the place of the first
            ours.save_model(f"{folder}/out")
    files = {path.name for path in Path(folder, "out").iterdir()}
    assert files >= {"model.safetensors", "config.json", "training_args.bin"}
    loaded = type(ours.model).from_pretrained(f"{folder}/out")
    tokens = Counting().tokens[:2]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=tokens).logits, ours.model.eval()(input_ids=tokens).logits)
    again = zero_trainer(folder, build, stage, **options)
    assert numbers(again, resume_from_checkpoint=f"{folder}/checkpoint-2") == wanted
    assert all(torch.equal(p.full_tensor(), values[name]) for name, p in again.model.named_parameters())


def _half(folder: str, stage: str, microbatches: int, **resumed: str) -> list[tuple[str, float]]:
    batch = 4 // (microbatches * torch.distributed.get_world_size())
    options = {"gradient_accumulation_steps": microbatches, "per_device_train_batch_size": batch}
    saves = {} if resumed else {"save_strategy": "steps", "save_steps": 2}
    return numbers(zero_trainer(folder, llama, stage, **options, **saves), **resumed)


def test_a_run_resumes_on_other_ranks_and_at_another_stage(prepared: Ranks, tmp_path: Path) -> None:
    wanted = prepared(2).run(_half, str(tmp_path), "zero3", 1)[0]
    for n, stage, microbatches in ((2, "zero2", 2), (1, "zero1", 1), (1, "zero3", 2)):
        prepared(n, deadline_s=240).run(import_all)
        again = {"resume_from_checkpoint": f"{tmp_path}/checkpoint-2"}
        require_close(prepared(n).run(_half, str(tmp_path), stage, microbatches, **again)[0], wanted)


@on_two_ranks
def test_who_saves_tensors_by_their_memory_is_told_how_to_save(folder: str) -> None:
    """Whoever writes a file from the memory of each tensor is told what to call; and that works."""
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from transformers import Trainer

    model: Any = zero_trainer(folder, llama, "zero3").model
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
    again = zero_trainer(folder, llama, "zero3")
    with pytest.raises(zf.CheckpointError, match="holds no states"):
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
