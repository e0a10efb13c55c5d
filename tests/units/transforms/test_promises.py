"""Promises of options and verbs, each where few ranks can see it: larger tests did not notice when they were broken."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import Replicate, Shard

import zero_fn as zf
from tests.support.groups import alone, pretended
from tests.support.messages import refused


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


def test_hooks_on_saved_tensors_around_a_unit_get_what_is_not_a_parameter(axis):
    model = zf.shard_params(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), axis)
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(torch.ones(1, 3)).sum()
    assert packed and all(tensor.shape == (1, 3) for tensor in packed), "a weight was packed"
    loss.backward()


def test_a_parameter_of_exactly_persist_below_bytes_is_sharded():
    with pretended(2) as mesh:
        model = zf.shard_params(nn.Linear(4, 2, bias=False), mesh, persist_below=32)
        assert model.weight.placements == (Shard(0),)
        model = zf.shard_params(nn.Linear(4, 2, bias=False), mesh, persist_below=33)
        assert model.weight.placements == (Replicate(),)


def test_a_backward_of_a_forward_before_refresh_or_a_step_is_refused(axis):
    model = zf.shard_params(nn.Linear(2, 1), axis)
    first, second, third = (model(torch.ones(1, 2)).sum() for _ in range(3))
    first.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with refused("step_between_forward_and_backward"):
        second.backward()
    zf.transforms.refresh(model)
    with pytest.raises(zf.errors.StateError, match="changed between forward and backward"):
        third.backward()
