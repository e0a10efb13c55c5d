"""What is freed, and when: after each use, at the end of a step, with `del model`. Nothing grows with steps or with models.

The collector of garbage is off while it is counted, so that a cycle of references is growth too.
"""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_fn as zf
from tests.support.models import Language, Odd
from tests.support.on_ranks import on_ranks
from tests.support.profiles import PROFILE
from tests.support.programs import STAGES, loss_of
from tests.support.ranks import Ranks, axis
from tests.support.storages import Storages
from tests.support.wholes import full
from tests.support.worlds import WIDTH, Tower, noise
from zero_fn.one_host.arena import Arena
from zero_fn.resting import local_of
from zero_fn.runtime.entry import runs_of, units_of
from zero_fn.runtime.group import Buffer

# -- with the step, and with the model --------------------------------------------------------------------------------


class Gathered:
    """Watches every storage that the runtime allocates for parameters, at rest and gathered."""

    def __init__(self) -> None:
        self.seen: list[weakref.ref[torch.UntypedStorage]] = []
        self._allocate = Buffer.allocate

    def __enter__(self) -> Gathered:
        seen, allocate = self.seen, self._allocate

        def watched(of: Buffer) -> torch.Tensor:
            buffer = allocate(of)
            seen.append(weakref.ref(buffer.untyped_storage()))
            return buffer

        Buffer.allocate = watched  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        Buffer.allocate = self._allocate  # type: ignore[method-assign]

    @property
    def alive(self) -> int:
        """How many still have memory."""
        return sum(1 for reference in self.seen if (storage := reference()) is not None and storage.nbytes())


def _loss(model: nn.Module, seed: int = 0) -> Tensor:
    loss: Tensor = model(noise(4, WIDTH, seed=seed)).square().mean()
    return loss


def _train(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        with zf.accumulate(model) if step else nullcontext():
            _loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def _evaluate(model: Any, optimizer: torch.optim.Optimizer) -> None:
    _loss(model)


def _fail(model: Any, optimizer: torch.optim.Optimizer) -> None:
    try:
        model(noise(4, WIDTH + 1, seed=0))
    except RuntimeError:  # `pytest.raises` would keep its frames in a cycle
        return
    raise AssertionError("nothing was raised")


def _drop_the_graph(model: Any, optimizer: torch.optim.Optimizer) -> None:
    _loss(model)


def _in_part(model: Any, optimizer: torch.optim.Optimizer) -> None:
    _loss(model).backward(inputs=list(model.leave.parameters()))


def _unshard(model: Any, optimizer: torch.optim.Optimizer) -> None:
    with zf.unsharded(model, writeback=True):
        _loss(model)


@pytest.mark.parametrize("program", [_train, _evaluate, _fail, _drop_the_graph, _in_part, _unshard])
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
@on_ranks(2)
def test_memory_is_freed_after_a_step_and_with_the_model(
    program: Callable[[Any, torch.optim.Optimizer], None], stage: str
) -> None:
    """After the first three programs nothing is gathered. After the others it is when the model is gone."""
    gc.collect()
    gc.disable()
    try:
        with Gathered() as storages:
            model: Any = STAGES[stage](Tower(), axis())
            kept, resting = storages.alive, zf.held(model).parameters
            assert kept == sum(len(unit.groups.members) for unit in units_of(model))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            program(model, optimizer)
            if program.__name__ in ("_train", "_evaluate", "_fail"):
                assert storages.alive == kept, "gathered parameters were not freed"
                assert zf.held(model).parameters == resting
            if stage == "zero3" and program.__name__ == "_train":
                assert len(storages.seen) >= kept + 4, "nothing was gathered"
            watched: dict[str, weakref.ref[Any]] = {"model": weakref.ref(model)}
            for name, p in model.named_parameters():
                watched[f"parameter {name}"] = weakref.ref(p)
                watched[name] = weakref.ref(local_of(p).untyped_storage())
                watched |= {f"{key} of {name}": weakref.ref(value) for key, value in optimizer.state[p].items()}
            for unit in units_of(model):
                watched[f"unit {unit.name}"] = weakref.ref(unit)
                watched[f"run {unit.name}"] = weakref.ref(runs_of(model, verb="test")[0])
            del model, optimizer, p, unit
            assert [name for name, reference in watched.items() if reference() is not None] == []
            assert storages.alive == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
@on_ranks(2)
def test_a_backward_may_outlive_the_model(stage: str) -> None:
    """Only the loss is kept; a backward of it touches names of modules that are gone."""
    torch.manual_seed(0)
    model: Any = STAGES[stage](Tower(), axis())
    parameters = list(model.parameters())
    x = noise(4, WIDTH, seed=0).requires_grad_()
    loss = model(x).square().mean()
    del model
    loss.backward()
    assert x.grad is not None
    assert all(parameter.grad is not None for parameter in parameters)


def _small() -> Any:
    torch.manual_seed(0)
    return zf.shard_params(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), axis())


def _fail_in_backward(*_: object) -> None:
    raise ZeroDivisionError


@on_ranks(2, deadline_s=20)
def test_another_model_trains_after_one_that_failed_in_backward_was_dropped() -> None:
    """Receives that nobody had waited for died with the model, the next took their messages for its own, and all hung."""
    found = []
    for fails in (False, True):
        if fails:
            model = _small()
            model[1].register_forward_hook(
                lambda module, args, output: output.register_hook(_fail_in_backward) and None
            )
            with pytest.raises(ZeroDivisionError):
                model(torch.ones(2, 4)).sum().backward()
            del model
            gc.collect()
        model = _small()
        model(torch.ones(2, 4)).sum().backward()
        found.append(full(model[0].weight.grad))
    assert torch.equal(*found)


# -- the peak ---------------------------------------------------------------------------------------------------------

WIDE = 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, 4 * WIDE), nn.Linear(4 * WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Recomputed(Block):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(super().forward, x, use_reentrant=True)
        return y


def _peak(blocks: int, block: type[Block]) -> tuple[float, float]:
    """Storages above the resting parameters and gradients, and arena blocks, at most, in units."""
    model = zf.zero3(nn.Sequential(*(block() for _ in range(blocks))), axis())
    unit_nbytes = sum(parameter.numel() for parameter in model[0].parameters()) * 4
    arena_nbytes = 0
    allocate = Arena.allocate

    def counted(arena: Arena, nbytes: int) -> int | None:
        nonlocal arena_nbytes
        start = allocate(arena, nbytes)
        arena_nbytes = max(arena_nbytes, sum(end - begin for begin, end in arena._blocks))
        return start

    Arena.allocate = counted  # type: ignore[method-assign]
    try:
        for _ in range(2):  # the second step follows a recorded schedule
            model.zero_grad()
            with Storages() as storages:
                model(torch.randn(1, WIDE, requires_grad=True)).square().mean().backward()
                gradients = zf.held(model).gradients
    finally:
        Arena.allocate = allocate  # type: ignore[method-assign]
    return (storages.peak - gradients) / unit_nbytes, arena_nbytes / unit_nbytes


@pytest.mark.parametrize(("block", "most"), [(Block, lambda n: 4 - 1 / n), (Recomputed, lambda n: 4 + 1.1 / n)])
@pytest.mark.parametrize("n", [2, 4])
def test_a_zero3_step_needs_four_units_above_rest_whatever_the_depth(
    ranks: Ranks, n: int, block: type[Block], most: Callable[[int], float]
) -> None:
    """Weights and gradients of one unit and of what is under way, of which a part rests; the arena, where messages lie until
    all peers read them, holds two units more at the most.

    Under a reentrant checkpoint a unit stays gathered until the backward around its recomputation goes on, so beside its own
    reduction too. Reductions that are on no schedule were once waited for at the end: five units of ten blocks.
    """
    for blocks in (4, 10):
        for storages, arena in ranks(n).run(_peak, blocks, block):
            assert 1 < storages <= most(n)
            assert arena <= 2.1


# -- growth -----------------------------------------------------------------------------------------------------------

IS_SHORT = PROFILE == "dev"
STEPS, CYCLES = (75, 15) if IS_SHORT else (2000, 500)
WARM_UP_STEPS, WARM_UP_CYCLES = (25, 6) if IS_SHORT else (100, 250)
"""The allocator reaches its size within 250 cycles of replicated models: 652 KiB, then 40 KiB more in 1,750 cycles."""

TOLERATED = {"files": 0, "arenas": 0, "tensors": 0, "objects": 20, "resident_nbytes": 2**20}
"""11 to 14 objects were seen, those of the first footprint among them; one more for every cycle would be too many."""


@dataclass(frozen=True)
class Footprint:
    """What this process holds."""

    resident_nbytes: int  # after Python and the allocator have given back what they could
    files: int  # open descriptors
    arenas: int  # mappings of shared memory, of this rank and of peers
    tensors: int  # that Python holds
    objects: int  # with references

    @staticmethod
    def now() -> Footprint:
        import ctypes  # here, because it cannot be sent to ranks

        objects = gc.get_objects()
        tensors = sum(issubclass(type(thing), torch.Tensor) for thing in objects)
        count = len(objects)
        del objects
        # Cycles have been counted. What a collection frees beside them are Python's lists of free tuples, which grow to 2000
        # of each length while there is none.
        gc.collect()
        ctypes.pythonapi.malloc_trim(0)
        with open("/proc/self/statm") as statm, open("/proc/self/maps") as maps:
            pages, mappings = int(statm.read().split()[1]), maps.read()
        return Footprint(
            pages * os.sysconf("SC_PAGE_SIZE"),
            len(os.listdir("/proc/self/fd")),
            mappings.count("memfd:zero_fn"),
            tensors,
            count,
        )


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-3, foreach=True)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Every other step accumulates two backwards."""
    accumulates = number % 2 == 1
    with zf.accumulate(model) if accumulates else nullcontext():
        for seed in range(2 if accumulates else 1):
            loss_of(model, seed).backward()
    optimizer.step()
    optimizer.zero_grad()


def _over_steps(stage: str) -> tuple[Footprint, Footprint]:
    model = STAGES[stage](Language(blocks=1), axis())
    optimizer = _optimizer(model)
    return _around(lambda number: _step(model, optimizer, number), WARM_UP_STEPS, STEPS)


def _over_models(stage: str) -> tuple[Footprint, Footprint]:
    """Also the shared memory and the open files of their transports, of which every transform makes a new one."""

    def cycle(number: int) -> None:
        model = STAGES[stage](Odd(), axis())
        _step(model, _optimizer(model), number)

    return _around(cycle, WARM_UP_CYCLES, CYCLES)


def _around(act: Callable[[int], None], warm_up: int, times: int) -> tuple[Footprint, Footprint]:
    gc.collect()
    gc.disable()
    try:
        for number in range(warm_up):
            act(number)
        gc.collect()  # what the first calls of torch left
        before = Footprint.now()
        for number in range(times):
            act(number)
        return before, Footprint.now()
    finally:
        gc.enable()


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.timeout(1100)
@pytest.mark.parametrize("act", [_over_steps, _over_models])
@pytest.mark.parametrize(
    "stage", ["zero1", "zero3", *(pytest.param(s, marks=pytest.mark.long) for s in ("replicate", "zero2"))]
)
def test_nothing_grows(ranks: Ranks, stage: str, act: Callable[[str], tuple[Footprint, Footprint]]) -> None:
    for before, after in ranks(2, deadline_s=1000).run(act, stage):
        grown = {name: value - asdict(before)[name] for name, value in asdict(after).items()}
        assert not {name: by for name, by in grown.items() if by > TOLERATED[name]}, (before, after)
