"""Optimizers: built in time or too early, over shards or whole tensors; clipping; loss scaling; assigned gradients."""

import importlib
import math
from collections import OrderedDict, defaultdict
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial

import zero_fn as zf
from tests.promises.trials import TORCH, closures, groups, scaled
from tests.support.messages import Headed, refusals, refused
from tests.support.models import Layer
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.ranks import axis
from tests.support.wholes import full, fulls
from tests.support.worlds import ALL, WIDTH, Tower, as_replicas, differences, noise
from tests.units.storage.disks import failing

pipeline = importlib.import_module("zero_fn.streamed.stepping")  # the package has a function of this name


def _loss(model, seed):
    loss = model(noise(4, WIDTH, seed=seed)).square().mean()
    return loss


# -- steps ------------------------------------------------------------------------------------------------------------


class Lookahead(torch.optim.Optimizer):
    """As that of timm (arXiv:1907.08610): it never calls `Optimizer.__init__`, and has the hooks of a step alone."""

    def __init__(self, inner):
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self.inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults
        self.state, self.steps = defaultdict(dict), 0

    @torch.no_grad()
    def step(self, closure=None):
        loss, self.steps = self.inner.step(closure), self.steps + 1
        for parameter in self.param_groups[0]["params"] if self.steps % 2 == 0 else ():
            slow = self.inner.state[parameter].setdefault("slow", torch.empty_like(parameter).copy_(parameter))
            slow.add_(parameter - slow, alpha=0.5)
            parameter.copy_(slow)
        return loss


def _looked_ahead(world):
    """A hook of ours looked for what `Optimizer.__init__` makes, also in optimizers over plain models."""
    model = world.build(Tower)
    optimizer = Lookahead(torch.optim.AdamW(model.parameters(), lr=1e-2))
    world.train(model, optimizer, 0, 1, 2)
    optimizer.inner.load_state_dict(optimizer.inner.state_dict())
    world.train(model, optimizer, 3, 4)
    world.note_model(model)


ELEMENTWISE = {name: make for name, make in TORCH.items() if name not in ("Adafactor", "AdamW, fused", "Muon")}
"""The fused one rounds the last elements of shards in another way."""


def _elementwise(world):
    for make in ELEMENTWISE.values():
        model = world.build(Tower)
        world.train(model, make(list(model.parameters())), 0, 1)
        world.note_model(model)


def _in_float64():
    """LBFGS flattens gradients and directions, of which a rank may hold nothing (of one row)."""
    return nn.Sequential(Layer(WIDTH, 7), nn.Linear(WIDTH, 1)).double()


class Coded(nn.Module):
    """Has a parameter that is so large that its states are kept in 8 bits."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, 900), nn.Linear(900, WIDTH)

    def forward(self, x):
        y = self.leave(torch.tanh(self.enter(x)))
        return y


LR_IS_A_TENSOR = {"AdamW, lr is a tensor": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(1e-2), foreach=False)}
GROUPED = {"SGD": TORCH["SGD"], "AdamW, foreach": TORCH["AdamW, foreach"], **LR_IS_A_TENSOR}
TRIALS = {
    **{
        f"groups, {kind}": (2, partial(groups, lambda own, world, make=make: make(own)))
        for kind, make in GROUPED.items()
    },
    "scaled": (3, partial(scaled, Tower, lambda own, world: torch.optim.AdamW(own, lr=1e-2))),
    "scaled, 8 bits": (2, partial(scaled, Coded, lambda own, world: zf.states8bit(torch.optim.AdamW(own, lr=1e-2)))),
    "looks ahead": (2, _looked_ahead),
    "elementwise": (2, _elementwise),
    "closure": (2, partial(closures, Tower, lambda own, world: torch.optim.SGD(own, lr=0.1))),
    "closures": (3, partial(closures, _in_float64, lambda own, world: torch.optim.LBFGS(own, lr=0.1))),
}


@pytest.mark.parametrize("trial", TRIALS)
def test_optimizers_step_as_for_replicas(ranks, trial):
    n, program = TRIALS[trial]
    assert ranks(n).run(differences, program) == [[]] * n


@pytest.mark.parametrize("stage", ["replicate", "zero1", "zero3"])
@on_ranks(2)
def test_an_optimizer_built_before_the_transform_raises_and_updates_nothing(stage):
    plain = Tower()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    model = STAGES[stage](plain, axis())
    says = refused if stage == "zero3" else lambda _: pytest.raises(zf.errors.StaleError)
    with says("check_optimizer_of_the_module_before"):
        zf.check(model, optimizer)
    _loss(model, 0).backward()
    before = fulls([*model.parameters(), *plain.parameters()])
    with says("step_of_the_optimizer_before"):
        optimizer.step()
    assert all(map(torch.equal, fulls([*model.parameters(), *plain.parameters()]), before))
    assert not optimizer.state, "the step was refused after it had begun"
    late = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zf.check(model, late)
    late.step()
    with pytest.raises(zf.errors.StaleError):  # a second transform replaces parameters too
        zf.check(zf.precision(model, compute=torch.float64), late)


# -- norms ------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_norm_of_one_gradient_after_another_is_that_of_all_at_once():
    """The norm of any order, and what it clips, are those of replicas: the laws."""
    for stage in ALL:
        torch.manual_seed(0)
        model, norms = STAGES[stage](Tower(), axis()), []
        for foreach in (True, False):
            model.zero_grad()
            _loss(model, 0).backward()
            norms.append(full(nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=foreach)))
        torch.testing.assert_close(*norms, rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [math.inf, math.nan])
@on_ranks(2)
def test_ranks_agree_that_a_norm_is_not_finite(value):
    """Though the shard of one rank alone has the bad element."""
    for stage in ALL:
        model = STAGES[stage](Tower(), axis())
        _loss(model, 0).backward()
        if dist.get_rank() or stage == "replicate":
            model.enter.weight.grad.to_local()[0, 0] = value
        before = fulls(parameter.grad for parameter in model.parameters())
        # Not math.inf for NaN: the maximum of gloo drops it, and torch's norm of a sharded gradient with it.
        for p in (1.0, 2.0, math.inf if math.isinf(value) else 3.0):
            with pytest.raises(RuntimeError, match="non-finite"):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=p, error_if_nonfinite=True)
        for one, other in zip(fulls(parameter.grad for parameter in model.parameters()), before, strict=True):
            assert torch.equal(one.nan_to_num(1, 2, 3), other.nan_to_num(1, 2, 3))
        assert not torch.isfinite(full(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))


# -- optimizers that look at whole tensors ----------------------------------------------------------------------------


class Lamb(torch.optim.SGD):
    """Known by its name."""


class DistributedShampoo(torch.optim.SGD):
    """Known by a part of its name."""


class MyLamb(Lamb):
    """Known by what it derives from."""


class Cautious(torch.optim.SGD):
    """Known by an option: it scales updates by how many of the whole tensor agree in sign with the gradient."""

    def __init__(self, parameters, **options):
        super().__init__(parameters, **options)
        self.param_groups[0]["caution"] = True


WHOLE_TENSOR = {
    "Muon": lambda ps: torch.optim.Muon([p for p in ps if p.ndim == 2], lr=1e-2),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
    "Lamb": lambda ps: Lamb(ps, lr=1e-2),
    "DistributedShampoo": lambda ps: DistributedShampoo(ps, lr=1e-2),
    "MyLamb": lambda ps: MyLamb(ps, lr=1e-2),
    "Cautious": lambda ps: Cautious(ps, lr=1e-2),
}


@pytest.mark.parametrize("kind", WHOLE_TENSOR)
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
@on_ranks(2)
def test_an_optimizer_over_whole_tensors_refuses_shards_and_updates_nothing(stage, kind):
    model = STAGES[stage](Tower(), axis())
    optimizer = WHOLE_TENSOR[kind](list(model.parameters()))
    _loss(model, 0).backward()
    before = fulls(model.parameters())
    for act in (optimizer.step, lambda: zf.check(model, optimizer)):
        with pytest.raises(zf.errors.PlacementError):
            act()
    assert all(map(torch.equal, fulls(model.parameters()), before))
    assert not optimizer.state


@pytest.mark.parametrize("kind", ["Muon", "Adafactor"])
@as_replicas(n=3, stages=["replicate"])
def test_an_optimizer_over_whole_tensors_is_exact_over_those_that_are_replicated(world, kind):
    """As the error advises: matrices are replicated, all else is sharded under AdamW."""
    torch.manual_seed(0)
    model = Tower()
    if not world.is_replica:
        model = zf.replicate(zf.shard_params(model, axis(), where=lambda name, p: p.ndim < 2), axis())
    whole = WHOLE_TENSOR[kind]([p for p in model.parameters() if p.ndim == 2])
    adam = torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2], lr=1e-2)
    for step in range(3):
        _loss(model, step).backward()
        world.reduce(model)
        world.note_model(model)
        for optimizer in (whole, adam):
            optimizer.step()
            optimizer.zero_grad()


# -- refusals ---------------------------------------------------------------------------------------------------------


def _step_of_adafactor(model):
    torch.optim.Adafactor(model.parameters()).step()


def _interrupted(folder):
    disk = zf.nvme(folder)
    model = zf.offload(nn.Linear(2, 2), params=disk, grads=disk, optim=disk)
    optimizer = zf.streamed(torch.optim.AdamW(model.parameters()), finish="forward")
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "steps_in_one_pass", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(2))
        optimizer.step()


test_refusals = refusals(
    {
        "check_optimizer_of_another_module": lambda model: zf.check(model, torch.optim.AdamW(Headed().parameters())),
        "step_over_whole_tensors": lambda two: _step_of_adafactor(zf.shard_params(Headed(), two)),
        "step_that_waits_is_interrupted": _interrupted,
    }
)


@on_ranks(2)
def test_states_that_one_rank_cannot_move_are_told_on_all(folder):
    model = zf.shard_params(nn.Linear(64, 64), axis())
    optimizer = torch.optim.AdamW(model.parameters())
    model(noise(2, 64, seed=0)).sum().backward()
    optimizer.step()
    fails = dist.get_rank() == 1
    told = pytest.raises(zf.errors.StorageError) if fails else refused("step_that_failed_on_another_rank")
    with failing(where=fails), told:
        zf.streamed(optimizer, zf.nvme(folder))


def _as_owner(optimizer, odd):
    """`by_owner` refuses a sum that is still to be taken."""
    optimizer.param_groups[0]["params"].append(odd)
    try:
        return zf.by_owner(optimizer)
    finally:
        optimizer.param_groups[0]["params"].pop()


def _with_a_group(optimizer, odd):
    optimizer.add_param_group({"params": [odd], "lr": 1.0})


SMALL = zf.cpu(limit="4KiB")
REFUSED = {
    "by_owner": (lambda own: own, _as_owner, zf.errors.PlacementError),
    "a group": (zf.by_owner, _with_a_group, zf.errors.PlacementError),
    "a tier for states at owners": (zf.by_owner, lambda own, _: zf.streamed(own, SMALL), zf.errors.TierError),
    "a tier for states in 8 bits": (zf.states8bit, lambda own, _: zf.streamed(own, SMALL), zf.errors.TierError),
    "a tier": (lambda own: own, lambda own, _: zf.streamed(own, SMALL), zf.errors.TierError),
}


@pytest.mark.parametrize("row", REFUSED)
@on_ranks(2)
def test_an_optimizer_that_is_refused_stays_as_it_was(row):
    """It says the same of itself, has the same groups and states, and steps as one that was never taken over."""
    make, take, error = REFUSED[row]
    odd = nn.Parameter(DTensor.from_local(torch.ones(3), axis(), [Partial()], run_check=False))
    seen = []
    for is_refused in (False, True):
        torch.manual_seed(0)
        model = zf.shard_params(nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 40)), axis())
        optimizer = make(torch.optim.AdamW(model.parameters(), lr=1e-2))
        for step in range(3):
            if is_refused and step == 1:
                before = str(optimizer)
                with pytest.raises(error):
                    take(optimizer, odd)
                assert str(optimizer) == before
            model(noise(4, 64, seed=step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state_dict()["state"]
        seen.append([*fulls(model.parameters()), *(full(own["exp_avg"]) for own in state.values())])
    assert all(map(torch.equal, *seen))


# -- gradients that users assign --------------------------------------------------------------------------------------


class Own(torch.optim.AdamW):
    """An optimizer that is none of torch's."""


MAKERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.1),
    "own": partial(Own, lr=0.1),
    "streamed": lambda ps: zf.streamed(torch.optim.AdamW(ps, lr=0.1, fused=True), zf.cpu()),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("stage", ["replicate", "zero1", "zero3"])
@on_ranks(2)
def test_whole_gradients_that_are_assigned_are_cut(stage, kind):
    """A whole plain gradient is cut by the optimizer, and by the next backward, which adds to it."""
    torch.manual_seed(0)
    plain = nn.Linear(4, 7)
    models = STAGES[stage](plain, axis()), plain
    optimizers = [MAKERS[kind](model.parameters()) for model in models]
    for step in range(3):
        for p, q in zip(*(model.parameters() for model in models), strict=True):
            q.grad = torch.randn(q.shape)
            p.grad = q.grad.clone()
        for model, optimizer in zip(models, optimizers, strict=True):
            if step == 1:
                model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        for p, q in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(full(p), q, rtol=1e-6, atol=1e-7)
