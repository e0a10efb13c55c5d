"""A loss that adds a penalty on resting parameters to what the model gave."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

import zero_fn as zf
from tests.axes.grids import composed, loss_of
from tests.support.models import Stack
from tests.support.on_ranks import on_ranks
from tests.support.profiles import SIZES
from tests.support.ranks import axis
from tests.support.wholes import full
from tests.support.worlds import ALL, as_replicas, noise

PENALTIES = {
    "squares": lambda model: 0.01 * sum(p.square().sum() for p in model.parameters()),
    "absolutes": lambda model: sum(p.abs().sum() for p in model.layers.parameters()) / 64,
    "largest": lambda model: sum(p.abs().max() for p in model.parameters()) / 32,
    "rows": lambda model: (model.enter.weight[1:] - model.enter.weight[:-1]).square().sum(),
    "last rows": lambda model: sum(p[-1].square().sum() for p in model.parameters()),
    "flat": lambda model: nn.utils.parameters_to_vector(model.parameters()).square().sum() / 64,
}


def _mse(model, seed):
    return F.mse_loss(model(noise(4, 6, seed=seed)), noise(4, 6, seed=seed + 10))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", PENALTIES)
@as_replicas(Stack, n=None)
def test_a_penalty_is_added_to_the_mean_of_gradients(model, run, number, name):
    """As the refusal of a sum of both says: the penalty is brought together before."""
    loss, penalty = _mse(model, number), PENALTIES[name](model)
    if isinstance(penalty, DTensor):
        whole = penalty.full_tensor()
        run.backward((loss + whole if number else whole + loss) * 0.5)
    else:  # after the mean: the order of the sum
        run.backward(loss * 0.5)
        (penalty * 0.5).backward()


@as_replicas(Stack)
def test_a_penalty_on_frozen_parameters_has_no_gradient(model, run, number):
    model.enter.requires_grad_(False)
    penalty = sum(p.square().sum() for p in model.enter.parameters())
    run.backward((_mse(model, number) + full(penalty)) * 0.5)


@as_replicas(Stack)
def test_a_penalty_in_a_block_of_accumulate_is_added(model, run, number):
    """With a loss, or alone beside gradients that wait, where it comes after their mean."""
    with run.accumulate():
        _mse(model, number).backward()
        last, penalty = _mse(model, number + 1), PENALTIES["squares"](model)
        is_together = isinstance(penalty, DTensor) and number == 0
        (last + penalty.full_tensor() if is_together else last).backward()
        if isinstance(penalty, DTensor) and number:
            penalty.backward()
    if not isinstance(penalty, DTensor):
        penalty.backward()


@as_replicas(Stack, stages=ALL)
def test_a_loss_that_reads_a_weight_beside_the_model_is_refused_or_averaged(model, run, number):
    """As fused losses over an unwrapped model do; where the weight is made whole, the loss says that gradients differ."""
    hidden, weight = model.layers[0](noise(4, 6, seed=number)), model.leave.weight
    if isinstance(weight, DTensor):
        with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
            F.linear(hidden, weight)
        weight = weight.full_tensor(grad_placements=[Partial("avg")])
    run.backward(F.linear(hidden, weight).square().mean())


ANCHORED = {
    "a sum": lambda p, anchor: F.mse_loss(p, anchor, reduction="sum"),
    "a norm of everything": lambda p, _: p.norm() + p.norm(3),
    "a quotient of sums": lambda p, anchor: anchor.sum() / p.square().sum(),
    "stacked at the end": lambda p, anchor: torch.stack([p, anchor], dim=-1)[..., 0].square().sum(),
}
"""What torch alone has wrong is in `units/runtime/test_refused.py`."""


@pytest.mark.parametrize(("rows", "stage"), [(4, "zero1"), (7, "zero3")])
@on_ranks(2)
def test_penalties_over_shards_are_those_of_whole_tensors(rows, stage):
    for name, penalty in ANCHORED.items():
        plain = nn.Linear(6, rows, bias=False)
        weight = getattr(zf, stage)(plain, axis()).weight
        anchor = distribute_tensor(torch.randn(weight.shape), weight.device_mesh, weight.placements)
        value, expected = penalty(weight, anchor), penalty(plain.weight, full(anchor))
        value.backward()
        expected.backward()
        for one, other in ((value.detach(), expected), (weight.grad, plain.weight.grad)):
            assert bool(((full(one) - other).abs() <= 1e-6 * other.abs().sum()).all()), name  # other orders of 42 terms


def _gradients(composition, *, together):
    model, row = composed(composition)
    loss, penalty = loss_of(model, 0, row), 0.01 * sum(p.square().sum() for p in model.parameters())
    for part in (loss + penalty.full_tensor(),) if together else (loss, penalty):
        part.backward(retain_graph=together)
    return [full(p.grad) for p in model.parameters()]


@pytest.mark.parametrize("composition", ["tp", "hybrid"])
@on_ranks(4)
def test_a_penalty_is_added_on_two_axes(composition):
    assert all(map(torch.equal, _gradients(composition, together=True), _gradients(composition, together=False)))


@on_ranks(2)
def test_steps_take_gradients_that_come_whole(folder):
    """Of penalties on the last rows of uneven shards only. A streamed optimizer had refused them."""
    for make in (lambda o: o, lambda o: zf.streamed(o, zf.nvme(folder)), lambda o: zf.streamed(o, zf.cpu())):
        torch.manual_seed(0)
        plain = nn.Linear(4, 7)
        model = zf.shard_params(plain, axis())
        optimizers = [make(torch.optim.AdamW(model.parameters())), torch.optim.AdamW(plain.parameters())]
        for _ in range(3):
            for each, optimizer in zip((model, plain), optimizers, strict=True):
                optimizer.zero_grad()
                (each.weight[-2:].square().sum() + each.bias[1:].sum()).backward()
                optimizer.step()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(full(one), other)
