"""Methods beside `forward`: those that are declared gather as it does; others work through modules, and raise at weights."""

import copy

import pytest
import torch
from torch import nn

import zero_fn as zf
from tests.support.models import Block
from tests.support.on_ranks import on_ranks
from tests.support.programs import parameters
from tests.support.ranks import axis
from tests.support.seeds import seed_generator
from tests.support.worlds import WIDTH, Tower, as_replicas, noise


class Half(Block):
    def halved(self, x):
        return x @ self.up.weight.T * self.gate


class Coder(Tower):
    """Methods that call modules, methods that read weights."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Half(7) for _ in range(3))

    def encode(self, x):
        return self.blocks[0](x @ self.enter.weight.T + self.enter.bias)  # reads weights of the root's unit

    def decode(self, x, *, scale=1.0):
        for block in self.blocks[1:]:
            x = block(x)
        return self.leave(x) * scale

    def generate(self, x, steps):
        for _ in range(steps):
            x = self(x)
        return x

    def forward(self, x):
        return self.decode(self.encode(x), scale=2.0)

    def stream(self, x):
        yield x @ self.enter.weight.T

    async def later(self, x):
        return x @ self.enter.weight.T


@pytest.mark.parametrize("order", ["before", "after", "between", "deepcopy"])
@as_replicas()
def test_declared_methods_gather_as_forward_does(world, order):
    seed_generator(0)
    model = Coder()
    if not world.is_replica:
        names = ("encode", "blocks.1.halved")
        if order == "before":
            model = world.place(zf.register_forward_method(model, *names))
        elif order == "between":
            model = zf.shard_optimizer(zf.register_forward_method(zf.replicate(model, axis()), *names), axis())
            model = world.place(model)
        else:
            model = zf.register_forward_method(world.place(model), *names)
            model = copy.deepcopy(model) if order == "deepcopy" else model
        assert "enter" not in vars(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        x = noise(4, WIDTH, seed=step)
        code = model.encode(x)
        loss = model.decode(code, scale=0.5).square().mean() + model.blocks[1].halved(code).sum()
        world.step(model, optimizer, loss + model(x).square().mean())
        with torch.no_grad():
            world.note("generated", model.generate(x, 2))
            world.note("encoded", model.encode(x))


@on_ranks(2)
def test_undeclared_methods_work_through_modules_and_raise_at_weights():
    model = zf.shard_params(Coder(), axis())
    x = noise(4, WIDTH, seed=0)
    before = parameters(model)
    model.decode(noise(4, 7, seed=0)).sum().backward()  # calls modules only
    model.generate(x, 2).sum().backward()  # calls itself
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()
    for refused in (lambda: model.encode(x), lambda: model.blocks[1].halved(noise(4, 7, seed=0))):
        with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
            refused()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in parameters(model).items())
    model(x).sum().backward()
    for name in ("stream", "later", "none"):
        with pytest.raises(zf.errors.LayoutError):
            zf.register_forward_method(model, name)
