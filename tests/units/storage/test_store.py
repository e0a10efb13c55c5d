"""Places on a disk that are used again: each gives what was put there last."""

from __future__ import annotations

from dataclasses import dataclass
from unittest.mock import Mock

import pytest
import torch

from zero_fn.errors import TierError
from zero_fn.storage import DiskStorage, Store, Stored
from zero_fn.storage.host_memory import Available
from zero_fn.values.tiers import cpu, nvme


@dataclass
class Filled(Stored):
    """Bytes of one value."""

    value: int
    nbytes: int = 5000


def _put(store, *members):
    for member in members:
        store.reserve([member], torch.device("cpu"))
        room = store.fetch(member)
        room.memory.fill_(member.value)
        store.keep(member, room)


def test_a_place_that_was_read_ahead_and_freed_gives_what_was_put_there_last(tmp_path):
    store = Store(nvme(tmp_path), "activations")
    first, *others = members = [Filled(number) for number in range(6)]
    _put(store, *members)
    nbytes = store.nbytes
    store.fetch(first)
    store.free(first)
    last = Filled(7)
    _put(store, last)
    assert last.place == first.place
    assert store.nbytes == nbytes
    for member in (last, *others):
        assert torch.equal(store.get(member), torch.full((5000,), member.value, dtype=torch.uint8))


def test_a_place_on_the_host_is_given_to_as_many_bytes_only():
    """What lies there together lies back to back: more bytes would reach into the next."""
    store = Store(cpu(), "activations")
    first, second = Filled(1, nbytes=100), Filled(2, nbytes=200)
    store.reserve([first, second], torch.device("cpu"))
    for member in (first, second):
        store.fetch(member).memory.fill_(member.value)
    store.free(first)
    _put(store, Filled(3, nbytes=150))
    assert torch.equal(store.get(second), torch.full((200,), 2, dtype=torch.uint8))


def test_a_byte_string_without_room_is_counted_with_none_that_come_later(tmp_path, monkeypatch):
    """One that was too large locked out all others, and took room of the disk at each try."""
    little = Available(1 << 20, "cgroup /job")
    monkeypatch.setattr("zero_fn.storage.host_memory.available", lambda: little)
    store = Store(nvme(tmp_path), "activations")
    _put(store, first := Filled(1))
    taken = store.nbytes, store.buffers_nbytes
    for _ in range(3):
        with pytest.raises(TierError, match="buffers of activations need"):
            _put(store, Filled(2, nbytes=1 << 20))
    assert (store.nbytes, store.buffers_nbytes) == taken
    _put(store, other := Filled(3, nbytes=9000))
    for member in (first, other):
        assert store.get(member).eq(member.value).all()


def test_an_interrupt_before_a_read_has_begun_keeps_no_buffer(tmp_path, monkeypatch):
    """All later byte strings passed through memory of their own, which is not pinned."""
    store = Store(nvme(tmp_path), "activations")
    _put(store, *(members := [Filled(number) for number in range(4)]))
    store.forget()
    with monkeypatch.context() as patched:
        patched.setattr(DiskStorage, "read", Mock(side_effect=KeyboardInterrupt))
        for member in members:
            with pytest.raises(KeyboardInterrupt):
                store.fetch(member)
    assert isinstance(disk := store._storage, DiskStorage)
    assert len(disk._free) == disk.stagings.count == 4
