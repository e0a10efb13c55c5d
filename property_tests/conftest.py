"""The fixtures, warnings and Hypothesis profiles of `tests/conftest.py`, also when only these tests run."""

import tests.conftest as suite
from tests.conftest import _seed, fresh_ranks, local_tensor, pytest_xdist_auto_num_workers, ranks, simulated

__all__ = ["_seed", "fresh_ranks", "local_tensor", "pytest_xdist_auto_num_workers", "ranks", "simulated"]


def pytest_configure(config):
    if not config.pluginmanager.is_registered(suite):
        config.pluginmanager.register(suite, "tests.conftest")
