"""Fixtures of the whole suite: ranks, seeds, strict warnings, the profile of Hypothesis, and how many processes run tests.

[Note: one thread] Ranks have one thread each, and an oracle that adds with two rounds in another way. Every thread that
runs an operation of torch would also leave a pool of native threads behind, and simulated ranks are threads.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.simulation import Simulated
from tests.support.faults import FreshRanks
from tests.support.local_tensor import LocalTensors
from tests.support.profiles import load_profile
from tests.support.ranks import Ranks, freeze, hide_slow_imports, let_kernels_take_small_tensors
from tests.support.seeds import seed_generator
from tests.support.watchdog import Watchdog

load_profile()
torch.set_num_threads(1)  # [Note: one thread]
let_kernels_take_small_tensors()
hide_slow_imports()


class Tier(Protocol):
    """A way to have ranks."""

    executed: int  # cases so far

    def close(self): ...


TIERS = {
    "simulated": Simulated,
    "local_tensor": LocalTensors,
    "ranks": Ranks,
    "fresh_ranks": FreshRanks,
}
"""By the name of their fixture. A new tier is a line here and a fixture below."""

TIERS_OPEN = pytest.StashKey[dict[str, Tier]]()
_WORKERS = 4


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", r"error:::zero_fn(\.|$)")
    config.stash[TIERS_OPEN] = {name: make() for name, make in TIERS.items()}
    config.pluginmanager.register(RanksAreUsed(), "zero_fn_tiers")
    config.pluginmanager.register(NothingIsLeft(), "zero_fn_left")
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):  # it runs tests itself
        config.pluginmanager.register(Watchdog(), "zero_fn_watchdog")


def pytest_collection_finish():
    freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """How many processes share the tests, each with ranks of its own: as many as cores, for whole folders; none for files.

    Ranks wait for one another most of the time, and simulated ones use one core: two processes keep two cores busy.
    """
    are_folders = all(Path(argument).is_dir() for argument in config.args)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _WORKERS) if are_folders and cores > 1 else 0


def _tier(request):
    tier = request.config.stash[TIERS_OPEN][request.fixturename or ""]
    yield tier
    tier.close()


@pytest.fixture(scope="session")
def simulated(request):
    """Ranks in this process: `simulated(2).run(fn, *args)` returns the value of each. See `tests/simulation`."""
    yield from _tier(request)


@pytest.fixture(scope="session")
def local_tensor(request):
    """8 to 64 ranks in this process: `with local_tensor(16) as world:`. See `tests/support/local_tensor.py`."""
    yield from _tier(request)


@pytest.fixture(scope="session")
def fresh_ranks(request):
    """Processes of their own for each case, to be killed: `fresh_ranks(2, "zero3", fault)`. See `tests/support/faults.py`."""
    yield from _tier(request)


@pytest.fixture(scope="session")
def ranks(request):
    """Persistent gloo ranks: `ranks(2).run(fn, *args)` returns the value of each rank. See `tests/support/ranks.py`."""
    yield from _tier(request)


@pytest.fixture(autouse=True)
def _seed():
    seed_generator(0)


class RanksAreUsed:
    """A test that has ranks and passes without running anything on them has tested nothing: it fails.

    A plugin: hooks of a conftest hear of the tests beside it only.
    """

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        function = item
        named = (
            function._fixtureinfo.argnames if hasattr(item, "_fixtureinfo") else ()
        )  # by itself, not by its fixtures
        given = {name: function.funcargs.get(name) for name in named}
        tiers = {name: tier for name, tier in item.config.stash[TIERS_OPEN].items() if given.get(name) is tier}
        before = {name: tier.executed for name, tier in tiers.items()}
        yield
        unused = [name for name, tier in tiers.items() if tier.executed == before[name]]
        assert not unused, f"nothing ran on {', '.join(unused)}"


class NothingIsLeft:
    """A test that leaves a process group behind, or the groups of simulated ranks, fails; the next one finds none."""

    shared = None  # the group of a fixture that several tests share, or of whoever runs the tests

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self):
        self.shared = dist.group.WORLD if dist.is_initialized() else None

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        before = dist.is_initialized()
        value = yield
        if fixturedef.scope != "function" and dist.is_initialized() and not before:
            self.shared = dist.group.WORLD
        return value

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self):
        yield
        assert isinstance(distributed_c10d._world, distributed_c10d._World), "simulated ranks have left their groups"
        if dist.is_initialized() and dist.group.WORLD is not self.shared:
            dist.destroy_process_group()
            raise AssertionError("the test has left a process group behind")
