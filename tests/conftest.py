"""Fixtures of the whole suite: ranks, seeds, strict warnings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.local_tensor import local_tensor as local_tensor  # a fixture
from tests.profiles import PROFILE
from tests.ranks import Ranks

settings.load_profile(PROFILE)

_RANKS = pytest.StashKey[Ranks]()
_WANTED = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", r"error:::zero_fn(\.|$)")
    config.stash[_RANKS] = Ranks()
    config.stash[_WANTED] = 0


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Persistent gloo ranks: `ranks(2).run(fn, *args)` returns the value of each rank. See `tests/ranks.py`."""
    pool = request.config.stash[_RANKS]
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.when == "call" and report.passed and "ranks" in getattr(item, "fixturenames", ()):
        item.config.stash[_WANTED] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A suite whose distributed tests pass without running anything on ranks has tested nothing: it fails."""
    if session.config.stash[_WANTED] and not session.config.stash[_RANKS].executed:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    wanted, executed = config.stash[_WANTED], config.stash[_RANKS].executed
    if wanted or executed:
        verdict = "" if executed else ": they tested nothing"
        terminalreporter.write_line(f"{wanted} tests on ranks passed, {executed} cases were executed{verdict}")
