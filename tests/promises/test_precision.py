"""`precision`: what a module sees, gives and keeps in which dtype; masters of weights that were loaded in 16 bits."""

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_fn as zf
from tests.support.models import Language, Layer
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES, loss_of
from tests.support.ranks import axis
from tests.support.wholes import fulls
from tests.support.worlds import noise

# -- what modules are given and give ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    x: Tensor
    mask: Tensor
    inner: list[Tensor]
    name: str = "of tensors"


class Masked(nn.Module):
    """Takes and gives a dataclass, or an object of attrs."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(6, 6), []

    def forward(self, batch):
        self.seen.append(batch)
        x = self.layer(batch.x) * batch.mask + batch.inner[0]
        return replace(batch, x=x) if isinstance(batch, Batch) else x


@pytest.mark.parametrize("library", ["dataclasses", "attrs"])
@on_ranks(2)
def test_tensors_in_records_are_cast(library):
    kind = Batch
    if library == "attrs":
        kind = pytest.importorskip("attrs").make_class("AttrsBatch", ["x", "mask", "inner"], frozen=True, slots=True)
    model = zf.precision(zf.shard_params(Masked(), axis()), compute=torch.bfloat16, output=torch.float64)
    given = kind(torch.ones(2, 6), torch.ones(2, 6, dtype=torch.bool), [torch.ones(2, 6)])
    output = model(given)
    (seen,) = model.seen
    assert (seen.x.dtype, seen.mask.dtype, seen.inner[0].dtype) == (torch.bfloat16, torch.bool, torch.bfloat16)
    if library == "dataclasses":
        assert (output.x.dtype, output.inner[0].dtype, output.name) == (torch.float64, torch.float64, "of tensors")
        output = output.x
    assert given.x.dtype == torch.float32
    output.sum().backward()
    assert model.layer.weight.grad is not None


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
@on_ranks(2)
def test_a_part_keeps_the_output_dtype_that_it_was_given_before_the_whole_was_transformed(stage):
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), nn.Identity(), nn.Linear(6, 6))
    model[0] = zf.precision(model[0], compute=torch.bfloat16, output=torch.float32)
    seen = []
    model[1].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    model = STAGES[stage](model, axis())
    model = zf.precision(model, compute=torch.float32, where="2.*", output=torch.float16)
    output = model(torch.ones(2, 6))
    assert (seen, output.dtype) == ([torch.float32], torch.float16)
    assert copy.deepcopy(model)(torch.ones(2, 6)).dtype == torch.float16
    output.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with zf.accumulate(model, unshard=True):
        model(torch.ones(2, 6)).sum().backward()
    assert seen == [torch.float32] * 3


class Normed(nn.Module):
    """Norms with weights and a buffer that stays in float32, and an input that comes past the model's own."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList((nn.LayerNorm(6), nn.GroupNorm(2, 6)))
        self.body, self.outside = Layer(), torch.ones(6)
        self.register_buffer("offset", torch.ones(6))
        self.seen = set()

    def forward(self, x):
        assert self.offset.dtype == torch.float32
        for norm in self.norms:
            x = norm(x)
        self.seen.add(x.dtype)
        y = self.body(x + self.outside.to(x.dtype))
        return y


@pytest.mark.parametrize(("stage", "compute"), [("zero1", torch.bfloat16), ("zero3", torch.float16)])
@on_ranks(2)
def test_dtypes_are_those_that_were_asked_for(stage, compute):
    """Also of a model that was frozen at first, whose sums have the dtype asked for all the same."""
    found = []
    for is_frozen_first in (False, True):
        torch.manual_seed(0)
        model = zf.precision(STAGES[stage](Normed(), axis()), compute=compute, reduce=torch.float32)
        if is_frozen_first:
            model.requires_grad_(False)
            model(noise(2, 6, seed=5))
            model.requires_grad_(True)
        for ends in (model, lambda x, model=model: checkpoint(model, x, use_reentrant=False)):
            y = ends(noise(2, 6, seed=0))
            y.float().square().mean().backward()
            assert model.seen == {compute}
            assert y.dtype == compute
            assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
        found.append([p.grad.full_tensor() for p in model.parameters()])
    assert all(map(torch.equal, *found))


# -- masters ----------------------------------------------------------------------------------------------------------


def _in_16_bits():
    """Tied, with a buffer that stays as it is."""
    torch.manual_seed(0)
    model = Language().bfloat16()
    model.register_buffer("scale", torch.ones(6, dtype=torch.bfloat16))
    return model


def _trained(model, optimizer):
    found = []
    for seed in range(3):
        loss = loss_of(model, seed)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    zf.check(model, optimizer)
    return [*found, *fulls(model.parameters())]


@pytest.mark.parametrize(
    ("stage", "order"), [("zero1", "before"), ("zero1", "away"), ("zero2", "after"), ("zero3", "away")]
)
@on_ranks(2)
def test_masters_are_those_of_weights_widened_before(stage, order, folder):
    tiers = dict.fromkeys(("params", "optim"), zf.nvme(folder)) if order == "away" else {}

    def placed(module):
        module = STAGES[stage](module, axis())
        return zf.offload(module, **tiers) if tiers else module

    def adam(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        return zf.streamed(optimizer) if tiers else optimizer

    widened, loaded = _in_16_bits(), _in_16_bits()
    for parameter in widened.parameters():
        parameter.data = parameter.data.float()
    expected = placed(zf.precision(widened))
    if order == "before":
        model = placed(zf.precision(loaded, rest=torch.float32))
    else:
        model = zf.precision(placed(loaded), rest=torch.float32)
    assert all(parameter.dtype == torch.bfloat16 for parameter in loaded.parameters()), "the input is unchanged"
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert model.scale.dtype == torch.bfloat16
    assert model.head.weight is model.embedding.weight
    assert all(map(torch.equal, _trained(model, adam(model)), _trained(expected, adam(expected))))
    assert zf.memory(model) == zf.memory(expected)


@on_ranks(2)
def test_masters_are_made_where_it_is_asked():
    model = zf.precision(
        zf.shard_params(_in_16_bits(), axis()), rest=torch.float32, where=lambda name, _: name[:4] != "norm"
    )
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.bfloat16} == {"norm.weight", "norm.bias"}
