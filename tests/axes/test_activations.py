"""`checkpoint_activations`: the same gradients, less memory, whole inputs or parts of them."""

import weakref
from itertools import chain

import pytest
import torch
from torch import nn

import zero_fn as zf
from tests.axes.grids import Block, Decoder, differing, grid, loss_of, parallelized
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.ranks import axis
from tests.support.wholes import full, fulls
from tests.support.worlds import as_replicas, noise
from zero_fn.transforms.offloaded_activations import Parking


class Dropped(nn.Module):
    """A block that draws random numbers, takes two tensors and a switch, and returns a pair."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.calls = 0

    def forward(self, x, shift, *, doubles=False):
        self.calls += 1
        y = x + self.down(torch.dropout(torch.tanh(self.up(x + shift)), 0.3, self.training))
        return (2 * y if doubles else y), shift + 1


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Dropped() for _ in range(3))

    def forward(self, x):
        shift = torch.ones(6)
        for number, block in enumerate(self.blocks):
            x, shift = block(x, shift, doubles=number == 1)
        return x.square().mean() + shift.mean()


@pytest.mark.parametrize("order", ["before", "after", "twice", "to the host"])
@as_replicas(stages=["zero1", "zero2", "zero3"])
def test_gradients_are_those_without_checkpoints(world, order):
    """And each block runs twice."""
    torch.manual_seed(0)
    model = Tower()
    if order in ("before", "to the host") and not world.is_replica:
        tier = zf.cpu() if order == "to the host" else None  # memory of the host is the device's own on the CPU
        model = zf.checkpoint_activations(model, units="blocks.*", offload=tier)
    model = world.place(model)
    if order == "after" and not world.is_replica:
        model = zf.checkpoint_activations(model, units=Dropped)
    if order == "twice" and not world.is_replica:
        model = zf.checkpoint_activations(zf.checkpoint_activations(model))
    torch.manual_seed(5)
    loss = model(noise(4, 6, seed=0))
    loss.backward()
    world.reduce(model)
    world.note("loss", loss)
    world.note_model(model)
    assert [block.calls for block in model.blocks] == [1 if world.is_replica else 2] * 3


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
@on_ranks(4)
def test_inputs_cut_over_tensor_parallel_ranks_give_the_same_gradients(stage):
    """Also inputs of an element for each rank."""
    mesh, seen = grid("dp", "tp"), []
    for partition in (None, mesh["tp"]):
        torch.manual_seed(0)
        model, small = (
            STAGES[stage](parallelized(mesh["tp"]), mesh["dp"]),
            nn.Sequential(nn.Sequential(nn.Linear(2, 2))),
        )
        if partition is not None:
            model = zf.checkpoint_activations(model, units=Block, partition=partition)
            small = zf.checkpoint_activations(small, units="?", partition=partition)
        for number in range(2):
            loss_of(model, number, mesh["dp"].get_local_rank()).backward()
        small(torch.tensor([1.0, 2.0])).sum().backward()
        seen.append({name: full(p.grad) for of in (model, small) for name, p in of.named_parameters()})
    assert differing(*seen) == []


@pytest.mark.parametrize(("stage", "partition"), [("zero1", False), ("zero3", False), ("zero3", True)])
@on_ranks(4)
def test_inputs_that_wait_on_a_disk_give_the_same_gradients(stage, partition, folder):
    """Over two steps, after forwards without gradients in training mode, as of old policies, which keep nothing; and no whole
    input is alive after forward, with a disk or with parts."""
    mesh = grid("dp", "tp")
    given, alive = [], []
    for tier in (None, zf.nvme(folder)):
        torch.manual_seed(0)
        model = STAGES[stage](Tower(), mesh["dp"])
        parts = mesh["tp"] if partition else None
        model = zf.checkpoint_activations(model, units=Dropped, partition=parts, offload=tier)
        inputs = []
        for block in model.blocks:
            block.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))  # noqa: B023
        for step in range(2):
            torch.manual_seed(5 + step)
            with torch.no_grad():
                given.append([model(torch.randn(6, 4).t()) for _ in range(2)])
            inputs.clear()
            loss = model(torch.randn(6, 4).t())  # not contiguous: it comes back as it was
            alive.append(sum(x() is not None for x in inputs))
            loss.backward()
            given.append(fulls(p.grad for p in model.parameters()))
            model.zero_grad()
    assert all(map(torch.equal, [*chain(*given[:4])], [*chain(*given[4:])]))
    assert all(alive[:2]) != partition
    assert alive[2:] == [0, 0]


def test_an_input_that_is_changed_after_its_module_is_refused_or_kept_as_it_was(tmp_path):
    """Recomputed from the changed input, gradients were silently wrong."""
    found = []
    for offload in (zf.nvme(tmp_path), zf.cpu(), None):
        torch.manual_seed(0)
        model = zf.checkpoint_activations(Tower().eval(), units=Dropped, offload=offload)
        x, shift = torch.randn(4, 6).requires_grad_() * 1, torch.ones(6)
        for block in model.blocks:
            x += block(x, shift)[0]
        if offload == zf.nvme(tmp_path):
            x.square().mean().backward()
            found = [p.grad for p in model.parameters()]
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                x.square().mean().backward()
    torch.manual_seed(0)
    plain = Tower().eval()
    x = torch.randn(4, 6)
    for block in plain.blocks:
        x = x + block(x, torch.ones(6))[0]
    x.square().mean().backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(plain.parameters(), found, strict=True))


def test_places_on_the_disk_are_used_again(tmp_path):
    """Also by graphs that never had a backward; and one that was retained is read twice."""
    parking = Parking(zf.nvme(tmp_path))
    values = [torch.randn(700), torch.randn(3, 5).t(), torch.empty(0, 4), torch.randn(5000, dtype=torch.float64)]
    for turn in range(5):
        parked = [parking.park(value + turn) for value in values for _ in range(2)]
        found = [one.take() for one in reversed(parked)]
        again = parked[0].take()
        assert torch.equal(again, values[0] + turn)
        for value, expected in zip(found, [value + turn for value in reversed(values) for _ in range(2)], strict=True):
            assert torch.equal(value, expected)
            assert value.stride() == expected.stride()
        del parked
    assert parking.nbytes <= 2 * (4096 + 4096 + 40960)


def _on_a_small_disk(path):
    limit = "4096B" if torch.distributed.get_rank() else None  # no room for the second input
    model = zf.checkpoint_activations(
        zf.shard_params(Tower(), axis()), units=Dropped, offload=zf.nvme(path, limit=limit)
    )
    model(torch.ones(4, 6)).backward()


def test_a_full_disk_is_told_on_every_rank(simulated, tmp_path):
    here, there = simulated(2).report(_on_a_small_disk, str(tmp_path)).outcomes
    assert isinstance(there.error, zf.errors.TierError)
    assert "activations" in str(there.error)
    assert isinstance(here.error, zf.errors.LostRankError)


@on_ranks(4)
def test_an_axis_along_which_activations_differ_is_refused():
    mesh = grid("dp", "tp")
    model = zf.checkpoint_activations(Decoder(), units=Block, partition=mesh["dp"])
    with pytest.raises(zf.errors.DisagreementError, match="Ranks 0 and 1 hold different activations"):
        loss_of(model, 0, mesh["dp"].get_local_rank())
    with pytest.raises(zf.errors.MeshError):
        zf.checkpoint_activations(Decoder(), units=Block, partition=mesh)
