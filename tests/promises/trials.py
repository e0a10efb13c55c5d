"""Trials of `tests/support/worlds.py` that several files run, each with its own kind of optimizer."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from tests.support.worlds import WIDTH, Tower, noise
from zero_fn.values.dtensors import local_of

__all__ = ["TORCH", "Shapes", "closures", "groups", "matrices", "note_states", "scaled"]


def matrices(parameters):
    """Those that Muon takes."""
    return [parameter for parameter in parameters if parameter.ndim == 2]


TORCH = {
    "Adadelta": lambda ps: torch.optim.Adadelta(ps),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2, initial_accumulator_value=0.1),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "Adamax": lambda ps: torch.optim.Adamax(ps, lr=1e-2),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "AdamW, foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
    "AdamW, fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "ASGD": lambda ps: torch.optim.ASGD(ps, lr=1e-2),
    "Muon": lambda ps: torch.optim.Muon(matrices(ps), lr=0.02),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=1e-2),
    "RAdam": lambda ps: torch.optim.RAdam(ps, lr=1e-2),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-2, momentum=0.5, centered=True),
    "Rprop": lambda ps: torch.optim.Rprop(ps, lr=1e-2),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, nesterov=True),
    "SGD, foreach": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, maximize=True, foreach=True),
}
"""All of torch that step one parameter alone."""


class Shapes(Tower):
    """A tower, whose rows are uneven, beside fewer rows than ranks, a stack of matrices, strides of another order."""

    def __init__(self):
        super().__init__()
        self.image = nn.Parameter(torch.randn(3, 2, 3, 2).to(memory_format=torch.channels_last))
        self.turned = nn.Parameter(torch.randn(18, 5).t())
        self.single = nn.Parameter(torch.ones(1))
        self.row = nn.Parameter(torch.randn(1, 9))
        self.stack = nn.Parameter(torch.randn(3, 5, 2))

    def forward(self, x):
        extra = [(each.reshape(-1) ** 2).mean() for each in (self.image, self.turned, self.row, self.stack)]
        scaled = super().forward(x) * self.single * sum(extra)
        return scaled


def note_states(world, optimizer):
    """Notes all states, leaf by leaf, and the numbers of groups."""
    for number, own in sorted(optimizer.state_dict()["state"].items()):
        for key, value in sorted(own.items()):
            for at, leaf in enumerate(tree_leaves(value)):
                world.note(f"{key} {at} of parameter {number}", torch.as_tensor(leaf))
    for number, group in enumerate(optimizer.param_groups):
        values = [torch.as_tensor(v, dtype=torch.float64) for v in group.values() if type(v) in (int, float)]
        world.note(f"numbers of group {number}", torch.stack(values))
        world.note(f"rate of group {number}", torch.as_tensor(group["lr"], dtype=torch.float64))


def _tied():
    model = Shapes()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    return model


def groups(make, world):
    """Groups with options, of which one comes later, schedules, hooks; frozen, toggled, unused, tied and plain parameters.

    Args:
        make: Takes groups, and gives an optimizer as this world steps it.
    """
    model, plain = world.build(_tied), nn.Linear(3, 2)
    first, second, third = (list(block.parameters()) for block in model.blocks)
    second = [p for p in second if p.numel() > 1]
    own = [{"params": first, "lr": 3e-2}, {"params": [*second, *plain.parameters()], "weight_decay": 0.3}]
    optimizer = make(own, world)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda e: 1 / (1 + e), lambda e: 0.5**e])]
    if "nesterov" in optimizer.param_groups[0]:
        schedules.append(torch.optim.lr_scheduler.CyclicLR(optimizer, 1e-3, 1e-2, step_size_up=2))
    for step in range(5):
        if step == 1:
            first[0].requires_grad_(False)
            first[0].grad = None
        if step == 2:
            first[0].requires_grad_(True)
            later = [p for p in third if all(p is not known for known in first)]
            optimizer.add_param_group({"params": [*later, model.row, model.turned], "lr": 2e-2})
            schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]
        for number, parameter in enumerate(plain.parameters()):
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(10 * step + number))
        model.single.requires_grad_(step != 3)
        world.step(model, optimizer, model(noise(4, WIDTH, seed=step)).square().mean())
        for schedule in schedules:
            schedule.step()
        if step == 3:  # gradients of some parameters alone
            second[-1].grad = torch.ones(second[-1].shape)
            optimizer.step()
            optimizer.zero_grad()
            assert second[-1].grad is None
    assert calls == ["before", "after"] * 6
    world.note_model(model, plain)
    note_states(world, optimizer)


def closures(build, make, world):
    """The optimizer calls a closure, LBFGS several times. Arguments are those of `scaled`."""
    model = world.build(build)
    optimizer = make([*model.parameters()], world)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = model(noise(2, WIDTH, seed=0, dtype=next(model.parameters()).dtype)).square().mean()
        loss.backward()
        world.reduce(model)
        dist.all_reduce(value := loss.detach().clone())
        return value / dist.get_world_size()

    for _ in range(2):
        world.note("loss", optimizer.step(closure))
    assert all(calls) and len(calls) >= 2
    world.note_model(model)


def scaled(build, make, world):
    """At step 2 one element in the shard of one rank overflows, and others have finite shards, or none: all skip it.

    Args:
        build: Makes the model, which takes `WIDTH` features.
        make: Takes parameters, and gives an optimizer as this world steps it.
    """
    model = world.build(build)
    optimizer = make([*model.parameters()], world)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
    for step in range(6):
        scaler.scale(model(noise(4, WIDTH, seed=step)).square().mean()).backward()
        world.reduce(model)
        if step == 2 and (world.stage in (None, "replicate") or dist.get_rank() == 0):
            local_of(next(model.parameters()).grad)[0, 0] = math.inf
        if step % 2:  # at others the optimizer takes the scale, if it can
            scaler.unscale_(optimizer)
        if step != 2:
            world.note_model(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        world.note("scale", torch.tensor(scaler.get_scale()))
        world.note_model(model)
        note_states(world, optimizer)
    assert scaler.get_scale() == 4.0, "backed off once, grew once"
