"""`precision(grads=)`: gradients that rest in fewer bits, as if each reduced gradient had been rounded once by hand.

In tiers: `property_tests/test_streamed_laws.py`.
"""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import SGD, AdamW, RMSprop, Rprop

import zero_fn as zf
from tests.axes.grids import grid
from tests.support.eviction import evicted
from tests.support.groups import alone
from tests.support.messages import refused
from tests.support.models import Odd
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.ranks import axis
from tests.support.wholes import fulls
from zero_fn.monitor.gradient_norm import clip_grad_norm

NARROW = torch.bfloat16
OPTIMIZERS = {
    "AdamW": partial(AdamW, lr=1e-2, fused=False),
    "SGD": partial(SGD, lr=1e-2, momentum=0.9),
    "RMSprop": partial(RMSprop, lr=1e-2),
}


def _narrow(model):
    return zf.precision(model, compute=torch.bfloat16, grads=NARROW)


def _by_hand(model):
    for parameter in model.parameters():
        if parameter.grad is not None and parameter.is_floating_point():
            parameter.grad.copy_(parameter.grad.to(NARROW))


def _built(kind=Odd):
    torch.manual_seed(0)
    return kind()


def _batch(seed):
    torch.manual_seed(100 * seed + dist.get_rank())
    return torch.randint(0, 37, (4, 5))


def _trained(model, optimizer, round_grads=lambda model: None, microbatches=1):
    for step in range(3):
        with zf.accumulate(model):
            for part in range(microbatches):
                model(_batch(10 * step + part)).float().square().mean().backward()
        round_grads(model)
        optimizer.step()
        optimizer.zero_grad()
    with zf.unsharded(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


def _require_same(found, wanted, what):
    assert all(map(torch.equal, found, wanted)), what


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2)
def test_every_stage_steps_as_if_gradients_were_rounded_by_hand(name):
    make = OPTIMIZERS[name]
    for microbatches in (1, 2):
        plain = zf.precision(zf.replicate(_built(), axis()), compute=torch.bfloat16)
        wanted = _trained(plain, make(plain.parameters()), _by_hand, microbatches)
        for stage, place in STAGES.items():
            model = place(_narrow(_built()), axis())
            _require_same(_trained(model, make(model.parameters()), microbatches=microbatches), wanted, stage)


@on_ranks(4)
def test_two_axes_keep_the_bits():
    mesh = grid("outer", "inner")
    plain = zf.precision(zf.hybrid(_built(), mesh), compute=torch.bfloat16)
    wanted = _trained(plain, AdamW(plain.parameters()), _by_hand)
    model = _narrow(zf.hybrid(_built(), mesh))
    _require_same(_trained(model, AdamW(model.parameters())), wanted, "two axes")


def _grads(model):
    return fulls(p.grad for p in model.parameters() if p.grad is not None)


@on_ranks(2)
def test_hooks_copies_and_state_dicts_see_them():
    model = zf.shard_params(_narrow(_built()), axis())
    optimizer = AdamW(model.parameters(), lr=1e-2)
    seen = []
    first = model.embedding.weight
    first.register_hook(lambda grad: seen.append(grad.dtype))
    first.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.dtype))
    other = copy.deepcopy(model)
    wanted = _trained(model, optimizer)
    assert set(seen) == {NARROW}
    _require_same(_trained(other, AdamW(other.parameters(), lr=1e-2)), wanted, "a copy")
    fresh = zf.shard_params(_narrow(_built()), axis())
    unstepped = AdamW(fresh.parameters())
    set_optimizer_state_dict(fresh, unstepped, get_optimizer_state_dict(fresh, unstepped))  # torch assigns wide zeros
    model(_batch(1)).float().sum().backward()
    before = _grads(model)
    evicted(model, optimizer).restore()
    assert {grad.dtype for grad in _grads(model)} == {NARROW, torch.complex64}
    _require_same(_grads(model), before, "evicted")


@on_ranks(2)
def test_norms_are_taken_in_float32():
    norms = []
    for place in STAGES.values():
        model = place(_narrow(_built()), axis())
        model(_batch(0)).float().square().sum().backward()
        grads = _grads(model)
        flat = [torch.view_as_real(g).flatten() if g.is_complex() else g.double().flatten() for g in grads]
        truth = torch.cat(flat).norm().item()
        with CommDebugMode() as seen:
            norms.append(float(clip_grad_norm(model.parameters(), truth / 3)))
        assert seen.get_total_counts() <= 1, "norms are stacked, and reduced together"
        assert abs(norms[-1] / truth - 1) < 1e-6
        for before, clipped in zip(grads, _grads(model), strict=True):
            assert torch.allclose(clipped, before / 3, rtol=0.01)
    assert max(norms) / min(norms) - 1 < 1e-6, norms


def test_what_cannot_work_is_refused():
    with alone() as mesh:
        model = zf.shard_params(_narrow(nn.Linear(4, 4)), mesh)
        model(torch.ones(2, 4)).float().sum().backward()
        with refused("step_of_another_class_with_narrow_gradients"):  # its states would rest in bfloat16
            Rprop(model.parameters()).step()
        with refused("precision_of_integers"):  # torch does not add in 8 bits
            zf.precision(model, grads=torch.float8_e5m2)
        for options in ({"compute": torch.int8}, {"output": "float32"}):
            with pytest.raises(zf.errors.LayoutError):
                zf.precision(model, **options)


@on_ranks(2)
def test_ranks_with_other_dtypes_are_told():
    model = zf.shard_params(zf.precision(_built(), grads=NARROW if dist.get_rank() else None), axis())
    with pytest.raises(zf.errors.DisagreementError, match=r"fp32/bf16/fp32\n(.|\n)*fp32/bf16/fp32/bf16"):
        model(_batch(0))
