"""Tiers below several axes: states that stream, models that leave memory, parameters and gradients that rest on a disk."""

import pytest
import torch

import zero_fn as zf
from tests.axes.grids import composed, differing, loss_of, snapshot
from tests.support.eviction import evicted
from tests.support.on_ranks import on_ranks
from tests.units.storage.disks import failing

COMPOSITIONS = ("tp", "hybrid", "hpz")


@pytest.mark.parametrize(
    ("composition", "states"), [*((each, ("params", "grads")) for each in COMPOSITIONS), (COMPOSITIONS[0], ())]
)
@on_ranks(4)
def test_tiers_change_no_bit_on_two_axes(folder, composition, states):
    """States on a disk, and an absence in between, or neither."""
    given = []
    for is_away in (False, True):
        model, row = composed(composition)
        if is_away and states:
            model = zf.offload(model, **{name: zf.nvme(folder) for name in states})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if is_away:
            optimizer = zf.streamed(optimizer, zf.nvme(folder), buffer="64KiB")
        for step in range(3):
            loss_of(model, step, row).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            if is_away and step == 1:
                evicted(model, optimizer).restore()
        given.append(snapshot(model))
    assert differing(*given) == []


def _failing(composition, path, moment):
    """What each of 2 x 2 ranks is told when the disk of the last one fails."""
    model, row = composed(composition)
    model = zf.offload(model, params=zf.nvme(path), grads=zf.nvme(path))
    optimizer = zf.streamed(torch.optim.AdamW(model.parameters()), zf.cpu())
    loss_of(model, 0, row).backward()
    weight = max(model.parameters(), key=lambda p: p.numel() if sum(q.is_shard() for q in p.placements) > 1 else -1)
    try:
        with failing(where=torch.distributed.get_rank() == 3):
            if moment == "full_tensor":
                weight.detach().full_tensor()
            elif moment == "norm":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            else:
                optimizer.step()
    except zf.errors.StorageError as error:
        return error.summary
    return "nothing"


@pytest.mark.parametrize("moment", ["full_tensor", "norm", "step"])
def test_a_disk_that_fails_is_an_error_along_both_axes(ranks, moment, tmp_path):
    """Along the axis of tensor parallelism ranks were once not told, and waited in the next collective of torch."""
    told = ranks(4).run(_failing, "tp", str(tmp_path), moment)
    assert told[3].startswith("Reading from")
    assert [said.partition("failed on ")[2] for said in told[:3]] == [
        "rank 1 of axis 'tp' (2).",
        "rank 1 of axis 'dp' (2).",
        "rank 1 of axis 'tp' (2).",
    ]
