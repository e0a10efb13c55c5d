"""What is called in which order, and how often backward passes through it."""

from contextlib import nullcontext, suppress
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import zero_fn as zf
from tests.promises.tables import each_as_replicas
from tests.support.models import Layer, Stack
from tests.support.on_ranks import on_ranks
from tests.support.ranks import axis
from tests.support.worlds import as_replicas, noise


def forward(model, number):
    return model(noise(3, 6, seed=number)).square().mean()


# -- any module is an entry -------------------------------------------------------------------------------------------


class Nested(nn.Module):
    """Stacks in a stack, in a plain list and a dict of their own."""

    def __init__(self):
        super().__init__()
        self.stacks = nn.ModuleList(Stack(4, 5, 2) for _ in range(2))
        self.named = nn.ModuleDict({"layer": Layer(4, 3), "linear": nn.Linear(4, 4)})
        self.plain = [self.stacks[0].layers[1], self.named["layer"]]

    def forward(self, x):
        for module in (*self.stacks, *self.named.values(), *self.plain):
            x = torch.tanh(module(x))
        return x


ORDERS = [
    [("stacks.0.layers.0.first", True), ("", True), ("stacks.0", False), ("named.linear", True)],
    [("named.layer", False), ("named.layer.first", True), ("stacks.0.enter", True), ("stacks.1.leave", True)],
    [("stacks.0.layers.1", True), ("", False), ("stacks.0.layers.1", True), ("stacks.0.layers.0", True)],
]


def _by_all_entries(model, run, number, order):
    """Children before the root, alone, with gradients or without; what they give is used in one backward each."""
    outputs = []
    for i, (name, is_trained) in enumerate(order):
        with torch.set_grad_enabled(is_trained):
            outputs.append(model.get_submodule(name)(noise(3, 4, seed=10 * number + i)))
        if is_trained and i % 2:
            run.backward(outputs[-1].square().mean())
    run.backward(model(noise(3, 4, seed=number)).square().mean())
    return outputs


test_any_module_is_an_entry_in_any_order = each_as_replicas(
    {
        f"{number}, {units}": (Nested, partial(_by_all_entries, order=order), {"options": {"units": units}})
        for number, order in enumerate(ORDERS)
        for units in ("*", "stacks.*")
    }
)


def _layers_taken_out(model, run, number):
    """Schedules were recorded with them, forward and backward."""
    if number == 2:
        del model.layers[1]
    if number == 3:
        model.layers = model.layers[:1]
    run.backward(forward(model, number))


def _another_order(model, run, number):
    """In each step: what was gathered ahead is not what is needed."""
    x = model.enter(noise(2, 6, seed=number))
    for layer in ([0, 1, 2], [2, 1, 0], [1, 1, 0], [2], [0, 1, 2])[number]:
        x = model.layers[layer](x)
    run.backward(model.leave(x).square().mean())


# -- several forwards -------------------------------------------------------------------------------------------------


def _interleaved(model, run, number):
    first = forward(model, 10 * number)
    second = forward(model, 10 * number + 1)
    third = forward(model, 10 * number + 2)
    run.backward(second)
    fourth = forward(model, 10 * number + 3)
    discarded = forward(model, 10 * number + 4)
    run.backward(third + fourth)
    del discarded
    run.backward(first)
    with run.accumulate():
        fifth, sixth = forward(model, 10 * number + 5), forward(model, 10 * number + 6)
        run.backward(sixth)
        run.backward(fifth)


def _a_checkpointed_one_too(model, run, number):
    x = noise(3, 6, seed=number)
    run.backward((model(x) * checkpoint(model, 2 * x, use_reentrant=False)).mean())


def _saved_on_the_host(model, run, number):
    with torch.autograd.graph.save_on_cpu():
        run.backward(forward(model, number))


class NoInputs(Stack):
    """Its root makes its own inputs, by a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self):
        return super().forward(self.scale * torch.ones(2, 6))


def _without_inputs(model, run, number):
    run.backward((model() * noise(2, 6, seed=number)).mean())


PROGRAMS = {
    "layers are taken out": (Stack, _layers_taken_out, {"steps": 5}),
    "another order in each step": (Stack, _another_order, {"steps": 5}),
    "forwards and backwards interleave": (Stack, _interleaved),
    "a forward and a checkpointed one": (Stack, _a_checkpointed_one_too),
    "saved on the host": (Stack, _saved_on_the_host),
    "no inputs": (NoInputs, _without_inputs),
}
"""In the order of the forwards, by one output, and of graphs that are retained, they are drawn by the laws."""

test_calls_and_backwards_of_any_order_are_those_of_replicas = each_as_replicas(PROGRAMS)


# -- backwards inside a forward ---------------------------------------------------------------------------------------


class InChunks(torch.autograd.Function):
    """A loss whose chunks are backed through at once, so that one chunk of outputs exists at a time."""

    @staticmethod
    def forward(ctx, hidden, head):
        leaf, total = hidden.detach().requires_grad_(), hidden.new_zeros(())
        with torch.enable_grad():
            for chunk in leaf.chunk(3):
                loss = head(chunk).square().sum() / len(hidden)
                loss.backward()
                total += loss.detach()
        ctx.save_for_backward(leaf.grad)
        return total

    @staticmethod
    def backward(ctx, *grads):
        return ctx.saved_tensors[0] * grads[0], None


class BacksInside(Stack):
    """Forwards that back through a part of their graph, and go on."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.layers[1].requires_grad_("frozen" not in kind)
        self.double()

    def run(self, layer, x):
        return checkpoint(layer, x, use_reentrant=False) if "checkpointed" in self.kind else layer(x)

    def forward(self, x):
        if self.kind.startswith("forces"):
            energy = super().forward(x.requires_grad_()).square().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return (self.enter(force) - self.layers[0](force)).square().mean()
        hidden = first = self.enter(x.requires_grad_())
        for layer in self.layers:
            hidden = self.run(layer, hidden)
        if self.kind == "a head":
            return InChunks.apply(hidden, self.leave)
        if self.kind == "a unit":
            return InChunks.apply(self.layers[0](hidden), self.layers[2])
        if self.kind == "raises":
            first.register_hook(_fail_once())
            with suppress(ZeroDivisionError):
                torch.autograd.grad(hidden.sum(), x, retain_graph=True)
        else:
            hidden.abs().mean().backward(retain_graph=True)
        return self.leave(self.layers[1](hidden)).square().mean()


def _fail_once():
    still = [ZeroDivisionError]

    def fail(_grad):
        if still:
            raise still.pop()

    return fail


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize(
    "kind", ["a head", "a unit", "all so far", "frozen", "checkpointed", "forces", "forces, checkpointed", "raises"]
)
@as_replicas(tolerance=1e-13)
def test_a_forward_may_back_through_what_it_has_computed(world, kind, accumulates):
    """To the bit where each parameter has one sum. Where backwards are reduced one by one, their sum over ranks has another
    order than that of replicas."""
    model = world.build(lambda: BacksInside(kind))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in range(3):
        with world.accumulate(model) if accumulates else nullcontext():
            loss = model(noise(6, 6, seed=number, dtype=torch.float64))
            loss.backward()
        world.reduce(model)
        world.note("loss", loss)
        world.note_model(model)
        optimizer.step()
        model.zero_grad()


# -- roots, and what is around them -----------------------------------------------------------------------------------


@as_replicas()
def test_containers_may_be_roots(world):
    """FSDP2 refuses lists and dicts: nobody calls them. A slice of a Sequential is one, of units."""
    listed = world.place(nn.ModuleList(Layer() for _ in range(2)))
    named = world.place(nn.ModuleDict({"a": Layer(), "b": Layer()}))
    chain = world.place(nn.Sequential(Layer(), Layer(), Layer()))
    x = chain[:2](noise(2, 6, seed=0))
    for module in (*listed, *named.values()):
        x = module(x)
    x.square().mean().backward()
    world.reduce(listed, named, chain)
    world.note_model(listed, named, chain)


@on_ranks(2)
def test_sharded_parts_train_inside_ddp_that_ignores_them():
    losses = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        model = Stack()
        if is_sharded:
            model.layers = zf.shard_params(model.layers, axis())
            ignored = [name for name, _ in model.named_parameters() if name.startswith("layers")]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            loss = wrapped(noise(2, 6, seed=step)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - losses[1]) < 1e-6
