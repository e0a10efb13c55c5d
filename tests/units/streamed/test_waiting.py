"""A step that is finished by the next forward: unit by unit, as if it had been finished at once for whoever looks."""

import copy
import gc
import tempfile
import weakref

import pytest
import torch

import zero_fn as zf
from tests.support.models import Language
from tests.support.on_ranks import on_ranks
from tests.support.ranks import axis
from tests.support.seeds import seed_generator
from tests.support.wholes import fulls
from tests.units.storage.disks import Lazy, failing
from zero_fn.streamed.pipeline import ChunkPipeline

KINDS = ("params", "grads", "optim")


def tokens(seed):
    return torch.randint(37, (2, 5), generator=torch.Generator().manual_seed(seed))


def backward(model, seed):
    model(tokens(seed)).logsumexp(-1).mean().backward()


def step(model, optimizer, seed):
    backward(model, seed)
    optimizer.step()
    optimizer.zero_grad()


class Pair:
    """A model in tiers whose steps wait, and the same in memory."""

    def __init__(
        self,
        path,
        transform=lambda model: model,
        kinds=KINDS,
        finish="forward",
    ):
        seed_generator(0)
        self.plain = Language(blocks=4)
        self.model = zf.offload(transform(copy.deepcopy(self.plain)), **dict.fromkeys(kinds, zf.nvme(path)))
        self.stock = torch.optim.AdamW(self.plain.parameters(), lr=0.01)
        self.optimizer = zf.streamed(torch.optim.AdamW(self.model.parameters(), lr=0.01), finish=finish)

    @property
    def both(self):
        return (self.model, self.optimizer), (self.plain, self.stock)

    def step(self, seed=0):
        for model, optimizer in self.both:
            step(model, optimizer, seed)

    @property
    def waiting(self):
        return self.optimizer._steps.waiting

    def require_same(self):
        assert all(map(torch.equal, fulls(self.model.parameters()), self.plain.parameters()))
        states, golden = self.optimizer.state_dict()["state"], self.stock.state_dict()["state"]
        assert all(torch.equal(*fulls([states[i][name], golden[i][name]])) for i in golden for name in golden[i])


@pytest.fixture
def pair(tmp_path):
    return Pair(tmp_path)


def test_a_step_is_taken_unit_by_unit_by_the_forward_that_reads_it(pair):
    pair.step()
    assert "before the next forward" in str(pair.optimizer)
    assert pair.waiting is not None
    chunks = len(pair.optimizer.states.chunks)
    assert pair.waiting.progress == f"0 of {chunks} chunks"
    seen = []
    for block in pair.model.blocks:
        block.register_forward_pre_hook(lambda *_: seen.append(pair.waiting.progress if pair.waiting else "all"))
    pair.model(tokens(1))
    done = [int(progress.split()[0]) for progress in seen]
    # The root, the unit itself, which is entered before hooks of the user, and the one fetched.
    assert done == [3, 4, 5, 5], seen
    assert pair.waiting.progress == f"{chunks} of {chunks} chunks"
    pair.require_same()


@pytest.mark.parametrize("kinds", [("optim",), ("params", "optim"), ("grads", "optim")])
def test_what_is_in_memory_is_stepped_at_once(tmp_path, kinds):
    """Anybody can read it."""
    pair = Pair(tmp_path, kinds=kinds)
    pair.step()
    assert pair.waiting is None


def edited_whole(pair):
    with zf.unsharded(pair.model, writeback=True), torch.no_grad():
        assert all(map(torch.equal, pair.model.parameters(), pair.plain.parameters()))
        for model in (pair.model, pair.plain):
            model.blocks[1].up.weight.mul_(0.5)


def saved(pair):
    read = Language(blocks=4)
    with tempfile.TemporaryDirectory() as folder:
        zf.save(f"{folder}/step-2", pair.model)
        zf.load(folder, read)
    assert all(map(torch.equal, read.parameters(), pair.plain.parameters()))


def handed_over(pair):
    assert all(torch.equal(value, pair.plain.get_parameter(name)) for name, value in zf.weights(pair.model))


def loaded(pair):
    """States of before, which come after the step that waits."""
    with tempfile.TemporaryDirectory() as folder:
        zf.save(f"{folder}/step-2", pair.model, pair.optimizer)
        states = copy.deepcopy(pair.stock.state_dict())
        pair.step(3)
        assert pair.waiting is not None
        zf.load(folder, pair.model, pair.optimizer, only="optimizer")
    pair.stock.load_state_dict(states)


def inferred(pair):
    with torch.inference_mode():
        pair.model(tokens(5))
    pair.step(2)


READS = {
    "a parameter": lambda pair: pair.model.blocks[3].down.weight.detach().clone(),
    "state_dict": lambda pair: {name: value.clone() for name, value in pair.model.state_dict().items()},
    "states": lambda pair: pair.optimizer.state_dict(),
    "step counts": lambda pair: len(pair.optimizer.state),
    "a copy": lambda pair: copy.deepcopy(pair.model),
    "evaluation": lambda pair: pair.model(tokens(9)),
    "evaluation in inference mode, and a step": inferred,
    "whole parameters, and an edit of them": edited_whole,
    "another transform": lambda pair: zf.precision(pair.model, compute=torch.bfloat16),
    "eviction": lambda pair: zf.offload_states(pair.model, pair.optimizer, to=zf.cpu()).restore(),
    "a checkpoint of the weights": saved,
    "weights for another engine": handed_over,
    "states that are loaded": loaded,
    "the next step": lambda pair: pair.step(7),
}


@pytest.mark.parametrize("reads", READS)
def test_whoever_reads_finds_it_stepped(pair, reads):
    pair.step(1)
    pair.step(2)
    READS[reads](pair)
    pair.require_same()


@pytest.mark.parametrize("rate", [float, torch.tensor])
def test_edits_and_gradients_after_a_step_are_those_of_one_that_was_finished(pair, rate):
    for model, optimizer in pair.both:
        for group in optimizer.param_groups:
            group["lr"] = rate(0.01)
        backward(model, 1)
        optimizer.step()  # gradients stay, are added to, scaled, and cleared in place
        for group in optimizer.param_groups:
            group["lr"] *= 100.0
        backward(model, 2)
        with torch.no_grad():
            model.blocks[2].up.weight.mul_(0.5)
            model.blocks[1].up.weight.grad.mul_(2.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        with torch.no_grad():
            model.norm.weight.fill_(0.25)
    pair.require_same()


def test_nothing_is_read_that_is_still_being_written(tmp_path, monkeypatch):
    """Whatever the disk does first: a read may pass a write, which is under way until somebody has waited for it."""
    monkeypatch.setattr("zero_fn.storage.tier_storage.io_backend", Lazy)
    pair = Pair(tmp_path)
    for seed in range(3):
        pair.step(seed)
    pair.model(tokens(3))
    pair.require_same()


@pytest.mark.parametrize("is_in_a_cycle", [False, True])
def test_parameters_outlive_their_optimizer(pair, is_in_a_cycle):
    pair.step(1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(pair.optimizer, lambda _: 1.0) if is_in_a_cycle else None
    del pair.optimizer, scheduler
    gc.collect()
    assert all(map(torch.equal, fulls(pair.model.parameters()), pair.plain.parameters()))


def test_a_model_that_is_gone_is_not_stepped(pair, monkeypatch):
    pair.step(1)
    waiting, reached = weakref.ref(pair.waiting), []
    monkeypatch.setattr(ChunkPipeline, "reach", lambda _, count: reached.append(count))
    gc.disable()
    try:
        del pair.model, pair.optimizer
        assert waiting() is None, "it keeps the memory of a model that nobody has"
    finally:
        gc.enable()
    assert reached == []


@pytest.mark.parametrize("finishes", [("forward", "forward"), ("forward", "step"), ("step", "forward")])
@pytest.mark.parametrize("second", ["every other parameter", "one of the second unit"])
def test_two_optimizers_may_step_the_same_parcels(pair, second, finishes):
    for model in (pair.model, pair.plain):
        named = list(model.named_parameters())
        of_second = [name for name, _ in named[1::2]] if "other" in second else ["blocks.0.up.weight"]
        parts = [[p for name, p in named if (name in of_second) == is_second] for is_second in (False, True)]
        optimizers = [torch.optim.AdamW(parts[0], lr=0.01), torch.optim.SGD(parts[1], lr=0.1, momentum=0.9)]
        if model is pair.model:
            optimizers = [zf.streamed(each, finish=how) for each, how in zip(optimizers, finishes, strict=True)]
        for seed in range(3):
            backward(model, seed)
            for optimizer in optimizers * 2:  # and again, with no forward between
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    assert all(map(torch.equal, fulls(pair.model.parameters()), pair.plain.parameters()))


@pytest.mark.parametrize("moment", ["forward", "the next step", "states"])
@on_ranks(2)
def test_a_disk_that_fails_in_a_step_that_waited_is_an_error_on_every_rank(folder, moment):
    pair = Pair(folder, lambda model: zf.shard_params(model, axis()))
    pair.step(1)
    states = copy.deepcopy(pair.optimizer.state_dict())
    values = {key: value.clone() for key, value in pair.model.state_dict().items()}
    pair.step(2)
    acts = {
        "forward": lambda: pair.model(tokens(7)), "the next step": pair.optimizer.step, "states": pair.optimizer.state_dict
    }  # fmt: skip
    fails = axis().get_local_rank() == 1
    told = "^(Reading from|Writing to)" if fails else "failed on rank 1"
    with failing(where=fails), pytest.raises(zf.errors.StorageError, match=told):
        acts[moment]()
    for _ in range(2):  # the disk is well again: what is half stepped stays so
        with pytest.raises((zf.errors.StorageError, zf.errors.StateError)):
            pair.optimizer.step()
    pair.optimizer.load_state_dict(states)
    pair.model.load_state_dict(values)
    step(pair.model, pair.optimizer, 2)
    pair.require_same()


@pytest.mark.parametrize("finish", ["step", "forward"])
@on_ranks(2)
def test_one_rank_may_read_states_that_every_rank_has_whole(folder, finish):
    pair = Pair(folder, lambda model: zf.replicate(model, axis()), finish=finish)
    pair.step(1)
    if axis().get_local_rank() == 0:
        pair.require_same()
    pair.step(2)
