"""A model and its optimizer leave memory and come back to the bit; until then nothing can use them."""

import os
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

import zero_fn as zf
from tests.support.eviction import evicted
from tests.support.groups import alone
from tests.support.messages import refusals, refused
from tests.support.models import Language, Odd
from tests.support.on_ranks import on_ranks
from tests.support.worlds import ALL, differences, trained


@on_ranks(2)
def test_a_model_that_was_evicted_goes_on_to_the_bit():
    """Between steps, and in the midst of one, with gradients that are added to after. Plain models: the laws."""

    def program(model, run, step):
        tokens = torch.randint(37, (2, 5), generator=torch.Generator().manual_seed(step))
        for given in (tokens, tokens.flip(0)):
            if not run.world.is_replica:
                away = evicted(model, run.optimizer)
                assert zf.memory(model, run.optimizer).total < 100  # states of one element stay
                away.restore()
            run.backward(model(given).real.logsumexp(-1).mean())

    assert differences(trained(Odd, program, optimizer="adamw"), stages=ALL) == []


@pytest.mark.parametrize("transform", [lambda m: m, zf.precision], ids=["plain", "precision"])
def test_what_an_evicted_parameter_shows_is_not_taken_for_values(transform):
    """Its norm was 0, and an edit was dropped."""
    model = transform(nn.Linear(4, 3))
    before = [p.detach().clone() for p in model.parameters()]
    away = evicted(model)
    for parameter in model.parameters():
        assert parameter.isnan().all() and parameter.norm().isnan()
        with torch.no_grad(), pytest.raises(RuntimeError):
            parameter.mul_(2)
    away.restore()
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for resident memory")
def test_as_much_is_freed_as_the_host_takes():
    def resident_nbytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    model = nn.Linear(4096, 4096)
    model(torch.ones(1, 4096)).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer.step()
    before = resident_nbytes()
    away = evicted(model, optimizer)
    assert "256.06 MiB evicted" in str(away)
    assert resident_nbytes() - before < 64 << 20
    away.restore()
    assert str(away) == "restored"
    assert resident_nbytes() - before < 64 << 20


def test_nothing_is_moved_where_the_tier_is_the_memory_of_the_model():
    model = Language()
    address = model.norm.weight.data_ptr()
    away = zf.offload_states(model, to=zf.cpu())
    assert "nothing was moved" in str(away)
    with refused("evicted_model_runs"):
        model(torch.zeros(1, 3, dtype=torch.int64))
    with refused("evicted_twice"):
        zf.offload_states(model, to=zf.cpu())
    away.restore()
    with refused("restored_twice"):
        away.restore()
    assert model.norm.weight.data_ptr() == address


USES = {
    "forward": lambda model, _: model(torch.zeros(1, 3, dtype=torch.int64)),
    "a block alone": lambda model, _: model.get_submodule("blocks.0")(torch.zeros(1, 10)),
    "step": lambda _, optimizer: optimizer.step(),
    "state_dict": lambda model, _: model.state_dict(),
    "optimizer.state_dict": lambda _, optimizer: optimizer.state_dict(),
    "evict": lambda model, optimizer: zf.offload_states(model, optimizer, to=zf.cpu()),
    "unsharded": lambda model, _: zf.unsharded(model).__enter__(),
    "describe": lambda model, _: zf.describe(model),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("is_plain", [True, False])
def test_an_evicted_model_cannot_be_used(use, is_plain):
    if is_plain and use in ("unsharded", "describe"):
        return  # nothing of ours
    with alone() as mesh:
        model = Language() if is_plain else zf.shard_params(Language(), mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.zeros(2, 5, dtype=torch.int64)).logsumexp(-1).mean().backward()
        optimizer.step()
        seen = []
        model.get_submodule("blocks.0").register_forward_pre_hook(lambda *given: seen.append(given))
        away = evicted(model, optimizer)
        with pytest.raises(zf.errors.StateError, match="evicted"):
            USES[use](model, optimizer)
        assert not seen, "a hook of the user would have read parameters"
        away.restore()
        if use not in ("evict", "unsharded"):
            USES[use](model, optimizer)


class Averaged(torch.optim.SGD):
    """Keeps a second view of its momentum."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
                state["flat"] = state["momentum"].view(-1)
            state["flat"].add_(parameter.grad.view(-1))
            parameter.sub_(state["momentum"])


def test_what_shares_memory_is_not_evicted():
    """It had come back apart: momentum was no longer what had been added up, silently."""
    model = nn.Linear(4, 4)
    optimizer = Averaged(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with refused("evicted_states_share_memory"):
        evicted(model, optimizer)
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight.data = tied[0].weight.data
    before = [p.detach().clone() for p in tied.parameters()]
    with pytest.raises(zf.errors.PlacementError, match=r"0\.weight and 1\.weight share memory"):
        evicted(tied)
    assert all(map(torch.equal, tied.parameters(), before))
    optimizer.step()  # as before


def test_a_model_stays_where_it_is_when_memory_has_no_room():
    """That of the host, to leave; that of the device, to come back, which can be tried again."""
    model = nn.Linear(700, 700)
    before = model.weight.detach().clone()
    with pytest.raises(zf.errors.TierError, match="can be taken"):
        evicted(model, to=zf.cpu(limit="1MiB"))
    model(torch.ones(1, 700))
    away = evicted(model)
    full = torch.OutOfMemoryError("the device is full")
    with patch("torch.empty_like", side_effect=full), pytest.raises(torch.OutOfMemoryError):
        away.restore()
    with pytest.raises(zf.errors.StateError):
        model(torch.ones(1, 700))
    away.restore()
    assert torch.equal(model.weight, before)


test_refusals = refusals(
    {
        "evicted_to_a_disk": lambda: zf.offload_states(nn.Linear(4, 4), to=zf.nvme(".")),
        "evicted_unit_runs": lambda model: (evicted(model), zf.describe(model)),
    }
)
