"""A checkpoint of any mesh loads on any other: values and optimizer states to the bit, with torch.distributed.checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import zero_fn as zf
from tests.axes.grids import Decoder, grid, loss_of, parallelized, snapshot
from tests.support.ranks import Ranks, axis
from tests.support.wholes import full


def _tensor_parallel() -> nn.Module:
    mesh = grid("dp", "tp")
    return zf.zero3(parallelized(mesh["tp"], "columns"), mesh["dp"])


def _two_axes() -> nn.Module:
    mesh = grid("outer", "inner")
    return zf.zero3(zf.zero2(_plain(), mesh["outer"]), mesh["inner"])


def _hybrid() -> nn.Module:
    return zf.hybrid(_plain(), grid("outer", "inner"))


def _one_axis() -> nn.Module:
    return zf.zero1(_plain(), axis())


def _plain() -> nn.Module:
    torch.manual_seed(0)
    return Decoder()


MESHES: dict[str, Callable[[], nn.Module]] = {
    "tensor parallel": _tensor_parallel,
    "two axes": _two_axes,
    "hybrid": _hybrid,
    "one axis": _one_axis,
}


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    loss_of(model, number, 0).backward()  # the same data everywhere: meshes have other data-parallel ranks
    optimizer.step()
    optimizer.zero_grad()


def _everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor | None]:
    moments = {name: full(optimizer.state[p]["exp_avg_sq"]) for name, p in model.named_parameters()}
    return {**snapshot(model), **{f"second moment of {name}": value for name, value in moments.items()}}


def _saved_and_loaded(saved_on: str, loaded_on: tuple[str, ...], folder: str) -> list[str]:
    model = MESHES[saved_on]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _trained(model, optimizer, 0)
    dcp.save(_state(model, optimizer), checkpoint_id=folder)
    expected = _everything(model, optimizer)
    lines = []
    for name in loaded_on:
        other = MESHES[name]()
        its_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
        _trained(other, its_optimizer, 1)
        state = _state(other, its_optimizer)
        dcp.load(state, checkpoint_id=folder)
        other.load_state_dict(state["model"])
        set_optimizer_state_dict(other, its_optimizer, state["optimizer"])
        found = _everything(other, its_optimizer)
        lines += [f"{name}: {key}" for key, value in expected.items() if not _equal(value, found[key])]
        _trained(other, its_optimizer, 2)  # it goes on
        if name == saved_on:
            _trained(model, optimizer, 2)
            after, there = _everything(model, optimizer), _everything(other, its_optimizer)
            lines += [f"continued, {key}" for key, value in after.items() if not _equal(value, there[key])]
    dist.barrier()
    return lines


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    assert one is not None
    assert other is not None
    return torch.equal(one, other)


@pytest.mark.parametrize(
    ("saved_on", "loaded_on"),
    [("tensor parallel", ("tensor parallel", "hybrid")), ("two axes", ("tensor parallel", "one axis"))],
)
def test_a_checkpoint_loads_on_other_meshes(ranks: Ranks, saved_on: str, loaded_on: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert ranks(4).run(_saved_and_loaded, saved_on, loaded_on, str(Path(folder) / "checkpoint")) == [[]] * 4
