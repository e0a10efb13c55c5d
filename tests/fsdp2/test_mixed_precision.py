"""By intent, `test_fully_shard_mixed_precision.py` of FSDP2. Said elsewhere:

test_compute_dtype, test_reduce_dtype     distributed/test_training.py::test_mixed_precision_equals_the_same_casts_by_hand
test_grad_acc_with_reduce_dtype           transforms/test_promises.py::test_microbatches_are_summed_in_the_dtype_asked_for
test_float16_on_one_submodule
    distributed/test_verbs.py::test_a_part_keeps_the_output_dtype_that_it_was_given_before_the_whole_was_transformed
test_dataclass_input                      distributed/test_verbs.py::test_precision_casts_tensors_in_dataclasses
test_clamp_reduce_dtype                   distributed/test_verbs.py::test_a_transformed_model_can_change_its_dtype
grad_dtype                                distributed/test_masters.py::test_masters_are_those_of_weights_widened_before
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_fn as zf
from tests.fsdp2.models import DIM, Mlp
from tests.support.ranks import Ranks, axis
from tests.support.worlds import noise


class Normed(nn.Module):
    """Norms with weights and a buffer that stays in float32, and an input that comes past the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList((nn.LayerNorm(DIM), nn.GroupNorm(2, DIM)))
        self.body, self.outside = Mlp(), torch.ones(DIM)
        self.register_buffer("offset", torch.ones(DIM))
        self.seen: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        assert self.offset.dtype == torch.float32
        for norm in self.norms:
            x = norm(x)
        self.seen.add(x.dtype)
        y: Tensor = self.body(x + self.outside.to(x.dtype))
        return y


def _dtypes(compute: torch.dtype) -> None:
    for stage in (zf.zero1, zf.zero3):
        torch.manual_seed(0)
        model: Any = zf.precision(stage(Normed(), axis()), compute=compute, reduce=torch.float32)
        for ends in (model, lambda x, model=model: checkpoint(model, x, use_reentrant=False)):
            model.zero_grad()
            y = ends(noise(2, DIM, seed=0))
            y.float().square().mean().backward()
            assert model.seen == {compute}
            assert y.dtype == compute
            assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def _jvp() -> None:
    torch.manual_seed(0)
    plain = Mlp()
    model = zf.shard_params(plain, axis(), reshard_after="backward")
    x = noise(2, DIM, seed=0)
    with zf.unsharded(model):
        found = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    expected = torch.func.jvp(plain, (x,), (torch.ones_like(x),))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def _first_forward_frozen() -> None:
    """The dtype of sums holds also where nothing was trained at first."""
    torch.manual_seed(0)
    model = zf.precision(zf.zero3(Mlp(), axis()), compute=torch.bfloat16, reduce=torch.float32)
    model.requires_grad_(False)
    model(noise(2, DIM, seed=0))
    model.requires_grad_(True)
    late = []
    for other in (model, zf.precision(zf.zero3(Mlp(), axis()), compute=torch.bfloat16, reduce=torch.float32)):
        other.load_state_dict(model.state_dict())
        other(noise(2, DIM, seed=1)).float().square().mean().backward()
        late.append([p.grad.full_tensor() for p in other.parameters()])  # type: ignore[union-attr]
    assert all(torch.equal(one, other) for one, other in zip(*late, strict=True))


def _all() -> None:
    _dtypes(torch.bfloat16)
    _dtypes(torch.float16)
    _jvp()
    _first_forward_frozen()


def test_dtypes_are_those_that_were_asked_for(ranks: Ranks) -> None:
    ranks(2).run(_all)


def test_an_integer_dtype_is_refused() -> None:
    with pytest.raises(zf.LayoutError, match="floating point"):
        zf.precision(Mlp(), compute=torch.int8)
