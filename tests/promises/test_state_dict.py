"""State dicts: what those of models hold and alias; what `load_state_dict` takes and refuses; those of optimizers, by torch's
own means. Checkpoints: `test_resume.py`, `axes/test_checkpoints.py`."""

import copy
import io
from collections import OrderedDict
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Replicate, Shard

import zero_fn as zf
from tests.axes.grids import grid
from tests.support.groups import pretended
from tests.support.models import Language, Odd
from tests.support.on_ranks import on_ranks
from tests.support.profiles import SIZES
from tests.support.programs import STAGES, loss_of, parameters
from tests.support.ranks import axis
from tests.support.wholes import full, named_fulls
from tests.support.worlds import ALL, WIDTH, Tower, differences, noise
from zero_fn.values.dtensors import local_of
from zero_fn.values.dtypes import keeps_every_bit

# -- saved ------------------------------------------------------------------------------------------------------------


class Normalized(Tower):
    """With buffers, one of them not persistent."""

    scale: Tensor

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, x):
        return super().forward(self.norm(x)) * self.scale


def _saved_and_loaded(world):
    """Saved before the first forward; loaded before it, and between steps, where kept gathered parameters are stale."""
    saved = {key: value.clone() for key, value in world.build(Normalized).state_dict().items()}
    for key, value in saved.items():
        world.note(key, value)
    model = world.build(Normalized, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, entries in enumerate((saved, _whole(Normalized), saved)):
        model.load_state_dict(entries)
        world.train(model, optimizer, step)


def _aliasing(world):
    """As torch documents: entries share memory with the model, so that they follow it; `clone` keeps a moment."""
    model = world.build(Tower)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alias = model.state_dict()
    kept = {key: value.detach().clone() for key, value in alias.items()}
    average = {key: value.detach().clone() for key, value in alias.items()}
    for step in range(3):
        world.train(model, optimizer, step)
        for key, value in model.state_dict().items():
            average[key].mul_(0.5).add_(value, alpha=0.5)  # what an average of weights does
    for states in (alias, kept, average):
        for key, value in states.items():
            world.note(key, value)


@pytest.mark.parametrize("stage", [*ALL, "hybrid"])
@on_ranks(4)
def test_a_state_dict_is_copied_and_pickled_as_that_of_a_replica(stage):
    """As those who keep the best epoch in memory, and the last one in a file of each rank.

    torch 2.13 takes a DTensor whose local tensor begins inside its memory for a plain one, and raised.
    """
    place = STAGES.get(stage, zf.hybrid)
    mesh = axis() if stage in STAGES else grid("outer", "inner")
    model = place(Odd(), mesh)
    for module in (model, model if stage == "hybrid" else place(model, mesh)):  # hooks are there once
        state, file = module.state_dict(), io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        kept = copy.deepcopy(state), torch.load(file, weights_only=False)
        before = {name: local_of(value).clone() for name, value in state.items()}
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        for other in kept:
            assert all(type(other[name]) is type(value) for name, value in state.items())
            assert all(torch.equal(local_of(other[name]), value) for name, value in before.items())
        module.load_state_dict(kept[0])
        assert all(torch.equal(local_of(value), before[name]) for name, value in module.state_dict().items())


# -- loaded -----------------------------------------------------------------------------------------------------------


def _whole(build=Tower, seed=5):
    torch.manual_seed(seed)
    return build().state_dict()


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("loaded", ["replicate", "zero1", "zero3"])
@on_ranks(3)
def test_shards_of_another_layout_are_redistributed_on_load(loaded, assign):
    """Of other stages, and of another mesh, cut along another dim. Assigned ones are cut as the parameter is."""
    model = STAGES[loaded](Odd(), axis())
    placements = {name: parameter.placements for name, parameter in model.named_parameters()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for saved in ("replicate", "zero3", "by columns"):
        plain = Odd()
        if saved == "by columns":
            entries = plain.state_dict()
            cuts = {key: Shard(value.ndim - 1) if value.numel() > 1 else Replicate() for key, value in entries.items()}
            entries = {key: distribute_tensor(value, mesh, [cuts[key]]) for key, value in entries.items()}
        else:
            entries = STAGES[saved](plain, axis()).state_dict()
        model.load_state_dict(entries, assign=assign)
        found = dict(model.named_parameters())  # of a tie, more than plain names, until the next forward ties it again
        wholes = named_fulls(found)
        assert all(torch.equal(wholes[name], value) for name, value in plain.named_parameters()), saved
        assert all(found[name].placements == placement for name, placement in placements.items()), saved


def _elsewhere(tensor):
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("other", "mesh"))
    return distribute_tensor(tensor, mesh, [Replicate(), Replicate()])


CHANGES = {
    "norm.bias": lambda t: t[:3],  # the last of the parameters
    "blocks.2.gate": lambda t: t.expand(2),  # a scalar
    "norm.running_mean": lambda t: t[:1],  # a buffer
    "leave.bias": _elsewhere,
}


@pytest.mark.parametrize("key", CHANGES)
@on_ranks(2)
def test_another_shape_or_mesh_raises_and_nothing_is_written(key):
    for stage in ALL:
        torch.manual_seed(0)
        model = STAGES[stage](Normalized(), axis())
        before = named_fulls(model.state_dict())
        entries = _whole(Normalized)
        with pytest.raises(zf.errors.CheckpointError, match=key):
            model.load_state_dict({**entries, key: CHANGES[key](entries[key])})
        for name, value in named_fulls(model.state_dict()).items():
            assert torch.equal(value, before[name]), f"{stage}: {name} was written"


def _casts(world):
    model = world.build(Tower)
    entries = {key: value.to(torch.bfloat16) for key, value in _whole().items()}
    entries["leave.weight"] = _whole()["leave.weight"].double() * (1 + 2**-40)  # is rounded, as torch does
    entries["blocks.0.gate"] = torch.tensor([3], dtype=torch.int8)  # a scalar as old checkpoints have it
    model.load_state_dict(entries)
    world.train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), 1)
    world.note_model(model)


DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


def _extremes(dtype):
    """Values that a cast to too small a dtype changes."""
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if dtype.is_floating_point or dtype.is_complex:
        limits = torch.finfo(dtype)
        values = [limits.max, limits.min, 1 + limits.eps, limits.smallest_normal * limits.eps, 0.5]
        return (torch.tensor(values, dtype=torch.float64) * (1 + 1j if dtype.is_complex else 1)).to(dtype)
    whole = torch.iinfo(dtype)
    return torch.tensor([whole.min, whole.max, whole.max - 1, 1], dtype=dtype)


def _numbers(values):
    """As Python's numbers, whose comparison is exact."""
    return (values.double() if values.is_floating_point() else values).tolist()


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_a_dtype_keeps_every_bit_if_it_keeps_the_extremes(source):
    values = _extremes(source)
    for target in DTYPES:
        survive = _numbers(values.to(target)) == _numbers(values)
        assert keeps_every_bit(source, target) == survive, target


@on_ranks(2)
def test_missing_and_unexpected_keys_are_named():
    torch.manual_seed(0)
    model = zf.shard_params(Tower(), axis())
    entries = _whole()
    entries["extra"] = entries.pop("leave.bias")
    with pytest.raises(RuntimeError, match=r"Missing key\(s\)[\s\S]*leave.bias[\s\S]*Unexpected key\(s\)[\s\S]*extra"):
        model.load_state_dict(entries)
    found = model.load_state_dict(entries, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["leave.bias"], ["extra"])


def _assigned(world):
    model = world.build(Tower)
    model.load_state_dict(_whole(), assign=True)
    twin = copy.deepcopy(model)  # raised where this rank's part begins inside the tensor that was loaded
    world.train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), 0, 1)
    world.note_model(twin, copy.deepcopy(model))


TRIALS = [_saved_and_loaded, _aliasing, _casts, _assigned]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("trial", TRIALS)
def test_state_dicts_are_whole_alias_and_load_as_those_of_replicas(ranks, trial, n):
    assert ranks(n).run(differences, trial) == [[]] * n


class Tied(nn.Sequential):
    def __init__(self):
        super().__init__(OrderedDict(enter=nn.Linear(WIDTH, WIDTH), tanh=nn.Tanh(), leave=nn.Linear(WIDTH, WIDTH)))
        self.leave.weight = self.enter.weight


@pytest.mark.parametrize("stage", ALL)
@on_ranks(2)
def test_two_values_for_a_tied_parameter_are_not_assigned(stage):
    """The second was dropped. Every rank raises, also those on which both shards are the same."""
    torch.manual_seed(0)
    model = STAGES[stage](Tied(), axis())
    x = noise(2, WIDTH, seed=0)
    before = model(x).detach()
    whole = {key: value + 1 for key, value in named_fulls(model.state_dict()).items()}
    shards = {key: value.clone() for key, value in model.state_dict().items()}
    whole["leave.weight"] = whole["leave.weight"] + 1
    if dist.get_rank() == 1 or stage == "replicate":
        shards["leave.weight"].to_local().add_(1)
    both = torch.stack([whole["enter.weight"], whole["leave.weight"]])
    in_one_memory = {**whole, "enter.weight": both[0], "leave.weight": both[1]}
    for entries in (whole, shards, in_one_memory):
        with pytest.raises(zf.errors.CheckpointError):
            model.load_state_dict(entries, assign=True)
    assert torch.equal(model(x), before)
    for entries in (whole, shards):
        entries["leave.weight"] = entries["enter.weight"].clone()
        model.load_state_dict(entries, assign=True)
        model(x)
        assert model.leave.weight is model.enter.weight
        assert torch.equal(full(model.leave.weight), full(entries["enter.weight"]))


class Renaming(nn.Linear):
    """Rewrites the entries of its state dict, as modules that read those of an older version do."""

    def _load_from_state_dict(self, state_dict, prefix, *others):
        state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}kernel")
        super()._load_from_state_dict(state_dict, prefix, *others)


def test_what_stands_behind_a_module_that_rewrites_its_entries_is_checked_before_anything_is_written():
    with pretended(2) as mesh:
        model = zf.shard_params(nn.Sequential(nn.Linear(4, 4), Renaming(4, 4), nn.Linear(4, 4)), mesh)
    entries = {key: torch.ones(4, 4) if "weight" in key else torch.ones(4) for key in model.state_dict()}
    entries["1.kernel"] = entries.pop("1.weight")
    before = local_of(model[0].weight).clone()
    with pytest.raises(zf.errors.CheckpointError):
        model.load_state_dict({**entries, "2.bias": torch.ones(5)})
    assert torch.equal(local_of(model[0].weight), before)
    model.load_state_dict(entries)
    assert all(bool((local_of(parameter) == 1).all()) for parameter in model.parameters())


# -- of optimizers ----------------------------------------------------------------------------------------------------

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def _built(stage, build, streamed=False):
    torch.manual_seed(0)
    model = STAGES[stage](build(), axis())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, zf.streamed(optimizer, zf.cpu()) if streamed else optimizer


def _step(model, optimizer, seed):
    loss_of(model, seed).backward()
    optimizer.step()
    optimizer.zero_grad()


def _same(one, other):
    ours, theirs = parameters(one), parameters(other)
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("what", ["model", "optimizer", "first", "streamed"])
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
@on_ranks(2)
def test_shards_of_another_rank_are_refused(stage, what, folder):
    """Of a file of the own rank, and of rank 0's; before a first step, too."""
    model, optimizer = _built(stage, Odd, what == "streamed")
    _step(model, optimizer, 0)
    rank, state = dist.get_rank(), model if what == "model" else optimizer
    torch.save(state.state_dict(), f"{folder}/{rank}.pt")
    dist.barrier()
    said = r"holds the shard of another rank[\s\S]*torch.distributed.checkpoint" if rank else "failed on rank 1"
    for is_own in (True, False):
        loaded = torch.load(f"{folder}/{rank if is_own else 0}.pt", weights_only=True)
        state = torch.optim.AdamW(model.parameters(), lr=0.01) if what == "first" else state
        is_refused = not is_own and (rank == 1 or what == "streamed")
        with pytest.raises(zf.ZeroError, match=said) if is_refused else nullcontext():
            state.load_state_dict(loaded)
            if what == "first":
                state.step()
        dist.barrier()


def _whole_states(optimizer):
    state_dict = optimizer.state_dict()
    states = {number: {name: full(value) for name, value in of.items()} for number, of in state_dict["state"].items()}
    return {**state_dict, "state": states}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(  # NAdam has a second number for each parameter, which torch loads in the parameter's dtype
    ("stage", "build", "kind"), [("zero1", Language, torch.optim.NAdam), ("zero3", Odd, torch.optim.AdamW)]
)
@on_ranks(2)
def test_states_that_were_loaded_go_on(stage, build, kind, whole):
    """As they rest, or whole as those of plain modules: in memory, and streamed, before they are loaded or after."""
    models = []
    for loads, streams in ((False, False), (True, False), (True, True)):
        model, optimizer = _built(stage, build)
        optimizer = kind(model.parameters())
        for seed in range(3):
            if loads and seed:
                saved = _whole_states(optimizer) if whole else optimizer.state_dict()
                optimizer = kind(model.parameters())
                optimizer = zf.streamed(optimizer, zf.cpu()) if streams and seed == 1 else optimizer
                optimizer.load_state_dict(saved)
                optimizer = zf.streamed(optimizer, zf.cpu()) if streams and seed == 2 else optimizer
            _step(model, optimizer, seed)
        models.append(model)
    assert _same(models[0], models[1])
    assert _same(models[0], models[2])


@pytest.mark.parametrize(("stage", "at_owners"), [("replicate", False), ("zero2", False), ("zero2", True)])
@on_ranks(2)
def test_states_of_rank_0_go_to_other_stages_whole(stage, at_owners):
    """The state of rank 0, whole and on the host, given to another stage, and to plain modules."""
    first, optimizer = _built("zero3", Language)
    optimizer = zf.by_owner(optimizer) if at_owners else optimizer
    for number in range(2):
        _step(first, optimizer, number)
    values = get_model_state_dict(first, options=WHOLE)
    states = copy.deepcopy(get_optimizer_state_dict(first, optimizer, options=WHOLE))  # numbers of steps alias
    assert bool(values) == (dist.get_rank() == 0)
    values = {name: value.clone() for name, value in values.items()}
    second, other = _built(stage, Language)
    other = zf.by_owner(other) if at_owners else other
    set_model_state_dict(second, dict(values), options=FROM_RANK_0)  # which it changes
    set_optimizer_state_dict(second, other, states, options=FROM_RANK_0)
    assert _same(first, second)
    for model, its in ((first, optimizer), (second, other)):
        _step(model, its, 5)
    assert _same(first, second)
    if dist.get_rank() == 0:
        Language().load_state_dict(values)
