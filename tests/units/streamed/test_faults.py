"""Disks that are full, fail, or flip a bit: whatever rests there (states, parameters, gradients, activations), an error says
so, and training goes on to the bit once the disk is well."""

from __future__ import annotations

import copy
import errno
import re
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import zero_fn as zf
from tests.support.models import Language
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.ranks import axis
from tests.support.seeds import seed_generator
from tests.support.wholes import fulls
from tests.units.storage.disks import answers, failing, overwrite
from zero_fn.storage import tier_storage

KINDS = ("states", "parameters", "gradients", "activations")


class Training:
    """A model of which one kind of state rests in a tier; None is none."""

    def __init__(self, kind, tier, transform=lambda model: model):
        seed_generator(0)
        self.model = transform(Language(dim=30, blocks=7))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
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

    def step(self, seed, between=None):
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

    def values(self):
        return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in self.model.parameters()]


def stepped(*seeds, transform=lambda model: model):
    """Parameters in memory after a step 0 and these."""
    plain = Training(None, None, transform)
    for seed in seeds:
        plain.step(seed)
    return plain.values()


@pytest.mark.parametrize("kind", KINDS)
def test_a_tier_too_small_is_found_before_anything_moves(tmp_path, kind):
    kept = []
    seed_generator(0)
    before = stepped() if kind == "states" else list(Language(dim=30, blocks=7).parameters())
    with pytest.raises(zf.errors.TierError, match="the limit of the tier"):
        Training(kind, zf.nvme(tmp_path, limit="4096B"), lambda model: kept.append(model) or model)
    assert all(map(torch.equal, kept[-1].parameters(), before))


@pytest.mark.parametrize("kind", KINDS[:3])
def test_a_step_in_which_the_disk_fails_before_any_update_is_taken_again(tmp_path, kind):
    training = Training(kind, zf.nvme(tmp_path))
    with failing(), pytest.raises(zf.errors.StorageError, match=f"(?s)(Reading from|Writing to) {kind}.*EIO"):
        training.step(1)
    training.step(1)
    training.step(2)
    assert all(map(torch.equal, training.values(), stepped(1, 2)))


@pytest.mark.parametrize("is_write", [True, False])
@pytest.mark.parametrize("kind", ["states", "parameters"])
def test_a_step_that_fails_half_way_says_so_until_states_are_loaded(tmp_path, monkeypatch, kind, is_write):
    training = Training(kind, zf.nvme(tmp_path))
    saved = copy.deepcopy(training.optimizer.state_dict()), training.values()
    seen = []

    def fourth_fails(request, result):
        seen.extend([result] * (request.is_write == is_write))
        return -errno.ENOSPC if len(seen) == 4 else result

    with pytest.raises(zf.errors.StorageError, match=f"{kind} of AdamW|{kind} in"), monkeypatch.context() as patched:
        training.step(1, {"backward": lambda: answers(patched, fourth_fails)})
    for act in (training.optimizer.step, training.optimizer.state_dict):
        with pytest.raises(zf.errors.StateError, match=r"(?s)failed half-way.*after \d+ of \d+ chunks"):
            act()
    training.optimizer.load_state_dict(saved[0])
    with torch.no_grad():
        for parameter, value in zip(training.model.parameters(), saved[1], strict=True):
            parameter.copy_(value)
    training.step(1)
    assert all(map(torch.equal, training.values(), stepped(1)))


@pytest.mark.skipif(sys.platform != "linux", reason="opens a file without a name again")
@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_not_computed_with(tmp_path, kind):
    tier = zf.nvme(tmp_path)
    training = Training(kind, tier)
    before = training.values()

    def flip():
        (disk,) = (each for each in tier_storage._disks if each.tier == tier)
        overwrite(disk.files[0], b"other", 777)

    moment = {"gradients": "backward", "activations": "forward"}.get(kind, "zero_grad")
    with pytest.raises(zf.errors.StorageError, match="does not hold what was written to it"):
        training.step(1, {moment: flip})
    if kind in ("states", "parameters"):  # what was read wrong is in no buffer of the next step
        with pytest.raises(zf.errors.StorageError, match="does not hold what was written to it"):
            training.step(1)
    if kind in ("states", "activations"):
        assert all(map(torch.equal, training.values(), before))


@pytest.mark.parametrize("kind", KINDS[:3])
@on_ranks(2)
def test_a_path_that_one_rank_lacks_is_an_error_on_all_that_changes_nothing(folder, kind):
    training = Training(None, None, lambda model: zf.shard_params(model, axis()))
    before = [value for state in training.optimizer.state.values() for value in state.values()]
    is_there = axis().get_local_rank() == 1
    what = "Moving the states of an optimizer" if kind == "states" else "offload"
    told = rf"^{what} failed on rank 0 of axis 'dp' \(2\)" if is_there else "^No file can be made in"
    tier = zf.nvme(folder if is_there else f"{folder}/missing")
    with pytest.raises(zf.errors.StorageError, match=told):
        if kind == "states":
            zf.streamed(training.optimizer, tier)
        else:
            zf.offload(training.model, **{"params" if kind == "parameters" else "grads": tier})
    after = [value for state in training.optimizer.state.values() for value in state.values()]
    assert all(one is other for one, other in zip(before, after, strict=True))
    training.step(1)


# -- ranks whose disk is well ------------------------------------------------------------------------------------------


def _norm(foreach):
    return lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 0.05, foreach=foreach)


def _in_unsharded(model, _):
    with zf.unsharded(model.blocks[1]):
        pass


ACTS = {
    "unsharded": _in_unsharded,
    "norm": _norm(False),
    "norms": _norm(True),
    # 37 rows on 2 ranks: one of them pads first
    "full_tensor": lambda model, _: model.embedding.weight.detach().full_tensor(),
    "redistribute": lambda model, _: model.embedding.weight.detach().redistribute(placements=[Shard(1)]),
    "operand": lambda model, _: model.embedding.weight.detach().softmax(0).full_tensor(),
    "gradient": lambda model, _: model.embedding.weight.grad.full_tensor(),
    "state_dict": lambda _, optimizer: optimizer.state_dict(),
}
"""What is done between backward and step."""

HALF_WAY = "step of an optimizer whose step failed half-way."
REDISTRIBUTED = "Reading a tensor to redistribute it"


@dataclass(frozen=True)
class Failure:
    """A disk that fails on rank 1, in the second step: when, and what the other rank and this one are told."""

    away: str  # what rests on it
    moments: str  # "forward", "backward", "step", or one of `ACTS`
    other: str
    own: str
    refuses: dict[str, Any] = field(default_factory=dict)
    stage: str = "zero3"
    after: tuple[str, ...] = ()  # what later steps say


READ = "Reading from {} in"
FAILURES = {
    "forward": Failure("params optim", "forward", r"Fetching unit [\w.]+", READ.format("parameters")),
    "backward": Failure("params optim", "backward", r"Fetching unit [\w.]+", READ.format("parameters")),
    "unsharded": Failure("params optim", "unsharded", r"Fetching unit [\w.]+", READ.format("parameters")),
    "gradients that cannot be written": Failure(
        "params grads", "backward step", "Writing gradients", "Writing to gradients in",
        {"code": errno.ENOSPC, "reads": False},
    ),
    # Once waited in torch's reduction of the norm, or stepped with other gradients.
    "norm": Failure("grads", "norm", "The norm of a gradient", READ.format("gradients"), {"writes": False}),
    "norms": Failure("grads", "norms", "The norm of gradients", READ.format("gradients"), {"writes": False}),
    "scaling": Failure("grads", "norms", "Scaling gradients", "Writing to gradients in", {"reads": False}),
    # Once waited in the collective of torch.
    "full_tensor": Failure("params grads", "full_tensor", REDISTRIBUTED, READ.format("parameters")),
    "redistribute": Failure("params grads", "redistribute", REDISTRIBUTED, READ.format("parameters")),
    "operand": Failure("params grads", "operand", REDISTRIBUTED, READ.format("parameters")),
    "gradient": Failure("params grads", "gradient", REDISTRIBUTED, READ.format("gradients")),
    "states": Failure("optim", "state_dict", "Reading the states of an optimizer", "Reading from states of", stage="zero1"),
    "step": Failure(
        "optim", "step", "A step of a streamed optimizer", "Reading from states of", {"writes": False}, after=(HALF_WAY,) * 2
    ),
}  # fmt: skip


def _told(path, failure):
    """What this rank was told, and whether it trains to the bit as if nothing had been: a step that failed is taken again."""
    said = []
    values = []
    for steps in ((0, 1, 2), (0, 1, 1, 2)):
        seed_generator(0)
        model = STAGES[failure.stage](Language(dim=30, blocks=7), axis())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        breaks = len(steps) > 3 and axis().get_local_rank() == 1
        if len(steps) > 3:
            disk = zf.nvme(path)
            model = zf.offload(model, **dict.fromkeys(failure.away.split(), disk))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            where = None if "optim" in failure.away else zf.cpu()
            optimizer = zf.streamed(optimizer, where, buffer="12KiB" if failure.away == "optim" else "64KiB")
        for number, step in enumerate(steps):

            def act(moment, do, now=breaks and number == 1):
                with failing(**failure.refuses, where=now and moment in failure.moments.split()):
                    return do()

            optimizer.zero_grad()
            try:
                tokens = torch.randint(37, (2, 5), generator=torch.Generator().manual_seed(step))
                loss = act("forward", lambda: model(tokens).logsumexp(-1).mean())  # noqa: B023
                act("backward", loss.backward)
                for moment in filter(ACTS.__contains__, failure.moments.split()):
                    act(moment, lambda: ACTS[moment](model, optimizer))  # noqa: B023
                act("step", optimizer.step)
            except zf.ZeroError as error:
                said.append(error.summary)
        values.append(fulls(model.parameters()))
    return said, all(map(torch.equal, *values))


@pytest.mark.parametrize("case", FAILURES)
def test_a_disk_that_fails_on_one_rank_is_an_error_on_all_and_the_step_may_be_taken_again(ranks, tmp_path, case):
    failure = FAILURES[case]
    (here, good), (there, good_there) = ranks(2).run(_told, str(tmp_path), failure)
    assert there[0].startswith(failure.own)
    assert re.fullmatch(rf"{failure.other} failed on rank 1 of axis 'dp' \(2\)\.", here.pop(0))
    assert here == there[1:] == list(failure.after)
    assert good == good_there == (not failure.after)
