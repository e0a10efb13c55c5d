"""Frozen weights of tensor subclasses, below adapters that are trained: they rest as the plain tensors they are made of."""

from __future__ import annotations

import copy
import functools
import types
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

import zero_fn as zf
from tests.support.groups import alone
from tests.support.messages import refused
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.ranks import axis

WIDTH = 16


_made = []  # values of each tensor of 8 bits, plain or gathered


class Scaled(Tensor):
    """Values of 8 bits and a scale for each row; it computes as what they stand for."""

    values: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, values, scale):
        tensor = Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)
        tensor.values, tensor.scale = values, scale
        return tensor

    def __init__(self, *_):
        _made.append(weakref.ref(self.values))

    def __tensor_flatten__(self):
        return ["values", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, _context, _size, _stride):
        return Scaled(inner["values"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].values, args[0].scale)
        plain = tree_map_only(Scaled, lambda tensor: tensor.values * tensor.scale, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


class _Matmul(torch.autograd.Function):
    """Saves the quantized weight, as quantized linears do."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return F.linear(x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx, *grads):
        (weight,) = ctx.saved_tensors
        assert isinstance(weight, Scaled)
        return grads[0] @ (weight.values * weight.scale).to(grads[0].dtype), None


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        scaled = Scaled(torch.randint(-99, 99, (WIDTH, WIDTH), dtype=torch.int8), torch.rand(WIDTH, 1) / 400)
        self.weight = nn.Parameter(scaled, requires_grad=False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        y = x + _Matmul.apply(x, self.weight) + self.up(self.down(x))
        return y


def _model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(Adapted() for _ in range(3)))


def _trained(model):
    """Losses, of the same batch on every rank, so that they are those of one process."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


WORLDS = {
    "alone": lambda model: model,
    **{stage: lambda model, make=make: make(model, axis()) for stage, make in STAGES.items()},
    "on the host": lambda model: zf.offload(
        zf.shard_params(model, axis()), params=zf.cpu(), where="*parametrizations*"
    ),
    "in 16 bits": lambda model: zf.precision(zf.shard_params(model, axis()), compute=torch.float32),
}


@on_ranks(2)
def test_adapters_on_weights_of_a_subclass_train_as_alone():
    expected = _trained(_model())
    for name, make in WORLDS.items():
        model = make(zf.transforms.flatten_subclasses(_model()))
        for _ in range(2):
            assert all(map(torch.equal, _trained(copy.deepcopy(model)), expected)), name
        with zf.unsharded(model) if name != "alone" else nullcontext():
            weight = model[1].weight
            assert type(weight) is Scaled
            assert not weight.requires_grad


@on_ranks(2)
def test_they_rest_and_wait_for_backward_in_their_own_bytes():
    model = zf.shard_params(zf.transforms.flatten_subclasses(_model()), axis())
    elements, scales, trained = 3 * WIDTH * WIDTH, 3 * WIDTH, 3 * 4 * WIDTH
    assert 2 * sum(p.to_local().nbytes for p in model.parameters()) == elements + 4 * (scales + trained)
    names = [name for name, _ in model.named_parameters() if "parametrizations" in name]
    assert names[:2] == ["0.parametrizations.weight.original0", "0.parametrizations.weight.original1"]
    _made.clear()
    loss = model(torch.ones(2, WIDTH, requires_grad=True)).sum()
    whole = {values.data_ptr() for made in _made if (values := made()) is not None}
    assert len(whole) <= 1, "autograd keeps gathered weights; that of the last block stays anyway"
    loss.backward()


@on_ranks(2)
def test_precision_leaves_parts_in_their_dtypes():
    model = zf.precision(zf.shard_params(zf.transforms.flatten_subclasses(_model()), axis()), compute=torch.bfloat16)
    model(torch.ones(2, WIDTH)).sum().backward()
    layer, seen = model[0], []
    layer.down.register_forward_hook(lambda *_: seen.extend([layer.weight.scale.dtype, layer.down.weight.dtype]))
    model(torch.ones(2, WIDTH))
    assert seen == [torch.float32, torch.bfloat16]
    narrow = zf.precision(zf.transforms.flatten_subclasses(_model()), rest=torch.bfloat16)
    dtypes = {p.dtype for name, p in narrow.named_parameters() if "parametrizations" in name}
    assert dtypes == {torch.int8, torch.float32}


@on_ranks(2)
def test_parts_are_saved_and_loaded_between_stages(folder):
    expected = _model()
    zf.save(f"{folder}/one", zf.shard_params(zf.transforms.flatten_subclasses(expected), axis()))
    other = zf.shard_optimizer(zf.transforms.flatten_subclasses(_model(seed=1)), axis())
    zf.load(f"{folder}/one", other)
    assert torch.equal(other(torch.ones(2, WIDTH)), expected(torch.ones(2, WIDTH)))


def test_tied_weights_are_made_of_the_same_parts():
    plain = nn.Sequential(Adapted(), Adapted())
    plain[1].weight = plain[0].weight
    model = zf.transforms.flatten_subclasses(plain)
    assert sum(p.dtype == torch.int8 for p in model.parameters()) == 1
    assert torch.equal(model(torch.ones(1, WIDTH)), plain(torch.ones(1, WIDTH)))
    assert type(plain[0].weight) is Scaled, "the module that was passed is unchanged"
    assert type(plain[0]) is Adapted
    assert isinstance(model[0], Adapted)


def test_a_text_of_a_module_may_hold_the_module_of_before():
    """torchao leaves one at each linear that it quantizes. It is printed, and computes nothing."""

    def text(before, module):
        return f"{before()}, quantized"

    plain = nn.Linear(2, 2)
    plain.extra_repr = types.MethodType(functools.partial(text, plain.extra_repr), plain)
    model = zf.transforms.flatten_subclasses(plain)
    assert "quantized" in repr(zf.precision(model))
    assert (
        type(model) is nn.Linear and model is not plain and model.weight is plain.weight
    )  # no parameter is of a subclass


class Opaque(Tensor):
    """A class that says nothing of what it is made of."""


def _holding(weight, *, is_trained=False):
    module = nn.Module()
    module.weight = nn.Parameter(weight, requires_grad=is_trained)
    return module


def test_what_cannot_be_flattened_is_refused():
    values, scale = torch.ones(2, 2, dtype=torch.int8), torch.ones(2, 1)
    two = TwoTensor(torch.ones(2, 2), torch.ones(2, 2))
    with refused("subclass_is_trained"):
        zf.transforms.flatten_subclasses(_holding(two, is_trained=True))
    with refused("subclass_says_not_what_it_is_made_of"):
        zf.transforms.flatten_subclasses(_holding(scale.as_subclass(Opaque)))
    with pytest.raises(zf.errors.PlacementError, match="not plain: scale"):
        zf.transforms.flatten_subclasses(_holding(Scaled(values, Scaled(values, scale))))
    with alone() as mesh:
        with pytest.raises(zf.errors.PlacementError, match="placed on a mesh already"):
            zf.transforms.flatten_subclasses(_holding(DTensor.from_local(two, mesh, [Replicate()])))
        with refused("flattened_after_a_transform"):
            zf.transforms.flatten_subclasses(zf.shard_params(nn.Linear(2, 2), mesh))
