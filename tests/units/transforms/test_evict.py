"""A model and its optimizer leave memory and come back to the bit; until then nothing can use them."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zero_fn as zf
from tests.support.groups import alone
from tests.support.models import Language, Odd
from tests.support.ranks import Ranks, axis
from tests.units.storage.disks import answers, small_disk


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, *, backwards: int = 1) -> None:
    generator = torch.Generator().manual_seed(number)
    for _ in range(backwards):
        model(torch.randint(37, (2, 5), generator=generator)).logsumexp(-1).mean().backward()
    optimizer.step()


def trained(stage: str, path: str | None) -> tuple[list[Tensor], list[Any], int]:
    """Parameters and states after steps, evicted to `path` between them and in the middle of one; bytes while evicted."""
    model: Any = getattr(zf, stage)(Odd(), axis())
    if stage == "zero2":
        model = zf.precision(model, compute=torch.bfloat16)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if not p.is_complex()], lr=0.01)
    held = 0
    for number in range(3):
        optimizer.zero_grad()
        tokens = torch.randint(37, (2, 5), generator=torch.Generator().manual_seed(number))
        model(tokens).float().logsumexp(-1).mean().backward()
        if path is not None and number:
            evicted = zf.evict(model, optimizer, to=zf.nvme(path))  # with gradients
            held = max(held, zf.held(model, optimizer).total)
            evicted.restore()
        model(tokens.flip(0)).float().logsumexp(-1).mean().backward()  # and added to after
        optimizer.step()
        if path is not None:
            zf.evict(model, optimizer, to=zf.nvme(path)).restore()
    whole = [p.detach().full_tensor() for p in model.parameters()]
    values = [
        value.full_tensor() if isinstance(value, DTensor) else value
        for state in optimizer.state.values()
        for value in state.values()
    ]
    return whole, values, held


@pytest.mark.parametrize("stage", ["replicate", "zero1", "zero2", "zero3"])
def test_a_model_that_was_evicted_goes_on_to_the_bit(ranks: Ranks, tmp_path: Path, stage: str) -> None:
    evicted, stayed = ranks(2).run(trained, stage, str(tmp_path)), ranks(2).run(trained, stage, None)
    for (parameters, states, held), (expected, expected_states, _) in zip(evicted, stayed, strict=True):
        assert all(map(torch.equal, parameters, expected))
        assert all(map(torch.equal, states, expected_states))
        assert held < 100  # states of one element stay


@pytest.mark.parametrize("tier", ["nvme", "cpu"])
def test_a_plain_module_is_evicted_and_restored(tmp_path: Path, tier: str) -> None:
    def run(to: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = Language()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for number in range(3):
            step(model, optimizer, number, backwards=2)
            if to is not None:
                zf.evict(model, optimizer, to=to).restore()
        return [p.detach() for p in model.parameters()]

    assert all(map(torch.equal, run(zf.nvme(tmp_path) if tier == "nvme" else zf.cpu()), run(None)))


@pytest.mark.parametrize("transform", [lambda m: m, zf.precision], ids=["plain", "precision"])
def test_what_an_evicted_parameter_shows_is_not_taken_for_values(
    tmp_path: Path, transform: Callable[[nn.Module], nn.Module]
) -> None:
    """Its norm was 0, and an edit was dropped."""
    model = transform(nn.Linear(4, 3))
    before = [p.detach().clone() for p in model.parameters()]
    evicted = zf.evict(model, to=zf.nvme(tmp_path))
    for parameter in model.parameters():
        assert parameter.isnan().all() and parameter.norm().isnan()
        with torch.no_grad(), pytest.raises(RuntimeError):
            parameter.mul_(2)
    evicted.restore()
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for resident memory")
def test_memory_is_freed_while_a_model_is_evicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def resident_nbytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    model = nn.Linear(4096, 4096)
    model(torch.ones(1, 4096)).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer.step()
    before = resident_nbytes()
    with monkeypatch.context() as patched:
        patched.setattr("zero_fn.storage.shelf.Disk.read", None)  # there is nothing to read yet
        evicted = zf.evict(model, optimizer, to=zf.nvme(tmp_path))
    assert "256.06 MiB evicted" in str(evicted)
    assert before - resident_nbytes() > 112 << 20  # of 256 MiB, with 128 MiB of buffers
    evicted.restore()
    assert str(evicted) == "restored"


def test_nothing_is_moved_where_the_tier_is_the_memory_of_the_model() -> None:
    model = Language()
    address = model.norm.weight.data_ptr()
    evicted = zf.evict(model, to=zf.cpu())
    assert "nothing was moved" in str(evicted)
    with pytest.raises(zf.StateError, match="evicted"):
        model(torch.zeros(1, 3, dtype=torch.int64))
    evicted.restore()
    assert model.norm.weight.data_ptr() == address


USES: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "forward": lambda model, _: model(torch.zeros(1, 3, dtype=torch.int64)),
    "a block alone": lambda model, _: model.get_submodule("blocks.0")(torch.zeros(1, 10)),
    "step": lambda _, optimizer: optimizer.step(),
    "state_dict": lambda model, _: model.state_dict(),
    "optimizer.state_dict": lambda _, optimizer: optimizer.state_dict(),
    "evict": lambda model, optimizer: zf.evict(model, optimizer, to=zf.cpu()),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("is_plain", [True, False])
def test_an_evicted_model_cannot_be_used(tmp_path: Path, use: str, is_plain: bool) -> None:
    with alone() as mesh:
        model = Language() if is_plain else zf.zero3(Language(), mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer, 0)
        seen: list[object] = []
        model.get_submodule("blocks.0").register_forward_pre_hook(lambda *given: seen.append(given))
        evicted = zf.evict(model, optimizer, to=zf.nvme(tmp_path))
        with pytest.raises(zf.StateError, match="evicted"):
            USES[use](model, optimizer)
        assert not seen, "a hook of the user would have read parameters"
        evicted.restore()
        if use != "evict":
            USES[use](model, optimizer)
        with pytest.raises(zf.StateError, match="restored already"):
            evicted.restore()


def test_verbs_refuse_an_evicted_model(tmp_path: Path) -> None:
    with alone() as mesh:
        model = zf.zero3(Language(), mesh)
        evicted = zf.evict(model, to=zf.nvme(tmp_path))
        with pytest.raises(zf.StateError, match="evicted"), zf.unsharded(model):
            pass
        with pytest.raises(zf.StateError, match="evicted"):
            zf.describe(model)
        evicted.restore()
        zf.describe(model)


class Averaged(torch.optim.SGD):
    """Keeps a second view of its momentum."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
                state["flat"] = state["momentum"].view(-1)
            state["flat"].add_(parameter.grad.view(-1))
            parameter.sub_(state["momentum"])


def test_what_shares_memory_is_not_evicted(tmp_path: Path) -> None:
    """It had come back apart: momentum was no longer what had been added up, silently."""
    model = nn.Linear(4, 4)
    optimizer = Averaged(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(zf.PlacementError, match="a state 'momentum' and a state 'flat' share memory"):
        zf.evict(model, optimizer, to=zf.nvme(tmp_path))
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight.data = tied[0].weight.data
    before = [p.detach().clone() for p in tied.parameters()]
    with pytest.raises(zf.PlacementError, match=r"0\.weight and 1\.weight share memory"):
        zf.evict(tied, to=zf.nvme(tmp_path))
    assert all(map(torch.equal, tied.parameters(), before))
    optimizer.step()  # as before


def test_a_model_in_use_is_not_evicted(tmp_path: Path) -> None:
    with alone() as mesh:
        model = zf.zero3(Language(), mesh)
        with zf.unsharded(model), pytest.raises(zf.StateError, match="in use"):
            zf.evict(model, to=zf.nvme(tmp_path))
        with zf.accumulate(model), pytest.raises(zf.StateError, match="in use"):
            model(torch.zeros(1, 3, dtype=torch.int64)).sum().backward()
            zf.evict(model, to=zf.nvme(tmp_path))


def test_a_model_stays_where_it_is_when_the_disk_is_full_or_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(700, 700)
    before = model.weight.detach().clone()
    with small_disk(tmp_path / "disk") as path, pytest.raises(zf.TierError, match="can be taken"):
        zf.evict(model, to=zf.nvme(path))
    answers(monkeypatch, lambda request, result: -errno.EIO)
    with pytest.raises(zf.StorageError, match="EIO"):
        zf.evict(model, to=zf.nvme(tmp_path))
    monkeypatch.undo()
    assert torch.equal(model.weight, before)
    model(torch.ones(1, 700))


def test_a_failed_restoration_can_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(700, 700)
    before = model.weight.detach().clone()
    evicted = zf.evict(model, to=zf.nvme(tmp_path))
    answers(monkeypatch, lambda request, result: -errno.EIO)
    with pytest.raises(zf.StorageError, match="EIO"):
        evicted.restore()
    monkeypatch.undo()
    with pytest.raises(zf.StateError, match="evicted"):
        model(torch.ones(1, 700))
    evicted.restore()
    assert torch.equal(model.weight, before)


def test_a_model_that_is_in_a_tier_already_leaves_nothing_to_evict(tmp_path: Path) -> None:
    model = zf.offload(nn.Linear(3, 2), params=zf.nvme(tmp_path))
    before = model.weight.detach().clone()
    zf.evict(model, to=zf.nvme(tmp_path)).restore()
    assert torch.equal(model.weight.detach().clone(), before)
