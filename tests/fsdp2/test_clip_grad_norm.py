"""By intent, `test_fully_shard_clip_grad_norm_.py` and `test_fully_shard_grad_scaler.py` of FSDP2. Said elsewhere:

test_clip_grad_norm_1d     acceptance/test_optimizers.py::test_g40_the_clipped_norm_is_that_of_replicas
test_clip_grad_norm_2d     acceptance/test_models.py::test_g41_a_norm_below_tensor_parallelism_is_that_of_one_process
test_gradient_scaler       acceptance/test_optimizers.py::test_g42_an_overflow_on_one_rank_skips_the_step_on_all
"""

from __future__ import annotations

import torch
from torch import nn

import zero_fn as zf
from tests.fsdp2.models import DIM, Stacked
from tests.support.ranks import Ranks, axis
from tests.support.worlds import noise


def _one_after_another() -> list[list[float]]:
    """The norms of a run that clips by another norm in each step, at stage 0 and 3."""
    runs = []
    for stage in (zf.replicate, zf.zero3):
        torch.manual_seed(0)
        model, norms = stage(Stacked(), axis()), []
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, kind in enumerate((1.0, 2.0, 3.0, float("inf"))):
            optimizer.zero_grad()
            scaler.scale(model(noise(3, DIM, seed=step)).square().mean()).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=kind)
            norms.append(norm.full_tensor().item() if hasattr(norm, "full_tensor") else norm.item())
            scaler.step(optimizer)
            scaler.update()
        runs.append(norms)
    return runs


def test_clipping_scaled_gradients_is_the_same_at_every_stage(ranks: Ranks) -> None:
    first, second = ranks(2).run(_one_after_another)
    assert first == second
    assert all(abs(one - other) <= 1e-6 * one for one, other in zip(*first, strict=True))
