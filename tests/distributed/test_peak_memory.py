"""The peak of a ZeRO-3 step, counted: every storage that an operation makes, and the blocks of the rank's arena."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import zero_fn as zf
from tests.support.ranks import Ranks, axis
from zero_fn.one_host.arena import Arena

WIDTH = 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Recomputed(Block):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(super().forward, x, use_reentrant=True)
        return y


_resize = torch.UntypedStorage.resize_


class Storages(TorchDispatchMode):
    """Bytes of the storages made, or given memory, inside the block that are alive, now and at most.

    A storage that is a range of another is no memory of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, tuple[int, int]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if type(t) is Tensor}
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if type(tensor) is Tensor and tensor.untyped_storage()._cdata not in given:
                self._note(tensor.untyped_storage())
        return made

    def __enter__(self) -> Storages:
        def resized(storage: torch.UntypedStorage, nbytes: int) -> None:
            _resize(storage, nbytes)
            if storage._cdata in self._alive or nbytes:
                self._note(storage)

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._alive:
            weakref.finalize(storage, self._drop, storage._cdata)
        self._drop(storage._cdata)
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        if not any(first <= start and end <= last for first, last in self._alive.values()):
            self._alive[storage._cdata] = start, end
        self.now += end - start if storage._cdata in self._alive else 0
        self.peak = max(self.peak, self.now)

    def _drop(self, key: int) -> None:
        start, end = self._alive.pop(key, (0, 0))
        self.now -= end - start


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
                model(torch.randn(1, WIDTH, requires_grad=True)).square().mean().backward()
                gradients = zf.held(model).gradients
    finally:
        Arena.allocate = allocate  # type: ignore[method-assign]
    return (storages.peak - gradients) / unit_nbytes, arena_nbytes / unit_nbytes


@pytest.mark.parametrize("n", [2, 4])
def test_a_zero3_step_needs_four_units_above_rest_whatever_the_depth(ranks: Ranks, n: int) -> None:
    """Weights and gradients of one unit and of what is under way, of which a part rests; the arena, where messages lie until
    all peers read them, holds two units more at the most."""
    for blocks in (4, 10):
        for storages, arena in ranks(n).run(_peak, blocks, Block):
            assert 1 < storages <= 4 - 1 / n
            assert arena <= 2.1


@pytest.mark.parametrize("n", [2, 4])
def test_reentrant_checkpoints_need_little_more_whatever_the_depth(ranks: Ranks, n: int) -> None:
    """Reductions that are on no schedule were once waited for at the end of the backward: five units of ten blocks.

    A unit stays gathered until the backward around its recomputation goes on, so beside its own reduction too.
    """
    for blocks in (4, 10):
        for storages, arena in ranks(n).run(_peak, blocks, Recomputed):
            assert 1 < storages <= 4 + 1.1 / n
            assert arena <= 2.1
