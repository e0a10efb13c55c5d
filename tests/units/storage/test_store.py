"""Places on a disk that are used again: each gives what was put there last."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from zero_fn.storage import Store
from zero_fn.values.tiers import cpu, nvme


@dataclass
class Filled:
    """Bytes of one value."""

    value: int
    nbytes: int = 5000
    place: int = 0
    is_stored: bool = False


def _put(store: Store, *members: Filled) -> None:
    for member in members:
        store.reserve([member], torch.device("cpu"))
        memory, _ = store.fetch(member)
        store.keep(member, memory.fill_(member.value))


def test_a_place_that_was_read_ahead_and_freed_gives_what_was_put_there_last(tmp_path: Path) -> None:
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


def test_a_place_on_the_host_is_given_to_as_many_bytes_only() -> None:
    """What lies there together lies back to back: more bytes would reach into the next."""
    store = Store(cpu(), "activations")
    first, second = Filled(1, nbytes=100), Filled(2, nbytes=200)
    store.reserve([first, second], torch.device("cpu"))
    for member in (first, second):
        store.keep(member, store.fetch(member)[0].fill_(member.value))
    store.free(first)
    _put(store, Filled(3, nbytes=150))
    assert torch.equal(store.get(second), torch.full((200,), 2, dtype=torch.uint8))
