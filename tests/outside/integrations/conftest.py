"""Ranks that know the libraries."""

from __future__ import annotations

import pytest

from tests.support.ranks import Ranks


@pytest.fixture
def prepared(ranks: Ranks, request: pytest.FixtureRequest) -> Ranks:
    """Two ranks that have imported the libraries, and what the file of tests calls `NEEDED`, which may take longer than a
    collective may wait for a peer."""
    from tests.outside.integrations.worlds import import_all

    ranks(2, deadline_s=300).run(import_all, *getattr(request.module, "NEEDED", ()))
    return ranks
