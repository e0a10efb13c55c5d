"""A model that is dropped in the middle of something leaves its axis usable."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import zero_fn as zf
from tests.support.ranks import Ranks, axis


def a_model_that_failed_and_then_another() -> float:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return zf.shard_params(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), axis())

    def fails(*_: object) -> None:
        raise ZeroDivisionError

    model = build()
    middle: nn.Module = model[1]
    middle.register_forward_hook(lambda module, args, output: output.register_hook(fails) and None)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(2, 4)).sum().backward()
    del model
    gc.collect()
    model = build()
    model(torch.ones(2, 4)).sum().backward()  # type: ignore[operator]
    grad = model[0].weight.grad
    return grad.full_tensor().sum().item()  # type: ignore[operator]


def test_another_model_trains_after_one_that_failed_in_backward_was_dropped(ranks: Ranks) -> None:
    """Receives that nobody had waited for died with the model, the next took their messages for its own, and all hung."""
    first, second = ranks(2, deadline_s=20.0).run(a_model_that_failed_and_then_another)
    assert first == second
