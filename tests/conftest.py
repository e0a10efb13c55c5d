"""Fixtures of the whole suite: ranks, seeds, strict warnings, the profile of Hypothesis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

import pytest
import torch

from tests.faults import FreshRanks
from tests.local_tensor import LocalTensors
from tests.profiles import load_profile
from tests.ranks import Ranks
from tests.simulation import Simulated

load_profile()


class Tier(Protocol):
    """A way to have ranks. A suite whose tests on it pass without executing a case has tested nothing: it fails."""

    executed: int

    def close(self) -> None: ...


TIERS: dict[str, Callable[[], Tier]] = {
    "simulated": Simulated,
    "local_tensor": LocalTensors,
    "ranks": Ranks,
    "fresh_ranks": FreshRanks,
}
"""By the name of their fixture. A new tier is a line here and a fixture below."""

_TIERS = pytest.StashKey[dict[str, Tier]]()
_PASSED = pytest.StashKey[Counter[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", r"error:::zero_fn(\.|$)")
    config.stash[_TIERS] = {name: make() for name, make in TIERS.items()}
    config.stash[_PASSED] = Counter()
    config.pluginmanager.register(_Counting(), "zero_fn_tiers")


def _tier(request: pytest.FixtureRequest) -> Iterator[Tier]:
    tier = request.config.stash[_TIERS][request.fixturename or ""]
    yield tier
    tier.close()


@pytest.fixture(scope="session")
def simulated(request: pytest.FixtureRequest) -> Iterator[Tier]:
    """Ranks in this process: `simulated(2).run(fn, *args)` returns the value of each. See `tests/simulation`."""
    yield from _tier(request)


@pytest.fixture(scope="session")
def local_tensor(request: pytest.FixtureRequest) -> Iterator[Tier]:
    """8 to 64 ranks in this process: `with local_tensor(16) as world:`. See `tests/local_tensor.py`."""
    yield from _tier(request)


@pytest.fixture(scope="session")
def fresh_ranks(request: pytest.FixtureRequest) -> Iterator[Tier]:
    """Processes of their own for each case, to be killed: `fresh_ranks(2, "zero3", fault)`. See `tests/faults.py`."""
    yield from _tier(request)


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Iterator[Tier]:
    """Persistent gloo ranks: `ranks(2).run(fn, *args)` returns the value of each rank. See `tests/ranks.py`."""
    yield from _tier(request)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class _Counting:
    """Counts tests that passed on each tier. A plugin: hooks of a conftest hear of the tests beside it only."""

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        outcome = yield
        report = outcome.get_result()  # type: ignore[attr-defined]
        if report.when == "call" and report.passed:
            item.config.stash[_PASSED].update(TIERS.keys() & set(getattr(item, "fixturenames", ())))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A suite whose distributed tests pass without running anything on ranks has tested nothing: it fails."""
    tiers, passed = session.config.stash[_TIERS], session.config.stash[_PASSED]
    if any(passed[name] and not tier.executed for name, tier in tiers.items()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for name, tier in config.stash[_TIERS].items():
        passed = config.stash[_PASSED][name]
        if passed or tier.executed:
            verdict = "" if tier.executed else ": they tested nothing"
            terminalreporter.write_line(
                f"{passed} tests on {name} passed, {tier.executed} cases were executed{verdict}"
            )
