"""Ranks meet in a store that outlives them, as torchrun's does: those of one start, or they say who is missing."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch.distributed as dist

import zero_fn as zf
from tests.support.messages import refused
from zero_fn.errors import LostRankError
from zero_fn.local.rendezvous import meet


@pytest.fixture
def port(monkeypatch):
    """Of a store that no rank keeps."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield store.port
    del store


class Start:
    """Ranks that meet, each in a thread."""

    def __init__(self, port, ranks, timeout_s=20.0):
        self._given, self._threads = (port, ranks, timeout_s), ThreadPoolExecutor(ranks)
        self._met = []

    def begin(self, *ranks):
        port, size, timeout_s = self._given
        self._met += [self._threads.submit(meet, "127.0.0.1", port, rank, size, "me", timeout_s) for rank in ranks]

    def assert_has_a_part(self):
        """All have met in one part of the store, in which nothing was."""
        stores = [each.result(30) for each in self._met]
        assert not any(store.check(["mark"]) for store in stores)
        stores[0].set("mark", "")
        assert all(store.check(["mark"]) for store in stores)

    def errors(self):
        raised = [each.exception(30) for each in self._met]
        assert all(isinstance(error, LostRankError) for error in raised), raised
        return [str(error).splitlines()[0] for error in raised]


def test_each_start_has_a_part_of_the_store_for_itself_whoever_comes_first(port):
    for ranks in ([0, 1, 2], [2, 1, 0], [1], [1, 0]):
        start = Start(port, 3)
        start.begin(*ranks[:1])
        time.sleep(0.1)  # the first has read what the start before has left
        start.begin(*(set(range(3)) - {ranks[0]}))
        start.assert_has_a_part()


def test_ranks_that_come_are_told_who_is_missing_and_later_ones_are_not(port):
    start = Start(port, 12, timeout_s=0.5)
    start.begin(0, 2)
    missing = "rank 1, 3, 4, 5, 6, 7, 8, 9 and 2 more"
    assert start.errors() == [f"Rank {rank} of 12 did not meet {missing}." for rank in (0, 2)]
    later = Start(port, 3)
    later.begin(2)
    time.sleep(0.1)
    later.begin(1, 0)
    later.assert_has_a_part()


def test_without_rank_0_the_others_say_so_in_time(port):
    before = Start(port, 2)
    before.begin(0, 1)
    before.assert_has_a_part()
    start, began = Start(port, 2, timeout_s=0.3), time.monotonic()
    start.begin(1)
    assert start.errors() == ["Rank 1 of 2 did not meet the others."]
    assert time.monotonic() - began < 10


def test_a_rank_alone_says_where_nobody_listens():
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    here = zf.from_environment({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", **address})
    with mock.patch.dict(os.environ), refused("started_where_nobody_listens"):
        here.start(timeout_s=1)
