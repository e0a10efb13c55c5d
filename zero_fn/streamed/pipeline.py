"""Fetches chunks ahead, hands each to a function, and writes it back, in a few buffers.

    chunk        0      1      2      3      4         with four buffers
    fetch        ====   ====   ====   ....   ....      two ahead of the one that is computed
    compute             ####   ####   ####
    write back                 ====   ====   ====

Reads and writes are under way beside each other and beside the computation; what is slowest decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

from torch import Tensor

from zero_fn.errors import StorageError
from zero_fn.storage import Transfer
from zero_fn.streamed.store import Store

__all__ = ["Stored", "each_chunk"]


class Stored(Protocol):
    """What rests in a store as one."""

    nbytes: int
    place: int
    is_stored: bool


C = TypeVar("C", bound=Stored)


def each_chunk(store: Store, chunks: Sequence[C], compute: Callable[[C, Tensor], None], *, writes: bool = True) -> None:
    """Brings each chunk into memory, in order, calls `compute(chunk, buffer)`, and puts it back.

    Args:
        store: Where they rest.
        chunks: What to visit. Those that the store does not hold yet come with a buffer of any content.
        compute: What to do with each; it may change the buffer.
        writes: Whether buffers were changed and are to be put back.

    Raises:
        StorageError: A read or a write failed. Nothing is under way any more.
    """
    ahead = max(store.buffers // 2, 1)
    fetches: dict[int, tuple[Tensor, Transfer | None]] = {}
    puts: dict[int, Transfer] = {}
    try:
        for turn, chunk in enumerate(chunks):
            for later in range(turn + len(fetches), min(turn + ahead + 1, len(chunks))):
                _wait(puts.pop(later - store.buffers, None))
                fetches[later] = _fetched(store, later, chunks[later])
            buffer, transfer = fetches[turn]
            _wait(transfer)
            del fetches[turn]
            compute(chunk, buffer)
            put = store.keep(chunk.place, buffer) if writes and chunk.nbytes else None
            chunk.is_stored |= writes
            if put is not None:
                puts[turn] = put
        while puts:
            _wait(puts.pop(min(puts)))
    finally:
        for left in (*(transfer for _, transfer in fetches.values()), *puts.values()):
            with suppress(StorageError):  # the first failure is the one that is told
                _wait(left)


def _fetched(store: Store, turn: int, chunk: Stored) -> tuple[Tensor, Transfer | None]:
    buffer = store.buffer(turn, chunk.place, chunk.nbytes)
    return buffer, store.fetch(chunk.place, buffer) if chunk.is_stored and chunk.nbytes else None


def _wait(transfer: Transfer | None) -> None:
    if transfer is not None:
        transfer.wait()
