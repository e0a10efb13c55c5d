"""Hooks of users on parameters and modules.

A hook of a parameter is called once in each backward (once in a block of `accumulate`), on every rank, with the resting
gradient: the mean over ranks, as a DTensor placed as the parameter. DDP calls it with the local gradient, before the mean;
for a hook that is linear the two orders are one, and exactly one if it scales by powers of two.
"""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.utils import prune
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

import zero_fn as zf
from tests.promises.tables import each_as_replicas
from tests.support.messages import refused
from tests.support.models import Block, Stack
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.ranks import axis
from tests.support.wholes import fulls
from tests.support.worlds import World, as_replicas, noise, one_backward


def scaled(grad):
    return grad * 4


def doubled(parameter):
    parameter.grad.mul_(2)


def hook_some(model):
    return [
        model.layers[0].second.weight.register_hook(scaled),
        model.layers[0].second.weight.register_hook(scaled),
        model.layers[1].first.bias.register_post_accumulate_grad_hook(doubled),
        model.leave.weight.register_post_accumulate_grad_hook(doubled),
        model.leave.weight.register_hook(scaled),
    ]


class Again(Stack):
    def run(self, layer, x):
        return checkpoint(layer, x, use_reentrant=False)


class Hooked(Stack):
    def __init__(self):
        super().__init__()
        hook_some(self)


def loss_of(model, seed):
    return model(noise(3, 6, seed=seed)).square().mean()


def _come_and_go(model, run, number):
    """At any time."""
    early = hook_some(model) if number != 1 else []
    loss = loss_of(model, number)
    late = hook_some(model) if number != 2 else []
    for handle in early[::2]:
        handle.remove()
    run.backward(loss)
    for handle in (*early, *late):
        handle.remove()
    if number == 1:
        run.backward(loss_of(model, 7))


def _into_inputs(model, run, number):
    """In `autograd.grad` and in a backward into inputs: a hooked parameter was "not used in the graph"."""
    handles = hook_some(model)
    grads = torch.autograd.grad(loss_of(model, number), list(model.parameters()))
    run.backward(loss_of(model, number), inputs=list(model.layers.parameters()))
    for handle in handles:
        handle.remove()
    return [run.mean(grad) for grad in grads]


def _of_modules(model, run, number):
    seen = []
    handles = []

    def note(*values):
        seen.extend(values)

    for module in (model, model.enter, model.layers[1].first, model.layers[2]):
        handles += [
            module.register_forward_pre_hook(lambda _, args: note(args)),
            module.register_forward_hook(lambda _, args, output: note(output)),
            module.register_full_backward_pre_hook(lambda _, grads: note(grads)),
            module.register_full_backward_hook(lambda _, inputs, outputs: note(inputs, outputs)),
        ]
    handles += [
        model.layers[1].register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
        model.layers[1].register_forward_hook(lambda _, args, output: output * 0.5),
        model.layers[2].register_full_backward_pre_hook(lambda _, grads: (grads[0] * 2,)),
        model.layers[0].register_full_backward_hook(lambda _, inputs, outputs: (inputs[0] * 4,)),
    ]
    run.backward(model(noise(3, 6, seed=number).requires_grad_()).square().mean())
    for handle in handles:
        handle.remove()
    return seen


def _keeps_a_weight(model, run, number):
    """A gathered weight enters the loss."""
    weights = []
    handle = model.layers[0].first.register_forward_hook(lambda module, args, output: weights.append(module.weight))
    loss = loss_of(model, number)
    handle.remove()
    run.backward(loss + weights[0].square().sum())


PROGRAMS = {
    "before the transform": (Hooked, one_backward),
    "come and go": (Stack, _come_and_go),
    "autograd.grad and inputs": (Stack, _into_inputs),
    "of modules": (Stack, _of_modules),
    "of modules that are computed again": (Again, _of_modules),
    "keeps a gathered weight": (Stack, _keeps_a_weight),
}

test_hooks_fire_as_in_replicas = each_as_replicas(PROGRAMS, steps=3)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(3)
def test_a_hook_of_a_parameter_is_called_once_with_the_resting_gradient(stage):
    model = STAGES[stage](Stack(), axis())
    seen = []

    names = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: seen.append((name, grad)))
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.append((f"{name} after", p.grad)))
        names += [name, f"{name} after"]

    def fired(run, every=1):
        seen.clear()
        run()
        assert sorted(name for name, _ in seen) == sorted(names[::every])
        return dict(seen)

    gradients = fired(lambda: loss_of(model, 1).backward())
    for name, parameter in model.named_parameters():
        assert gradients[name].placements == parameter.placements
        assert gradients[f"{name} after"] is parameter.grad
        assert torch.equal(gradients[name].to_local(), parameter.grad.to_local())

    def two_microbatches():
        with zf.accumulate(model):
            loss_of(model, 1).backward()
            loss_of(model, 2).backward()

    fired(two_microbatches)
    loss = loss_of(model, 3)
    fired(lambda: loss.backward(retain_graph=True))
    fired(loss.backward)
    fired(lambda: loss_of(model, 4).backward(inputs=list(model.parameters())))
    fired(lambda: torch.autograd.grad(loss_of(model, 5), list(model.parameters())), every=2)


@on_ranks(2)
def test_hooks_of_before_and_after_the_transform_see_whole_parameters():
    """After the forward of a unit a hook reads them as the module around it may. (test_weight_reads.py)"""
    for registers_first in (True, False):
        found = []

        def look(module, *_, found=found):
            found.append(type(module.gate) is Tensor)

        model = nn.Sequential(Block(7), Block(7))
        model = model if registers_first else zf.shard_params(model, axis(), units=Block)
        model[1].register_forward_pre_hook(look)
        model[1].register_forward_hook(look)
        model = zf.shard_params(model, axis(), units=Block) if registers_first else model
        model(noise(2, 7, seed=0))
        assert found == [True, True]


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
@on_ranks(2)
def test_hooks_of_several_parameters_come_and_go(stage):
    model = STAGES[stage](Stack(), axis())
    some = [model.enter.weight, model.layers[1].first.bias, model.leave.bias]
    seen = []

    def fired():
        seen.clear()
        loss_of(model, 1).backward()
        return sorted(map(str, seen))

    for parameter in some:
        parameter.requires_grad_(False)
    fired()
    for parameter in some:
        parameter.requires_grad_(True)
    every = register_multi_grad_hook(some, lambda grads: seen.append(sum(grad is not None for grad in grads)))
    register_multi_grad_hook(some, lambda grad: seen.append("any"), mode="any")
    assert fired() == ["3", "any"]
    every.remove()
    assert fired() == ["any"]


def _train_from_hooks(model, optimizer_of):
    """Every few layers have an optimizer that steps, and drops their gradients, once the last of these has come."""

    def attach(*modules):
        parameters = [parameter for module in modules for parameter in module.parameters()]
        optimizer, missing = optimizer_of(parameters), set(parameters)

        def step(parameter):
            missing.remove(parameter)
            if not missing:
                optimizer.step()
                optimizer.zero_grad()
                missing.update(parameters)

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(step)

    attach(model.enter, model.layers[0])
    attach(model.layers[1], model.layers[2])
    attach(model.leave)
    for number in range(3):
        loss_of(model, number + axis().get_local_rank()).backward()
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("stage", "where"),
    [("replicate", "memory"), ("zero1", "disk"), ("zero2", "memory"), ("zero3", "memory"), ("zero3", "disk")],
)
@on_ranks(2)
def test_optimizers_may_step_in_hooks_while_backward_runs(stage, where, folder):
    expected, model = (World(stage).build(Stack) for _ in range(2))
    stock = AdamW(expected.parameters(), lr=0.01)
    for number in range(3):
        loss_of(expected, number + axis().get_local_rank()).backward()
        stock.step()
        stock.zero_grad()
    tier = zf.nvme(folder)
    if where == "disk":
        model = zf.offload(model, params=tier, grads=tier)
        _train_from_hooks(model, lambda parameters: zf.streamed(AdamW(parameters, lr=0.01), tier))
    else:
        _train_from_hooks(model, lambda parameters: AdamW(parameters, lr=0.01))
    assert all(map(torch.equal, fulls(model.parameters()), fulls(expected.parameters())))


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
@on_ranks(2)
def test_an_optimizer_that_steps_in_hooks_of_nodes_is_refused(stage):
    model = STAGES[stage](Stack(), axis())
    before = fulls(model.parameters())
    _apply_optimizer_in_backward(AdamW, model.parameters(), {"lr": 0.01})
    with refused("step_in_a_hook_of_a_node"):
        loss_of(model, axis().get_local_rank()).backward()
    assert all(map(torch.equal, before, fulls(model.parameters())))


class Reparametrized(nn.Module):
    """Layers that are units, and whose weights are computed by hooks before their forward: old GANs, pruned models."""

    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.layers = nn.ModuleList(
                [
                    nn.utils.spectral_norm(nn.Linear(6, 9)),
                    nn.utils.weight_norm(nn.Linear(9, 9)),
                    prune.random_unstructured(nn.Linear(9, 9), "weight", 0.4),
                    nn.utils.weight_norm(nn.Linear(9, 3)),
                ]
            )
        self.layers[2].bias = self.layers[0].bias  # of the root: called alone, these layers enter two units

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@as_replicas(Reparametrized)
def test_hooks_before_a_forward_may_compute_weights(model, run, number):
    """In checkpoints: the laws."""
    x = noise(4, 6, seed=number).requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    run.backward(output.square().mean() + slope.square().sum())
    with torch.no_grad():
        first, second, third, _ = model.layers
        return model(x), third(second(first(x)))


def _again(model):
    loss_of(model, 5).backward()
    model.zero_grad()
    return zf.shard_params(model, axis())


@as_replicas(Hooked, transform=_again)
def test_a_transformed_model_can_be_transformed_with_its_hooks(model, run, number):
    one_backward(model, run, number)
