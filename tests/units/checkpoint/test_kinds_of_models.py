"""Tied, frozen, tiled, compiled, odd and large: what models there are comes back, through one buffer."""

import copy

import pytest
import torch
from torch import nn

import zero_fn as zf
from tests.support.groups import alone
from tests.support.messages import refusals
from tests.support.on_ranks import on_ranks
from tests.support.ranks import axis
from tests.support.resident import forget_peak, in_new_process, peak_nbytes
from tests.units.checkpoint.worlds import Tied, differing, everything


def _trained(model, optimizer, seed):
    model(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_tied_parameter_is_found_by_any_of_its_names(tmp_path):
    model = Tied("a", "b")
    zf.save(tmp_path / "tied", model, torch.optim.SGD(model.parameters(), lr=0.1))
    turned = Tied("b", "a")
    zf.load(tmp_path / "tied", turned, torch.optim.SGD(turned.parameters(), lr=0.2))
    assert torch.equal(turned.a.weight, model.a.weight)
    apart = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    zf.load(tmp_path / "tied", apart)
    assert torch.equal(apart["a"].weight, model.a.weight)
    assert torch.equal(apart["b"].weight, model.a.weight)


@pytest.mark.parametrize("streams", [False, True])
@on_ranks(2)
def test_tiles_are_saved_as_if_they_were_whole(folder, streams):
    plain, whole = (nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 3)) for _ in range(2))
    zf.save(f"{folder}/plain", plain)
    model = zf.shard_params(zf.tile(copy.deepcopy(whole), parts=3, where="0.*"), axis())
    zf.load(f"{folder}/plain", model)
    assert torch.equal(model(torch.ones(1, 3)), plain(torch.ones(1, 3)))
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer = zf.streamed(optimizer, zf.nvme(folder)) if streams else optimizer
    _trained(model, optimizer, 0)
    zf.save(f"{folder}/tiled", model, optimizer)
    expected = everything(model, optimizer)
    stock = torch.optim.AdamW(whole.parameters())
    zf.load(f"{folder}/tiled", whole, stock)
    tiles = [name for name, _ in model.named_parameters() if name.startswith("0") and "weight" in name]
    for kind, value in (("", whole[0].weight), ("exp_avg of ", stock.state[whole[0].weight]["exp_avg"])):
        assert torch.equal(torch.cat([expected[kind + name] for name in tiles]), value)
    _trained(model, optimizer, 1)
    zf.load(f"{folder}/tiled", model, optimizer)
    assert differing(expected, everything(model, optimizer)) == []


def test_a_compiled_model_is_saved_under_the_names_of_what_was_compiled(tmp_path):
    model, other = nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3))
    zf.save(tmp_path / "a", torch.compile(model))
    zf.load(tmp_path / "a", other)
    assert torch.equal(other[0].weight, model[0].weight)


def test_a_parameter_of_several_parcels_of_a_tier_comes_back(tmp_path):
    plain = nn.Linear(1100, 1200)
    zf.save(tmp_path / "plain", plain)
    model = zf.offload(nn.Linear(1100, 1200), params=zf.nvme(tmp_path))
    zf.load(tmp_path / "plain", model)
    zf.save(tmp_path / "away", model)
    found = nn.Linear(1100, 1200)
    zf.load(tmp_path / "away", found)
    assert torch.equal(found.weight, plain.weight) and torch.equal(found.bias, plain.bias)


def test_the_default_device_does_not_matter(tmp_path):
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    with torch.device("meta"):
        zf.save(tmp_path / "a", model, extra={"noise": torch.ones(2, device="cpu")})
        found = zf.load(tmp_path / "a", other)
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(found["noise"], torch.ones(2))


def _of_a_late_state(one, folder):
    model = zf.shard_params(nn.Linear(4, 4), one)
    optimizer = zf.streamed(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), zf.cpu())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.states.chunks[0].cuts[0].resident["late"] = torch.zeros(4, 4)
    zf.save(folder / "step-1", model, optimizer)


def _of_states_in_another_order(one, folder):
    model = zf.shard_params(nn.Sequential(nn.Conv2d(64, 64, 3)).to(memory_format=torch.channels_last), one)
    optimizer = zf.streamed(torch.optim.Adam(model.parameters()), zf.cpu(), buffer="64KiB")
    model(torch.ones(1, 64, 3, 3)).sum().backward()
    optimizer.step()
    zf.save(folder / "step-1", model, optimizer)


test_refusals = refusals(
    {
        "checkpoint_of_a_late_state": _of_a_late_state,
        "checkpoint_of_states_in_another_order": _of_states_in_another_order,
    }
)


# -- memory ------------------------------------------------------------------------------------------------------------


BUFFER = 64 << 20


def _peaks(where, folder):
    """By how many bytes each save and load makes a process grow, of 128 MiB of parameters and as many states."""
    torch.set_num_threads(1)
    with alone() as mesh:
        model = nn.Sequential(*(nn.Linear(2048, 4096, bias=False) for _ in range(4)))
        model = zf.shard_params(model, mesh)
        if where == "disk":
            model = zf.offload(model, params=zf.nvme(folder), grads=zf.nvme(folder))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = zf.streamed(optimizer, zf.nvme(folder)) if where == "disk" else optimizer
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        zf.save(f"{folder}/warm", nn.Linear(2, 2))
        found = {}
        acts = {
            "save": lambda: zf.save(f"{folder}/step-1", model, optimizer),
            "save_pretrained": lambda: zf.save_pretrained(model, f"{folder}/hf"),
            "load": lambda: zf.load(f"{folder}/step-1", model, optimizer),
            "load_pretrained": lambda: zf.load_pretrained(model, f"{folder}/hf"),
        }
        for name, act in acts.items():
            forget_peak()
            before = peak_nbytes()
            act()
            found[name] = peak_nbytes() - before
    return found


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_no_more_than_a_buffer_beside_what_rests(where, tmp_path):
    for act, nbytes in in_new_process(_peaks, where, str(tmp_path)).items():
        assert nbytes < (2.25 if act == "load" else 1.25) * BUFFER, act
