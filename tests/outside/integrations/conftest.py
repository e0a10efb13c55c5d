"""Ranks that know the libraries."""

from __future__ import annotations

import pytest

from tests.outside.integrations.worlds import import_all
from tests.support.ranks import Ranks


@pytest.fixture
def prepared(ranks: Ranks) -> Ranks:
    """Two ranks that have imported the libraries, which may take longer than a collective may wait for a peer."""
    ranks(2, deadline_s=240).run(import_all)
    return ranks
