"""Fetches chunks ahead, hands each to a function, and writes it back, in a few buffers.

    chunk        0      1      2      3      4         with four buffers
    fetch        ====   ====   ====   ....   ....      two ahead of the one that is computed
    compute             ####   ####   ####
    write back                 ====   ====   ====

Reads and writes are under way beside each other and beside the computation; what is slowest decides.

[Note: back and forth] The chunks that were computed last are still in the buffers. A pass that visits them in the other
direction begins with those: it reads four buffers less, and has work from its first moment, while the disk fetches the rest.
So whatever the disk could not be asked to do before (a norm over all gradients decides by how much they are clipped) costs
a step no waiting for it.
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


def each_chunk(
    store: Store,
    chunks: Sequence[C],
    compute: Callable[[C, Tensor], None],
    *,
    writes: bool = True,
    backwards: bool = False,
) -> None:
    """Brings each chunk into memory, in order, calls `compute(chunk, buffer)`, and puts it back.

    Args:
        store: Where they rest.
        chunks: What to visit. Those that the store does not hold yet come with a buffer of any content.
        compute: What to do with each; it may change the buffer.
        writes: Whether buffers were changed and are to be put back.
        backwards: Whether to begin with the last. [Note: back and forth]

    Raises:
        StorageError: A read or a write failed. Nothing is under way any more.
    """
    ahead, last = max(store.buffers // 2, 1), len(chunks) - 1
    order = [(last - turn if backwards else turn) for turn in range(len(chunks))]
    fetches: dict[int, tuple[Tensor, Transfer | None]] = {}
    puts: dict[int, Transfer] = {}
    is_whole = False
    try:
        for turn, number in enumerate(order):
            for later in range(turn + len(fetches), min(turn + ahead + 1, len(chunks))):
                _wait(puts.pop(later - store.buffers, None))
                fetches[later] = _fetched(store, order[later], chunks[order[later]])
            chunk = chunks[number]
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
        is_whole = True
    finally:
        for left in (*(transfer for _, transfer in fetches.values()), *puts.values()):
            with suppress(StorageError):  # the first failure is the one that is told
                _wait(left)
        if not is_whole:
            store.forget()


def _fetched(store: Store, number: int, chunk: Stored) -> tuple[Tensor, Transfer | None]:
    buffer = store.buffer(number, chunk.place, chunk.nbytes)
    return buffer, store.fetch(chunk.place, buffer) if chunk.is_stored and chunk.nbytes else None


def _wait(transfer: Transfer | None) -> None:
    if transfer is not None:
        transfer.wait()
