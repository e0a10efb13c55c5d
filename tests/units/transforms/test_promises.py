"""Promises of options and verbs, each where few ranks can see it: larger tests did not notice when they were broken."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import Replicate, Shard

import zero_fn as zf
from tests.support.groups import alone, pretended
from tests.support.ranks import axis as axis_of_ranks

STAGES = [zf.replicate, zf.zero1, zf.zero2, zf.zero3]


@pytest.fixture
def axis():
    with alone() as mesh:
        yield mesh


@pytest.mark.parametrize(("reduce", "total"), [(torch.float32, 257.0), (torch.bfloat16, 256.0)])
def test_microbatches_are_summed_in_the_dtype_asked_for(axis, reduce, total):
    """257 is no bfloat16."""
    model = zf.precision(zf.shard_params(nn.Linear(1, 1, bias=False), axis), compute=torch.bfloat16, reduce=reduce)
    with zf.accumulate(model):
        for value in (256.0, 1.0):
            model(torch.full((1, 1), value)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.full_tensor().item() == total


def test_outputs_have_the_dtype_asked_for(axis):
    model = zf.precision(zf.shard_params(nn.Linear(2, 2), axis), compute=torch.bfloat16, output=torch.float64)
    assert model(torch.ones(1, 2)).dtype == torch.float64


def test_hooks_on_saved_tensors_around_a_unit_get_what_is_not_a_parameter(axis):
    model = zf.shard_params(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), axis)
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(torch.ones(1, 3)).sum()
    assert packed
    loss.backward()


def test_a_block_of_accumulation_gathers_what_was_edited_before_it(ranks):
    """On two ranks, where a kept parameter is a copy of the shards of others."""

    def seen():
        found = []
        for stage in STAGES:
            torch.manual_seed(0)
            model = stage(nn.Linear(2, 2, bias=False), axis_of_ranks())
            with torch.no_grad():
                model(torch.ones(1, 2))
                model.weight.fill_(3.0)
            with zf.accumulate(model):
                found += model(torch.ones(1, 2)).flatten().tolist()
        return found

    assert ranks(2).run(seen) == [[6.0] * 8] * 2


def test_where_selects(axis):
    with_where = zf.shard_params(nn.Linear(4, 4), axis, where="weight")
    assert with_where.weight.placements == (Shard(0),)
    assert with_where.bias.placements == (Replicate(),)


def test_a_parameter_of_exactly_persist_below_bytes_is_sharded():
    with pretended(2) as mesh:
        model = zf.shard_params(nn.Linear(4, 2, bias=False), mesh, persist_below=32)
        assert model.weight.placements == (Shard(0),)
        model = zf.shard_params(nn.Linear(4, 2, bias=False), mesh, persist_below=33)
        assert model.weight.placements == (Replicate(),)


def test_a_backward_of_a_forward_before_refresh_is_refused(axis):
    model = zf.shard_params(nn.Linear(2, 1), axis)
    loss = model(torch.ones(1, 2)).sum()
    zf.refresh(model)
    with pytest.raises(zf.StateError, match="changed between forward and backward"):
        loss.backward()


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_that_raised_leaves_no_gradient_to_the_next(axis, stage):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2, bias=False)

        def forward(self, x, fails):
            middle = self.inner(x)
            if fails:
                middle.register_hook(_raise)
            return self.inner(middle)

    model = stage(Twice(), axis, units="inner")
    x = torch.ones(1, 2)
    model(x, False).sum().backward()
    expected = model.inner.weight.grad.full_tensor().clone()
    model.zero_grad()
    with pytest.raises(ZeroDivisionError):
        model(x, True).sum().backward()
    model.zero_grad()
    model(x, False).sum().backward()
    assert torch.equal(model.inner.weight.grad.full_tensor(), expected)


def _raise(_):
    raise ZeroDivisionError
