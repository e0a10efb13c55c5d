"""Disks that are full, fail, or flip a bit: whatever rests there (states, parameters, gradients, activations), an error says
so, and training goes on to the bit once the disk is well."""

from __future__ import annotations

import copy
import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import zero_fn as zf
from tests.support.models import Language
from tests.support.ranks import Ranks, axis
from tests.support.seeds import seed_generator
from tests.units.storage.disks import answers, failing
from zero_fn.storage import tier_storage
from zero_fn.storage.io import Request

KINDS = ("states", "parameters", "gradients", "activations")


class Training:
    """A model of which one kind of state rests in a tier; None is none."""

    def __init__(self, kind: str | None, tier: Any, transform: Callable[[Any], Any] = lambda model: model) -> None:
        seed_generator(0)
        self.model = transform(Language(dim=30, blocks=7))
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        if kind in (None, "states"):
            self.step(0)  # streamed after it, the next step begins with a chunk that is on the disk only
        if kind == "states":
            self.optimizer = zf.streamed(self.optimizer, tier, buffer="12KiB")
        if kind in ("parameters", "gradients"):
            state = {"parameters": "params", "gradients": "grads"}[kind]
            self.model = zf.offload(self.model, donate=True, **{state: tier})
            self.optimizer = zf.streamed(torch.optim.AdamW(self.model.parameters(), lr=0.01), zf.cpu())
        if kind == "activations":
            self.model = zf.checkpoint_activations(self.model, units="blocks.*", offload=tier)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        if kind not in (None, "states"):
            self.step(0)

    def step(self, seed: int, between: dict[str, Callable[[], object]] | None = None) -> None:
        """A step; `between` is called after "zero_grad", "forward" and "backward"."""
        acts = between or {}
        self.optimizer.zero_grad()
        acts.get("zero_grad", lambda: None)()
        tokens = torch.randint(37, (2, 5), generator=torch.Generator().manual_seed(seed))
        loss = self.model(tokens).logsumexp(-1).mean()
        acts.get("forward", lambda: None)()
        loss.backward()
        acts.get("backward", lambda: None)()
        self.optimizer.step()

    def values(self) -> list[Tensor]:
        return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in self.model.parameters()]


def stepped(*seeds: int, transform: Callable[[Any], Any] = lambda model: model) -> list[Tensor]:
    """Parameters in memory after a step 0 and these."""
    plain = Training(None, None, transform)
    for seed in seeds:
        plain.step(seed)
    return plain.values()


@pytest.mark.parametrize("kind", KINDS)
def test_a_tier_too_small_is_found_before_anything_moves(tmp_path: Path, kind: str) -> None:
    kept: list[Any] = []
    seed_generator(0)
    before = stepped() if kind == "states" else list(Language(dim=30, blocks=7).parameters())
    with pytest.raises(zf.TierError, match="the limit of the tier"):
        Training(kind, zf.nvme(tmp_path, limit="4096B"), lambda model: kept.append(model) or model)  # type: ignore[func-returns-value]
    assert all(map(torch.equal, kept[-1].parameters(), before))


@pytest.mark.parametrize("kind", KINDS[:3])
def test_a_step_in_which_the_disk_fails_before_any_update_is_taken_again(tmp_path: Path, kind: str) -> None:
    training = Training(kind, zf.nvme(tmp_path))
    with failing(), pytest.raises(zf.StorageError, match=f"(?s)(Reading from|Writing to) {kind}.*EIO"):
        training.step(1)
    training.step(1)
    training.step(2)
    assert all(map(torch.equal, training.values(), stepped(1, 2)))


@pytest.mark.parametrize("is_write", [True, False])
@pytest.mark.parametrize("kind", ["states", "parameters"])
def test_a_step_that_fails_half_way_says_so_until_states_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_write: bool
) -> None:
    training = Training(kind, zf.nvme(tmp_path))
    saved = copy.deepcopy(training.optimizer.state_dict()), training.values()
    seen: list[int] = []

    def fourth_fails(request: Request, result: int) -> int:
        seen.extend([result] * (request.is_write == is_write))
        return -errno.ENOSPC if len(seen) == 4 else result

    with pytest.raises(zf.StorageError, match=f"{kind} of AdamW|{kind} in"), monkeypatch.context() as patched:
        training.step(1, {"backward": lambda: answers(patched, fourth_fails)})
    for act in (training.optimizer.step, training.optimizer.state_dict):
        with pytest.raises(zf.StateError, match=r"(?s)failed half-way.*after \d+ of \d+ chunks"):
            act()
    training.optimizer.load_state_dict(saved[0])
    with torch.no_grad():
        for parameter, value in zip(training.model.parameters(), saved[1], strict=True):
            parameter.copy_(value)
    training.step(1)
    assert all(map(torch.equal, training.values(), stepped(1)))


@pytest.mark.skipif(sys.platform != "linux", reason="opens a file without a name again")
@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_not_computed_with(tmp_path: Path, kind: str) -> None:
    tier = zf.nvme(tmp_path)
    training = Training(kind, tier)
    before = training.values()

    def flip() -> None:
        (disk,) = (each for each in tier_storage._disks if each.tier == tier)
        with open(f"/proc/self/fd/{disk.files[0].fd}", "r+b", buffering=0) as file:
            os.pwrite(file.fileno(), bytes([os.pread(file.fileno(), 1, 777)[0] ^ 4]), 777)
            os.fsync(file.fileno())

    moment = {"gradients": "backward", "activations": "forward"}.get(kind, "zero_grad")
    with pytest.raises(zf.StorageError, match="does not hold what was written to it"):
        training.step(1, {moment: flip})
    if kind in ("states", "parameters"):  # what was read wrong is in no buffer of the next step
        with pytest.raises(zf.StorageError, match="does not hold what was written to it"):
            training.step(1)
    if kind in ("states", "activations"):
        assert all(map(torch.equal, training.values(), before))


def _without_a_path(kind: str, path: str) -> str:
    tier = zf.nvme(path if axis().get_local_rank() else f"{path}/missing")
    try:
        Training(kind, tier, lambda model: zf.zero3(model, axis()))
    except zf.StorageError as error:
        return error.summary
    return "nothing"


@pytest.mark.parametrize("kind", ["parameters", "gradients"])
def test_a_path_that_one_rank_lacks_is_an_error_on_all(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    here, there = ranks(2).run(_without_a_path, kind, str(tmp_path))
    assert here.startswith("No file can be made in")
    assert there == "offload failed on rank 0 of axis 'dp' (2)."
