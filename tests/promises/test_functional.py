"""Double backward, `torch.autograd.grad`, and the functions of `torch.func`."""

import pytest
import torch
from torch import nn
from torch.autograd.functional import jacobian
from torch.distributed.tensor import DTensor
from torch.func import functional_call, grad, grad_and_value, jvp, vmap

import zero_fn as zf
from tests.support.messages import refused
from tests.support.models import Stack
from tests.support.on_ranks import on_ranks
from tests.support.profiles import SIZES
from tests.support.programs import STAGES
from tests.support.ranks import axis
from tests.support.wholes import named_fulls
from tests.support.worlds import DAILY, as_replicas, noise, one_backward


class Tied(Stack):
    """Its last linear has the weight of the first."""

    def __init__(self):
        super().__init__()
        self.leave.weight = self.enter.weight


class Shared(Tied):
    """One layer runs twice."""

    def forward(self, x):
        x = self.layers[0](self.layers[0](self.enter(x)))
        return self.leave(x)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("build", [Stack, Tied])
@as_replicas(n=None)
def test_a_gradient_penalty_on_the_input_trains(model, run, number):
    x = noise(4, 6, seed=number).requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    run.backward(output.square().mean() + (slope.norm(dim=1) - 1).square().mean())
    return slope, x.grad


@pytest.mark.parametrize("n", SIZES)
@as_replicas(lambda: Shared().double(), n=None, steps=1, tolerance=1e-12)
def test_modules_that_run_several_times_are_differentiated_twice_and_added_up(model, run, number):
    """In another order of local sums than replicas."""
    x = noise(4, 6, seed=number, dtype=torch.float64).requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    run.backward(output.square().mean() + (slope.norm(dim=1) - 1).square().mean())
    used = [p for name, p in model.named_parameters() if not name.startswith(("layers.1", "layers.2"))]
    return slope, x.grad, [run.mean(value) for value in torch.autograd.grad(model(x).sum(), used)]


@pytest.mark.parametrize("n", [1, 2])
@as_replicas(Stack, n=None)
def test_a_penalty_on_the_gradient_of_parameters_trains(model, run, number):
    """The gradient in the graph is the mean over ranks; with one batch on all ranks, that of each."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
    loss = model(x).square().mean()
    whole = [
        g.full_tensor() if isinstance(g, DTensor) else g
        for g in torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    ]
    run.backward(loss + sum(g.square().sum() for g in whole))
    return whole


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("build", [Stack, Tied])
@as_replicas(n=None)
def test_autograd_grad_gives_resting_gradients(model, run, number):
    """Of all parameters, and of some, which a backward may be for, too."""
    x = noise(4, 6, seed=number)
    grads = torch.autograd.grad(model(x).square().mean(), list(model.parameters()), allow_unused=True)
    for parameter, value in zip(model.parameters(), grads, strict=True):
        if isinstance(parameter, DTensor) and value is not None:
            assert isinstance(value, DTensor)
            assert value.placements == parameter.placements
    some = torch.autograd.grad(model(x).sum(), list(model.layers[0].parameters()))
    run.backward(model(x).square().mean(), inputs=list(model.layers.parameters()))
    run.backward(model(x).square().mean(), inputs=[model.enter.weight])
    return [run.mean(value) for value in (*grads, *some)]


def _values(model, *, scale):
    return {name: value * scale for name, value in named_fulls(dict(model.named_parameters())).items()}


@pytest.mark.parametrize("n", SIZES)
@as_replicas(Shared, n=None)
def test_a_call_on_whole_tensors_is_that_of_a_plain_module(model, run, number):
    """Of the model and of a unit alone: functional_call, its transforms and ensembles. Gradients are those of the rank."""
    x, layer = noise(4, 6, seed=number), model.layers[1]
    values = _values(model, scale=0.5)
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}

    def loss(values, x):
        return functional_call(model, values, (x,)).square().mean()

    inner = loss(leaves, x)
    steps = torch.autograd.grad(inner, list(leaves.values()), create_graph=True, allow_unused=True)
    fast = {name: p if g is None else p - 0.25 * g for (name, p), g in zip(leaves.items(), steps, strict=True)}
    with run.accumulate():
        alone = functional_call(layer, _values(layer, scale=2.0), (x,))
        run.backward(model(x).square().mean())
    return (
        torch.autograd.grad(loss(fast, x + 1), list(leaves.values()), allow_unused=True),
        grad_and_value(loss)(values, x),
        vmap(grad(loss), in_dims=(None, 0))(values, x),  # of each sample
        grad(lambda values, x: sum(g.square().sum() for g in grad(loss)(values, x).values()))(values, x),
        vmap(lambda values: functional_call(model, values, (x,)))(
            {k: torch.stack([v, 2 * v]) for k, v in values.items()}
        ),
        alone,
        model(x),
    )


@on_ranks(2)
def test_a_swap_leaves_units_and_parameters_as_they_were():
    for stage in STAGES.values():
        model = stage(Tied(), axis())
        before = [id(parameter) for parameter in model.parameters()]
        x = noise(3, 6, seed=1)
        expected = model(x)
        values = _values(model, scale=2.0)
        swapped = functional_call(Tied(), values, (x,))
        with zf.traffic() as sent:
            functional_call(model, values, (x,))
        assert sent.nbytes == 0, "nothing is gathered in place of what was given"
        for block in (zf.unsharded(model), zf.accumulate(model, unshard=True)):
            with block:
                assert torch.equal(functional_call(model, values, (x,)), swapped)
                assert torch.equal(model(x), expected)
                with refused("functional_call_unties"):
                    two = {**values, "leave.weight": torch.randn(6, 6)}
                    functional_call(model, two, (x,), tie_weights=False)
        assert torch.equal(model(x), expected)
        assert [id(parameter) for parameter in model.parameters()] == before


@pytest.mark.parametrize("stage", DAILY)
@on_ranks(2)
def test_resting_tensors_and_some_of_the_tensors_are_refused(stage):
    """Inside torch.func and outside. In the block of the error's fix, parameters are whole, and a call takes any of them."""
    model = STAGES[stage](Stack(), axis())
    x = noise(3, 6, seed=1)

    def loss(values):
        return functional_call(model, values, (x,)).sum()

    some = {name: value for name, value in _values(model, scale=2.0).items() if "leave" in name}
    for values in ({name: parameter.detach() * 2 for name, parameter in model.named_parameters()}, some):
        for call in (loss, grad(loss)):
            with refused("torch_func_of_resting_parameters"):
                call(values)
    expected = grad(loss)(_values(model, scale=2.0))
    with zf.unsharded(model):
        assert loss(some).isfinite()
        whole = {name: parameter.detach() * 2 for name, parameter in model.named_parameters()}
        found = grad(loss)(whole)
        _, slope = jvp(loss, (whole,), (whole,))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert torch.allclose(slope, sum((whole[name] * value).sum() for name, value in expected.items()))


@pytest.mark.parametrize("stage", DAILY)
@on_ranks(2)
def test_vectorized_gradients_of_parameters_are_refused_and_those_of_inputs_are_exact(stage):
    reference = Stack()
    model = STAGES[stage](reference, axis())
    x = noise(3, 6, seed=1)
    parameters = list(model.parameters())
    with refused("gradients_are_vectorized"):
        torch.autograd.grad(model(x)[0, :2], parameters, torch.eye(2), is_grads_batched=True)
    (first, *_) = torch.autograd.grad(model(x).square().mean(), parameters, create_graph=True)
    with pytest.raises(zf.errors.StateError):
        torch.autograd.grad(first.sum().reshape(1), parameters, torch.ones(2, 1), is_grads_batched=True)
    found, expected = (jacobian(lambda x, m=m: m(x)[0, :2], x, vectorize=True) for m in (model, reference))
    assert torch.equal(found, expected)
    model(x).sum().backward()


class _Fused(torch.autograd.Function):
    """Puts the gradient of the weight where it belongs itself, as fused accumulations do."""

    @staticmethod
    def forward(ctx, x, weight, layer):
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        ctx.layer.weight.grad = grad.T @ x
        return grad @ weight, None, None


class _FusedLinear(nn.Linear):
    def forward(self, x):
        y = _Fused.apply(x, self.weight, self)
        return y + self.bias


def _fused():
    return nn.Sequential(nn.Linear(6, 5), nn.Sequential(_FusedLinear(5, 6), nn.Tanh()), _FusedLinear(6, 2))


@pytest.mark.parametrize("n", SIZES)
@as_replicas(_fused, n=None)
def test_a_gradient_that_a_function_assigns_in_backward_is_reduced(model, run, number):
    one_backward(model, run, number)
