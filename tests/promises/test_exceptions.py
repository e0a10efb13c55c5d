"""Whatever raises in the middle of a step, the next step gives what replicas give; the user calls only `zero_grad`.

torch calls our hook after an exception, and not after an interrupt, of which the next forward finds the traces.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_fn as zf
from tests.simulation import axis as simulated_axis
from tests.support.seeds import seed_generator
from tests.support.wholes import full
from tests.support.worlds import WIDTH, Tower, as_replicas, noise

_packing = torch._C._autograd._top_saved_tensors_default_hooks


class Breakdown(Exception):
    """What the tests raise."""


def _raise(*_):
    raise Breakdown


def _interrupt(*_):
    raise KeyboardInterrupt


def _adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _loss(model, seed):
    return model(noise(4, WIDTH, seed=seed)).square().mean()


# -- in backward, and in blocks ---------------------------------------------------------------------------------------


TRAPS = {
    "a hook of a parameter": lambda model: model.blocks[1].up.weight.register_hook(_raise),
    "a post-accumulate hook": lambda model: model.blocks[2].down.bias.register_post_accumulate_grad_hook(_raise),
    "backward, before any unit": lambda model: model.register_forward_hook(
        lambda module, args, output: output.register_hook(_raise) and None
    ),
    "a full backward hook": lambda model: model.blocks[1].down.register_full_backward_hook(_raise),
}
"""The first two are also tried inside a block of `accumulate`. In units, in blocks or not: the laws. In recomputations, by an
interrupt: `test_checkpointing.py`."""


def _require_names_of_resting_parameters(model):
    """A gathered parameter stood under its name until the next forward; an edit of it was lost."""
    for name, parameter in model.named_parameters():
        owner, _, attribute = name.rpartition(".")
        assert getattr(model.get_submodule(owner), attribute) is parameter, name


@pytest.mark.parametrize(
    ("case", "in_block"), [*((case, False) for case in TRAPS), *((case, True) for case in list(TRAPS)[:2])]
)
@as_replicas(Tower, steps=3, optimizer="adamw")
def test_the_step_after_an_exception_is_exact(model, run, number, case, in_block):
    if number == 1:
        handle = TRAPS[case](model)
        with pytest.raises(Breakdown), run.accumulate() if in_block else nullcontext():
            run.backward(_loss(model, 10))
        handle.remove()
        if not in_block:
            _require_names_of_resting_parameters(model)
        run.zero_grad(set_to_none=True)
    with run.accumulate() if in_block else nullcontext():
        run.backward(_loss(model, number))
        if in_block:
            run.backward(_loss(model, number + 20))


# -- in hooks of modules, by an exception or an interrupt -------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "inside", "error"),
    [
        (where, inside, (_raise, _interrupt)[(one + other) % 2])
        for one, where in enumerate(("first of all", "before", "after", "last of all"))
        for other, inside in enumerate(("", "blocks.1", "enter", "blocks.2.up"))
    ],
)
@as_replicas()
def test_a_hook_that_raises_leaves_nothing(world, where, inside, error):
    """A hook raises in the second forward; then two steps as if nothing was."""
    model = world.build(Tower)
    optimizer = _adam(model)
    world.train(model, optimizer, 0)
    resting = 0 if world.is_replica else zf.memory(model).parameters
    module = model.get_submodule(inside)
    is_before, prepend = where in ("first of all", "before"), where in ("first of all", "after")
    register = module.register_forward_pre_hook if is_before else module.register_forward_hook
    handle = register(error, prepend=prepend)
    with pytest.raises((Breakdown, KeyboardInterrupt)):
        _loss(model, 1)
    handle.remove()
    if error is _raise:
        assert _packing(False) is None, "tensors are packed outside a forward"
        is_over = (where, inside) == ("last of all", "")  # then what the backward needs first is kept
        assert world.is_replica or is_over or zf.memory(model).parameters == resting, "a unit stayed gathered"
        _require_names_of_resting_parameters(model)
    world.train(model, optimizer, 2)
    assert _packing(False) is None
    world.train(model, optimizer, 3)


@pytest.mark.parametrize("then", ["a backward of before", "a step", "an edit", "a load", "a child"])
@as_replicas()
def test_whatever_comes_after_an_interrupt_finds_the_model_at_rest(world, then):
    model = world.build(Tower)
    optimizer = _adam(model)
    world.train(model, optimizer, 0)
    loss = _loss(model, 1)
    handle = model.blocks[1].register_forward_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        _loss(model, 2)
    handle.remove()
    if then == "a backward of before":
        world.step(model, optimizer, loss)
    elif then == "a step":
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    elif then == "an edit":
        with world.unsharded(model), torch.no_grad():
            model.leave.weight.mul_(0.5)
    elif then == "a load":
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
    else:
        model.blocks[2](noise(4, 7, seed=3)).sum()
    world.train(model, optimizer, 4)


# -- around a step ----------------------------------------------------------------------------------------------------


@as_replicas()
def test_a_closure_that_raises_leaves_nothing(world):
    model = world.build(Tower)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            loss = _loss(model, step)
            loss.backward()
            world.reduce(model)
            return loss.item()

        def broken():
            _loss(model, 99).backward()
            raise Breakdown

        with pytest.raises(Breakdown):
            optimizer.step(broken)
        optimizer.step(closure)
        world.note_model(model)


class Recursive(nn.Module):
    """Calls itself, and once a call of itself fails."""

    def __init__(self):
        super().__init__()
        self.linear, self.gate = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(0.5))

    def forward(self, x, times=2):
        x = torch.tanh(self.linear(x)) * self.gate
        if times == 1:
            try:
                self(x, times=-1)
            except Breakdown:
                return x
        if times < 0:
            raise Breakdown
        y = self(x, times - 1)
        return y + self.gate


@pytest.mark.parametrize("build", [Recursive, Tower])
@as_replicas()
def test_exceptions_that_are_handled_in_and_around_a_forward_are_none_of_it(world, build):
    """A module that calls itself is left when the outermost call ends."""
    model = world.build(build)
    optimizer = _adam(model)
    for seed in range(3):
        try:
            raise Breakdown
        except Breakdown:
            world.train(model, optimizer, seed)


class Detached(nn.Linear):
    """Has gradients on rank 0 only: the backward of rank 1 passes through it."""

    def forward(self, x):
        weight, bias = (each if dist.get_rank() == 0 else each.detach() for each in (self.weight, self.bias))
        return nn.functional.linear(x, weight, bias)


def _passes(raises):
    """A rank with gradients issues a reduction as they come; one without, when backward has come further, or has raised."""
    seed_generator(0)
    layers = nn.Sequential(nn.Linear(3, 3), Detached(3, 3), Detached(3, 3))
    model = zf.shard_params(layers, simulated_axis(), units=(nn.Linear, Detached))
    for raises_now in (raises, False):
        model.zero_grad()
        middle = model[0](noise(2, 3, seed=1)).clone()  # so that backward raises between two units
        if raises_now:
            middle.register_hook(_raise)
        context = pytest.raises(Breakdown) if raises_now else nullcontext()
        with context:
            model[2](model[1](middle)).sum().backward()
    return [full(parameter.grad).flatten().tolist() for parameter in model.parameters()]


def test_a_rank_without_gradients_issues_the_reductions_that_others_wait_for(simulated):
    assert simulated(2).run(_passes, True) == simulated(2).run(_passes, False)
