"""Blocks of an arena never overlap, come lowest first, and are given back one at a time."""

import os
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory files exist on Linux")

import zero_fn as zf  # noqa: E402
from zero_fn.one_host.arena import Arena, map_arena  # noqa: E402


@given(st.lists(st.one_of(st.integers(0, 1000), st.integers(-20, -1)), max_size=60))
@example([0, 100, -1])  # a free block of no bytes once shared its address with the next, and freed it too
def test_live_blocks_are_disjoint(actions):
    """A number from 0 allocates that many bytes, a negative one frees a live block."""
    arena = Arena()
    live = {0: 16}  # the token
    try:
        for action in actions:
            if action < 0:
                starts = [start for start in live if start]
                if starts:
                    start = starts[action % len(starts)]
                    arena.free(start)
                    del live[start]
                continue
            start = arena.allocate(action)
            assert start not in live
            assert start % 128 == 0
            assert all(start + action <= other or start >= other + nbytes for other, nbytes in live.items())
            live[start] = action
    finally:
        arena.close_file()


def test_an_arena_refuses_what_it_has_no_room_for():
    arena = Arena()
    with pytest.raises(zf.errors.TierError, match="Messages to ranks of this host need"):
        arena.allocate(arena.mapped.memory.numel())
    assert arena.allocate(1000)
    arena.close_file()


def test_a_mapped_arena_is_the_same_memory_and_a_wrong_one_is_refused():
    arena = Arena()
    seen = map_arena(os.getpid(), arena.fd, arena.token)
    assert seen is not None
    arena.mapped.memory[500] = 7
    assert seen.memory[500] == 7
    arena.mapped.words[100] = -9
    assert seen.words[100] == -9
    assert map_arena(os.getpid(), arena.fd, bytes(16)) is None
    assert map_arena(os.getpid(), 10**6, arena.token) is None
    arena.close_file()


def test_pages_after_the_last_block_go_back_to_the_system():
    arena = Arena(head_nbytes=3000)
    start = arena.allocate(10_000_000)
    assert start is not None and start >= 3128
    arena.mapped.words[16] = 5  # in the head
    arena.mapped.memory[start : start + 10_000_000] = 1
    used = os.fstat(arena.fd).st_blocks * 512
    arena.free(start)
    arena.trim()
    assert used >= 10_000_000
    assert os.fstat(arena.fd).st_blocks * 512 <= 8192
    assert arena.mapped.words[16] == 5
    assert not arena.mapped.memory[8192 : start + 10_000_000].any()
    arena.close_file()
