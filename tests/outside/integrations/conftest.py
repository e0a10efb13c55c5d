"""Ranks that know the libraries."""

import pytest


@pytest.fixture
def prepared(ranks, request):
    """Two ranks that have imported the libraries, and what the file of tests calls `NEEDED`, which may take longer than a
    collective may wait for a peer."""
    from tests.outside.integrations.worlds import import_all

    ranks(2, deadline_s=300).run(import_all, *getattr(request.module, "NEEDED", ()))
    return ranks
