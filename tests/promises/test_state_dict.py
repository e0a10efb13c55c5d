"""State dicts: what they hold before the first forward and what they alias; what `load_state_dict` takes and refuses."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Replicate, Shard

import zero_fn as zf
from tests.axes.grids import grid
from tests.support.groups import pretended
from tests.support.models import Odd
from tests.support.on_ranks import on_ranks
from tests.support.profiles import SIZES
from tests.support.programs import STAGES
from tests.support.ranks import Ranks, axis
from tests.support.wholes import full, fulls, named_fulls
from tests.support.worlds import ALL, WIDTH, Tower, World, differences, noise
from zero_fn.checkpoint.live.load_plan import keeps_every_bit
from zero_fn.resting import local_of

# -- saved ------------------------------------------------------------------------------------------------------------


class Normalized(Tower):
    """With buffers, one of them not persistent."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x)) * self.scale


def _before_the_first_forward(world: World) -> None:
    model = world.build(Normalized)
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    for key, value in saved.items():
        world.note(key, value)
    other = world.build(Normalized, seed=1)
    other.load_state_dict(saved)
    for each in (model, other):
        world.train(each, torch.optim.AdamW(each.parameters(), lr=1e-2), 0, 1)


def _aliasing(world: World) -> None:
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
def test_a_state_dict_is_copied_and_pickled_as_that_of_a_replica(ranks: Ranks, stage: str) -> None:
    """torch 2.13 takes a DTensor whose local tensor begins inside its memory for a plain one, and raised."""
    ranks(4 if stage == "hybrid" else 2).run(_copied_and_pickled, stage)


def _copied_and_pickled(stage: str) -> None:
    """The best epoch is kept in memory, and the last one in a file of each rank."""
    place: Any = STAGES.get(stage, zf.hybrid)
    mesh = axis() if stage in STAGES else grid("outer", "inner")
    model = place(Odd(), mesh)
    for module in (model, model if stage == "hybrid" else place(model, mesh)):  # hooks are there once
        state = module.state_dict()
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        kept = {"copied": copy.deepcopy(state), "pickled": torch.load(file, weights_only=False)}
        for key, value in state.items():
            own = local_of(value)
            for how, other in kept.items():
                held = local_of(other[key])
                assert type(other[key]) is type(value), (how, key)
                assert torch.equal(held, own), (how, key)
                assert not own.numel() or held.data_ptr() != own.data_ptr(), (how, key)
        before = {name: local_of(parameter).clone() for name, parameter in module.named_parameters()}
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        module.load_state_dict(kept["copied"])
        assert all(torch.equal(local_of(value), before[name]) for name, value in module.named_parameters())


# -- loaded -----------------------------------------------------------------------------------------------------------


def _whole(build: Callable[[], nn.Module] = Tower, seed: int = 5) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return build().state_dict()


def _loads_whole(world: World) -> None:
    model = world.build(Tower)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        model.load_state_dict(_whole(seed=step))  # between steps: kept gathered parameters are stale
        world.train(model, optimizer, step)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("replicate", "zero3"), ("zero1", "replicate"), ("zero1", "zero3"), ("zero3", "zero1"), ("zero3", "zero3")],
)
@on_ranks(3)
def test_shards_of_another_stage_are_redistributed_on_load(saved: str, loaded: str) -> None:
    source, model = STAGES[saved](Odd(), axis()), STAGES[loaded](Odd(), axis())
    model.load_state_dict(source.state_dict())
    assert all(map(torch.equal, fulls(model.parameters()), fulls(source.parameters())))


@on_ranks(3)
def test_shards_of_another_layout_are_redistributed_on_load() -> None:
    torch.manual_seed(0)
    model = zf.zero3(Tower(), axis())
    whole = _whole()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model.load_state_dict({key: distribute_tensor(value, mesh, [Replicate()]) for key, value in whole.items()})
    assert all(torch.equal(value, whole[key]) for key, value in named_fulls(model.state_dict()).items())
    by_columns = {
        key: distribute_tensor(value + 1, mesh, [Shard(value.ndim - 1) if value.ndim else Replicate()])
        for key, value in whole.items()
    }
    model.load_state_dict(by_columns)
    assert all(torch.equal(value, whole[key] + 1) for key, value in named_fulls(model.state_dict()).items())


REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "size mismatch for norm.bias": lambda t: t[:3],  # the last of the parameters
    "size mismatch for blocks.2.gate": lambda t: t.expand(2),  # a scalar
    "size mismatch for norm.running_mean": lambda t: t[:1],  # a buffer
    "leave.bias lies on another mesh": lambda t: distribute_tensor(
        t,
        init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("other", "mesh")),
        [Replicate(), Replicate()],
    ),
}
"""What is said of an entry that was changed so."""


@pytest.mark.parametrize("said", REFUSED)
@on_ranks(2)
def test_another_shape_or_mesh_raises_and_nothing_is_written(said: str) -> None:
    (key,) = [word for word in said.split() if "." in word]
    for stage in ALL:
        torch.manual_seed(0)
        model: Any = STAGES[stage](Normalized(), axis())
        before = named_fulls(model.state_dict())
        entries = _whole(Normalized)
        with pytest.raises(zf.CheckpointError, match=said):
            model.load_state_dict({**entries, key: REFUSED[said](entries[key])})
        for name, value in named_fulls(model.state_dict()).items():
            assert torch.equal(value, before[name]), f"{stage}: {name} was written"


def _casts(world: World) -> None:
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


def _extremes(dtype: torch.dtype) -> Tensor:
    """Values that a cast to too small a dtype changes."""
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if dtype.is_floating_point or dtype.is_complex:
        limits = torch.finfo(dtype)
        values = [limits.max, limits.min, 1 + limits.eps, limits.smallest_normal * limits.eps, 0.5]
        return (torch.tensor(values, dtype=torch.float64) * (1 + 1j if dtype.is_complex else 1)).to(dtype)
    whole = torch.iinfo(dtype)
    return torch.tensor([whole.min, whole.max, whole.max - 1, 1], dtype=dtype)


def _numbers(values: Tensor) -> list[complex]:
    """As Python's numbers, whose comparison is exact."""
    return (values.double() if values.is_floating_point() else values).tolist()


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_a_dtype_keeps_every_bit_if_it_keeps_the_extremes(source: torch.dtype) -> None:
    values = _extremes(source)
    for target in DTYPES:
        survive = _numbers(values.to(target)) == _numbers(values)
        assert keeps_every_bit(source, target) == survive, target


@on_ranks(2)
def test_missing_and_unexpected_keys_are_named() -> None:
    torch.manual_seed(0)
    model = zf.zero3(Tower(), axis())
    entries = _whole()
    entries["extra"] = entries.pop("leave.bias")
    with pytest.raises(RuntimeError, match=r"Missing key\(s\)[\s\S]*leave.bias[\s\S]*Unexpected key\(s\)[\s\S]*extra"):
        model.load_state_dict(entries)
    found = model.load_state_dict(entries, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["leave.bias"], ["extra"])


@on_ranks(3)
def test_ranks_that_load_different_tensors_get_an_error() -> None:
    """The same: `test_same_values.py`."""
    model = zf.zero3(Tower(), axis())
    model(noise(2, WIDTH, seed=0)).sum().backward()
    model.load_state_dict(_whole(seed=dist.get_rank()))
    before = [local_of(parameter).clone() for parameter in model.parameters()]
    with pytest.raises(zf.DisagreementError, match="initial values"):
        model(noise(2, WIDTH, seed=0))
    assert all(map(torch.equal, map(local_of, model.parameters()), before))
    model.load_state_dict(_whole(seed=7))
    model(noise(2, WIDTH, seed=0)).sum().backward()


def _assigned(world: World) -> None:
    model = world.build(Tower)
    model.load_state_dict(_whole(), assign=True)
    twin = copy.deepcopy(model)  # raised where this rank's part begins inside the tensor that was loaded
    world.train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), 0, 1)
    world.note_model(twin, copy.deepcopy(model))


TRIALS = [_before_the_first_forward, _aliasing, _loads_whole, _casts, _assigned]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("trial", TRIALS)
def test_state_dicts_are_whole_alias_and_load_as_those_of_replicas(
    ranks: Ranks, trial: Callable[[World], None], n: int
) -> None:
    assert ranks(n).run(differences, trial) == [[]] * n


class Tied(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(OrderedDict(enter=nn.Linear(WIDTH, WIDTH), tanh=nn.Tanh(), leave=nn.Linear(WIDTH, WIDTH)))
        self.leave.weight = self.enter.weight


@pytest.mark.parametrize("stage", ALL)
@on_ranks(2)
def test_two_values_for_a_tied_parameter_are_not_assigned(stage: str) -> None:
    """The second was dropped. Every rank raises, also those on which both shards are the same."""
    torch.manual_seed(0)
    model: Any = STAGES[stage](Tied(), axis())
    x = noise(2, WIDTH, seed=0)
    before = model(x).detach()
    whole = {key: value + 1 for key, value in named_fulls(model.state_dict()).items()}
    whole["leave.weight"] = whole["leave.weight"] + 1
    shards = {key: value.clone() for key, value in model.state_dict().items()}
    for value in shards.values():
        value.to_local().add_(1)
    if dist.get_rank() == 1 or stage == "replicate":
        shards["leave.weight"].to_local().add_(1)
    both = torch.stack([whole["enter.weight"], whole["leave.weight"]])
    in_one_memory = {**whole, "enter.weight": both[0], "leave.weight": both[1]}
    for entries in (whole, shards, in_one_memory):
        with pytest.raises(zf.CheckpointError, match=r"enter.weight and leave.weight are one parameter"):
            model.load_state_dict(entries, assign=True)
    assert torch.equal(model(x), before)
    for entries in (whole, shards):
        entries["leave.weight"] = entries["enter.weight"].clone()
        model.load_state_dict(dict(entries), assign=True)
        model(x)
        assert model.leave.weight is model.enter.weight
        assert torch.equal(full(model.leave.weight), full(entries["enter.weight"]))


class Renaming(nn.Linear):
    """Rewrites the entries of its state dict, as modules that read those of an older version do."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}kernel")
        super()._load_from_state_dict(state_dict, prefix, *others)


def test_what_stands_behind_a_module_that_rewrites_its_entries_is_checked_before_anything_is_written() -> None:
    with pretended(2) as mesh:
        model: Any = zf.shard_params(nn.Sequential(nn.Linear(4, 4), Renaming(4, 4), nn.Linear(4, 4)), mesh)
    entries = {key: torch.ones(4, 4) if "weight" in key else torch.ones(4) for key in model.state_dict()}
    entries["1.kernel"] = entries.pop("1.weight")
    before = local_of(model[0].weight).clone()
    with pytest.raises(zf.CheckpointError, match=r"size mismatch for 2.bias: nothing was loaded"):
        model.load_state_dict({**entries, "2.bias": torch.ones(5)})
    assert torch.equal(local_of(model[0].weight), before)
    model.load_state_dict(entries)
    assert all(bool((local_of(parameter) == 1).all()) for parameter in model.parameters())


def test_two_values_for_a_tie_are_not_assigned_where_entries_before_it_are_missing() -> None:
    with pretended(2) as mesh:
        model = zf.shard_params(Tied(), mesh)
    entries = dict(Tied().state_dict())
    del entries["enter.bias"]
    entries["leave.weight"] = entries["leave.weight"] + 1
    with pytest.raises(zf.CheckpointError, match=r"enter.weight and leave.weight are one parameter"):
        model.load_state_dict(entries, strict=False, assign=True)


def test_assigned_shards_of_another_layout_are_cut_as_the_parameter_is() -> None:
    with pretended(2) as mesh:
        model = zf.shard_params(nn.Linear(4, 4), mesh)
        whole = zf.replicate(nn.Linear(4, 4), mesh)
    model.load_state_dict(whole.state_dict(), assign=True)
    assert all(parameter.placements == (Shard(0),) for parameter in model.parameters())
    assert torch.equal(local_of(model.weight), local_of(whole.weight)[:2])
