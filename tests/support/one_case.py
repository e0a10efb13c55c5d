"""`-p tests.support.one_case`: of each test function one case, the one in the middle of its table. `.ci/run` has all."""

from __future__ import annotations

from collections import defaultdict

import pytest

__all__ = ["pytest_collection_modifyitems"]


@pytest.hookimpl(trylast=True)  # after marks have deselected theirs
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the other cases."""
    cases = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    kept = {id(each[len(each) // 2]) for each in cases.values()}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]
