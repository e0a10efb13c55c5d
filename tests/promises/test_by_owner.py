"""The result of an optimizer never depends on the sharding: each tensor is stepped whole, by its owner (`zf.by_owner`).

To the bit that of replicas whose gradients are averaged in the order of the ranks. Drawn shapes, groups and up to 8 ranks are
in `property_tests/test_optimizer_laws.py`, several axes in `tests/axes/`, who owns what in `tests/units/owners/`.
"""

import copy
import io
import pickle
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.optim._muon import _zeropower_via_newtonschulz

import zero_fn as zf
from tests.promises.trials import TORCH, Shapes, closures, groups, matrices, note_states, scaled
from tests.support.messages import Headed, refusals, refused
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.ranks import Ranks, axis
from tests.support.seeds import seed_generator
from tests.support.wholes import fulls
from tests.support.worlds import ALL, WIDTH, Tower, differences, noise
from tests.units.checkpoint.worlds import differing, everything
from zero_fn.values.dtensors import local_of

pytorch_optimizer = pytest.importorskip("pytorch_optimizer", reason="the extra [test] is not installed")


def _with_auxiliary(parameters):
    """Muon for matrices and AdamW for all else, in one optimizer."""
    others = [parameter for parameter in parameters if parameter.ndim != 2]
    groups = [{"params": matrices(parameters), "use_muon": True}, {"params": others, "use_muon": False}]
    return pytorch_optimizer.Muon(groups, weight_decay=0.1, adamw_lr=1e-2)


class Slowing(torch.optim.SGD):
    """Its rate falls with a count of steps, a tensor in its group that it adds to in place."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"].add_(1)
            group["lr"] = 0.1 / float(group["count"])
        super().step()


OPTIMIZERS = {
    **TORCH,
    "AdaFactor of pytorch_optimizer": lambda ps: pytorch_optimizer.AdaFactor(ps),
    "Lamb": lambda ps: pytorch_optimizer.Lamb(ps, lr=1e-2, max_grad_norm=0.0, weight_decay=0.1),
    "Lion": lambda ps: pytorch_optimizer.Lion(ps, lr=1e-2, weight_decay=0.1),
    "Muon with AdamW": _with_auxiliary,
    "SGD that slows": lambda ps: Slowing([{"params": [*ps], "count": torch.zeros(())}], lr=0.1),
    "SOAP": lambda ps: pytorch_optimizer.SOAP(ps, lr=1e-2, precondition_frequency=2),
}
"""All of torch, and those of others that look at whole tensors."""


def _owned(world, optimizer, **options):
    """The optimizer as this world steps it."""
    return optimizer if world.is_replica else zf.by_owner(optimizer, **options)


# -- steps ------------------------------------------------------------------------------------------------------------


def _every_optimizer(names, world):
    for name in names:
        model = world.build(Shapes)
        optimizer = _owned(world, OPTIMIZERS[name](list(model.parameters())), batch=600)
        world.train(model, optimizer, 0, 1, 2)
        world.note_model(model)
        note_states(world, optimizer)


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_every_optimizer_steps_as_over_replicas(ranks, n):
    names, stages = ([*OPTIMIZERS], ["zero3"]) if n == 3 else (["Muon with AdamW", "SOAP"], ALL)
    assert ranks(n).run(differences, partial(_every_optimizer, names), stages=stages) == [[]] * n


@pytest.mark.parametrize("stage", ALL)
@on_ranks(3)
def test_newton_schulz_runs_once_per_matrix_and_step_over_all_ranks(stage):
    model, steps = STAGES[stage](Shapes(), axis()), 3
    cut = matrices([*model.parameters()])
    optimizer = zf.by_owner(torch.optim.Muon(cut), batch=600)
    with patch("torch.optim._muon._zeropower_via_newtonschulz", wraps=_zeropower_via_newtonschulz) as orthogonalize:
        for step in range(steps):
            model(noise(4, WIDTH, seed=step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.all_reduce(calls := torch.tensor(orthogonalize.call_count))
    assert calls == steps * len(cut)


# -- used as any optimizer --------------------------------------------------------------------------------------------


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


MAKERS = {
    "tensor lr": lambda own: torch.optim.AdamW(own, lr=torch.tensor(1e-2), foreach=False),
    "foreach": lambda own: torch.optim.AdamW(own, lr=1e-2, foreach=True, amsgrad=True),
    "group numbers": lambda own: pytorch_optimizer.SOAP(own, lr=1e-2, precondition_frequency=1),
}


def _made(kind, own, world):
    return _owned(world, (MAKERS | OPTIMIZERS)[kind](own), batch=400)


TRIALS = {
    **{f"groups, {kind}": partial(groups, partial(_made, kind)) for kind in MAKERS},
    "scaled": partial(scaled, Shapes, partial(_made, "AdamW, fused")),
    "closure": partial(closures, Shapes, partial(_made, "Adafactor")),
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
        note_states(world, optimizer)


def test_everything_may_rest_in_a_tier(ranks, tmp_path):
    assert ranks(3).run(differences, partial(_away, str(tmp_path)), stages=["zero1", "zero3"]) == [[]] * 3


@on_ranks(1)
def test_states_that_are_loaded_or_moved_again_take_no_more_room(folder):
    """Each load took as much again: the places of the states before were never given back."""
    model = zf.shard_params(Tower(), axis())
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


def _between_stock_and_owners(make, folder):
    """From a stock optimizer over shards to owners and back, through files and through state dicts; then both go on."""

    def made(seed, is_stock):
        seed_generator(seed)
        model = zf.shard_params(Tower(), axis())
        optimizer = make(model.parameters())
        return model, optimizer if is_stock else zf.by_owner(optimizer, batch=600)

    runs = []
    for is_stock in (True, False):
        model, optimizer = made(0, is_stock)
        _train(model, optimizer, 0)
        zf.save(f"{folder}/{is_stock}/step-1", model, optimizer)
        runs.append((model, optimizer))
    saved = {True: copy.deepcopy(runs[0][1].state_dict()), False: copy.deepcopy(runs[1][1].state_dict())}
    for is_stock in (True, False):
        for way in ("file", "state dict"):
            model, optimizer = made(5, is_stock)
            zf.load(f"{folder}/{not is_stock}", model, optimizer if way == "file" else None)
            if way == "state dict":
                optimizer.load_state_dict(saved[not is_stock])
            runs.append((model, optimizer))
    for model, optimizer in runs:
        _train(model, optimizer, 1)
    first, *others = (everything(*run) for run in runs)
    return [differing(first, other) for other in others]


def _train(model, optimizer, seed):
    model(noise(2, WIDTH, seed=seed)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", ["AdamW", "SGD", pytest.param("Adagrad", marks=pytest.mark.nightly)])
def test_states_are_those_of_the_stock_optimizer_over_shards(ranks, name, tmp_path):
    """Between owners and any world: test_resume.py."""
    assert ranks(3).run(_between_stock_and_owners, OPTIMIZERS[name], str(tmp_path)) == [[[]] * 5] * 3


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
    model = zf.shard_params(Tower(), axis())
    optimizer, before = make(model.parameters()), fulls(model.parameters())
    with pytest.raises(zf.errors.PlacementError):
        zf.by_owner(optimizer)
    assert all(map(torch.equal, fulls(model.parameters()), before))
    optimizer.state_dict()


def _of_owners(mesh):
    return zf.by_owner(torch.optim.SGD(zf.shard_params(Headed(), mesh).parameters()))


def _of_a_partial_value(mesh):
    part = DTensor.from_local(torch.ones(3, 4), mesh, [Partial()], run_check=False)
    return zf.by_owner(torch.optim.SGD([nn.Parameter(part)]))


test_refusals = refusals(
    {
        "owners_of_parameters_that_have_some": lambda one: zf.by_owner(_of_owners(one)),
        "owners_of_parameters_that_are_coupled": lambda: zf.by_owner(torch.optim.LBFGS(Headed().parameters())),
        "owners_of_a_partial_value": lambda two: _of_a_partial_value(two),
        "owners_are_streamed_in_pieces": lambda one: zf.streamed(_of_owners(one), zf.cpu(), buffer="1MiB"),
    }
)


@on_ranks(1)
def test_an_optimizer_has_one_place_and_no_copies():
    model = zf.shard_params(Tower(), axis())
    inner = torch.optim.Adagrad(model.parameters())
    optimizer = zf.by_owner(inner)
    for act in (
        inner.step,
        inner.state_dict,
        lambda: inner.load_state_dict({}),
        lambda: zf.by_owner(zf.streamed(torch.optim.AdamW(model.parameters()), zf.cpu())),
        lambda: copy.deepcopy(optimizer),
        lambda: pickle.dumps(optimizer),
        lambda: torch.save(optimizer, io.BytesIO()),
    ):
        with pytest.raises(zf.errors.StateError):
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
    with pytest.raises((zf.errors.DisagreementError, zf.errors.LostRankError)) as caught:
        optimizer.step()
    with pytest.raises(zf.errors.StateError):
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
        except (ArithmeticError, zf.errors.LostRankError, zf.errors.StateError) as error:
            told.append(type(error).__name__)
    with pytest.raises(zf.errors.StateError):
        optimizer.state_dict()
    return told


@pytest.mark.parametrize("stage", ["replicate", "zero3"])
def test_an_optimizer_that_raises_on_one_rank_ends_the_step_of_all(stage):
    expected = [[name, "StateError"] for name in ("LostRankError", "ArithmeticError", "LostRankError")]
    assert _on_fresh_ranks(3, _lost, stage) == expected


@on_ranks(1)
def test_a_step_that_failed_is_not_saved_and_a_checkpoint_ends_it(folder):
    model = zf.shard_params(Tower(), axis())
    optimizer = zf.by_owner(inner := Raising(model.parameters(), lr=0.1))
    zf.save(f"{folder}/step-1", model, optimizer)
    model(noise(2, WIDTH, seed=0)).sum().backward()
    inner.is_armed = True
    with pytest.raises(ArithmeticError):
        optimizer.step()
    inner.is_armed = False
    with refused("step_by_owners_after_one_that_failed"):
        optimizer.step()
    with pytest.raises(zf.errors.StateError):
        zf.save(f"{folder}/step-2", model, optimizer)
    zf.load(folder, model, optimizer)
    optimizer.step()
