"""8 to 64 ranks inside this process: torch's private `LocalTensorMode`, behind one fixture.

    def test_the_whole_is_gathered(local_tensor):
        with local_tensor(16) as world:
            x = world.each(lambda rank: torch.full((2,), float(rank)))
            total = dist.all_reduce(x)                  # autograd, DTensor and collectives see 16 ranks
            assert world.values(x)[3].equal(...)        # the tensor of one rank

A tensor holds the tensors of all ranks, an operation runs once for each, a collective moves bytes between them, and the
number of a rank is a `SymInt` with a value per rank. The program itself runs once. So what is simulated is a program in
which the rank enters arithmetic and nothing else: a branch on the rank raises.

[Note: what the simulator cannot do] Everything private of torch is used here and nowhere else. Three things are put right
while a world is open: `min` and `max` of Python compare, which is a branch on the rank, so the modules that cut by rank
get torch's symbolic ones; a simulated tensor has one address per rank, so `data_ptr` gives all of them; a simulated
storage has none, so its identity stands for it. Fused optimizers are wrong under the simulator (2.13), and agreement
between ranks compares a rank with itself, because control messages are made outside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import reduce
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import zero_fn.transport.segment
import zero_fn.values.layout
from tests.support.groups import pretended
from zero_fn.values.mesh import Axis, mesh_axis

__all__ = ["LocalTensors", "World"]


class World:
    """Simulated ranks.

    Attributes:
        n: How many.
        mesh: The axis "dp" over them.
        axis: The same, as the library sees it.
    """

    def __init__(self, mesh: DeviceMesh, mode: LocalTensorMode) -> None:
        self.n, self.mesh = mesh.size(), mesh
        self.axis: Axis = mesh_axis(mesh, verb="simulated")
        self._mode = mode

    def each(self, make: Callable[[int], Tensor]) -> Tensor:
        """One tensor, without history, that is `make(rank)` on every rank; sizes may differ, the number of dims may not."""
        return self._mode.rank_map(lambda rank: make(rank).detach())

    def values(self, tensor: Tensor) -> list[Tensor]:
        """The plain tensor of every rank; of a DTensor, its local tensors."""
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()
        if not isinstance(local, LocalTensor):
            return [local] * self.n  # made outside of the simulation: the same on every rank
        return [local._local_tensors[rank] for rank in range(self.n)]


class LocalTensors:
    """The fixture `local_tensor`: `with local_tensor(16) as world:` simulates 16 ranks.

    Attributes:
        executed: Worlds that were opened so far.
    """

    def __init__(self) -> None:
        self.executed = 0

    @contextmanager
    def __call__(self, n: int) -> Iterator[World]:
        self.executed += 1
        with ExitStack() as stack:
            mesh = stack.enter_context(pretended(n))
            for module in (zero_fn.values.layout, zero_fn.transport.segment):
                stack.enter_context(patch.object(module, "min", _least, create=True))
                stack.enter_context(patch.object(module, "max", _greatest, create=True))
            stack.enter_context(patch.object(LocalTensor, "data_ptr", _addresses, create=True))
            stack.enter_context(patch.object(torch.UntypedStorage, "data_ptr", _address_or_identity, create=True))
            mode = stack.enter_context(LocalTensorMode(n))
            yield World(mesh, mode)

    def close(self) -> None:
        """Nothing is left open."""


def _least(*values: Any) -> Any:
    return reduce(torch.sym_min, values if len(values) > 1 else values[0])


def _greatest(*values: Any) -> Any:
    return reduce(torch.sym_max, values if len(values) > 1 else values[0])


def _addresses(tensor: LocalTensor) -> tuple[int, ...]:
    return tuple(local.data_ptr() for local in tensor._local_tensors.values())


_address = torch.UntypedStorage.data_ptr


def _address_or_identity(storage: torch.UntypedStorage) -> int:
    try:
        return _address(storage)
    except RuntimeError:
        return int(storage._cdata)
