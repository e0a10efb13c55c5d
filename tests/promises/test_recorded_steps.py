"""`zf.record_step`: steps begin again as they were, on as many ranks to the bit; what is not as it was is named."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_fn as zf
from tests.axes.grids import grid
from tests.support.programs import STAGES
from tests.support.ranks import Ranks, axis
from tests.support.wholes import full
from tests.support.worlds import WIDTH, Tower
from tests.units.checkpoint.worlds import WORLDS, made, stepped
from zero_fn.state_digests import StateDigests, digests_of
from zero_fn.streamed.coded import CODES

FIRST, LAST = 3, 6


def _made(stage: str, folder: str, seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model: nn.Module = Tower(dropout=0.3)
    if stage == "away":
        model = zf.offload(zf.zero3(model, axis()), params=zf.nvme(folder), grads=zf.cpu())
    elif stage != "plain":
        model = STAGES[stage](model, axis())
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, zf.streamed(optimizer, zf.nvme(folder), buffer="16MiB") if stage == "away" else optimizer


def _step(model: nn.Module, optimizer: Any, batches: Any, count: int) -> list[float]:
    """A step with dropout and draws of every kind; the losses of its batches."""
    found = []
    for batch in batches:
        noise = random.random() + float(np.random.rand())
        loss = (model(batch["x"]) * noise).square().mean()
        (loss / count).backward()
        found.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    return found


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(value.detach()).clone() for name, value in model.named_parameters()}


def _recorded(stage: str, folder: str) -> tuple[list[list[float]], dict[str, Tensor]]:
    """A run that is saved before its third step; the losses of the steps from there on, and the values they lead to."""
    model, optimizer = _made(stage, folder, seed=0)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(50 + dist.get_rank())
    losses, record = [], zf.record_step(f"{folder}/steps", model, optimizer, digests=1)
    for step in range(LAST + 1):
        if step == FIRST:
            zf.save(f"{folder}/step-{step}", model, optimizer)
        batch = {"x": torch.randn(4, WIDTH), "name": f"batch {step}"}
        record(batch, step=step)
        losses.append(_step(model, optimizer, [batch], 1))
    return losses[FIRST:], _values(model)


def _again(stage: str, folder: str) -> tuple[list[list[float]], dict[str, Tensor]]:
    model, optimizer = _made(stage, folder, seed=7)
    zf.load(f"{folder}/step-{FIRST}", model, optimizer)
    losses = []
    for recorded in zf.recorded_steps(f"{folder}/steps", model, optimizer, first=FIRST):
        batches = [recorded.batch] if len(recorded.ranks) == 1 else recorded.batches()
        losses.append(_step(model, optimizer, batches, len(recorded.ranks)))
    return losses, _values(model)


@pytest.mark.parametrize(("stage", "n"), [*((stage, 2) for stage in STAGES), ("zero3", 3), ("away", 2)])
def test_on_as_many_ranks_steps_are_the_same_to_the_bit(ranks: Ranks, stage: str, n: int, tmp_path: Path) -> None:
    expected = ranks(n).run(_recorded, stage, str(tmp_path))
    for (losses, values), (again, found) in zip(expected, ranks(n).run(_again, stage, str(tmp_path)), strict=True):
        assert again == losses
        assert all(torch.equal(values[name], found[name]) for name in values)


@pytest.mark.parametrize(("n", "m", "stage"), [(2, 1, "plain"), (4, 1, "zero3"), (4, 2, "zero2")])
def test_on_fewer_ranks_steps_are_the_same_but_for_rounding(
    ranks: Ranks, n: int, m: int, stage: str, tmp_path: Path
) -> None:
    """With the draws of each rank: dropout is that of the run."""
    expected = ranks(n).run(_recorded, "zero3", str(tmp_path))
    found = ranks(m).run(_again, stage, str(tmp_path))
    for at in range(LAST + 1 - FIRST):
        was = [loss for losses, _ in expected for loss in losses[at]]
        now = [loss for losses, _ in found for loss in losses[at]]
        torch.testing.assert_close(now, was)
    for name, value in expected[0][1].items():
        torch.testing.assert_close(found[0][1][name], value)


# -- digests -----------------------------------------------------------------------------------------------------------


def _first(folder: str) -> None:
    model, optimizer = made("plain", folder, seed=0)
    for number in range(2):
        stepped(model, optimizer, number)
    zf.save(f"{folder}/saved", model, optimizer)


def _records(world: str, folder: str) -> None:
    model, optimizer = made(world, folder, seed=7)
    zf.load(f"{folder}/saved", model, optimizer)
    zf.record_step(f"{folder}/{world}", model, optimizer)(None, step=2)


def _edited(edit: Callable[[nn.Module, Any], object] | None, world: str, folder: str) -> str:
    """What is said of a model that was loaded and edited."""
    model, optimizer = made("plain", folder, seed=7)
    zf.load(f"{folder}/saved", model, optimizer)
    with torch.no_grad():
        if edit is not None:
            edit(model, optimizer)
    try:
        next(iter(zf.recorded_steps(f"{folder}/{world}", model, optimizer, first=2)))
    except zf.CheckpointError as error:
        return "; ".join(str(fact) for name, fact in error.facts.items() if name.isdigit())
    return ""


def _swap(tensor: Tensor) -> None:
    flat = tensor.view(-1)
    flat[:2] = flat[:2].flip(0).clone()


EDITS: dict[str, tuple[Callable[[Any, Any], object] | None, str]] = {
    "nothing": (None, ""),
    "a bit": (
        lambda model, _: model.head.weight.view(torch.int32)[-1, -1].bitwise_xor_(1),
        "head.weight: had other values",
    ),
    "two elements change places": (lambda model, _: _swap(model.head.weight), "head.weight: had other values"),
    "a state": (
        lambda model, optimizer: optimizer.state[model.head.weight]["exp_avg_sq"][0, 0].mul_(2),
        "head.weight/exp_avg_sq: had other values",
    ),
    "a count of steps": (
        lambda model, optimizer: optimizer.state[model.head.weight]["step"].add_(1),
        "head.weight/step: had other values",
    ),
    "a buffer": (lambda model, _: model.seen[1].zero_(), "seen: had other values"),
    "a rate": (lambda _, optimizer: optimizer.param_groups[1].update(lr=1.0), "lr of the group of "),
    "no states": (
        lambda model, optimizer: optimizer.state.pop(model.head.weight),
        "head.weight/step: is not there now",
    ),
}


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("saved"))
    ranks(1).run(_first, folder)
    return folder


@pytest.mark.parametrize("world", WORLDS)
def test_digests_do_not_depend_on_how_tensors_rest_and_see_each_change(ranks: Ranks, world: str, saved: str) -> None:
    ranks(WORLDS[world].ranks).run(_records, world, saved)
    for name, (edit, expected) in EDITS.items():
        (said,) = ranks(1).run(_edited, edit, world, saved)
        assert expected in said, name
        assert bool(expected) == bool(said), f"{name}: {said}"


def _wide(stage: str, folder: str, *, is_new: bool) -> tuple[nn.Module, Any]:
    """Tensors so wide that replicas count a part of each."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(300, 130), nn.Linear(130, 300))
    if stage == "hybrid, away":
        model = zf.offload(zf.hybrid(model, grid("outer", "inner")), params=zf.nvme(folder), grads=zf.cpu())
    elif not stage.startswith("plain"):
        model = STAGES[stage.partition(",")[0]](model, axis())
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.25)
    if stage.endswith("away"):
        optimizer = zf.streamed(optimizer, zf.nvme(folder), buffer="16MiB")
    elif stage.endswith("streamed"):
        optimizer = zf.streamed(optimizer, zf.cpu(), buffer="64KiB")
    elif stage.endswith("8 bits"):
        optimizer = zf.states8bit(optimizer)
    if is_new:
        model(torch.randn(2, 300)).square().sum().backward()
        optimizer.step()
        zf.save(f"{folder}/saved", model, optimizer)
    zf.load(f"{folder}/saved", model, optimizer)
    return model, optimizer


def _wide_recorded(stage: str, folder: str) -> None:
    zf.record_step(f"{folder}/steps", *_wide(stage, folder, is_new=False))(None, step=0)


@pytest.mark.parametrize(
    ("n", "stage"),
    [(2, "replicate"), (3, "replicate, streamed"), (2, "zero3, streamed"), (4, "hybrid, away"), (3, "zero3, 8 bits")],
)
def test_ranks_share_the_counting_of_what_several_hold(ranks: Ranks, n: int, stage: str, tmp_path: Path) -> None:
    model, optimizer = _wide("plain, 8 bits" if "8 bits" in stage else "plain", str(tmp_path), is_new=True)
    state = "exp_avg" + CODES * ("8 bits" in stage)
    assert {f"0.weight/{state}", "0.weight"} <= digests_of(model, optimizer)[0].wholes.keys()
    ranks(n).run(_wide_recorded, stage, str(tmp_path))
    assert next(iter(zf.recorded_steps(tmp_path / "steps", model, optimizer, first=0))).step == 0


@pytest.mark.parametrize("shape", [(), (7,), (5, 3), (3, 4, 5, 2), (0, 3)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.complex64])
def test_a_digest_is_the_sum_that_it_is_said_to_be(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Also of a tensor that does not lie in order."""
    torch.manual_seed(0)
    model, other = nn.Module(), nn.Module()
    value = torch.randn(shape).to(dtype)
    model.register_buffer("value", value)
    other.register_buffer("value", value.mT.contiguous().mT if len(shape) > 1 else value.clone())
    found, again = (digests_of(each, None)[0] for each in (model, other))
    assert found == again
    assert found.differing(again) == []
    if value.numel() > 1 and dtype != torch.bool:
        model.get_buffer("value").view(-1)[-1].neg_()
        assert digests_of(model, None)[0].differing(found) == ["value: had other values"]


def test_a_transposed_tensor_has_another_digest() -> None:
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.load_state_dict({"weight": one.weight.mT.contiguous(), "bias": one.bias})
    found, again = (digests_of(each, None)[0] for each in (one, other))
    assert found.differing(again) == ["weight: had other values"]


def test_parts_of_ranks_add_up() -> None:
    both = StateDigests()
    for each in (StateDigests({"a": 2**64 - 1}, {"b": ["1"]}), StateDigests({"a": 3}, {"b": ["2"]})):
        both.add(each)
    assert both == StateDigests({"a": 2}, {"b": ["1", "2"]})
    assert both.differing(StateDigests({"a": 2}, {"b": ["1"]})) == []
    assert both.differing(StateDigests({"a": 2}, {"b": ["1", "3"]})) == ["b: had other values"], "of a rank"
    assert both.differing(StateDigests({"a": 1}, {"b": ["3"]})) == ["b: had other values", "a: had other values"]


# -- records -----------------------------------------------------------------------------------------------------------


def _plain(folder: Path, steps: int = 3, **options: Any) -> tuple[nn.Linear, zf.StepRecorder]:
    """A model in this process alone, and a run that has recorded steps without changing it."""
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(1.5), model.bias.fill_(0.5)
    record = zf.record_step(folder, model, **options)
    for step in range(steps):
        record({"step": step, "x": torch.full((3,), float(step))}, step=step)
    return model, record


def _batches(folder: Path, model: nn.Module, first: int = 0, **options: Any) -> list[int]:
    return [each.batch["step"] for each in zf.recorded_steps(folder, model, first=first, **options)]


def test_batches_come_back_as_they_were(tmp_path: Path) -> None:
    model, record = _plain(tmp_path, 0)
    batch = (1, [torch.arange(3), {"mask": torch.ones(2, 3, dtype=torch.bool)}], OrderedDict(a=torch.randn(2, 3).T))
    record(batch, step=5)
    (recorded,) = zf.recorded_steps(tmp_path, model, first=5)
    assert repr(recorded.batch) == repr(next(iter(recorded.batches()))) == repr(batch)


def test_what_cannot_be_kept_is_refused_and_leaves_no_record(tmp_path: Path) -> None:
    model, record = _plain(tmp_path, 1)
    with pytest.raises(zf.CheckpointError, match=r"\['batch'\]\['x'\] cannot be saved"):
        record({"x": print}, step=1)
    assert _batches(tmp_path, model) == [0]


def test_the_newest_records_are_kept_and_a_run_that_goes_back_replaces_its_own(tmp_path: Path) -> None:
    model, record = _plain(tmp_path, 6, keep=3)
    assert _batches(tmp_path, model, 3) == [3, 4, 5]
    with pytest.raises(zf.CheckpointError, match=r"Step 2 was not recorded.\n[^\n]*\n  found  : 3, 4, 5\n"):
        _batches(tmp_path, model, 2)
    record({"step": 40}, step=4)
    assert _batches(tmp_path, model, 3) == [3, 40]
    record({"step": 6}, step=6)
    with pytest.raises(zf.CheckpointError, match="Step 5 was not recorded"):
        _batches(tmp_path, model, 3)


def test_a_damaged_record_is_refused(tmp_path: Path) -> None:
    model, _ = _plain(tmp_path)
    (path,) = tmp_path.glob("record-000002/extra/*")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    steps = iter(zf.recorded_steps(tmp_path, model, first=0))
    assert [next(steps).step, next(steps).step] == [0, 1]
    with pytest.raises(zf.CheckpointError, match="damaged"):
        next(steps)


def test_values_that_were_not_recorded_are_refused(tmp_path: Path) -> None:
    model, _ = _plain(tmp_path, 5, digests=2)
    with pytest.raises(zf.CheckpointError, match="Step 1 was recorded without digests"):
        _batches(tmp_path, model, 1)
    steps = iter(zf.recorded_steps(tmp_path, model, first=2))
    assert next(steps).step == 2
    with torch.no_grad():
        model.bias[1] += 1
    assert next(steps).step == 3
    with pytest.raises(
        zf.CheckpointError, match=r"Step 4 does not begin as it did[^\n]*\n  1   : bias: had other values\n"
    ):
        next(steps)
    with pytest.raises(zf.CheckpointError, match=r"Step 2 did not begin with these values.\n  1   : bias: had other"):
        _batches(tmp_path, model, 2)
    with torch.no_grad(), mock.patch.object(torch, "__version__", "another, which may round otherwise"):
        model.bias[1] -= 1
        steps = iter(zf.recorded_steps(tmp_path, model, first=2))
        next(steps)
        model.bias[1] += 1
        assert [each.step for each in steps] == [3, 4]
    with torch.no_grad():
        model.bias[1] -= 1
    steps = iter(zf.recorded_steps(tmp_path, model, first=2, compare="first"))
    next(steps)
    with torch.no_grad():
        model.bias[1] += 1
    assert [each.step for each in steps] == [3, 4]


def test_ranks_that_cannot_share_the_batches_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    def record(folder: str) -> None:
        _plain(Path(folder))

    def read(folder: str, first: int) -> list[str]:
        try:
            found = zf.recorded_steps(folder, _plain(Path(folder) / "other", 0)[0], first=first)
            return [f"{recorded.step} of {[*recorded.ranks]}" for recorded in found]
        except zf.ZeroError as error:
            return [str(error).splitlines()[0]]

    ranks(2).run(record, str(tmp_path))
    assert ranks(2).run(read, str(tmp_path), 1) == [["1 of [0]", "2 of [0]"], ["1 of [1]", "2 of [1]"]]
    assert read(str(tmp_path), 1) == ["1 of [0, 1]", "2 of [0, 1]"]
    said = ranks(3).run(read, str(tmp_path), 1)
    assert said[0] == ["3 ranks cannot share the batches of 2 evenly."]
    assert all("3 ranks cannot share" in each[0] for each in said)
