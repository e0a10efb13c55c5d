"""`accumulate(unshard=True)`: gathered once, reduced once, plain leaves in between; and what is refused inside."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_fn as zf
from tests.axes.grids import differing
from tests.support.models import Odd, Stack
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES, gradients, loss_of, parameters
from tests.support.ranks import axis
from tests.support.wholes import full, means
from tests.support.worlds import noise


class Mixed(Stack):
    """Ties across units, a frozen layer, a parameter that nothing uses, and statistics."""

    def __init__(self, *, has_statistics=True):
        super().__init__(5, 5)
        self.norm = nn.BatchNorm1d(5) if has_statistics else nn.LayerNorm(5)
        self.leave.weight = self.layers[2].first.weight = self.enter.weight
        self.layers[1].requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return super().forward(self.norm(x))


class Gated(nn.Module):
    """A block that owns a parameter and recomputes itself, or lies in a checkpoint."""

    def __init__(self, way):
        super().__init__()
        self.way, self.up, self.gate = way, nn.Linear(5, 5), nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        if self.way in ("reentrant", "other"):
            return checkpoint(self._inner, x, use_reentrant=self.way == "reentrant")
        return self._inner(x)

    def _inner(self, x):
        return x + self.gate * torch.tanh(nn.functional.linear(x, self.up.weight, self.up.bias))


def _built(stage, kind):
    torch.manual_seed(0)
    if kind == "mixed":
        return STAGES[stage](Mixed(), axis())
    if kind == "mixed, bfloat16":
        return zf.precision(STAGES[stage](Mixed(has_statistics=False), axis()))
    model = zf.precision(STAGES[stage](nn.Sequential(*[Gated(kind) for _ in range(3)]), axis()))
    return zf.checkpoint_activations(model, units=Gated) if kind == "ours" else model


@pytest.mark.parametrize(
    ("stage", "kind"),
    [
        *((stage, "mixed") for stage in STAGES),
        *(("zero3", kind) for kind in ("mixed, bfloat16", "ours", "other", "reentrant")),
        ("replicate", "ours"),
        ("zero1", "other"),
    ],
)
@on_ranks(2)
def test_gathering_once_gives_the_gradients_of_gathering_each_time(stage, kind):
    """Buffers too; and what is computed again sees what the forward saw."""
    found = []
    for unshard in (False, True):
        model = _built(stage, kind)
        with zf.accumulate(model, unshard=unshard):
            for microbatch in range(3):
                (model(noise(3, 5, seed=microbatch).requires_grad_()).float().square().mean() / 3).backward()
                if unshard and not kind.startswith("mixed"):
                    assert model[0].gate.grad is not None, "it is a leaf"
        found.append({**gradients(model), **{name: buffer.clone() for name, buffer in model.named_buffers()}})
    assert differing(*found) == []


def _raising(_grad):
    raise ZeroDivisionError


@on_ranks(2)
def test_casts_are_hidden_again_after_a_backward_that_raised():
    """Its engine forgets what was to be done at the end: casts are hidden again all the same."""
    model = _built("zero3", "other")
    with zf.accumulate(model, unshard=True):
        output = model(noise(3, 5, seed=0).requires_grad_())
        model(noise(3, 5, seed=1))
        handle = model[0].up.weight.register_hook(_raising)
        with pytest.raises(ZeroDivisionError):
            output.float().square().mean().backward()
        handle.remove()
        model.zero_grad()
        model(noise(3, 5, seed=1)).float().mean().backward()
        assert isinstance(model[0].gate, nn.Parameter)
    assert isinstance(model[0].gate, nn.Parameter)
    assert model[0].gate.grad is not None


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_gradients_may_be_taken_and_edited_in_any_way(stage):
    """As zero-bubble schedules take them: by `torch.autograd.grad`, added up by hand, scaled, and some of them dropped."""
    plain = Odd()
    model = STAGES[stage](plain, axis())
    for module, block in ((plain, nullcontext()), (model, zf.accumulate(model, unshard=True))):
        with block:
            trained = [p for p in module.parameters() if p.requires_grad]
            for microbatch in range(2):
                loss = loss_of(module, microbatch)
                for parameter, grad in zip(trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True):
                    if grad is not None:
                        parameter.grad = grad if parameter.grad is None else parameter.grad + grad
            trained[-1].grad = None
            for parameter in trained:
                if parameter.grad is not None:
                    parameter.grad.div_(2)
    expected = means([p.grad for p in plain.parameters()], list(plain.parameters()))
    assert differing(dict(zip(gradients(model), expected, strict=True)), gradients(model)) == []


@pytest.mark.parametrize("stage", ["replicate", "zero1", "zero3"])
@on_ranks(2)
def test_what_is_refused_inside_changes_nothing(stage):
    model = _built(stage, "mixed")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    before, x = parameters(model), noise(3, 5, seed=0)
    with zf.accumulate(model, unshard=True):
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        model(x).sum().backward()
        attempts = [
            optimizer.step,
            lambda: zf.unsharded(model).__enter__(),
            lambda: zf.accumulate(model, unshard=True).__enter__(),
        ]
        for attempt in attempts:
            with pytest.raises(zf.errors.StateError):
                attempt()
        model.zero_grad()
    assert all(p.grad is None for p in model.parameters()), "zero_grad inside drops what was summed"
    with pytest.raises(ZeroDivisionError), zf.accumulate(model, unshard=True):
        model(x).sum().backward()
        raise ZeroDivisionError
    assert all(p.grad is None for p in model.parameters()), "an exception drops what was summed"
    assert differing(before, parameters(model)) == []
    model(x).sum().backward()
    optimizer.step()
    with zf.accumulate(model, unshard=True), torch.no_grad():
        model.enter.bias.fill_(2.0)
    assert (full(model.enter.bias) == 2.0).all(), "a single edit stays"
