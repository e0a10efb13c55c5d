"""What `plan` says of other tiers, and what is there: memory of the host to the page, bytes moved to the byte."""

import weakref
from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zero_fn as zf
from tests.support.groups import pretended
from zero_fn.storage import DiskStorage, Slab

OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "amsgrad": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05),
}


class Slabs:
    """Bytes of the slabs made inside the block that are alive, now and at most."""

    def __init__(self, patch):
        self.now = self.peak = 0
        made = Slab.__init__

        def counted(slab, *args, **kwargs):
            made(slab, *args, **kwargs)
            self.now += slab.nbytes
            self.peak = max(self.peak, self.now)
            weakref.finalize(slab.memory.untyped_storage(), self._drop, slab.nbytes)

        patch.setattr(Slab, "__init__", counted)

    def _drop(self, nbytes):
        self.now -= nbytes


def moved_in(step, patch):
    counts = Counter()
    for verb in ("read", "write"):
        own = getattr(DiskStorage, verb)

        def counted(disk, offset, view, own=own, verb=verb):
            counts[str(disk.tier), verb] += view.numel()
            return own(disk, offset, view)

        patch.setattr(DiskStorage, verb, counted)
    step()
    patch.undo()
    return counts


@pytest.mark.parametrize(
    ("states", "name", "is_cast"),
    [
        ("optim", "adamw", False),
        ("optim", "amsgrad", True),
        ("params optim", "adagrad", False),
        ("params optim", "adamw", True),
        ("params grads optim", "sgd", False),
        ("params grads optim", "amsgrad", True),
    ],
)
def test_a_step_moves_and_holds_what_was_planned(tmp_path, monkeypatch, states, name, is_cast):
    """Bytes moved are the mean of two steps in a row: chunks that the last step left in buffers are not read. Memory of the
    host is that of the plan at the peak of a step, too: no buffer beside those that were planned."""
    tiers = {kind: zf.nvme(tmp_path, limit=f"{i + 1}GiB") for i, kind in enumerate(states.split())}
    slabs = Slabs(monkeypatch)
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(10)))
    model = zf.offload(zf.precision(model) if is_cast else model, **tiers)
    model[3].weight.requires_grad_(False)
    stock = OPTIMIZERS[name]([p for p in model.parameters() if p.requires_grad])
    optimizer = zf.streamed(stock, buffer="2MiB")

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, 300)).square().mean().backward()
        optimizer.step()

    step()
    step()
    planned, measured = zf.plan(model, optimizer), zf.memory(model, optimizer)
    assert dict(measured.tiers) == dict(planned.memory.tiers)
    assert measured.optimizer == planned.memory.optimizer
    assert slabs.now == slabs.peak == measured.buffers == planned.memory.buffers
    assert planned.moved
    counts = moved_in(lambda: (step(), step()), monkeypatch)
    for tier, (read, written) in planned.moved.items():
        assert (counts[tier, "read"], counts[tier, "write"]) == (2 * read, 2 * written), tier
        assert tier in str(planned)
    assert sum(counts.values()) == sum(2 * (read + written) for read, written in planned.moved.values())


def test_parameters_that_are_kept_in_another_dtype_are_planned_beside_those_at_rest():
    with pretended(2) as mesh:
        model = zf.precision(zf.shard_optimizer(nn.Linear(4, 6, bias=False), mesh), compute=torch.bfloat16)
        assert zf.plan(model).memory.parameters == 4 * 6 * 2 + 4 * 3 * 4
    with pretended(4):  # whole in each node of two, and cut over all
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "inside"))
        apart = zf.shard_optimizer(zf.shard_params(nn.Linear(4, 8, bias=False), mesh["inside"]), mesh["node"])
        assert zf.plan(apart).memory.parameters == 32 // 2 * 4
        assert zf.plan(zf.precision(apart, compute=torch.bfloat16)).memory.parameters == 32 // 2 * 2 + 32 // 4 * 4
