"""Whatever is wrong with a checkpoint is found before anything changes, and said with its place."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_fn as zf
from tests.profiles import PROFILE
from tests.ranks import Ranks, axis
from zero_fn.checkpoint import files

FLIPS, CUTS = {"dev": (200, 60), "ci": (1_000, 300)}.get(PROFILE, (10_000, 1_000))


def run_of(value: float) -> tuple[Any, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    optimizer = torch.optim.SGD(model.parameters(), lr=value, momentum=0.9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
            optimizer.state[parameter] = {"momentum_buffer": torch.full_like(parameter, value)}
    return model, optimizer


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [state["momentum_buffer"] for state in optimizer.state.values()]
    return [torch.tensor(optimizer.param_groups[0]["lr"]), *model.state_dict().values(), *states]


def saved(folder: Path) -> list[Path]:
    """Saves a checkpoint; its files."""
    zf.save(folder / "step-1", *run_of(1.5), extra={"step": 1, "noise": torch.arange(7)})
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_every_flipped_bit_is_found_and_nothing_has_changed(tmp_path: Path) -> None:
    paths = saved(tmp_path)
    model, optimizer = run_of(2.5)
    before = [value.clone() for value in values_of(model, optimizer)]
    choose = random.Random(0)
    total = sum(path.stat().st_size for path in paths)
    for _ in range(FLIPS):
        at, bit = choose.randrange(total), choose.randrange(8)
        for path in paths:
            if at < path.stat().st_size:
                break
            at -= path.stat().st_size
        whole = path.read_bytes()
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
        with pytest.raises(zf.CheckpointError) as caught:
            zf.load(tmp_path / "step-1", model, optimizer)
        path.write_bytes(whole)
        assert path.name in str(caught.value)
    assert all(torch.equal(one, other) for one, other in zip(before, values_of(model, optimizer), strict=True))
    zf.load(tmp_path, model, optimizer)
    assert torch.equal(model[0].weight, torch.full((5, 3), 1.5))


def test_every_truncation_is_found(tmp_path: Path) -> None:
    paths = saved(tmp_path)
    model, optimizer = run_of(2.5)
    choose = random.Random(0)
    for number in range(CUTS):
        path = paths[number % len(paths)]
        whole = path.read_bytes()
        path.write_bytes(whole[: choose.randrange(len(whole))])
        with pytest.raises(zf.CheckpointError):
            zf.load(tmp_path / "step-1", model, optimizer)
        path.write_bytes(whole)
    assert torch.equal(model[0].weight, torch.full((5, 3), 2.5))


def test_damage_names_file_tensor_and_rank(ranks: Ranks, tmp_path: Path) -> None:
    def case() -> str:
        model = zf.zero3(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), axis())
        zf.save(tmp_path / "step-1", model)
        if dist.get_rank() == 0:
            path = tmp_path / "step-1" / "model" / "00001-0.safetensors"
            whole = bytearray(path.read_bytes())
            whole[-1] ^= 1
            path.write_bytes(bytes(whole))
        dist.barrier()
        before = [parameter.to_local().clone() for parameter in model.parameters()]
        with pytest.raises(zf.CheckpointError) as caught:
            zf.load(tmp_path, model)
        assert all(torch.equal(a, b.to_local()) for a, b in zip(before, model.parameters(), strict=True))
        return str(caught.value)

    first, second = ranks(2).run(case)
    assert "00001-0.safetensors" in second
    assert "1.bias" in second
    assert "rank" in second
    assert "failed on rank 1" in first
    assert "00001-0.safetensors" in first


@pytest.mark.parametrize("file", ["model/00000-0.safetensors", "rank-00000.json", "manifest.json"])
def test_a_file_that_is_gone_is_a_typed_error(file: str, tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "step-1" / file).unlink()
    with pytest.raises((zf.StorageError, zf.CheckpointError)):
        zf.load(tmp_path / "step-1", *run_of(1.0))


def test_a_damaged_one_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    saved(tmp_path)
    zf.save(tmp_path / "step-2", *run_of(2.0))
    (tmp_path / "step-2" / "rank-00000.json").unlink()
    with pytest.raises(zf.StorageError, match="step-2"):
        zf.load(tmp_path, *run_of(1.0))
    zf.load(tmp_path / "step-1", *run_of(1.0))


def test_files_of_another_checkpoint_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    zf.save(tmp_path / "step-2", *run_of(2.0))
    shutil.copy(tmp_path / "step-2" / "rank-00000.json", tmp_path / "step-1" / "rank-00000.json")
    with pytest.raises(zf.CheckpointError, match="belongs to another checkpoint"):
        zf.load(tmp_path / "step-1", *run_of(1.0))


def test_once_says_that_the_model_is_partly_loaded(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "step-1" / "optimizer" / "00000-0.safetensors"
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(bytes(whole))
    model, optimizer = run_of(2.5)
    with pytest.raises(zf.CheckpointError) as caught:
        zf.load(tmp_path, model, optimizer, verify="once")
    assert "partly loaded" in caught.value.__notes__[0]
    assert torch.equal(model[0].weight, torch.full((5, 3), 1.5))


# -- what does not fit -------------------------------------------------------------------------------------------------


def test_all_that_does_not_fit_is_listed_before_anything_changes(tmp_path: Path) -> None:
    saved(tmp_path)
    model: Any = nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=7.0, momentum=0.9)
    before = model[0].bias.detach().clone()
    with pytest.raises(zf.CheckpointError) as caught:
        zf.load(tmp_path, model, optimizer, extra={"schedule": object()})
    for line in (
        "0.weight: [5, 3] in the checkpoint, [6, 3] here",
        "0.bias: [5] in the checkpoint, [6] here",
        "1.weight: [5] in the checkpoint, [2, 6] here",
        "1.running_mean: in the checkpoint, and not in the model",
        "extra['schedule']: not in the checkpoint",
    ):
        assert line in str(caught.value)
    assert torch.equal(model[0].bias, before)
    assert optimizer.param_groups[0]["lr"] == 7.0


def test_names_may_be_changed_left_out_and_missing(tmp_path: Path) -> None:
    saved(tmp_path)
    model, optimizer = run_of(2.5)
    named = nn.Module()
    named.enter, named.norm = model[0], model[1]
    rename = {r"^0\.": "enter.", r"^1\.": "norm."}
    zf.load(tmp_path, named, optimizer, rename=rename)
    assert all(bool((p == 1.5).all()) for p in named.parameters())
    assert all(bool((s["momentum_buffer"] == 1.5).all()) for s in optimizer.state.values())
    assert optimizer.param_groups[0]["lr"] == 1.5
    larger = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    with pytest.raises(zf.CheckpointError, match=r"2\.weight: not in the checkpoint"):
        zf.load(tmp_path, larger)
    zf.load(tmp_path, larger, strict=False)
    assert bool((larger[0].weight == 1.5).all())
    smaller = nn.Sequential(nn.Linear(3, 5))
    zf.load(tmp_path, smaller, strict=False)
    assert bool((smaller[0].weight == 1.5).all())
    norm = run_of(2.5)[0]
    zf.load(tmp_path, norm, where="1.*")
    assert bool((norm[1].weight == 1.5).all())
    assert bool((norm[0].weight == 2.5).all())


def test_only_loads_a_part(tmp_path: Path) -> None:
    saved(tmp_path)
    model, optimizer = run_of(2.5)
    assert zf.load(tmp_path, model, optimizer, only="model") == {}
    assert bool((model[0].weight == 1.5).all())
    assert optimizer.param_groups[0]["lr"] == 2.5
    assert set(zf.load(tmp_path, only="extra")) == {"step", "noise"}
    with pytest.raises(zf.LayoutError, match="names nothing"):
        zf.load(tmp_path, model, only="weights")


def test_elements_that_share_memory_are_refused_before_anything_changes(tmp_path: Path) -> None:
    def model(value: float) -> Any:
        made = nn.Linear(2, 2)
        nn.init.constant_(made.weight, value)
        made.register_buffer("mask", torch.full((1, 3), value).expand(2, 3))
        return made

    zf.save(tmp_path / "step-1", model(1.0))
    other = model(0.0)
    with pytest.raises(zf.CheckpointError, match="mask: expanded here"):
        zf.load(tmp_path, other)
    assert torch.equal(other.weight, torch.zeros(2, 2))
    other.mask = other.mask.contiguous()
    zf.load(tmp_path, other)
    assert torch.equal(other.mask, torch.ones(2, 3))


def test_bits_are_not_lost_in_smaller_dtypes(tmp_path: Path) -> None:
    saved(tmp_path)
    model = run_of(1.0)[0]
    with pytest.raises(zf.CheckpointError, match="bits would be lost"):
        zf.load(tmp_path, model.bfloat16())
    zf.save(tmp_path / "step-2", model)
    wide = run_of(7.0)[0]
    zf.load(tmp_path, wide)
    assert torch.equal(wide[0].weight, torch.ones(5, 3))


def test_there_must_be_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(zf.CheckpointError, match="no complete checkpoint"):
        zf.load(tmp_path, nn.Linear(2, 2))
    with pytest.raises(zf.StorageError, match="ENOENT"):
        zf.load(tmp_path / "nowhere", nn.Linear(2, 2))


# -- what cannot be saved ----------------------------------------------------------------------------------------------


class _Own(nn.Linear):
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}packed"] = torch.zeros(2)


class _Counting(nn.Linear):
    def get_extra_state(self) -> int:
        return 3


def _foreign() -> dict[str, Any]:
    return {"model": nn.Linear(2, 2), "optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"extra": {"a": [1, {"b": object()}]}}, r"extra\['a'\]\[1\]\['b'\] cannot be saved"),
        ({"extra": {"f": print}}, r"extra\['f'\] cannot be saved"),
        ({"extra": {"d": {"e": defaultdict(int)}}}, r"extra\['d'\]\['e'\] cannot be saved"),
        ({"extra": {"s": type("Steps", (list,), {})()}}, r"extra\['s'\] cannot be saved"),
        ({"extra": {"z": torch.zeros(2, dtype=torch.complex128)}}, "dtype that safetensors does not have"),
        ({"model": nn.Linear(2, 2, device="meta")}, "on meta"),
        ({"model": _Own(2, 2)}, "in its own way"),
        ({"model": nn.Sequential(_Counting(2, 2))}, "in its own way"),
        (_foreign(), "a parameter that the model does not have"),
        ({"keep": 0}, "numbers from 1 on"),
        ({"folder": ".hidden"}, "no name for a checkpoint"),
    ],
)
def test_what_cannot_be_saved_is_refused_with_its_path(arguments: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(zf.CheckpointError, match=words):
        zf.save(tmp_path / arguments.get("folder", "a"), **{k: v for k, v in arguments.items() if k != "folder"})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        -(2**70),
        1.5,
        float("-inf"),
        "é",
        b"\x00\xff",
        [1, [2]],
        (1, (2, "a")),
        {"a": {"b": 1}},
        {1: 2, (3, 4): 5},
        {"$tuple": 1},
        {"$tensor": [1], "x": 2},
        {"$counter": [["a", 1]]},
        Counter({4: 2, "a": 1}),
        OrderedDict(b=1, a=[OrderedDict()]),
        torch.arange(3),
        {"t": [torch.tensor(True)]},
    ],
)
def test_values_come_back_as_they_were(value: object, tmp_path: Path) -> None:
    zf.save(tmp_path / "a", extra={"x": value})
    found = zf.load(tmp_path)["x"]
    assert repr(found) == repr(value)
    assert type(found) is type(value)


def test_nan_comes_back(tmp_path: Path) -> None:
    zf.save(tmp_path / "a", extra={"x": float("nan")})
    assert zf.load(tmp_path)["x"] != zf.load(tmp_path)["x"]


# -- made by hand ------------------------------------------------------------------------------------------------------


def _forged(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a JSON file, with a digest that is right."""
    body = json.loads(path.read_text())["body"]
    change(body)
    path.write_bytes(files._signed(json.dumps(body)))


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("rank-00000.json", lambda body: body.pop("files")),
        ("rank-00000.json", lambda body: body["files"]["model"][0]["tensors"].popitem()),
        ("rank-00000.json", lambda body: body["files"].update({"../../etc": body["files"].pop("model")})),
        ("rank-00000.json", lambda body: body["files"]["model"][0].update(tensors=[1])),
        ("rank-00000.json", lambda body: body["files"]["model"][0]["tensors"]["0.bias"].update(sizes=[4])),
        ("rank-00000.json", lambda body: body["files"]["model"][0]["tensors"]["0.bias"].update(offset=10**9)),
        ("rank-00000.json", lambda body: body["files"]["model"][0]["tensors"]["0.bias"].update(xxh3="")),
        ("manifest.json", lambda body: body.update(version=99)),
        ("manifest.json", lambda body: body.update(format="other")),
        ("manifest.json", lambda body: body.update(ranks=2)),
    ],
)
def test_what_was_made_by_hand_is_a_typed_error(file: str, change: Callable[..., object], tmp_path: Path) -> None:
    saved(tmp_path)
    _forged(tmp_path / "step-1" / file, change)
    model, optimizer = run_of(2.5)
    with pytest.raises((zf.CheckpointError, zf.StorageError)):
        zf.load(tmp_path / "step-1", model, optimizer)
    assert torch.equal(model[0].weight, torch.full((5, 3), 2.5))
