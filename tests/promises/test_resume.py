"""A run that is saved and loaded goes on as if it had not stopped, to the bit.

The table `RUNS`: each way in which states rest, and each way of saving them, in other processes. The table `PASSED`: to every
world of `tests/units/checkpoint/worlds.py`, and back. Then what other libraries have saved; every optimizer and schedule.

Elsewhere: drawn models, ranks and tiers in `property_tests/test_checkpoint_laws.py` and `test_optimizer_laws.py`.
"""

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim import lr_scheduler
from torch.utils._pytree import tree_leaves

import zero_fn as zf
from tests.axes.grids import Decoder, grid, parallelized
from tests.promises.test_by_owner import OPTIMIZERS as OWNED
from tests.promises.test_optimizers import LR_IS_A_TENSOR
from tests.promises.trials import TORCH
from tests.support.groups import alone
from tests.support.profiles import by_night
from tests.support.programs import STAGES
from tests.support.ranks import Ranks, axis
from tests.support.seeds import seed_generator
from tests.support.wholes import full
from tests.support.worlds import WIDTH, Tower, noise
from tests.units.checkpoint import made_by_deepspeed as deepspeed
from tests.units.checkpoint.worlds import WORLDS, differing, everything, stepped
from zero_fn.values.chained_optimizer import ChainedOptimizer, members_of

STEPS = 3


def _known(model, optimizer, average=None):
    """Whole parameters, buffers, states and averages, and options of groups, leaf by leaf. All ranks call it."""
    named = everything(model, optimizer)
    if average is not None:
        named |= {f"average of {name}": value for name, value in average.tensors.items()}
        named["updates"] = average.updates
    leaves = {f"{key} {at}": leaf for key, value in named.items() for at, leaf in enumerate(tree_leaves(value))}
    return {key: full(leaf) if isinstance(leaf, Tensor) else leaf for key, leaf in leaves.items()}


# -- in other processes ------------------------------------------------------------------------------------------------

PLACES = {
    **{stage: lambda model, _, place=place: place(model, axis()) for stage, place in STAGES.items()},
    "local buffers": lambda model, _: zf.shard_params(model, axis(), buffers="local"),
    "away": lambda model, disk: zf.offload(zf.shard_params(model, axis()), params=disk, grads=disk),
}
DTYPES = {
    "bfloat16": {"rest": torch.bfloat16},
    "kahan": {"rest": torch.bfloat16, "round": "kahan"},
    "stochastic": {"rest": torch.bfloat16, "round": "stochastic", "seed": 5},
    "narrow gradients": {"compute": torch.float32, "grads": torch.bfloat16},
    "codes": {"compute": torch.float32, "gather": zf.wire.int8(), "reduce": zf.wire.int4()},
    "differences": {"compute": torch.float32, "gather": zf.wire.delta4(), "reduce": zf.wire.int8(rotate=True)},
}


class Run:
    """A model with dropout and batch statistics, its optimizer, schedule, average and random numbers: all are saved.

    For torch.distributed.checkpoint without batch statistics: it saves buffers of one rank, and each rank has its own.
    """

    def __init__(self, how, folder, seed):
        torch.manual_seed(seed)
        place, *self.how = how.split(", ")
        wide = nn.Sequential(nn.Linear(WIDTH, 900), nn.Tanh(), nn.Linear(900, WIDTH))  # so large that states are coded
        last = nn.Identity() if "dcp" in self.how else nn.BatchNorm1d(WIDTH)
        is_narrow = not {"bfloat16", "kahan", "stochastic"}.isdisjoint(self.how)
        model = nn.Sequential(wide, Tower(dropout=0.2), last).to(torch.bfloat16 if is_narrow else torch.float32)
        for word in self.how:
            model = zf.precision(model, **DTYPES[word]) if word in DTYPES else model
        disk = zf.nvme(folder)
        self.model, self.step = PLACES[place](model, disk), 0
        self.options = StateDictOptions(flatten_optimizer_state_dict="flat" in self.how)
        self.optimizer = self._optimizer(disk if place == "away" else None, disk)
        self.average = zf.ema(self.model, 0.9) if "average" in self.how else None
        torch.manual_seed(100 + dist.get_rank())

    def _optimizer(self, away, disk):
        parameters, is_one = [*self.model.parameters()], "two" not in self.how
        stock = torch.optim.AdamW([p for p in parameters if is_one or p.ndim != 2], lr=1e-2, amsgrad=True)
        self.schedule = lr_scheduler.CosineAnnealingLR(stock, 2 * STEPS)
        adamw = zf.states8bit(stock) if "8 bits" in self.how else stock
        if "owners" in self.how:
            adamw = zf.by_owner(adamw)
        elif away is not None:
            adamw = zf.streamed(adamw, away, buffer="16MiB", finish="forward")
        elif "in pieces" in self.how:
            adamw = zf.streamed(adamw, disk, buffer="32KiB")
        elif not {"kahan", "stochastic"}.isdisjoint(self.how):
            adamw = zf.streamed(adamw)
        if is_one:
            return adamw
        muon = zf.by_owner(torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.02))
        return ChainedOptimizer([muon if away is None else zf.streamed(muon, away), adamw])

    def train(self, steps=STEPS):
        for _ in range(steps):
            self.model(noise(4, WIDTH, seed=self.step)).float().square().mean().backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.step += 1
            if self.average is not None:
                self.average.update()

    def save_and_go_on(self, folder):
        own = {"random": torch.get_rng_state(), "step": self.step, **self._plain()}
        wait = lambda: None  # noqa: E731
        if "dcp" in self.how and "async" in self.how:
            own_group = dist.new_group(backend="gloo")  # its thread communicates while this one trains
            wait = dcp.async_save(self._states(), checkpoint_id=folder, process_group=own_group).result
        elif "dcp" in self.how:
            dcp.save(self._states(), checkpoint_id=folder)
        elif "in memory" in self.how:
            zf.checkpoint.memory_copies(folder, self.model, self.optimizer, every=1).update(extra=own)
        else:
            step, is_late = f"{folder}/step-{self.step}", "async" in self.how
            wait = zf.save(step, self.model, self.optimizer, extra=own, background=is_late).wait
        self.train()  # changes everything that is being saved
        wait()

    def load(self, folder):
        if "dcp" in self.how:
            states = self._states()
            dcp.load(states, checkpoint_id=folder)
            values = {"model_state_dict": states["model"], "optim_state_dict": states["optimizer"]}
            set_state_dict(self.model, members_of(self.optimizer), **values, options=self.options)
            found = states[f"rank {dist.get_rank()}"]
            self.schedule.load_state_dict(found["schedule"])
        else:
            load = zf.resume if "in memory" in self.how else zf.load
            found = load(folder, self.model, self.optimizer, extra=self._plain())
        torch.set_rng_state(found["random"])
        self.step = found["step"]

    def _plain(self):
        """What is saved beside the model and its optimizer, and loaded into what is there."""
        return {"schedule": self.schedule} | ({} if self.average is None else {"average": self.average})

    def _states(self):
        model, optimizer = get_state_dict(self.model, members_of(self.optimizer), options=self.options)
        own = {"random": torch.get_rng_state(), "step": self.step, "schedule": self.schedule.state_dict()}
        return {"model": model, "optimizer": optimizer, f"rank {dist.get_rank()}": own}

    def result(self):
        known = _known(self.model, self.optimizer, self.average)
        return {**known, "random": torch.get_rng_state(), "lr": self.schedule.get_last_lr()}


def _uninterrupted(how, folder):
    run = Run(how, folder, seed=0)
    run.train()
    run.save_and_go_on(folder)
    return run.result()


def _resumed(how, folder):
    run = Run(how, folder, seed=7)
    if "dcp" not in how:  # what has been stepped is replaced, too
        run.train(1)
    run.load(folder)
    run.train()
    return run.result()


RUNS = {
    "zero1, bfloat16, async": 2,
    "zero3, sync": 3,
    "zero3, async": 1,
    "zero1, in pieces, sync": 2,
    "away, async": 3,
    "local buffers, async": 2,
    "zero3, dcp": 3,
    "zero1, dcp, async": 2,
    "away, dcp": 2,
    "away, dcp, flat": 2,  # flattened ones were loaded without the states that are in the tier
    "zero3, in memory": 3,
    "zero1, bfloat16, in memory": 2,
    "away, in memory": 2,
    "local buffers, in memory": 2,
    "replicate, two, async": 2,
    "zero1, two, async": 2,
    "zero2, two, async": 3,
    "zero3, two, async": 2,
    "zero3, two, dcp": 2,
    "zero3, two, in memory": 3,
    "away, two, sync": 2,
    "zero2, 8 bits, in memory": 3,
    "away, 8 bits, async": 2,
    "zero3, 8 bits, kahan, sync": 2,
    "zero3, 8 bits, kahan, dcp": 2,
    "zero2, stochastic, dcp": 2,
    "away, stochastic, average, async": 2,
    "zero1, stochastic, owners, sync": 2,
    "zero3, kahan, average, in memory": 2,
    "zero3, narrow gradients, sync": 2,
    "zero3, codes, sync": 3,
    "zero2, differences, sync": 2,
}
"""Ranks of each."""


@pytest.fixture(scope="module")
def fresh():
    """Other processes than those of the session: they have loaded only."""
    fresh = Ranks()
    yield fresh
    fresh.close()


DAILY = (
    "zero1, bfloat16, async",
    "zero3, sync",
    "away, dcp, flat",
    "local buffers, in memory",
    "zero3, two, in memory",
    "away, 8 bits, async",
    "zero2, stochastic, dcp",
    "zero1, stochastic, owners, sync",
    "zero3, kahan, average, in memory",
    "zero3, narrow gradients, sync",
    "zero3, codes, sync",
    "zero2, differences, sync",
)
"""One run for each holder of state, and for each way to save."""


@pytest.mark.parametrize("how", by_night(dict.fromkeys((*RUNS, *(f"{stage}, dcp" for stage in STAGES))), DAILY))
def test_n7_a_run_resumed_in_fresh_processes_is_the_uninterrupted_one(ranks, fresh, how, tmp_path):
    n = RUNS.get(how, 2)
    expected = ranks(n).run(_uninterrupted, how, str(tmp_path))
    resumed = fresh(n).run(_resumed, how, str(tmp_path))
    for one, other in zip(expected, resumed, strict=True):
        assert differing(one, other) == []


# -- between worlds ----------------------------------------------------------------------------------------------------


def _made(what, world, folder, seed):
    """A seeded decoder, its optimizer, of which a group may have other options, and its average, if it has one."""
    name, *words = what.split(", ")
    place = WORLDS[world]
    seed_generator(seed)
    model = Decoder() if place.styles is None else parallelized(grid("dp", "tp")["tp"], place.styles)
    model.register_buffer("seen", torch.arange(5.0) + seed)
    model.norm.requires_grad_(False)
    model = place.place(model, folder)
    model = zf.precision(model, **DTYPES[name]) if name in DTYPES else model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if "owners" in words and name in OWNED:
        optimizer = OWNED[name](trained)
    elif what in OPTIMIZERS:
        optimizer = OPTIMIZERS[what](trained)
    else:
        others = {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0}
        groups = [{"params": [p for p in trained if p.ndim != 1]}, others]
        optimizer = torch.optim.AdamW(groups, lr=0.01 + seed, betas=(0.8, 0.9))
    is_away = world in ("streamed", "away")
    if "owners" in words and world != "plain":
        optimizer = zf.by_owner(optimizer, batch=600)
        optimizer = zf.streamed(optimizer, zf.nvme(folder)) if is_away else optimizer
    else:
        optimizer = zf.streamed(optimizer) if name in DTYPES and not is_away else place.stream(optimizer, folder)
    tier = zf.nvme(folder) if is_away else None
    return model, optimizer, zf.ema(model, 0.9, tier=tier) if "average" in words else None


def _step(model, optimizer, average, number):
    stepped(model, optimizer, number)
    if average is not None:
        average.update()


def _save(path, model, optimizer, average):
    zf.save(path, model, optimizer, extra={"step": 2} | ({} if average is None else {"average": average}))


def _load(folder, model, optimizer, average):
    assert zf.load(folder, model, optimizer, extra={} if average is None else {"average": average})["step"] == 2


def _first(folder, what):
    """One process trains and saves. What it has then."""
    run = _made(what, "plain", folder, seed=0)
    for number in range(2):
        _step(*run, number)
    _save(f"{folder}/plain/step-2", *run)
    return _known(*run), copy.deepcopy(run[1].state_dict())


def _passed_on(what, world, folder, first):
    """Loads that over other values, and saves it as it rests in this world."""
    expected, states = first
    run = _made(what, world, folder, seed=7)
    _step(*run, 3)
    _load(f"{folder}/plain", *run)
    _save(f"{folder}/{world}/step-2", *run)
    wrong = differing(expected, _known(*run))
    if "owners" in what:  # by a state dict, too: of whole tensors as those of a plain module, and of what rests here
        own = run[1].state_dict()
        for loaded in (states, own):
            _step(*run, 4)
            run[1].load_state_dict(copy.deepcopy(loaded))
            zf.load(f"{folder}/plain", run[0])
            wrong += differing(expected, _known(*run))
    return wrong


def _taken_back(what, world, folder, first):
    """What one process then loads."""
    run = _made(what, "plain", folder, seed=8)
    _load(f"{folder}/{world}", *run)
    return differing(first[0], _known(*run))


OPTIMIZERS = {name: TORCH[name] for name in TORCH if name not in ("Adafactor", "AdamW", "Muon")} | LR_IS_A_TENSOR
EVERY = [world for world in WORLDS if world != "plain"]
OF_OWNERS = ["replicate", "zero1", "zero3 on 3", "hybrid", "tensor parallel", "away"]
PASSED = {
    "AdamW": EVERY,
    "AdamW, average": ["replicas", "zero3 on 3", "hpz", "tensor parallel", "sequence parallel", "away"],
    "kahan": ["zero3 on 4", "streamed", "away"],
    "stochastic": ["zero1", "streamed", "away"],
    "kahan, owners": ["replicate", "away"],
    "stochastic, owners": ["zero3 on 4"],
    "AdamW, owners": OF_OWNERS[:2],
    "Muon with AdamW, owners": OF_OWNERS,
    "SOAP, owners": OF_OWNERS,
    "Adafactor, owners": OF_OWNERS[-3:],
    **{name: ["zero3 on 3"] for name in OPTIMIZERS},
}
"""What rests, and the worlds that pass it on. Daily: every one with AdamW, the first with owners and rounding."""


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """A folder with a checkpoint of one process, and what is in it; made once of each kind."""
    made = {}

    def saved(what):
        if what not in made:
            folder = str(tmp_path_factory.mktemp("checkpoints"))
            made[what] = folder, *ranks(1).run(_first, folder, what)
        return made[what]

    return saved


PASSED_DAILY = [
    *(("AdamW", world) for world in EVERY),
    *((what, worlds[0]) for what, worlds in PASSED.items() if what not in OPTIMIZERS),
]


@pytest.mark.parametrize(
    ("what", "world"), by_night([(what, world) for what, worlds in PASSED.items() for world in worlds], PASSED_DAILY)
)
def test_every_world_passes_on_what_it_has_loaded_to_the_bit(ranks, what, world, saved):
    folder, first = saved(what)
    assert ranks(WORLDS[world].ranks).run(_passed_on, what, world, folder, first) == [[]] * WORLDS[world].ranks
    assert ranks(1).run(_taken_back, what, world, folder, first) == [[]]
    if (what, world) == ("AdamW", "replicate"):
        sizes = [path.stat().st_size for path in (Path(folder) / world / "step-2" / "model").iterdir()]
        assert len(sizes) == 2, "replicas share the writing"
        assert max(sizes) < 0.8 * sum(sizes)


# -- of other libraries ------------------------------------------------------------------------------------------------


def _placed(stage, model):
    return STAGES[stage](model, axis()) if stage in STAGES else model


def _without_scalars(seed):
    """FSDP2 takes none."""
    seed_generator(seed)
    model = Decoder()
    model.scale = nn.Parameter(torch.ones(1) + seed)
    return model


def _by_fsdp2(folder):
    """FSDP2 trains, and torch saves. What was saved, and what there is after one more step."""
    model = _without_scalars(seed=0)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=axis())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(2):
        stepped(model, optimizer, number)
    for kind in ("nested", "flat"):
        options = StateDictOptions(flatten_optimizer_state_dict=kind == "flat")
        weights, states = get_state_dict(model, optimizer, options=options)
        beside = {"step": 2, "sampler": {"order": [3, 1]}}
        dcp.save({"model": weights, "optimizer": states, **beside}, checkpoint_id=f"{folder}/{kind}")
    found = _known(model, optimizer)
    stepped(model, optimizer, 2)
    return found, _known(model, optimizer)


def _after_fsdp2(stage, folder, before, after):
    model = _placed(stage, _without_scalars(seed=5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    extra = zf.load(folder, model, optimizer)
    assert (extra["step"], extra["sampler"]["order"]) == (2, [3, 1])
    wrong = differing(before, _known(model, optimizer))
    stepped(model, optimizer, 2)
    for name, value in _known(model, optimizer).items():
        if isinstance(value, Tensor) and not torch.allclose(value, after[name], atol=1e-5):
            wrong.append(f"{name} after a step")
    return wrong


@pytest.mark.parametrize(
    ("size", "stage", "kind"),
    by_night(
        [(1, "plain", "flat"), (2, "zero3", "nested"), (3, "zero1", "flat"), (3, "zero3", "nested")],
        [(1, "plain", "flat"), (2, "zero3", "nested")],
    ),
)
def test_training_goes_on_where_fsdp2_has_stopped(ranks, size, stage, kind, tmp_path):
    before, after = ranks(2).run(_by_fsdp2, str(tmp_path))[0]
    assert ranks(size).run(_after_fsdp2, stage, str(tmp_path / kind), before, after) == [[]] * size


def _after_deepspeed(stage):
    """Of every kind of folder: how the model differs from that of DeepSpeed."""
    wrong, golden = [], json.loads((deepspeed.HERE / "golden.json").read_text())
    for kind in [*deepspeed.KINDS, *deepspeed.UNIVERSAL]:
        is_narrow = kind.startswith("bf16")
        model = deepspeed.built()
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.add_(3)
        model = _placed(stage, zf.precision(model, compute=torch.bfloat16) if is_narrow else model)
        optimizer = deepspeed.adamw(model)
        optimizer.param_groups[1]["lr"] = 7.0
        extra = zf.load(deepspeed.HERE / kind, model, optimizer)
        assert (extra["epoch"], extra["global_steps"]) == (3, deepspeed.STEPS)
        assert optimizer.param_groups[1]["lr"] == 0.02
        assert full(model.get_parameter("norm.weight")).tolist() == [1.0] * 7, "what is frozen"
        assert full(model.get_buffer("shift")).tolist() == list(range(5))
        for moment, near in (("saved", 0.0), ("after", 3e-3 if is_narrow else 2e-6)):
            for name, values in golden[deepspeed.UNIVERSAL.get(kind, kind)][moment].items():
                found = full(model.get_parameter(name)).flatten()
                if not torch.allclose(found, torch.tensor(values), rtol=0, atol=near):
                    wrong.append(f"{kind}, {moment}: {name}")
            deepspeed.loss_of(model, deepspeed.batch(deepspeed.STEPS)).backward()
            optimizer.step()
    return wrong


@pytest.mark.parametrize(("size", "stage"), [(1, "plain"), (2, "replicate"), (3, "zero1"), (3, "zero3")])
def test_training_goes_on_where_deepspeed_has_stopped(ranks, size, stage):
    assert ranks(size).run(_after_deepspeed, stage) == [[]] * size


# -- schedules, and what is beside it ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_backward_of_a_forward_before_a_load_is_refused(tmp_path, is_sharded):
    """It would compute gradients with the weights that were loaded: torch refuses it, too, after `load_state_dict`."""
    with alone() as mesh:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model = zf.shard_params(model, mesh) if is_sharded else model
        zf.save(tmp_path / "a", model)
        output = model(torch.ones(1, 3))
        zf.load(tmp_path / "a", model)
        with pytest.raises(zf.errors.StateError if is_sharded else RuntimeError, match=r"stepped|inplace operation"):
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
    return {"optimizer": optimizer, "schedule": _schedule(name, optimizer)}


def _rates(run, loss):
    """A step; what it leaves the groups with."""
    run["optimizer"].step()
    run["schedule"].step(*[loss] * isinstance(run["schedule"], lr_scheduler.ReduceLROnPlateau))
    return [value for group in run["optimizer"].param_groups for value in group.values() if isinstance(value, float)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_goes_on_wherever_it_was_saved(name, tmp_path):
    """Also those that are made of others: each keeps what it knows in a state of its own kind (MultiStepLR in a Counter)."""
    run, losses = _scheduled(name), [0, -1, -2, -3, *[-4] * 9]
    expected = []
    for step, loss in enumerate(losses):
        zf.save(tmp_path / f"step-{step}", extra=run)
        expected.append(_rates(run, loss))
    for start in range(1, len(losses), 3):
        run = _scheduled(name)
        zf.load(tmp_path / f"step-{start}", extra=run)
        assert [_rates(run, loss) for loss in losses[start:]] == expected[start:], f"saved at step {start}"


def test_no_schedule_of_torch_is_left_out():
    assert {*SCHEDULES} == {*lr_scheduler.__all__} - {"LRScheduler"}


def _statistics(folder):
    """Each rank sees other rows, and keeps its own statistics of them."""
    model = zf.shard_params(nn.Sequential(Tower(), nn.BatchNorm1d(WIDTH)), axis(), buffers="local")
    model(noise(4, WIDTH, seed=dist.get_rank()))
    zf.save(f"{folder}/step-1", model)


def _elsewhere(folder):
    """The statistics of rank 0, where they are asked for."""
    model = zf.shard_params(nn.Sequential(Tower(), nn.BatchNorm1d(WIDTH)), axis(), buffers="local")
    before = model[1].running_mean.clone()
    with pytest.raises(
        zf.errors.CheckpointError, match=r"running_mean: 2 ranks have saved different values of a buffer"
    ):
        zf.load(folder, model)
    assert torch.equal(model[1].running_mean, before), "a refused load has changed something"
    model = zf.shard_params(nn.Sequential(Tower(), nn.BatchNorm1d(WIDTH)), axis())
    zf.load(folder, model)
    return model[1].running_mean.tolist()


def test_buffers_of_ranks_are_not_those_of_rank_0_in_silence(ranks, tmp_path):
    ranks(2).run(_statistics, str(tmp_path))
    plain = nn.Sequential(Tower(), nn.BatchNorm1d(WIDTH))
    zf.load(tmp_path, plain)
    assert ranks(3).run(_elsewhere, str(tmp_path)) == [plain[1].running_mean.tolist()] * 3
