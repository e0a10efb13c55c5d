"""Which parameters take part in a backward: frozen ones, those that some ranks or none use, shared ones; in evaluation none.

The laws draw all of it in combination, frozen and evaluated between steps. Here: at odd moments, and what differs by rank.
"""

import random
from functools import partial

import pytest
import torch
from torch import nn

import zero_fn as zf
from tests.promises.tables import each_as_replicas
from tests.support.models import Language, Layer, Stack
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.ranks import axis
from tests.support.worlds import (
    WIDTH,
    Tower,
    as_replicas,
    differences,
    noise,
    one_backward,
    trained,
)

# -- frozen, and evaluated --------------------------------------------------------------------------------------------


def _frozen_after_the_forward(model, run, number):
    """A gradient had no place to rest, and an assertion failed. Inputs have their gradients, also of a frozen model."""
    draw, xs = random.Random(number), [noise(3, 6, seed=number).requires_grad_() for _ in range(2)]
    model.requires_grad_(True)
    loss = model(xs[0]).square().mean()
    model.layers[number].requires_grad_(False)
    for parameter in (*model.enter.parameters(), *model.layers[number - 1].parameters(), *model.leave.parameters()):
        parameter.requires_grad_(draw.random() < 0.5)
    run.backward(loss)
    run.backward(model.requires_grad_(False)(xs[1]).square().mean())
    model.leave.requires_grad_(True)
    one_backward(model, run, number)
    return [x.grad for x in xs]


class Adding(nn.Module):
    """A frozen branch is added in place, without a graph, between uses of a trained one."""

    def __init__(self):
        super().__init__()
        self.frozen, self.trained = Layer().requires_grad_(False), nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x):
        with torch.no_grad():
            x += self.frozen(x)
        for layer in self.trained:
            x = layer(x)
        with torch.no_grad():
            y = self.frozen(x)
        return self.trained[0](x) + y


def _evaluated(model, run, number):
    """Before the very first forward, between a forward and its backward, and under `enable_grad`, which changes nothing."""
    outputs = []
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            outputs.append(model.eval()(noise(2, WIDTH, seed=7)))
        loss = model.train()(noise(4, WIDTH, seed=number)).square().mean()
        with mode(), torch.enable_grad():
            outputs.append(model.eval()(noise(1, WIDTH, seed=50 + number)).detach())
        model.train()
        run.backward(loss)
    return [output.clone() for output in outputs]


@pytest.mark.parametrize("moves", [False, True])
@as_replicas()
def test_a_model_that_is_transformed_or_moved_before_inference_trains_later(world, moves):
    """As in a server: transformed inside `inference_mode`, or moved before it."""
    model = world.place(Tower()).double() if moves else Tower()
    with torch.inference_mode():
        model = model if moves else world.place(model)
        world.note("output", model(noise(2, WIDTH, seed=1).to(model.enter.weight.dtype)).clone())
    world.train(model.float(), torch.optim.SGD(model.parameters(), lr=1e-2), 0, 1)


# -- used by some ranks, or by none -----------------------------------------------------------------------------------


class Unused(Stack):
    """A parameter of the root and one inside a unit are never used, one whole layer never runs."""

    def __init__(self):
        super().__init__()
        self.spare, self.turn = nn.Parameter(torch.randn(5, 3)), 0
        self.layers[1].spare = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return self.leave(self.layers[1](self.layers[0](self.enter(x))))


class SomeRanks(Unused):
    """All ranks run all layers; which outputs reach the loss depends on the rank and on the step."""

    def forward(self, x):
        x = self.enter(x)
        outputs = [layer(x) for layer in self.layers]
        number = (axis().get_local_rank() + self.turn) % 4
        self.turn += 1
        if axis().get_local_rank() == 1:
            x = x * self.spare.sum()
        return self.leave(outputs[number] if number < 3 else x)


def _other_numbers_of_batches(model, run, number):
    """In place of `Join`: a block takes what there is on each rank."""
    with run.accumulate(unshard=True):
        for microbatch in range(1 + 2 * axis().get_local_rank()):
            one_backward(model, run, 10 * number + microbatch)


class Sighted(Stack):
    """A frozen tower in front, which ranks call as often as they have images: a unit of its own was refused."""

    def __init__(self):
        super().__init__()
        self.tower = nn.ModuleList(Layer() for _ in range(2)).requires_grad_(False)

    def forward(self, x):
        for _ in range(1 + 2 * axis().get_local_rank()):
            y = x
            for layer in self.tower:
                y = layer(y)
            x = x + y
        return super().forward(x)


class Heads(Stack):
    """Each rank has data for another head, and runs no other."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 5) for _ in range(3))

    def forward(self, x):
        return self.heads[axis().get_local_rank()](super().forward(x))


def _in_one_block(model, run, number):
    with run.accumulate(unshard=True):
        one_backward(model, run, number)


_BLOCKS = {"options": {"units": "layers.?"}}  # what ranks run unlike one another belongs to the unit of the root


def _one_of_two_losses(model, run, number):
    """Each rank picks one of two losses, or backs through a head that others leave out.

    A kept unit was gathered again between two uses, on the ranks that ran the second: the others hung.
    """
    rank = axis().get_local_rank()
    first = model(noise(3, 6, seed=number))
    second = model(noise(3, 6, seed=number + 50))
    run.backward((first if (rank + number) % 2 else second).square().mean())
    hidden = model.enter(noise(2, 6, seed=number))
    outputs = [layer(hidden) for layer in model.layers]
    head = model.leave(outputs[0]).sum()  # forwards are the same on all ranks
    run.backward(outputs[rank % 3].sum() + (head if rank == number % 2 else 0))


# -- shared -----------------------------------------------------------------------------------------------------------


class Shared(Stack):
    """Weights are tied within a unit, across units and with the root; a layer and a linear run twice; a module and a buffer
    have two names."""

    def __init__(self):
        super().__init__(17, 17)
        self.layers[0].second.weight = self.layers[0].first.weight
        self.layers[1].first.weight, self.layers[1].second.weight = self.layers[0].first.weight, self.leave.weight
        self.layers[2].second.bias, self.leave.bias = self.enter.bias, self.enter.bias
        self.register_buffer("scale", torch.full((17,), 0.5))
        for layer in self.layers:
            layer.register_buffer("scale", self.scale)
            layer.again = layer.second

    def forward(self, x):
        assert self.layers[0].scale is self.scale
        for layer in (self.enter, *self.layers, self.layers[0], self.leave):
            x = layer(x * self.scale)
        return self.leave(x)


def _wide_backward(model, run, number):
    run.backward(model(noise(3, 17, seed=number)).square().mean())


PROGRAMS = {
    "frozen late": (Stack, _frozen_after_the_forward, {"steps": 3, "optimizer": "adamw", "options": {"units": "*"}}),
    "frozen late, gradients stay": (Stack, _frozen_after_the_forward, {"steps": 3, "zeroes": False}),
    "a frozen branch between uses of a trained one": (Adding, one_backward),
    "evaluated": (partial(Tower, dropout=0.2), _evaluated, {"optimizer": "adamw"}),
    "used by no rank": (Unused, one_backward, {"optimizer": "adamw"}),
    "used by some ranks": (SomeRanks, one_backward, {"n": 3}),
    "other numbers of batches": (Stack, _other_numbers_of_batches),
    "one of two losses": (Stack, _one_of_two_losses),
    "a tower of other numbers of calls, of the root": (Sighted, one_backward, _BLOCKS),
    "a tower of other numbers of calls, unsharded": (Sighted, _in_one_block),
    "a head for each rank, of the root": (Heads, one_backward, {"n": 3} | _BLOCKS),
    "a head for each rank, unsharded": (Heads, _in_one_block, {"n": 3, "optimizer": "adamw"}),
    "shared, uneven rows": (Shared, _wide_backward, {"n": 3, "optimizer": "adamw", "options": {"units": "*.first"}}),
}

test_what_takes_part_and_what_does_not_is_as_in_replicas = each_as_replicas(PROGRAMS)


@pytest.mark.parametrize("build", [Sighted, Heads])
def test_units_that_ranks_run_unlike_one_another_are_refused(ranks, build):
    with pytest.raises(zf.errors.DisagreementError, match=r"unit (tower|heads|layers)\.\d"):
        ranks(2).run(differences, trained(build, one_backward), stages=["zero3"])


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_part_of_a_transformed_model_is_transformed_as_the_model_was(stage):
    """Transformed again, they rest as the whole was asked to: they were replicated, without a word."""
    model = zf.precision(STAGES[stage](Language(), axis()), output=torch.float64)
    placements = [p.placements for p in model.blocks.parameters()]
    part = zf.precision(model.blocks)  # repeated: as it was asked for
    assert part[0](torch.ones(2, 4, 10)).dtype == torch.bfloat16
    for each in (part, STAGES[stage](nn.Sequential(part), axis())):
        assert [p.placements for p in each.parameters()] == placements
    head = zf.precision(model.head)  # tied to the embedding
    assert head.weight.placements == model.head.weight.placements
