"""A step that is finished by the next forward: unit by unit, as if it had been finished at once for whoever looks."""

from __future__ import annotations

import copy
import gc
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_fn as zf
from tests.support.models import Language
from tests.support.on_ranks import on_ranks
from tests.support.ranks import Ranks, axis
from tests.support.seeds import seed_generator
from tests.units.storage.disks import failing
from zero_fn.runtime.record import Record
from zero_fn.streamed.pipeline import Waiting


def tokens(seed: int) -> Tensor:
    return torch.randint(37, (2, 5), generator=torch.Generator().manual_seed(seed))


class Pair:
    """A model in tiers whose steps wait, and the same in memory."""

    def __init__(self, path: Path, **how: Any) -> None:
        seed_generator(0)
        self.plain: Any = Language(blocks=4)
        disk = zf.nvme(path)
        self.model: Any = zf.offload(copy.deepcopy(self.plain), params=disk, grads=disk, optim=disk)
        self.stock = torch.optim.AdamW(self.plain.parameters(), lr=0.01)
        self.optimizer = zf.streamed(torch.optim.AdamW(self.model.parameters(), lr=0.01), finish="forward", **how)

    def backward(self, seed: int = 0) -> None:
        for model in (self.model, self.plain):
            model(tokens(seed)).logsumexp(-1).mean().backward()

    def step(self, seed: int = 0) -> None:
        self.backward(seed)
        for optimizer in (self.optimizer, self.stock):
            optimizer.step()
            optimizer.zero_grad()

    @property
    def waiting(self) -> Waiting | None:
        return self.optimizer._steps.waiting

    def require_same(self) -> None:
        for one, other in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            assert torch.equal(one.detach().clone(), other)
        states, golden = self.optimizer.state_dict()["state"], self.stock.state_dict()["state"]
        for number in golden:
            assert all(torch.equal(states[number][name], golden[number][name]) for name in golden[number])


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def test_a_step_is_taken_unit_by_unit_by_the_forward_that_reads_it(pair: Pair) -> None:
    pair.step()
    assert pair.waiting is not None
    chunks = len(pair.optimizer.states.chunks)
    assert pair.waiting.progress == f"0 of {chunks} chunks"
    seen: list[str] = []
    for block in pair.model.blocks:
        block.register_forward_pre_hook(lambda *_: seen.append(pair.waiting.progress if pair.waiting else "all"))
    pair.model(tokens(1))
    done = [int(progress.split()[0]) for progress in seen]
    # The root, the unit itself, which is entered before hooks of the user, the one that is prefetched, and the one fetched.
    assert done == [4, 5, 5, 5], seen
    assert pair.waiting.progress == f"{chunks} of {chunks} chunks"
    pair.require_same()


def unsharded(pair: Pair) -> None:
    with zf.unsharded(pair.model), torch.no_grad():
        for whole, plain in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
            assert torch.equal(whole, plain)


def edited_whole(pair: Pair) -> None:
    with zf.unsharded(pair.model, writeback=True), torch.no_grad():
        pair.model.blocks[1].up.weight.mul_(0.5)
    with torch.no_grad():
        pair.plain.blocks[1].up.weight.mul_(0.5)


def saved(pair: Pair) -> None:
    with tempfile.TemporaryDirectory() as folder:
        zf.save(f"{folder}/step-1", pair.model)
        read = Language(blocks=4)
        zf.load(folder, read)
    for one, other in zip(read.parameters(), pair.plain.parameters(), strict=True):
        assert torch.equal(one, other)


def inferred(pair: Pair) -> None:
    with torch.inference_mode():
        pair.model(tokens(5))
    pair.step(2)


READS: dict[str, Callable[[Pair], object]] = {
    "a parameter": lambda pair: pair.model.blocks[3].down.weight.detach().clone(),
    "state_dict": lambda pair: {name: value.clone() for name, value in pair.model.state_dict().items()},
    "states": lambda pair: pair.optimizer.state_dict(),
    "step counts": lambda pair: len(pair.optimizer.state),
    "a copy": lambda pair: copy.deepcopy(pair.model),
    "evaluation": lambda pair: pair.model(tokens(9)),
    "evaluation in inference mode, and a step": inferred,
    "whole parameters": unsharded,
    "an edit of whole parameters": edited_whole,
    "another transform": lambda pair: zf.precision(pair.model, compute=torch.bfloat16),
    "eviction": lambda pair: zf.evict(pair.model, pair.optimizer, to=zf.cpu()).restore(),
    "a checkpoint of the weights": saved,
    "the next step": lambda pair: pair.step(7),
}


@pytest.mark.parametrize("reads", READS)
def test_whoever_reads_finds_it_stepped(pair: Pair, reads: str) -> None:
    pair.step(1)
    pair.step(2)
    READS[reads](pair)
    pair.require_same()


def test_states_that_are_loaded_come_after_the_step_that_waits(pair: Pair, tmp_path: Path) -> None:
    pair.step(1)
    zf.save(tmp_path / "step-1", pair.model, pair.optimizer)
    states = copy.deepcopy(pair.stock.state_dict())
    pair.step(2)
    assert pair.waiting is not None
    zf.load(tmp_path, pair.model, pair.optimizer, only="optimizer")
    pair.stock.load_state_dict(states)
    pair.require_same()


@pytest.mark.parametrize("rate", [float, torch.tensor])
def test_edits_and_gradients_after_a_step_are_those_of_one_that_was_finished(
    pair: Pair, rate: Callable[[float], Any]
) -> None:
    for group in (*pair.optimizer.param_groups, *pair.stock.param_groups):
        group["lr"] = rate(0.01)
    pair.backward(1)
    for optimizer in (pair.optimizer, pair.stock):
        optimizer.step()  # gradients stay, are added to, scaled, and cleared in place
    for group in (*pair.optimizer.param_groups, *pair.stock.param_groups):
        group["lr"] *= 100.0
    pair.backward(2)
    for model in (pair.model, pair.plain):
        with torch.no_grad():
            model.blocks[2].up.weight.mul_(0.5)
            model.blocks[1].up.weight.grad.mul_(2.0)
    for optimizer in (pair.optimizer, pair.stock):
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    for model in (pair.model, pair.plain):
        with torch.no_grad():
            model.norm.weight.fill_(0.25)
    pair.require_same()


def test_nothing_is_read_that_is_still_being_written(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the disk does first: a read may pass a write, which is under way until somebody has waited for it."""
    write, read = Record.write_parcel, Record.read_parcel
    under_way: set[Any] = set()
    reads: list[bool] = []

    def written(self: Record, parcel: Any, memory: Tensor, version: int | None = None) -> Any:
        transfer, key = write(self, parcel, memory, version), (self, parcel.start)
        under_way.add(key)
        return SimpleNamespace(wait=lambda: (transfer.wait(), under_way.discard(key)))  # type: ignore[func-returns-value, union-attr]

    def read_after(self: Record, parcel: Any, memory: Tensor) -> Any:
        reads.append((self, parcel.start) not in under_way)
        return read(self, parcel, memory)

    monkeypatch.setattr(Record, "write_parcel", written)
    monkeypatch.setattr(Record, "read_parcel", read_after)
    for seed in range(3):
        pair.step(seed)
    pair.model(tokens(3))
    pair.require_same()
    assert len(reads) > 8
    assert all(reads)


@pytest.mark.parametrize("is_in_a_cycle", [False, True])
def test_parameters_outlive_their_optimizer(pair: Pair, is_in_a_cycle: bool) -> None:
    pair.step(1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(pair.optimizer, lambda _: 1.0) if is_in_a_cycle else None
    del pair.optimizer, scheduler
    gc.collect()
    assert all(map(torch.equal, (p.detach().clone() for p in pair.model.parameters()), pair.plain.parameters()))


def test_a_model_that_is_gone_is_not_stepped(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[int] = []
    reach = Waiting.reach
    monkeypatch.setattr(Waiting, "reach", lambda self, count: (reached.append(count), reach(self, count)))
    pair.step(1)
    waiting = weakref.ref(pair.waiting)
    reached.clear()
    gc.disable()
    try:
        del pair.model
        del pair.optimizer
        assert waiting() is None, "it keeps the memory of a model that nobody has"
    finally:
        gc.enable()
    assert reached == []


@pytest.mark.parametrize("finishes", [("forward", "forward"), ("forward", "step"), ("step", "forward")])
@pytest.mark.parametrize("second", ["every other parameter", "one of the second unit"])
def test_two_optimizers_may_step_the_same_parcels(tmp_path: Path, second: str, finishes: Any) -> None:
    seed_generator(0)
    plain: Any = Language()
    disk = zf.nvme(tmp_path)
    model = zf.offload(copy.deepcopy(plain), params=disk, grads=disk, optim=disk)

    def halves(of: nn.Module, *, waits: bool) -> list[Any]:
        named = list(of.named_parameters())
        of_second = [name for name, _ in named[1::2]] if "other" in second else ["blocks.0.up.weight"]
        parts = [[p for name, p in named if (name in of_second) == is_second] for is_second in (False, True)]
        stock = [torch.optim.AdamW(parts[0], lr=0.01), torch.optim.SGD(parts[1], lr=0.1, momentum=0.9)]
        return [zf.streamed(each, finish=how) for each, how in zip(stock, finishes, strict=True)] if waits else stock

    pairs = (model, halves(model, waits=True)), (plain, halves(plain, waits=False))
    for step in range(3):
        for module, optimizers in pairs:
            module(tokens(step)).logsumexp(-1).mean().backward()
            for optimizer in optimizers * 2:  # and again, with no forward between
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    assert all(torch.equal(p.detach().clone(), q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def _failing(path: str, moment: str) -> str:
    seed_generator(0)
    disk = zf.nvme(path)
    model: Any = zf.offload(zf.zero3(Language(blocks=4), axis()), params=disk, grads=disk, optim=disk)
    optimizer = zf.streamed(torch.optim.AdamW(model.parameters(), lr=0.01), finish="forward")

    def step(seed: int) -> None:
        model(tokens(seed)).logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    step(1)
    saved = copy.deepcopy(optimizer.state_dict()), {key: value.clone() for key, value in model.state_dict().items()}
    step(2)
    acts: dict[str, Callable[[], object]] = {
        "forward": lambda: model(tokens(7)), "the next step": optimizer.step, "states": optimizer.state_dict
    }  # fmt: skip
    with failing(where=axis().get_local_rank() == 1), pytest.raises(zf.StorageError) as caught:
        acts[moment]()
    for _ in range(2):  # the disk is well again: what is half stepped stays so
        with pytest.raises((zf.StorageError, zf.StateError)):
            optimizer.step()
    optimizer.load_state_dict(saved[0])
    model.load_state_dict(saved[1])
    step(2)
    assert all(bool(parameter.full_tensor().isfinite().all()) for parameter in model.parameters())
    return caught.value.summary


@pytest.mark.parametrize("moment", ["forward", "the next step", "states"])
def test_a_disk_that_fails_in_a_step_that_waited_is_an_error_on_every_rank(
    ranks: Ranks, tmp_path: Path, moment: str
) -> None:
    here, there = ranks(2).run(_failing, str(tmp_path), moment)
    assert "failed on rank 1" in here
    assert "failed on rank" not in there


@on_ranks(2)
def test_one_rank_may_save_what_every_rank_has_whole(folder: str) -> None:
    disk = zf.nvme(folder)
    model: Any = zf.offload(zf.replicate(Language(), axis()), params=disk, grads=disk, optim=disk)
    optimizer = zf.streamed(torch.optim.AdamW(model.parameters()), finish="forward")
    for step in range(2):
        model(tokens(step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == axis().get_local_rank() == 0:
            assert optimizer.state_dict()["state"]


def test_what_is_in_memory_is_stepped_at_once(tmp_path: Path) -> None:
    """Anybody can read it."""
    for kinds in (("optim",), ("params", "optim"), ("grads", "optim")):
        model: Any = zf.offload(Language(), **{kind: zf.nvme(tmp_path) for kind in kinds})
        optimizer = zf.streamed(torch.optim.AdamW(model.parameters()), finish="forward")
        model(tokens(0)).sum().backward()
        optimizer.step()
        assert optimizer._steps.waiting is None


def test_it_says_when_it_is_stepped(pair: Pair) -> None:
    assert "before the next forward" in str(pair.optimizer)
