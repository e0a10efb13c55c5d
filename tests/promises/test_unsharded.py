"""`unsharded`: whole parameters in a block, written back on request; backwards that meet it."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_fn as zf
from tests.axes.grids import differing
from tests.support.messages import refused
from tests.support.models import Odd
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES, gradients, loss_of, parameters
from tests.support.ranks import axis


def _built(stage):
    torch.manual_seed(0)
    return STAGES[stage](Odd(), axis())


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(3)
def test_the_first_forward_may_be_that_of_one_rank_inside(stage):
    """It waited for the others, to compare what ranks hold: `unsharded` does that."""
    model = _built(stage)
    with zf.unsharded(model):
        if dist.get_rank() == 1:
            with zf.traffic() as sent, torch.no_grad():
                loss_of(model, 0)
            assert not sent.calls
    loss_of(model, 0).backward()
    torch.manual_seed(dist.get_rank())
    other = STAGES[stage](Odd(), axis())
    with pytest.raises(zf.errors.DisagreementError), zf.unsharded(other):
        pass


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(3)
def test_unsharded_gives_whole_parameters_and_writes_back_on_request(stage):
    model = _built(stage)
    plain = parameters(model)
    with zf.unsharded(model):
        inside = dict(model.named_parameters())
        assert all(type(parameter) is nn.Parameter for parameter in inside.values())
        assert differing({name: p.detach() for name, p in inside.items()}, plain) == []
        assert model.head.weight is model.embedding.weight
        with torch.no_grad():
            model.norm.weight.add_(1)
    assert differing(parameters(model), plain) == [], "edits without writeback are dropped"
    with zf.unsharded(model.blocks[0], writeback=True), torch.no_grad():
        for parameter in (model.blocks[0].gate, model.blocks[0].down.weight):  # the first of its unit, and another
            parameter.add_(1)
    for name in ("blocks.0.gate", "blocks.0.down.weight"):
        plain[name] = plain[name] + 1
    assert differing(parameters(model), plain) == []
    with pytest.raises(zf.errors.DisagreementError), zf.unsharded(model, writeback=True), torch.no_grad():
        model.norm.bias.add_(dist.get_rank())
    assert differing(parameters(model), plain) == [], "edits that differ between ranks are refused"
    with pytest.raises(ZeroDivisionError), zf.unsharded(model, writeback=True), torch.no_grad():
        model.norm.bias.add_(1)
        raise ZeroDivisionError
    assert differing(parameters(model), plain) == [], "an exception drops edits"
    for writeback in (False, True):  # an adapter freezes its base so
        with zf.unsharded(model, writeback=writeback):
            model.norm.requires_grad_(False)
        assert model.norm.weight.requires_grad is not writeback
    assert model.head.weight.requires_grad


@pytest.mark.parametrize("stage", ["replicate", "zero1", "zero3"])
@on_ranks(2)
def test_a_backward_gives_the_gradients_of_the_forward_before_and_none_that_would_be_lost(stage):
    expected, model = _built(stage), _built(stage)
    loss_of(expected, 0).backward()
    loss = loss_of(model, 0)
    with zf.unsharded(model):
        loss.backward()
    assert differing(gradients(model), gradients(expected)) == [], "of a forward before the block"
    model.zero_grad()
    with zf.unsharded(model):
        loss = loss_of(model, 0) + model.norm.weight.square().sum()
        (whole,) = torch.autograd.grad(model.norm.bias.square().sum(), model.norm.bias)
    assert type(whole) is Tensor, "asked for, a gradient is there"
    with pytest.raises(zf.errors.StateError):
        loss.backward()
    with pytest.raises(zf.errors.StateError), zf.unsharded(model):
        loss_of(model, 0).backward()
    with refused("gradient_of_a_whole_parameter"), zf.unsharded(model):
        model.norm.weight.sum().backward()
    model.zero_grad()
    loss_of(model, 0).backward()
    assert differing(gradients(model), gradients(expected)) == [], "nothing is left of the backward that failed"


@on_ranks(2)
def test_parts_without_parameters_are_passed_over():
    for stage in ("zero1", "zero3"):
        model = STAGES[stage](nn.Sequential(nn.Linear(6, 6), nn.Dropout()), axis())
        for part in model:
            with zf.unsharded(part):
                pass
            with zf.accumulate(part):
                model(torch.ones(2, 6)).sum().backward()
        assert model[0].weight.grad is not None
