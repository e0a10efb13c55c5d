"""A run that is saved and loaded goes on as if it had not stopped, to the bit.

The table `RUNS`: in fresh processes. Then to each of the worlds of `tests/units/checkpoint/worlds.py` and back, and with
every optimizer and schedule of torch.

Elsewhere: checkpoints of other libraries in `tests/units/checkpoint/test_of_*.py`; drawn models, ranks and tiers in
`property_tests/test_checkpoint_laws.py`.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import lr_scheduler

import zero_fn as zf
from tests.promises.test_optimizers import ELEMENTWISE
from tests.support.groups import alone
from tests.support.programs import STAGES
from tests.support.ranks import Ranks, axis
from tests.support.seeds import seed_generator
from tests.support.wholes import full
from tests.support.worlds import WIDTH, Tower, noise
from tests.units.checkpoint.worlds import WORLDS, differing, everything, made, stepped
from zero_fn.values.chained_optimizer import ChainedOptimizer

STEPS = 3


class Run:
    """A model with dropout and batch statistics, its optimizer, schedule and random numbers: all belong to a checkpoint.

    For torch.distributed.checkpoint without batch statistics: it saves buffers of one rank, and each rank has its own.
    """

    def __init__(self, stage, dtype, path, how, seed):
        torch.manual_seed(seed)
        last = nn.Identity() if "dcp" in how else nn.BatchNorm1d(WIDTH)
        model = nn.Sequential(Tower(dropout=0.2), last).to(dtype)
        if stage == "away":
            model = zf.offload(zf.zero3(model, axis()), params=zf.nvme(path), grads=zf.nvme(path))
        elif stage == "local buffers":
            model = zf.zero3(model, axis(), buffers="local")
        else:
            model = STAGES[stage](model, axis())
        self.model, self.dtype, self.step = model, dtype, 0
        self.options = StateDictOptions(flatten_optimizer_state_dict="flat" in how)
        matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2 and "two" in how]
        others = [parameter for parameter in model.parameters() if parameter.ndim != 2 or "two" not in how]
        self.optimizer = torch.optim.AdamW(others, lr=1e-2, amsgrad=True)
        self.schedule = lr_scheduler.CosineAnnealingLR(self.optimizer, 2 * STEPS)
        if stage == "away":
            self.optimizer = zf.streamed(self.optimizer, zf.nvme(path), buffer="16MiB", finish="forward")
        if "two" in how:
            muon = zf.by_owner(torch.optim.Muon(matrices, lr=0.02))
            muon = zf.streamed(muon, zf.nvme(path)) if stage == "away" else muon
            self.optimizer = ChainedOptimizer([muon, self.optimizer])
        torch.manual_seed(100 + dist.get_rank())

    def train(self, steps=STEPS):
        for _ in range(steps):
            self.model(noise(4, WIDTH, seed=self.step, dtype=self.dtype)).square().mean().backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.step += 1

    def save_and_go_on(self, folder, how):
        own = {"schedule": self.schedule, "random": torch.get_rng_state(), "step": self.step}
        wait = lambda: None  # noqa: E731
        if how == "dcp, async":
            own_group = dist.new_group(backend="gloo")  # its thread communicates while this one trains
            wait = dcp.async_save(self._states(), checkpoint_id=folder, process_group=own_group).result
        elif "dcp" in how:
            dcp.save(self._states(), checkpoint_id=folder)
        elif "mirror" in how:
            zf.mirror(folder, self.model, self.optimizer, every=1).update(extra=own)
        else:
            step = f"{folder}/step-{self.step}"
            wait = zf.save(step, self.model, self.optimizer, extra=own, background="async" in how).wait
        self.train()  # changes everything that is being saved
        wait()

    def load(self, folder, how):
        if "dcp" in how:
            states = self._states()
            dcp.load(states, checkpoint_id=folder)
            weights, moments = states["model"], states["optimizer"]
            values = {"model_state_dict": weights, "optim_state_dict": moments}
            set_state_dict(self.model, self.optimizer, **values, options=self.options)
            found = states[f"rank {dist.get_rank()}"]
            self.schedule.load_state_dict(found["schedule"])
        else:
            load = zf.resume if "mirror" in how else zf.load
            found = load(folder, self.model, self.optimizer, extra={"schedule": self.schedule})
        torch.set_rng_state(found["random"])
        self.step = found["step"]

    def _states(self):
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        own = {"random": torch.get_rng_state(), "step": self.step, "schedule": self.schedule.state_dict()}
        return {"model": model, "optimizer": optimizer, f"rank {dist.get_rank()}": own}

    def result(self):
        return {
            **everything(self.model, self.optimizer),
            "random": torch.get_rng_state(),
            "lr": self.schedule.get_last_lr(),
        }


def _uninterrupted(folder, stage, dtype, how):
    run = Run(stage, dtype, folder, how, seed=0)
    run.train()
    run.save_and_go_on(folder, how)
    return run.result()


def _resumed(folder, stage, dtype, how):
    run = Run(stage, dtype, folder, how, seed=7)
    if "dcp" not in how:  # what has been stepped is replaced, too
        run.train(1)
    run.load(folder, how)
    run.train()
    return run.result()


RUNS = [
    ("zero1", 2, torch.bfloat16, "async"),
    ("zero3", 3, torch.float32, "sync"),
    ("zero3", 3, torch.float32, "dcp"),
    ("zero1", 2, torch.float32, "dcp, async"),
    ("away", 3, torch.float32, "async"),
    ("away", 2, torch.float32, "dcp"),
    ("away", 2, torch.float32, "dcp, flat"),  # flattened ones were loaded without the states that are in the tier
    ("zero3", 1, torch.float32, "async"),
    ("local buffers", 2, torch.float32, "async"),
    ("zero3", 3, torch.float32, "mirror"),
    ("zero1", 2, torch.bfloat16, "mirror"),
    ("away", 2, torch.float32, "mirror"),
    ("local buffers", 2, torch.float32, "mirror"),
    *(
        (stage, n, torch.float32, "two, async")
        for stage, n in (("replicate", 2), ("zero1", 2), ("zero2", 3), ("zero3", 2))
    ),
    ("away", 2, torch.float32, "two, sync"),
    ("zero3", 3, torch.float32, "two, mirror"),
    *(pytest.param(stage, 2, torch.float32, "dcp", marks=pytest.mark.nightly) for stage in STAGES),
]


@pytest.mark.parametrize(("stage", "n", "dtype", "how"), RUNS)
def test_n7_a_run_resumed_in_fresh_processes_is_the_uninterrupted_one(ranks, stage, n, dtype, how, tmp_path):
    fresh = Ranks()  # other processes than those of the session
    try:
        expected = ranks(n).run(_uninterrupted, str(tmp_path), stage, dtype, how)
        resumed = fresh(n).run(_resumed, str(tmp_path), stage, dtype, how)
    finally:
        fresh.close()
    for one, other in zip(expected, resumed, strict=True):
        assert differing(one, other) == []


# -- between worlds ----------------------------------------------------------------------------------------------------


def _first(folder):
    """A model that was trained, saved by one process."""
    model, optimizer = made("plain", folder, seed=0)
    for number in range(2):
        stepped(model, optimizer, number)
    zf.save(f"{folder}/plain/step-2", model, optimizer, extra={"step": 2})
    return everything(model, optimizer)


def _passed_on(world, folder, expected):
    """Loads that over other values, and saves it as it rests in this world."""
    model, optimizer = made(world, folder, seed=7)
    stepped(model, optimizer, 3)
    step = zf.load(f"{folder}/plain", model, optimizer)["step"]
    zf.save(f"{folder}/{world}/step-{step}", model, optimizer, extra={"step": step})
    return differing(expected, everything(model, optimizer))


def _taken_back(world, folder, expected):
    """What one process then loads."""
    model, optimizer = made("plain", folder, seed=8)
    zf.load(f"{folder}/{world}", model, optimizer)
    return differing(expected, everything(model, optimizer))


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """A folder with a checkpoint of a plain model, and what is in it."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    (expected,) = ranks(1).run(_first, folder)
    return folder, expected


@pytest.mark.parametrize("world", [name for name in WORLDS if name != "plain"])
def test_every_world_passes_on_what_it_has_loaded_to_the_bit(ranks, world, saved):
    assert ranks(WORLDS[world].ranks).run(_passed_on, world, *saved) == [[]] * WORLDS[world].ranks
    assert ranks(1).run(_taken_back, world, *saved) == [[]]
    if world == "replicate":
        sizes = [path.stat().st_size for path in (Path(saved[0]) / world / "step-2" / "model").iterdir()]
        assert len(sizes) == 2, "replicas share the writing"
        assert max(sizes) < 0.8 * sum(sizes)


# -- optimizers and schedules ------------------------------------------------------------------------------------------


OPTIMIZERS = {
    **ELEMENTWISE,
    "Adafactor": lambda ps: torch.optim.Adafactor(ps),
    "Adam, fused": lambda ps: torch.optim.Adam(ps, fused=True),
    "Adam, lr is a tensor": lambda ps: torch.optim.Adam(ps, lr=torch.tensor(0.1)),
    "Rprop": lambda ps: torch.optim.Rprop(ps),
}


def _trained(model, optimizer, seed):
    model(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _stepped_on(name, folder, is_sharded):
    runs = []
    for number in range(2):
        seed_generator(number)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
        model = zf.zero3(model, axis()) if is_sharded else model
        optimizer = OPTIMIZERS[name](list(model.parameters()))
        _trained(model, optimizer, 0)
        if number == 0:
            zf.save(folder / name, model, optimizer)
        else:
            zf.load(folder / name, model, optimizer)
        _trained(model, optimizer, 1)
        runs.append({key: full(value) for key, value in model.named_parameters()})
    return [key for key, value in runs[0].items() if not torch.equal(value, runs[1][key])]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on(ranks, name, tmp_path):
    assert _stepped_on(name, tmp_path, is_sharded=False) == []
    is_sharded = name != "Adafactor"  # refused over shards: it looks at whole tensors
    assert ranks(2).run(_stepped_on, name, tmp_path / "ranks", is_sharded=is_sharded) == [[], []]


def test_a_parameter_that_passes_through_buffers_in_pieces_goes_on(tmp_path):
    """Its pieces had one count of steps in common after a load, and each of them counted it up."""

    def made():
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        return model, zf.streamed(optimizer, zf.nvme(tmp_path), buffer="16KiB")

    def train(model, optimizer):
        for number in range(2):
            model(torch.full((1, 64), 1.0 + number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    (model, optimizer), (again, resumed) = made(), made()
    train(model, optimizer)
    zf.save(tmp_path / "saved", model, optimizer)
    zf.load(tmp_path / "saved", again, resumed)
    train(model, optimizer)
    train(again, resumed)
    assert len(optimizer.states.chunks) > 1
    assert torch.equal(model.weight, again.weight)
    assert optimizer.state_dict()["state"][0]["step"] == resumed.state_dict()["state"][0]["step"]


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_backward_of_a_forward_before_a_load_is_refused(tmp_path, is_sharded):
    """It would compute gradients with the weights that were loaded: torch refuses it, too, after `load_state_dict`."""
    with alone() as mesh:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model = zf.zero3(model, mesh) if is_sharded else model
        zf.save(tmp_path / "a", model)
        output = model(torch.ones(1, 3))
        zf.load(tmp_path / "a", model)
        with pytest.raises(zf.StateError if is_sharded else RuntimeError, match=r"stepped|inplace operation"):
            output.sum().backward()


SCHEDULES = {
    "ChainedScheduler": {},
    "ConstantLR": {"total_iters": 3},
    "CosineAnnealingLR": {"T_max": 5},
    "CosineAnnealingWarmRestarts": {"T_0": 2, "T_mult": 2},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.2, "step_size_up": 2, "mode": "triangular2"},
    "ExponentialLR": {"gamma": 0.7},
    "LambdaLR": {"lr_lambda": lambda step: 0.9**step},
    "LinearLR": {"total_iters": 4},
    "MultiStepLR": {"milestones": [1, 2, 2, 5], "gamma": 0.3},
    "MultiplicativeLR": {"lr_lambda": lambda step: 1 - 0.1 * step},
    "OneCycleLR": {"max_lr": 0.3, "total_steps": 40},
    "PolynomialLR": {"total_iters": 6, "power": 2.0},
    "ReduceLROnPlateau": {"patience": 1, "cooldown": 1},
    "SequentialLR": {},
    "StepLR": {"step_size": 2},
}
"""Every schedule of torch, by its arguments."""


def _schedule(name, optimizer):
    """A schedule; one that is made of others has all that torch lets be in it."""
    simple = [each for each, arguments in SCHEDULES.items() if arguments and each != "ReduceLROnPlateau"]
    if name == "SequentialLR":
        return lr_scheduler.SequentialLR(optimizer, [_schedule(each, optimizer) for each in simple], [*range(1, 12)])
    if name == "ChainedScheduler":
        inside = lr_scheduler.ChainedScheduler([_schedule(each, optimizer) for each in simple], optimizer)
        return lr_scheduler.ChainedScheduler([inside, _schedule("SequentialLR", optimizer)], optimizer)
    return getattr(lr_scheduler, name)(optimizer, **SCHEDULES[name])


def _scheduled(name):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    return optimizer, _schedule(name, optimizer)


def _rates(optimizer, schedule, loss):
    """A step; what it leaves the groups with."""
    optimizer.step()
    schedule.step(*[loss] * isinstance(schedule, lr_scheduler.ReduceLROnPlateau))
    return [value for group in optimizer.param_groups for value in group.values() if isinstance(value, float)]


def test_every_schedule_goes_on_wherever_it_was_saved(tmp_path):
    """Also those that are made of others: each keeps what it knows in a state of its own kind (MultiStepLR in a Counter)."""
    assert {*SCHEDULES} == {*lr_scheduler.__all__} - {"LRScheduler"}, "torch has others"
    runs, steps = {name: _scheduled(name) for name in SCHEDULES}, 13
    wanted = {name: [] for name in SCHEDULES}
    for step in range(steps):
        extra = {f"{name}/{at}": part for name, run in runs.items() for at, part in enumerate(run)}
        zf.save(tmp_path / f"step-{step}", extra=extra)
        for name, run in runs.items():
            wanted[name].append(_rates(*run, loss=-min(step, 4)))
    for start in range(steps):
        resumed = {name: _scheduled(name) for name in SCHEDULES}
        extra = {f"{name}/{at}": part for name, run in resumed.items() for at, part in enumerate(run)}
        zf.load(tmp_path / f"step-{start}", extra=extra)
        for name, run in resumed.items():
            found = [_rates(*run, loss=-min(step, 4)) for step in range(start, steps)]
            assert found == wanted[name][start:], f"{name}, saved at step {start}"


def _statistics(folder):
    """Each rank sees other rows, and keeps its own statistics of them."""
    model = zf.zero3(nn.Sequential(Tower(), nn.BatchNorm1d(WIDTH)), axis(), buffers="local")
    model(noise(4, WIDTH, seed=dist.get_rank()))
    zf.save(f"{folder}/step-1", model)


def _elsewhere(folder):
    """The statistics of rank 0, where they are asked for."""
    model = zf.zero3(nn.Sequential(Tower(), nn.BatchNorm1d(WIDTH)), axis(), buffers="local")
    before = model[1].running_mean.clone()
    with pytest.raises(zf.CheckpointError, match=r"running_mean: 2 ranks have saved different values of a buffer"):
        zf.load(folder, model)
    assert torch.equal(model[1].running_mean, before), "a refused load has changed something"
    asked = zf.zero3(nn.Sequential(Tower(), nn.BatchNorm1d(WIDTH)), axis())
    zf.load(folder, asked)
    found = asked[1].running_mean.tolist()
    return found


def test_buffers_of_ranks_are_not_those_of_rank_0_in_silence(ranks, tmp_path):
    ranks(2).run(_statistics, str(tmp_path))
    plain = nn.Sequential(Tower(), nn.BatchNorm1d(WIDTH))
    zf.load(tmp_path, plain)
    assert ranks(3).run(_elsewhere, str(tmp_path)) == [plain[1].running_mean.tolist()] * 3
