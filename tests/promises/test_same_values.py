"""Ranks that begin with different values, or come to have different replicas, get the same error, and nothing is changed."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_fn as zf
from tests.axes.grids import grid
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.ranks import axis
from tests.support.worlds import WIDTH, Tower, noise


@pytest.mark.parametrize("stage", ["replicate", "zero1", "zero3"])
def test_different_values_at_first_or_loaded_raise_on_every_rank(ranks, stage):
    def other_values():
        torch.manual_seed(dist.get_rank())
        model = STAGES[stage](Tower(), axis())
        before = [parameter.to_local().clone() for parameter in model.parameters()]
        for _ in range(2):  # the second forward ran, with shards of different tensors
            with pytest.raises(zf.errors.DisagreementError) as caught:
                model(noise(2, WIDTH, seed=0))
        assert all(torch.equal(one, p.to_local()) for one, p in zip(before, model.parameters(), strict=True))
        model.load_state_dict({name: torch.ones(p.shape) for name, p in model.named_parameters()})  # one way out
        model(noise(2, WIDTH, seed=0)).sum().backward()
        model.load_state_dict(Tower().state_dict())
        with pytest.raises(zf.errors.DisagreementError):
            model(noise(2, WIDTH, seed=0))
        return str(caught.value)

    (message,) = set(ranks(3).run(other_values))
    assert "enter.weight" in message
    assert "torch.manual_seed" in message


REPLICAS = {
    "replicate": lambda model: zf.replicate(model, axis()),
    "hybrid": lambda model: zf.hybrid(model, grid("outer", "inner")),
    "persist_below": lambda model: zf.shard_params(model, axis(), persist_below=40),
    "left out by where": lambda model: zf.shard_params(model, axis(), where="*.weight"),
}


def _stack(device):
    with torch.device(device):
        return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))


@on_ranks(4)
def test_what_ranks_draw_from_meta_must_be_the_same():
    """It was compared as it was on meta: without values."""
    model = zf.shard_params(_stack("meta"), axis())
    torch.manual_seed(dist.get_rank())
    zf.materialize(model, "cpu")
    with pytest.raises(zf.errors.DisagreementError, match=r"initial values[\s\S]*0.weight"):
        model(noise(2, WIDTH, seed=0))
    torch.manual_seed(0)
    model.to_empty(device="meta")
    zf.materialize(model, "cpu")(noise(2, WIDTH, seed=0)).sum().backward()


def _emptied_and_drawn(model):
    model.to_empty(device="cpu")
    torch.manual_seed(7 if dist.get_rank() < 3 else 8)
    for parameter in model.parameters():
        parameter.to_local().detach().normal_()


def _filled(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1 if dist.get_rank() < 3 else 0.2)


def _copied_to_local(model):
    for parameter in model.parameters():
        parameter.to_local().detach().mul_(1 if dist.get_rank() < 3 else 2)


def _loaded(model):
    entries = {key: value.clone() for key, value in model.state_dict().items()}
    for value in entries.values():
        value.to_local().add_(dist.get_rank() == 3)
    model.load_state_dict(entries)


EDITS = {edit.__name__: edit for edit in (_emptied_and_drawn, _filled, _copied_to_local, _loaded)}


@pytest.mark.parametrize(
    ("case", "edit"),
    [*(("hybrid", edit) for edit in EDITS), *zip([case for case in REPLICAS if case != "hybrid"], EDITS, strict=False)],
)
@on_ranks(4)
def test_replicas_that_differ_at_the_first_forward_raise_on_every_rank(case, edit):
    """Of two axes, ranks 0 and 2 hold alike what rank 3 has nothing to do with; they are told, too."""
    model = REPLICAS[case](_stack("meta" if edit == "_emptied_and_drawn" else "cpu"))
    EDITS[edit](model)
    ranks = "Ranks 1 and 3" if case == "hybrid" else "Ranks 0 and 3"
    said = rf"{ranks}[\s\S]*values of the same parameter[\s\S]*torch.manual_seed"
    with pytest.raises(zf.errors.DisagreementError, match=said):
        model(noise(2, WIDTH, seed=0))


@on_ranks(4)
def test_replicas_that_differ_after_loading_raise():
    model = zf.offload(zf.replicate(_stack("cpu"), axis()), params=zf.cpu())
    model(noise(2, WIDTH, seed=0)).sum().backward()
    _loaded(model)
    with pytest.raises(zf.errors.DisagreementError, match="values of the same parameter"):
        model(noise(2, WIDTH, seed=0))


@on_ranks(2)
def test_values_that_are_equal_again_or_of_one_rank_alone_are_taken():
    """Shards that one rank holds may be edited there; raw collectives give the values of rank 0 to all replicas."""
    model = zf.shard_params(_stack("cpu"), axis())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().add_(dist.get_rank())
    model(noise(2, WIDTH, seed=0)).sum().backward()
    model = zf.replicate(_stack("cpu"), axis())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(dist.get_rank())
            dist.broadcast(parameter.to_local(), src=0)
    model(noise(2, WIDTH, seed=0)).sum().backward()
