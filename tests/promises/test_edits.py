"""Edits between steps: of parameters and their data, casts, pruning; what comes late or is replaced. Of slices:
`units/runtime/test_refused.py`."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import prune
from torch.nn.utils.parametrize import register_parametrization

import zero_fn as zf
from tests.promises.tables import each_as_replicas
from tests.support.groups import alone
from tests.support.messages import refused
from tests.support.models import Block
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.ranks import axis
from tests.support.wholes import full, fulls
from tests.support.worlds import WIDTH, Tower, World, noise

# -- of values --------------------------------------------------------------------------------------------------------


def _edits(world):
    """Of the resting parameters, as whole-tensor operations and through their local shards."""
    model = world.build(Tower)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    world.train(model, optimizer, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5).add_(0.25)
    world.train(model, optimizer, 1)
    for parameter in model.blocks.parameters():
        local = parameter.data.to_local() if isinstance(parameter, DTensor) else parameter.data
        local.clamp_(-0.1, 0.1)
    world.train(model, optimizer, 2)
    with world.unsharded(model), torch.no_grad():
        model.leave.weight[2] = 7.0
        model.blocks[1].gate.fill_(0.125)
        model.enter.weight.copy_(torch.linspace(-1, 1, model.enter.weight.numel()).view_as(model.enter.weight))
    world.train(model, optimizer, 3)
    world.note_model(model)


MOVES = {
    "nothing": lambda model: None,
    "to": lambda model: model.to("cpu"),
    "casts": lambda model: model.double().float(),
    "apply": lambda model: model._apply(lambda t: t.clone()),
    "state_dict": lambda model: model.load_state_dict(model.state_dict()),
    "forward": lambda model: model(torch.ones(1, 4)),
}
"""What is done to a model after data was assigned."""


def _assigned(stage, use, is_plain):
    """Values of parameters and gradients that are assigned are those of a plain model; old values are kept and put back."""
    plain, batch = nn.Linear(4, 7), torch.ones(1, 4)
    model = STAGES[stage](plain, axis())
    pairs = [*zip(model.parameters(), plain.parameters(), strict=True)]
    optimizers = [torch.optim.SGD(module.parameters(), 0.5) for module in (model, plain)]
    for _ in range(2):
        kept = [(p.data, q.data) for p, q in pairs]
        for p, q in pairs:
            q.data = q.data * 2
            p.data = q.data.clone() if is_plain else p.data * 2
        use(model)
        for module in (model, plain):
            module(batch).square().sum().backward()
        for p, q in pairs:
            q.grad.data = q.grad.data * 3
            p.grad.data = q.grad.data.clone() if is_plain else p.grad.data * 3
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert all(torch.equal(full(p), q) for p, q in pairs)
        for (p, q), (old_p, old_q) in zip(pairs, kept, strict=True):
            p.data, q.data = old_p, old_q
        assert torch.equal(model(batch), plain(batch))
        assert all(torch.equal(full(p), q) for p, q in pairs)


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("move", MOVES)
@on_ranks(2)
def test_what_is_assigned_to_data_is_kept_through_the_next_use(move, is_plain):
    """torch drops the values of parameters and gradients, silently."""
    for stage in STAGES:
        _assigned(stage, MOVES[move], is_plain)


@on_ranks(2)
def test_what_does_not_fit_is_refused_where_it_is_assigned_to_data():
    model = zf.shard_params(nn.Linear(4, 6), axis())
    whole = full(model.weight)
    for value in (torch.ones(6, 3), torch.ones(6, 4, device="meta"), torch.ones(3, 4)):
        with pytest.raises(zf.errors.PlacementError):
            model.weight.data = value
    with refused("data_of_a_parameter_was_assigned"):
        model.weight.data = torch.ones(6, 4).double()
    assert torch.equal(full(model.weight), whole)


# -- casts ------------------------------------------------------------------------------------------------------------


def _cast(world):
    """Before the first step, or with its states."""
    model = world.build(Tower)
    model(noise(2, WIDTH, seed=9))  # has run in the other dtype
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.to(torch.float64)
    for step in range(3):
        world.step(model, optimizer, model(noise(4, WIDTH, seed=step).double()).square().mean())
    saved = optimizer.state_dict()
    model.float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # as the error advises
    optimizer.load_state_dict(saved)
    world.train(model, optimizer, 0, 1)


@pytest.mark.parametrize(
    ("stage", "is_before_the_forward"), [("replicate", False), ("zero1", True), ("zero3", True), ("zero3", False)]
)
@on_ranks(2)
def test_a_cast_under_states_raises_before_any_update(stage, is_before_the_forward):
    model = World(stage).build(Tower)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = noise(4, WIDTH, seed=0)
    model(x).square().mean().backward()
    optimizer.step()
    if is_before_the_forward:
        model.double()(x.double()).square().mean().backward()
    else:
        model(x).square().mean().backward()
        model.double()
    held = [*model.parameters(), *(state["exp_avg"] for state in optimizer.state.values())]
    before = fulls(held)
    with refused("step_after_a_cast"):
        optimizer.step()
    assert all(map(torch.equal, fulls(held), before))
    assert {state["step"].item() for state in optimizer.state.values()} == {1}
    model.float().zero_grad()
    model(x).square().mean().backward()
    optimizer.step()  # the way back is open


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
@on_ranks(2)
def test_modules_before_and_after_a_transform_may_be_cast_while_the_others_live(stage, which):
    """torch swaps parameters that are DTensors, and refused: the transform referred to them weakly."""
    plain = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    first = zf.replicate(plain, axis())
    models = [plain, first, STAGES[stage](first, axis())]
    chosen = models.pop(which).to(torch.float64)
    chosen(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    for model in models:
        model(torch.ones(1, 4)).sum().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for m in (chosen, *models) for p in m.parameters())


def test_a_module_that_was_donated_holds_nothing_and_runs_no_more():
    """One that was not is left alone: the law of purity."""
    with alone() as mesh:
        plain = Tower()
        zf.shard_params(plain, mesh, donate=True)
        assert zf.memory(plain).parameters == 0
        for use in (lambda: plain(torch.ones(2, WIDTH)), lambda: zf.shard_params(plain, mesh)):
            with refused("module_was_donated"):
                use()


# -- what comes late --------------------------------------------------------------------------------------------------


class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.low = nn.Linear(7, 2, bias=False)

    def forward(self, x):
        return self.low(x) @ self.low.weight


LATE = {
    "a parameter of the root": (lambda m: setattr(m, "extra", nn.Parameter(torch.ones(3))), "extra"),
    "a parameter of a block": (lambda m: setattr(m.blocks[1], "extra", nn.Parameter(torch.ones(3))), "blocks.1.extra"),
    "a parameter of a container": (lambda m: setattr(m.blocks, "extra", nn.Parameter(torch.ones(3))), "blocks.extra"),
    "a parameter where there was None": (lambda m: setattr(m.none, "bias", nn.Parameter(torch.ones(7))), "none.bias"),
    "a tie under a new name": (lambda m: setattr(m, "alias", m.leave.weight), "alias"),
    "a module": (lambda m: setattr(m, "adapter", Adapter()), "adapter.low.weight"),
    "append": (lambda m: m.blocks.append(Block(7)), "blocks.3.gate"),
    "a replaced block": (lambda m: m.blocks.__setitem__(1, Block(7)), "blocks.1.gate"),
    "a replaced parameter": (lambda m: setattr(m.leave, "weight", nn.Parameter(torch.ones(WIDTH, 7))), "leave.weight"),
    "a parametrization": (lambda m: register_parametrization(m.leave, "weight", nn.Identity()), "leave.weight"),
    "a parameter of a late container": (
        lambda m: (setattr(m, "late", nn.Sequential()), m.late.append(nn.Linear(2, 2))),
        "late.0.weight",
    ),
}


class WithRoom(Tower):
    """With places where something may be added."""

    def __init__(self):
        super().__init__()
        self.none = nn.Linear(7, 7, bias=False)

    def forward(self, x):
        return super().forward(x) + 0 * self.none.weight.sum()


@pytest.mark.parametrize(
    ("case", "is_twin"), [*((case, False) for case in LATE), ("a parameter of a block", True), ("append", True)]
)
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
@on_ranks(2)
def test_what_comes_late_is_refused_by_the_next_forward_and_by_check(stage, case, is_twin):
    add, name = LATE[case]
    model = STAGES[stage](WithRoom(), axis())
    model = copy.deepcopy(model) if is_twin else model
    x = torch.ones(2, WIDTH)
    if stage != "zero1":  # before the first forward, too
        model(x).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    add(model)
    for use in (lambda: model(x), lambda: model.blocks[0](torch.ones(2, 7)), lambda: zf.check(model, optimizer)):
        with pytest.raises(zf.errors.PlacementError, match=rf"'{name}' was (added|replaced) after the transform"):
            use()


@on_ranks(2)
def test_a_model_runs_on_without_what_came_late():
    model = zf.shard_params(Tower(), axis())
    x = noise(2, WIDTH, seed=0)
    expected = model(x)
    model.adapter, model.extra = Adapter(), nn.Parameter(torch.ones(3))
    for name in ("extra", "adapter"):
        with pytest.raises(zf.errors.PlacementError, match=name):
            model(x)
        delattr(model, name)
    assert torch.equal(model(x), expected)
    head, model.leave = model.leave, nn.Linear(7, WIDTH)
    with pytest.raises(zf.errors.PlacementError, match=r"'leave.weight' was added"):
        model(x)
    model.leave = head
    assert torch.equal(model(x), expected)
    del head
    model.leave = nn.Linear(7, WIDTH)
    with refused("part_of_a_unit_is_taken_out"):
        model(x)


def _allowed_late(world):
    """Modules without parameters, transformed modules, also in place of others, None, other models."""
    model = world.build(Tower)
    model.dropout = nn.Sequential(nn.Tanh(), nn.Identity())
    register_parametrization(nn.Linear(2, 2), "weight", nn.Identity())  # of another model
    model.leave.register_parameter("none", None)
    model.adapter = world.build(Adapter, seed=3)
    model.blocks.insert(1, model.adapter)
    for step in range(4):
        if step == 2:
            model.blocks[2] = world.build(lambda: Block(7), seed=4)
        world.train(model, torch.optim.SGD(model.parameters(), lr=1e-2), step)


# -- pruning ----------------------------------------------------------------------------------------------------------

PRUNINGS = {
    "unstructured": lambda m: prune.l1_unstructured(m, "weight", 0.5),
    "mask": lambda m: prune.custom_from_mask(m, "weight", torch.arange(17 * 7).view(17, 7) % 2),
    "global": lambda m: prune.global_unstructured([(m, "weight"), (m, "bias")], prune.L1Unstructured, amount=0.4),
}


def _pruned(kind, world):
    """Before the transform the masks stay; after it, once or again, pruning is refused and changes nothing."""

    def make():
        tower = Tower()
        PRUNINGS[kind](tower.blocks[1].up)
        return tower

    model = world.build(make)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        for module in () if world.is_replica else (model.blocks[1].up, model.blocks[2].up):
            with pytest.raises(zf.errors.PlacementError, match=r"'blocks\.[12]\.up\..*' was to be pruned"):
                PRUNINGS[kind](module)
        world.train(model, optimizer, step)
    world.note_model(model)


TRIALS = {
    "edits": _edits,
    "casts": _cast,
    "what may come late": _allowed_late,
    **{f"pruned, {kind}": partial(_pruned, kind) for kind in PRUNINGS},
}

test_edits_that_are_allowed_are_those_of_replicas = each_as_replicas(TRIALS)
