"""Tied, frozen, tiled, compiled, odd and large: what models there are comes back, through one buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_fn as zf
from tests.support.groups import alone
from tests.support.ranks import Ranks, axis
from tests.support.resident import forget_peak, in_new_process, peak_nbytes
from tests.support.seeds import seed_generator
from tests.support.wholes import full
from tests.units.checkpoint.worlds import Tied


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    model(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_tied_parameter_is_found_by_any_of_its_names(tmp_path: Path) -> None:
    model = Tied("a", "b")
    zf.save(tmp_path / "tied", model, torch.optim.SGD(model.parameters(), lr=0.1))
    turned = Tied("b", "a")
    zf.load(tmp_path / "tied", turned, torch.optim.SGD(turned.parameters(), lr=0.2))
    assert torch.equal(turned.a.weight, model.a.weight)
    apart = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    zf.load(tmp_path / "tied", apart)
    assert torch.equal(apart["a"].weight, model.a.weight)
    assert torch.equal(apart["b"].weight, model.a.weight)


def _tiled(folder: Path) -> list[str]:
    seed_generator(0)
    plain = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 3))
    zf.save(folder / "plain", plain)
    seed_generator(1)
    model = zf.tile(nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 3)), parts=3, where="0.*")
    model = zf.zero3(model, axis())
    optimizer = torch.optim.AdamW(model.parameters())
    zf.load(folder / "plain", model)
    assert torch.equal(model(torch.ones(1, 3)), plain(torch.ones(1, 3)))
    _trained(model, optimizer, 0)
    zf.save(folder / "tiled", model, optimizer)
    whole = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 3))
    stock = torch.optim.AdamW(whole.parameters())
    zf.load(folder / "tiled", whole, stock)
    wrong = []
    for name, state in (("values", lambda p, o: p), ("moments", lambda p, o: o.state[p]["exp_avg"])):
        found = torch.cat(
            [full(state(p, optimizer)) for n, p in model.named_parameters() if n.startswith("0") and "weight" in n]
        )
        if not torch.equal(found, state(whole[0].weight, stock)):
            wrong.append(name)
    again = torch.optim.AdamW(model.parameters())
    zf.load(folder / "tiled", model, again)
    for p in model.parameters():
        if not torch.equal(full(again.state[p]["exp_avg_sq"]), full(optimizer.state[p]["exp_avg_sq"])):
            wrong.append("moments of tiles")
    return wrong


def test_tiles_are_saved_as_if_they_were_whole(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(_tiled, tmp_path) == [[], []]


def test_strange_strides_and_compiled_models(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))
    expected = model[0].weight.detach().clone()
    zf.save(tmp_path / "a", torch.compile(model))
    other = nn.Sequential(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))
    strides = other[0].weight.stride()
    zf.load(tmp_path, other)
    assert torch.equal(other[0].weight, expected)
    assert other[0].weight.stride() == strides


def test_a_parameter_of_several_parcels_of_a_tier_comes_back(tmp_path: Path) -> None:
    plain = nn.Linear(1100, 1200)
    zf.save(tmp_path / "plain", plain)
    model = zf.offload(nn.Linear(1100, 1200), params=zf.nvme(tmp_path))
    zf.load(tmp_path / "plain", model)
    zf.save(tmp_path / "away", model)
    found = nn.Linear(1100, 1200)
    zf.load(tmp_path / "away", found)
    assert torch.equal(found.weight, plain.weight) and torch.equal(found.bias, plain.bias)


def test_the_default_device_does_not_matter(tmp_path: Path) -> None:
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    with torch.device("meta"):
        zf.save(tmp_path / "a", model, extra={"noise": torch.ones(2, device="cpu")})
        found = zf.load(tmp_path / "a", other)
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(found["noise"], torch.ones(2))


# -- memory ------------------------------------------------------------------------------------------------------------


BUFFER = 64 << 20


def _peaks(where: str, folder: str) -> tuple[int, int]:
    """By how many bytes a save and a load make a process grow, of 128 MiB of parameters and as many states."""
    torch.set_num_threads(1)
    with alone() as mesh:
        model: nn.Module = nn.Sequential(*(nn.Linear(2048, 4096, bias=False) for _ in range(4)))
        model = zf.zero3(model, mesh)
        if where == "disk":
            model = zf.offload(model, params=zf.nvme(folder), grads=zf.nvme(folder))
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = zf.streamed(optimizer, zf.nvme(folder)) if where == "disk" else optimizer
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        zf.save(f"{folder}/warm", nn.Linear(2, 2))
        found = []
        for act in (zf.save, zf.load):
            forget_peak()
            before = peak_nbytes()
            act(f"{folder}/step-1", model, optimizer)
            found.append(peak_nbytes() - before)
    return found[0], found[1]


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_no_more_than_a_buffer_beside_what_rests(where: str, tmp_path: Path) -> None:
    saving, loading = in_new_process(_peaks, where, str(tmp_path))
    assert saving < 1.25 * BUFFER
    assert loading < 2.25 * BUFFER


def _tiled_and_streamed(folder: Path) -> bool:
    seed_generator(0)
    model = zf.tile(nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 3)), parts=3, where="0.*")
    model = zf.zero3(model, axis())
    optimizer = zf.streamed(torch.optim.AdamW(model.parameters()), zf.nvme(str(folder)))
    _trained(model, optimizer, 0)
    zf.save(folder / "tiled", model, optimizer)
    expected = [full(states["exp_avg"]) for states in optimizer.state_dict()["state"].values()]
    _trained(model, optimizer, 1)
    zf.load(folder / "tiled", model, optimizer)
    found = [full(states["exp_avg"]) for states in optimizer.state_dict()["state"].values()]
    return all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_states_of_tiles_are_streamed(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(_tiled_and_streamed, tmp_path) == [True, True]
