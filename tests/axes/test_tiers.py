"""Tiers below several axes: states that stream, models that leave memory, parameters and gradients that rest on a disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import zero_fn as zf
from tests.axes.grids import composed, loss_of
from tests.support.eviction import evicted
from tests.support.ranks import Ranks
from tests.units.storage.disks import failing

COMPOSITIONS = ("tp", "hybrid", "hpz")


def _local(tensor: Tensor) -> Tensor:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach().clone()


def _alike(composition: str, path: str, states: tuple[str, ...]) -> list[str]:
    """Where training with states on a disk, and an absence in between, differs from training without."""
    given = []
    for is_away in (False, True):
        model, row = composed(composition)
        if is_away and states:
            model = zf.offload(model, **{name: zf.nvme(path) for name in states})
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        if is_away:
            optimizer = zf.streamed(optimizer, zf.nvme(path), buffer="64KiB")
        for step in range(3):
            loss_of(model, step, row).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            if is_away and step == 1:
                evicted(model, optimizer).restore()
        given.append({name: _local(parameter) for name, parameter in model.named_parameters()})
    one, other = given
    return [name for name, values in one.items() if not torch.equal(values, other[name])]


@pytest.mark.parametrize(
    ("composition", "states"), [*((each, ("params", "grads")) for each in COMPOSITIONS), (COMPOSITIONS[0], ())]
)
def test_tiers_change_no_bit_on_two_axes(
    ranks: Ranks, composition: str, states: tuple[str, ...], tmp_path: Path
) -> None:
    assert ranks(4).run(_alike, composition, str(tmp_path), states) == [[]] * 4


def _failing(composition: str, path: str, moment: str) -> str:
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
    except zf.StorageError as error:
        return error.summary
    return "nothing"


@pytest.mark.parametrize("moment", ["full_tensor", "norm", "step"])
def test_a_disk_that_fails_is_an_error_along_both_axes(ranks: Ranks, moment: str, tmp_path: Path) -> None:
    """Along the axis of tensor parallelism ranks were once not told, and waited in the next collective of torch."""
    told = ranks(4).run(_failing, "tp", str(tmp_path), moment)
    assert told[3].startswith("Reading from")
    assert [said.partition("failed on ")[2] for said in told[:3]] == [
        "rank 1 of axis 'tp' (2).",
        "rank 1 of axis 'dp' (2).",
        "rank 1 of axis 'tp' (2).",
    ]
