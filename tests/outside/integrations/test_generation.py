"""`generate` of transformers over transformed models: the tokens of the plain model, at every stage and on disks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_fn as zf
from tests.outside.integrations.worlds import (
    STAGES,
    Counting,
    adapted,
    gpt2,
    llama,
    on_two_ranks,
    place,
    start,
    zero_trainer,
)
from tests.support.ranks import axis
from zero_fn.integrations.placing import place_module


def with_adapters() -> nn.Module:
    return adapted(llama(), "q_proj")


@pytest.mark.parametrize("build", [llama, gpt2, with_adapters])
@on_two_ranks
def test_tokens_are_those_of_the_plain_model(folder: str, build: Callable[[], nn.Module]) -> None:
    """Ranks want other numbers of tokens, so that one is done before the other."""
    start()
    tokens = Counting(8).tokens[:2, :4]
    disk = zf.nvme(folder)
    transforms: dict[str, Callable[[nn.Module], nn.Module]] = {
        **{stage: place(stage) for stage in STAGES},
        "on a disk": lambda model: zf.offload(zf.zero3(model, axis()), params=disk),
        "in bfloat16": lambda model: zf.precision(zf.zero3(model, axis()), output=torch.float32),
    }
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"do_sample": False},
        "static cache": {"do_sample": False, "cache_implementation": "static"},
        "beams": {"do_sample": False, "num_beams": 2},
        "sampled": {"do_sample": True, "top_k": 5},
    }
    for way, transform in transforms.items():
        ours, _ = place_module(transform, build().eval())
        plain: Any = build().eval()
        if way == "in bfloat16":
            plain = plain.bfloat16()
        for kind, options in kinds.items():
            if way == "in bfloat16" and kind != "greedy":
                continue
            length = 7 if kind == "static cache" else 3 + 4 * dist.get_rank()  # whose size is that of its rank
            torch.manual_seed(1)
            wanted = plain.generate(input_ids=tokens, max_new_tokens=length, **options)
            torch.manual_seed(1)
            found = ours.generate(input_ids=tokens, max_new_tokens=length, **options)
            assert torch.equal(found, wanted), f"{way}, {kind}"
            with zf.unsharded(ours):
                if dist.get_rank() == 1:  # alone: nothing is gathered
                    torch.manual_seed(1)
                    assert torch.equal(ours.generate(input_ids=tokens, max_new_tokens=length, **options), wanted), (
                        f"{way}, {kind}"
                    )


@on_two_ranks
def test_a_trainer_generates_between_steps(folder: str) -> None:
    """Generation between two steps of a Trainer changes nothing of what it trains."""
    from transformers import TrainerCallback

    prompt = Counting(8).tokens[:2, :4]
    tokens: list[torch.Tensor] = []

    class Generates(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            model = options["model"]
            model.eval()
            tokens.append(model.generate(prompt, max_new_tokens=2 + 3 * dist.get_rank(), do_sample=False))
            model.train()

    losses = []
    for callbacks in ([], [Generates()]):
        trainer = zero_trainer(folder, llama, "zero3", max_steps=3)
        for callback in callbacks:
            trainer.add_callback(callback)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == losses[1]
    assert len(tokens) == 3
