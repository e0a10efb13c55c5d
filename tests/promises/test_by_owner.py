"""The result of an optimizer never depends on the sharding: each tensor is stepped whole, by its owner (`zf.by_owner`).

To the bit that of replicas whose gradients are averaged in the order of the ranks. Drawn shapes, groups and up to 8 ranks are
in `property_tests/test_owner_laws.py`, several axes in `tests/axes/`, who owns what in `tests/units/owners/`.
"""

import copy
import io
import math
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils._pytree import tree_leaves

import zero_fn as zf
from tests.axes.grids import Decoder, grid, parallelized
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.ranks import Ranks, axis
from tests.support.seeds import seed_generator
from tests.support.wholes import full, fulls
from tests.support.worlds import ALL, WIDTH, Tower, differences, noise
from tests.units.checkpoint.worlds import WORLDS, differing, everything, stepped
from zero_fn.resting import local_of

pytorch_optimizer = pytest.importorskip("pytorch_optimizer", reason="the extra [test] is not installed")


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


Make = Callable[[Sequence[nn.Parameter]], Optimizer]


def _matrices(parameters):
    return [parameter for parameter in parameters if parameter.ndim == 2]


def _with_auxiliary(parameters):
    """Muon for matrices and AdamW for all else, in one optimizer."""
    others = [parameter for parameter in parameters if parameter.ndim != 2]
    groups = [{"params": _matrices(parameters), "use_muon": True}, {"params": others, "use_muon": False}]
    return pytorch_optimizer.Muon(groups, weight_decay=0.1, adamw_lr=1e-2)


class Slowing(torch.optim.SGD):
    """Its rate falls with a count of steps, a tensor in its group that it adds to in place."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"].add_(1)
            group["lr"] = 0.1 / float(group["count"])
        super().step()


OPTIMIZERS = {
    "Adadelta": lambda ps: torch.optim.Adadelta(ps),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "Adamax": lambda ps: torch.optim.Adamax(ps, lr=1e-2),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "AdamW, foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
    "AdamW, fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "ASGD": lambda ps: torch.optim.ASGD(ps, lr=1e-2),
    "Muon": lambda ps: torch.optim.Muon(_matrices(ps), lr=0.02),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=1e-2),
    "RAdam": lambda ps: torch.optim.RAdam(ps, lr=1e-2),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-2, momentum=0.5, centered=True),
    "Rprop": lambda ps: torch.optim.Rprop(ps, lr=1e-2),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, nesterov=True),
    "SGD, foreach": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, maximize=True, foreach=True),
    "AdaFactor of pytorch_optimizer": lambda ps: pytorch_optimizer.AdaFactor(ps),
    "Lamb": lambda ps: pytorch_optimizer.Lamb(ps, lr=1e-2, max_grad_norm=0.0, weight_decay=0.1),
    "Lion": lambda ps: pytorch_optimizer.Lion(ps, lr=1e-2, weight_decay=0.1),
    "Muon with AdamW": _with_auxiliary,
    "SGD that slows": lambda ps: Slowing([{"params": [*ps], "count": torch.zeros(())}], lr=0.1),
    "SOAP": lambda ps: pytorch_optimizer.SOAP(ps, lr=1e-2, precondition_frequency=2),
}
"""All of torch that step one parameter alone, and those of others that look at whole tensors."""


def _owned(world, optimizer, **options):
    """The optimizer as this world steps it."""
    return optimizer if world.is_replica else zf.by_owner(optimizer, **options)


def _note_states(world, optimizer):
    for number, own in sorted(optimizer.state_dict()["state"].items()):
        for key, value in sorted(own.items()):
            for at, leaf in enumerate(tree_leaves(value)):
                world.note(f"{key} {at} of parameter {number}", torch.as_tensor(leaf))
    for number, group in enumerate(optimizer.param_groups):
        world.note(f"numbers of group {number}", torch.tensor([v for v in group.values() if type(v) in (int, float)]))


# -- steps ------------------------------------------------------------------------------------------------------------


def _every_optimizer(names, world):
    for name in names:
        model = world.build(Shapes)
        optimizer = _owned(world, OPTIMIZERS[name](list(model.parameters())), batch=600)
        world.train(model, optimizer, 0, 1, 2)
        world.note_model(model)
        _note_states(world, optimizer)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_optimizer_steps_as_over_replicas(ranks, n):
    names, stages = ([*OPTIMIZERS], ["zero3"]) if n == 3 else (["Muon with AdamW", "SOAP", "Adafactor"], ALL)
    assert ranks(n).run(differences, partial(_every_optimizer, names), stages=stages) == [[]] * n


@pytest.mark.parametrize("stage", ALL)
@on_ranks(3)
def test_newton_schulz_runs_once_per_matrix_and_step_over_all_ranks(stage):
    model, steps = STAGES[stage](Shapes(), axis()), 3
    matrices = _matrices([*model.parameters()])
    optimizer = zf.by_owner(torch.optim.Muon(matrices), batch=600)
    with patch("torch.optim._muon._zeropower_via_newtonschulz", wraps=_zeropower_via_newtonschulz) as orthogonalize:
        for step in range(steps):
            model(noise(4, WIDTH, seed=step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.all_reduce(calls := torch.tensor(orthogonalize.call_count))
    assert calls == steps * len(matrices)


# -- used as any optimizer --------------------------------------------------------------------------------------------


def _groups(kind, world):
    """Groups with options, of which one comes later, schedules, hooks; frozen, toggled, unused, tied and plain parameters."""

    def build():
        model = Shapes()
        model.blocks[2].up.weight = model.blocks[0].up.weight
        return model

    model, plain = world.build(build), nn.Linear(3, 2)
    first, second, third = (list(block.parameters()) for block in model.blocks)
    second = [p for p in second if p.numel() > 1]
    groups = [{"params": first, "lr": 3e-2}, {"params": [*second, *plain.parameters()]}]
    groups[1]["weight_decay"] = 0.3
    lr = torch.tensor(1e-2) if kind == "tensor lr" else 1e-2
    make = {
        "tensor lr": partial(torch.optim.AdamW, lr=lr, foreach=False),
        "foreach": partial(torch.optim.AdamW, lr=lr, foreach=True, amsgrad=True),
        "group numbers": partial(pytorch_optimizer.SOAP, lr=lr, precondition_frequency=1),
    }[kind]
    optimizer = _owned(world, make(groups), batch=400)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda e: 1 / (1 + e), lambda e: 0.5**e])
    for step in range(5):
        if step == 1:
            first[0].requires_grad_(False)
            first[0].grad = None
        if step == 2:
            first[0].requires_grad_(True)
            later = [p for p in third if all(p is not known for known in first)]
            optimizer.add_param_group({"params": [*later, model.row, model.turned], "lr": 2e-2})
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        for number, parameter in enumerate(plain.parameters()):
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(10 * step + number))
        model.single.requires_grad_(step != 3)
        world.step(model, optimizer, model(noise(4, WIDTH, seed=step)).square().mean())
        schedule.step()
        if step == 3:  # gradients of some parameters alone
            second[-1].grad = torch.ones(second[-1].shape)
            optimizer.step()
            optimizer.zero_grad()
            assert second[-1].grad is None
    assert calls == ["before", "after"] * 6
    world.note_model(model, plain)
    _note_states(world, optimizer)


def _accumulated(world):
    """Two microbatches, clipped over all."""
    model = world.build(Shapes)
    optimizer = _owned(world, _with_auxiliary([*model.parameters()]))
    for step in range(3):
        with world.accumulate(model):
            for number in range(2):
                model(noise(4, WIDTH, seed=10 * step + number)).square().mean().backward()
        world.reduce(model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=math.inf)  # that of other norms is within rounding
        world.note_model(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    world.note_model(model)


def _scaled(world):
    """At step 1 one element overflows in the shard of one rank: all skip the step."""
    model = world.build(Shapes)
    optimizer = _owned(world, OPTIMIZERS["AdamW, fused"]([*model.parameters()]))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        scaler.scale(model(noise(4, WIDTH, seed=step)).square().mean()).backward()
        world.reduce(model)
        if step == 1 and (world.stage in (None, "replicate") or dist.get_rank() == 0):
            local_of(model.enter.weight.grad)[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        world.note("scale", torch.tensor(scaler.get_scale()))
        world.note_model(model)
        _note_states(world, optimizer)
    assert scaler.get_scale() == 2.0


def _closure(world):
    model = world.build(Shapes)
    optimizer = _owned(world, OPTIMIZERS["Adafactor"]([*model.parameters()]))
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = model(noise(2, WIDTH, seed=0)).square().mean()
        loss.backward()
        world.reduce(model)
        return loss

    for _ in range(2):
        world.note("loss", optimizer.step(closure))
    assert calls == [True, True]
    world.note_model(model)


class Rebinding(torch.optim.SGD):
    """Gives a parameter other memory, and its gradient too."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.mul(1.5)
                parameter.data = parameter - 0.1 * parameter.grad / parameter.grad.norm()


def _rebound(world):
    model = world.build(Shapes)
    world.train(model, _owned(world, Rebinding(model.parameters())), 0, 1)
    world.note_model(model)


TRIALS = {
    **{f"groups, {kind}": partial(_groups, kind) for kind in ("tensor lr", "foreach", "group numbers")},
    "accumulated": _accumulated,
    "scaled": _scaled,
    "closure": _closure,
    "rebound": _rebound,
}


@pytest.mark.parametrize("trial", TRIALS)
def test_it_is_used_as_any_optimizer(ranks, trial):
    stages = ["replicate", "zero1", "zero3"]
    assert ranks(3).run(differences, TRIALS[trial], stages=stages) == [[]] * 3


def _narrow(name, world):
    """Computed in bfloat16 over float32 at rest, with gradients in bfloat16."""
    model = zf.precision(world.build(Shapes), compute=torch.bfloat16, grads=torch.bfloat16)
    optimizer, is_stock = OPTIMIZERS[name]([*model.parameters()]), world.stage == "replicate" and name == "AdamW"
    world.train(model, optimizer if is_stock else zf.by_owner(optimizer, batch=600), 0, 1, 2)
    world.note_model(model)


@pytest.mark.parametrize("name", ["AdamW", "SOAP"])
def test_narrow_gradients_are_widened(ranks, name):
    trial = partial(_narrow, name)
    assert ranks(2).run(differences, trial, beside="replicate", stages=["zero1", "zero3"]) == [[]] * 2


def _away(folder, world):
    for name, tier in (("SOAP", zf.cpu()), ("Muon with AdamW", zf.nvme(folder))):
        model = world.build(Shapes)
        model = model if world.is_replica else zf.offload(model, params=tier, grads=tier)
        optimizer = OPTIMIZERS[name]([*model.parameters()])
        optimizer = optimizer if world.is_replica else zf.streamed(zf.by_owner(optimizer, batch=600), tier)
        world.train(model, optimizer, 0, 1, 2)
        world.note_model(model)
        _note_states(world, optimizer)


def test_everything_may_rest_in_a_tier(ranks, tmp_path):
    assert ranks(3).run(differences, partial(_away, str(tmp_path)), stages=["zero1", "zero3"]) == [[]] * 3


@on_ranks(1)
def test_states_that_are_loaded_or_moved_again_take_no_more_room(folder):
    """Each load took as much again: the places of the states before were never given back."""
    model = zf.zero3(Tower(), axis())
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    optimizer = zf.streamed(zf.by_owner(torch.optim.Muon(matrices)), zf.nvme(folder))
    model(noise(2, WIDTH, seed=0)).sum().backward()
    optimizer.step()
    taken, states = optimizer.tier_nbytes(), copy.deepcopy(optimizer.state_dict())
    for _ in range(2):
        optimizer.load_state_dict(copy.deepcopy(states))
        optimizer.step()
        assert optimizer.tier_nbytes() == taken
    zf.streamed(optimizer, zf.cpu())
    assert [*optimizer.tier_nbytes()] == [zf.cpu()]


# -- traffic ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ALL)
@on_ranks(3)
def test_shards_go_to_owners_and_new_values_come_back_and_nothing_else(stage):
    """(n-1)/n² of all bytes three times, up to the unevenness of owners: gradients, values, new values."""
    model = STAGES[stage](Shapes(), axis())
    optimizer = zf.by_owner(torch.optim.AdamW(model.parameters()), batch=600)
    model(noise(4, WIDTH, seed=0)).sum().backward()
    expected = 0
    for parameter in model.parameters():
        part, whole = local_of(parameter).nbytes, parameter.numel() * parameter.element_size()
        dealt = optimizer.owner_of(parameter)
        assert dealt is not None
        assert dealt.route.is_cut == (stage != "replicate" and parameter.dim() > 0)
        if dealt.route.is_cut:
            expected += whole - part if dealt.is_mine else 2 * part
        elif dealt.is_mine:
            expected += 2 * whole  # to two others
    with zf.traffic() as sent:
        optimizer.step()
    assert dict(sent.by_collective) == {"all-to-all": expected}


# -- saved and loaded -------------------------------------------------------------------------------------------------

PLACES = ("plain", "replicate", "zero1", "zero3 on 3", "hybrid", "tensor parallel", "away")


def _made(world, name, path, seed, *, is_stock=False):
    """A seeded decoder and its optimizer."""
    seed_generator(seed)
    place = WORLDS[world]
    model = place.place(Decoder() if place.styles is None else parallelized(grid("dp", "tp")["tp"], place.styles), path)
    optimizer = OPTIMIZERS[name]([*model.parameters()])
    optimizer = optimizer if world == "plain" or is_stock else zf.by_owner(optimizer, batch=600)
    return model, zf.streamed(optimizer, zf.nvme(path)) if world == "away" else optimizer


def _known(model, optimizer):
    """Whole parameters, states and options of groups, leaf by leaf. All ranks call it."""
    named = everything(model, optimizer).items()
    found = {f"{key} {at}": leaf for key, value in named for at, leaf in enumerate(tree_leaves(value))}
    return {key: full(leaf) if isinstance(leaf, Tensor) else leaf for key, leaf in found.items()}


def _first(folder, name):
    """A plain model that was trained; what is in it, and its state dicts."""
    model, optimizer = _made("plain", name, folder, seed=0)
    for number in range(2):
        stepped(model, optimizer, number)
    zf.save(f"{folder}/plain/step-2", model, optimizer)
    return _known(model, optimizer), copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())


def _passed_on(world, name, folder, first):
    """Loads that over other values, saves it as it rests in this world, and hands over its state dict."""
    expected, states, _ = first
    model, optimizer = _made(world, name, folder, seed=7)
    stepped(model, optimizer, 3)
    zf.load(f"{folder}/plain", model, optimizer)
    zf.save(f"{folder}/{world}/step-2", model, optimizer)
    found = differing(expected, _known(model, optimizer))
    own = optimizer.state_dict()
    for loaded in (states, own):  # whole tensors of a plain module; shards
        stepped(model, optimizer, 4)
        optimizer.load_state_dict(copy.deepcopy(loaded))
        zf.load(f"{folder}/plain", model)
        found += differing(expected, _known(model, optimizer))
    return found


def _taken_back(world, name, folder, first):
    """What one process then loads."""
    model, optimizer = _made("plain", name, folder, seed=8)
    zf.load(f"{folder}/{world}", model, optimizer)
    return differing(first[0], _known(model, optimizer))


@pytest.mark.parametrize("name", ["AdamW, fused", "Muon with AdamW", "SOAP", "Adafactor"])
def test_states_pass_through_every_place_and_back_to_the_bit(ranks, name, tmp_path):
    (first,) = ranks(1).run(_first, str(tmp_path), name)
    for world in PLACES[1:]:
        n = WORLDS[world].ranks
        assert ranks(n).run(_passed_on, world, name, str(tmp_path), first) == [[]] * n, world
        assert ranks(1).run(_taken_back, world, name, str(tmp_path), first) == [[]], world


def _between_stock_and_owners(world, name, folder):
    """From a stock optimizer over shards to owners and back, through files and through state dicts; then both go on."""
    runs = []
    for is_stock in (True, False):
        model, optimizer = _made(world, name, folder, seed=0, is_stock=is_stock)
        stepped(model, optimizer, 0)
        zf.save(f"{folder}/{is_stock}/step-1", model, optimizer)
        runs.append((model, optimizer, copy.deepcopy(optimizer.state_dict())))
    expected, found = _known(*runs[0][:2]), []
    for is_stock in (True, False):
        other, states = runs[is_stock][2], f"{folder}/{not is_stock}"
        for way in ("file", "state dict"):
            model, optimizer = _made(world, name, folder, seed=5, is_stock=is_stock)
            zf.load(states, model, optimizer if way == "file" else None)
            if way == "state dict":
                optimizer.load_state_dict(other)
            found += [f"{way}, stock={is_stock}: {each}" for each in differing(expected, _known(model, optimizer))]
            stepped(model, optimizer, 1)
            runs.append((model, optimizer, {}))
    last = [_known(*run[:2]) for run in runs[2:]]
    return found + [f"goes on: {each}" for run in last[1:] for each in differing(last[0], run)]


@pytest.mark.parametrize("name", ["AdamW", "Adagrad", "SGD"])
@pytest.mark.parametrize("world", ["zero1", "zero3 on 3"])
def test_states_are_those_of_the_stock_optimizer_over_shards(ranks, world, name, tmp_path):
    n = WORLDS[world].ranks
    assert ranks(n).run(_between_stock_and_owners, world, name, str(tmp_path)) == [[]] * n


def _saved_by_torch(world, name, folder, first, full):
    """Set from whole states, or from files that another place has written; got, written, and set into a fresh one."""
    options = StateDictOptions(full_state_dict=full, cpu_offload=full)
    found = []
    for seed in (1, 2):
        model, optimizer = _made(world, name, folder, seed=seed)
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))  # never stepped
        if seed == 1 and world == "zero1":
            zf.load(f"{folder}/plain", model, optimizer)
        elif full:
            states = torch.load(f"{folder}/full", weights_only=True)
        else:
            dcp.load(states, checkpoint_id=f"{folder}/dcp")
        if seed == 2 or world != "zero1":
            weights, moments = states["model"], states["optimizer"]
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=options)
        found += differing(first[0], _known(model, optimizer))
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options), strict=True))
        if full and dist.get_rank() == 0:
            torch.save(states, f"{folder}/full")
        elif not full:
            dcp.save(states, checkpoint_id=f"{folder}/dcp")
        dist.barrier()
        if full and dist.get_rank() != 0:
            assert states["optimizer"] == {}
    return found


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", ["AdamW", "Muon with AdamW"])
def test_torch_saves_and_loads_its_states(ranks, name, full, tmp_path):
    (first,) = ranks(1).run(_first, str(tmp_path), name)
    for world in ("zero1", "zero3 on 3"):
        n = WORLDS[world].ranks
        assert ranks(n).run(_saved_by_torch, world, name, str(tmp_path), first, full) == [[]] * n


# -- errors -----------------------------------------------------------------------------------------------------------


class Coupled(torch.optim.SGD):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        found = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in found]).norm()
        for parameter in found:
            parameter.sub_(0.1 * parameter.grad / norm)


@pytest.mark.parametrize("make", [torch.optim.LBFGS, torch.optim.SparseAdam, Coupled])
@on_ranks(2)
def test_an_optimizer_that_couples_parameters_is_refused_and_stays_as_it_was(make):
    model = zf.zero3(Tower(), axis())
    optimizer, before = make(model.parameters()), fulls(model.parameters())
    with pytest.raises(zf.PlacementError, match=f"The parameters of {make.__name__} cannot be stepped by their owners"):
        zf.by_owner(optimizer)
    assert all(map(torch.equal, fulls(model.parameters()), before))
    optimizer.state_dict()


@on_ranks(1)
def test_an_optimizer_has_one_place_and_no_copies():
    model = zf.zero3(Tower(), axis())
    inner = torch.optim.Adagrad(model.parameters())
    optimizer = zf.by_owner(inner)
    for act in (
        inner.step,
        inner.state_dict,
        lambda: inner.load_state_dict({}),
        lambda: zf.by_owner(inner),
        lambda: zf.by_owner(zf.streamed(torch.optim.AdamW(model.parameters()), zf.cpu())),
        lambda: copy.deepcopy(optimizer),
        lambda: pickle.dumps(optimizer),
        lambda: torch.save(optimizer, io.BytesIO()),
    ):
        with pytest.raises(zf.StateError):
            act()


def _torn(stage, has_none):
    """Each rank has gradients of parameters of its own, which have the same shapes; or one rank has none."""
    model = STAGES[stage](Tower(), axis())
    optimizer = zf.by_owner(torch.optim.SGD(model.parameters(), lr=0.1))
    model(noise(2, WIDTH, seed=0)).sum().backward()
    for block in model.blocks[dist.get_rank() :: 2]:
        block.up.weight.grad = None
    model.blocks[2].up.weight.grad = None
    if has_none and dist.get_rank():
        optimizer.zero_grad()
    with pytest.raises((zf.DisagreementError, zf.LostRankError)) as caught:
        optimizer.step()
    with pytest.raises(zf.StateError, match="step failed half-way"):
        optimizer.step()
    return type(caught.value).__name__


def _on_fresh_ranks(n, program, *args):
    """What ranks return who have lost one another, and run nothing after it."""
    ranks = Ranks()
    try:
        return ranks(n).run(program, *args)
    finally:
        ranks.close()


@pytest.mark.parametrize(("stage", "has_none"), [("replicate", False), ("zero3", False), ("zero3", True)])
def test_ranks_with_gradients_of_different_parameters_are_told(stage, has_none):
    assert "DisagreementError" in _on_fresh_ranks(2, _torn, stage, has_none)


class Raising(torch.optim.SGD):
    """Raises while it is armed."""

    is_armed = False

    def step(self, closure=None):
        if self.is_armed:
            raise ArithmeticError("of the user")
        return super().step(closure)


def _lost(stage):
    model = STAGES[stage](Tower(), axis())
    optimizer = zf.by_owner(inner := Raising(model.parameters(), lr=0.1), batch=600)
    told = []
    for is_armed in (False, True, True):
        if not told:
            model(noise(2, WIDTH, seed=0)).sum().backward()
        inner.is_armed = is_armed and dist.get_rank() == 1
        try:
            optimizer.step()
        except (ArithmeticError, zf.LostRankError, zf.StateError) as error:
            told.append(type(error).__name__)
    with pytest.raises(zf.StateError, match="step failed half-way"):
        optimizer.state_dict()
    return told


@pytest.mark.parametrize("stage", ["replicate", "zero3"])
def test_an_optimizer_that_raises_on_one_rank_ends_the_step_of_all(stage):
    expected = [[name, "StateError"] for name in ("LostRankError", "ArithmeticError", "LostRankError")]
    assert _on_fresh_ranks(3, _lost, stage) == expected


@on_ranks(1)
def test_a_step_that_failed_is_not_saved_and_a_checkpoint_ends_it(folder):
    model = zf.zero3(Tower(), axis())
    optimizer = zf.by_owner(inner := Raising(model.parameters(), lr=0.1))
    zf.save(f"{folder}/step-1", model, optimizer)
    model(noise(2, WIDTH, seed=0)).sum().backward()
    inner.is_armed = True
    with pytest.raises(ArithmeticError):
        optimizer.step()
    inner.is_armed = False
    with pytest.raises(zf.StateError, match=r"zf\.save of an optimizer whose step failed half-way"):
        zf.save(f"{folder}/step-2", model, optimizer)
    zf.load(folder, model, optimizer)
    optimizer.step()
