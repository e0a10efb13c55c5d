"""Optimizers that DeepSpeed has and torch has not: their arithmetic, their options, and their bits over shards and tiers."""

import math

import pytest
import torch
from torch import nn

import zero_fn as zf
from tests.support.messages import Headed, refusals
from tests.support.on_ranks import on_ranks
from tests.support.ranks import axis
from tests.units.deepspeed.configs import BASES
from tests.units.deepspeed.programs import built, furthest, trained, values, zero
from zero_fn.deepspeed.muon_lamb_lion import Lamb, Lion, muon_with_adam
from zero_fn.deepspeed.optimizers import finished
from zero_fn.deepspeed.settings import settings_of
from zero_fn.values.tiers import Tiers


def _drawn(*shape, seed, of=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(of)


def _stepped(optimizer, steps=3):
    """Parameters after steps with gradients that are drawn."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step in range(steps):
        for number, parameter in enumerate(parameters):
            parameter.grad = _drawn(*parameter.shape, seed=100 * step + number, of=parameter.dtype)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def _lamb(value, lr, eps, decay, least, most, *, inside, corrects):
    """Three steps, as csrc/lamb writes them for each element, with betas 0.9 and 0.99."""
    first, second = torch.zeros_like(value), torch.zeros_like(value)
    for step in range(3):
        grad = _drawn(*value.shape, seed=100 * step)
        first, second = 0.9 * first + 0.1 * grad, 0.99 * second + 0.01 * grad * grad
        update = first / ((second + eps).sqrt() if inside else second.sqrt() + eps) + decay * value
        size, change = math.sqrt(float((value * value).sum())), math.sqrt(float((update * update).sum()))
        ratio = min(max(size / change, least), most) if size and change else 1.0
        rate = lr * math.sqrt(1 - 0.99 ** (step + 1)) / (1 - 0.9 ** (step + 1)) if corrects else lr
        value = value - rate * ratio * update
    return value


@pytest.mark.parametrize("inside", [False, True], ids=["eps beside", "eps inside"])
@pytest.mark.parametrize("corrects", [False, True], ids=["raw", "corrected"])
@pytest.mark.parametrize(
    ("scale", "least", "most"), [(1.0, 0.01, 10.0), (1.0, 5.0, 9.0), (9.0, 0.01, 0.2), (0.0, 0.01, 10.0)]
)
def test_lamb_is_that_of_deepspeed(inside, corrects, scale, least, most):
    """Also where the quotient of norms is cut at either end, and where values begin at zero."""
    value = scale * _drawn(5, 3, seed=9)
    options = {"lr": 0.1, "eps": 0.3, "weight_decay": 0.2, "min_coeff": least, "max_coeff": most}
    optimizer = Lamb(
        [nn.Parameter(value.clone())], betas=(0.9, 0.99), bias_correction=corrects, eps_inside_sqrt=inside, **options
    )
    (found,) = _stepped(optimizer)
    wanted = _lamb(value, 0.1, 0.3, 0.2, least, most, inside=inside, corrects=corrects)
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-14)


def test_lion_moves_each_element_by_its_rate_along_a_sign():
    value = _drawn(5, 3, seed=9)
    (found,) = _stepped(Lion([nn.Parameter(value.clone())], lr=0.1, betas=(0.9, 0.99), weight_decay=0.2))
    moment = torch.zeros_like(value)
    for step in range(3):
        grad = _drawn(5, 3, seed=100 * step)
        value = value * (1 - 0.1 * 0.2) - 0.1 * torch.sign(0.9 * moment + 0.1 * grad)
        moment = 0.99 * moment + 0.01 * grad
    torch.testing.assert_close(found, value, rtol=1e-14, atol=1e-14)


class Mixed(nn.Module):
    """Hidden weights of all kinds, and what Muon leaves to AdamW."""

    def __init__(self):
        super().__init__()
        self.matrix, self.bias = nn.Parameter(_drawn(6, 4, seed=1).float()), nn.Parameter(_drawn(6, seed=2).float())
        self.stack, self.filters = (
            nn.Parameter(_drawn(2, 4, 5, seed=3).float()),
            nn.Parameter(_drawn(4, 2, 3, 3, seed=4).float()),
        )
        self.Embedding, self.lm_head = nn.Embedding(5, 4), nn.Linear(4, 5)


def test_muon_steps_hidden_matrices_and_adamw_the_rest():
    """To the bits of torch's own optimizers, over a stack of matrices and over filters as over the matrices in them."""
    model = Mixed()
    whole = muon_with_adam(model.parameters(), [model], muon_lr=0.02, adam_lr=0.01, weight_decay=0.1)
    hidden, rest = whole.param_groups
    assert [p is q for p, q in zip(hidden["params"], (model.matrix, model.stack, model.filters), strict=True)] == [
        True
    ] * 3
    assert [p.shape for p in rest["params"]] == [(6,), (5, 4), (5, 4), (5,)]
    pieces = [model.matrix, *model.stack, model.filters.flatten(1)]
    muon = torch.optim.Muon([nn.Parameter(piece.detach().clone()) for piece in pieces], lr=0.02, weight_decay=0.1)
    copies = [nn.Parameter(parameter.detach().clone()) for parameter in rest["params"]]
    adam = torch.optim.AdamW(copies, lr=0.01, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1)
    for step in range(3):
        for number, parameter in enumerate([*hidden["params"], *rest["params"]]):
            parameter.grad = _drawn(*parameter.shape, seed=100 * step + number, of=torch.float32)
        grads = [model.matrix.grad, *model.stack.grad, model.filters.grad.flatten(1), *(p.grad for p in rest["params"])]
        for each, grad in zip([*muon.param_groups[0]["params"], *copies], grads, strict=True):
            each.grad = grad
        for optimizer in (whole, muon, adam):
            optimizer.step()
    pieces = [model.matrix, *model.stack, model.filters.flatten(1), *rest["params"]]
    assert all(map(torch.equal, pieces, [*muon.param_groups[0]["params"], *copies]))


@pytest.mark.parametrize(
    ("params", "rates"),
    [
        ({}, (0.02, 3e-4)),
        ({"lr": 0.1}, (0.1, 0.1)),
        ({"lr": 0.1, "adam_lr": 0.2}, (0.1, 0.2)),
        ({"muon_lr": 0.3}, (0.3, 3e-4)),
    ],
    ids=str,
)
def test_rates_of_muon_and_of_its_adam_are_those_of_the_config(params, rates):
    stock = settings_of({**BASES["small"], "optimizer": {"type": "Muon", "params": params}}, 1).stock
    assert stock is not None
    assert tuple(group["lr"] for group in stock(Mixed()).param_groups) == rates
    groups = [{"params": Mixed().parameters()}, {"params": (model := Mixed()).parameters(), "lr": 7.0}][1:]
    assert [group["lr"] for group in stock.over(groups, [model]).param_groups] == [7.0, 7.0], "a group has its own"


@pytest.mark.parametrize("dtype", ["fp16", "bf16", None])
@pytest.mark.parametrize("kind", ["Muon", "Lamb"])
@on_ranks(2)
def test_shards_and_tiers_have_the_bits_of_replicas(kind, dtype):
    params = {"lr": 0.01, "weight_decay": 0.1}
    more = {"optimizer": {"type": kind, "params": params}, "scheduler": None}
    more |= {name: {"enabled": name == dtype} for name in ("fp16", "bf16")}
    wanted = trained(zf.from_deepspeed(built(), {**zero(0), **more}, axis()))
    for config in (zero(3), zero(2, offload_optimizer={"device": "cpu"})):
        assert furthest(trained(zf.from_deepspeed(built(), {**config, **more}, axis())), wanted) == 0
    assert furthest(values(built()), wanted) > 0


def _half_on_the_host(one):
    optimizer = zf.by_owner(torch.optim.SGD(zf.shard_params(Headed(), one).parameters()))
    finished(optimizer, Tiers(fraction=0.5))


test_refusals = refusals(
    {
        "muon_of_a_parameter_without_a_name": lambda: muon_with_adam([nn.Parameter(torch.empty(2, 2))], [Headed()]),
        "owners_of_a_part_of_the_states": _half_on_the_host,
    }
)
