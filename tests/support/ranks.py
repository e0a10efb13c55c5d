"""Persistent ranks for tests: one pool of processes per number of ranks, for the whole session.

    def mean_of_ranks(scale):                       # runs on every rank, in an initialized gloo group
        x = torch.full((2,), scale * dist.get_rank())
        dist.all_reduce(x)
        return x

    def test_ranks_agree(ranks):
        first, second = ranks(2).run(mean_of_ranks, 3.0)
        assert torch.equal(first, second)

A case costs about a millisecond. It ends in one of four ways: a list of values; the exception that a rank raised, with
the traceback of the rank as its cause; `RankDied`; or `RankHung`, with the stacks of the ranks that did not return in
time. After anything but values the processes are killed, and the next case gets fresh ones from the warm fork server
(0.1 s), so that a failing example of Hypothesis cannot poison the next.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import cloudpickle  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.support.seeds import seed_generator
from zero_fn.kernels import library, nontemporal
from zero_fn.local.launcher import LocalRanks
from zero_fn.tiers import parcels
from zero_fn.transport.rank0_messages import set_timeout

__all__ = ["Case", "Ranks", "axis", "freeze", "hide_slow_imports", "let_kernels_take_small_tensors", "sent_by_value"]

R = TypeVar("R")

_COLLECTIVE_TIMEOUT = timedelta(seconds=20)
_MANY_MODULES = 100
_MANY_GROUPS = 100


def let_kernels_take_small_tensors() -> None:
    """Models of tests are small: from here on what they send meets the kernels in C, and torch below.

    The kernels are compiled, or found, now: not in the first collective, which may have a second to wait for its peers.
    """
    nontemporal._LEAST_NBYTES = 256
    library()


def hide_slow_imports() -> None:
    """Of packages that transformers and jsonschema import only where they are installed: they take 8 and 6 s of a core."""
    for name in ("comet_ml", "rfc3987_syntax"):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]


@functools.cache
def axis() -> DeviceMesh:
    """The mesh axis "dp" over all ranks of the pool, on torch's default device. To be called on the ranks."""
    kind = torch.get_default_device().type
    return init_device_mesh("cpu" if kind == "meta" else kind, (dist.get_world_size(),), mesh_dim_names=("dp",))


class Ranks:
    """The fixture `ranks`: `ranks(2).run(fn, *args, **kwargs)` runs a case on 2 persistent ranks.

    Attributes:
        executed: Cases that were given to ranks so far, whatever came of them.
        generations: How often processes were started, for each number of ranks.
    """

    def __init__(self) -> None:
        self.executed = 0
        self.generations: dict[int, int] = {}
        self._pools: dict[int, LocalRanks] = {}

    def __call__(self, n: int, *, deadline_s: float = 60.0) -> Case:
        """A case on `n` ranks that must return within `deadline_s` seconds."""
        return Case(self, n, deadline_s)

    def close(self) -> None:
        """Ends all processes."""
        while self._pools:
            _, pool = self._pools.popitem()
            pool.close()

    def _run(self, case: Case, fn: Callable[..., R], args: tuple[object, ...], kwargs: dict[str, object]) -> list[R]:
        self.executed += 1
        pool = self._pools.pop(case.n, None) or self._start(case.n)
        # A pool that raised has killed its ranks and is not put back.
        with sent_by_value(fn):
            found = pool.run(_isolated, (fn, args, kwargs), timeout_s=case.deadline_s)
        # Groups live as long as their process, each with a thread and open files.
        if any(groups > _MANY_GROUPS for _, groups in found):
            pool.close()
        else:
            self._pools[case.n] = pool
        return [value for value, _ in found]

    def _start(self, n: int) -> LocalRanks:
        self.generations[n] = self.generations.get(n, 0) + 1
        return LocalRanks(n)


@dataclass(frozen=True, slots=True)
class Case:
    """A number of ranks and a deadline in seconds."""

    ranks: Ranks
    n: int
    deadline_s: float

    def run(self, fn: Callable[..., R], *args: object, **kwargs: object) -> list[R]:
        """Runs `fn(*args, **kwargs)` on every rank.

        Args:
            fn: Any function; its test module is moved as it is here, not imported by the ranks.

        Returns:
            The value of each rank, in the order of ranks.

        Raises:
            Exception: Whatever the first rank that raised has raised.
            RankDied: A rank was killed or exited.
            RankHung: The deadline has passed; says where the ranks were.
        """
        return self.ranks._run(self, fn, args, kwargs)


def _isolated(fn: Callable[..., R], args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[R, int]:
    """Runs a case as if it were the first of its process. Returns its value, and how many process groups there are now."""
    set_timeout(_COLLECTIVE_TIMEOUT)
    random.seed(0)
    seed_generator(0)
    torch.set_num_threads(1)  # libraries and cases may have set more, which sums in another order
    parcels._LANDING_NBYTES = 256  # of what rests on disks, ranks read all that may be straight into its place
    let_kernels_take_small_tensors()
    hide_slow_imports()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module=r"zero_fn(\.|$)")
        warnings.filterwarnings("ignore", ".*(is stepped on the host without fused=True|without float32 masters)")
        known = len(sys.modules)
        value = fn(*args, **kwargs)
    if len(sys.modules) > known + _MANY_MODULES:
        freeze()
    return value, len(c10d._world.pg_map)


def freeze() -> None:
    """What is there stays: collections of garbage, of which libraries ask for many, no longer look at modules."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def sent_by_value(fn: Callable[..., object]) -> Iterator[None]:
    """The module that defines a case goes as it is here, unless it is this one or part of a library, which ranks import."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__module__", None) or ""
    is_importable = name in ("__main__", __name__, "builtins") or name.split(".")[0] in ("zero_fn", "torch")
    if is_importable or name not in sys.modules:
        yield
        return
    cloudpickle.register_pickle_by_value(sys.modules[name])
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[name])
