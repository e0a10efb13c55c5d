"""Ranks agree that they hold the same program before the first collective that would hang if they did not."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from zero_fn.errors import DisagreementError

__all__ = ["agree", "agree_along", "content_digest", "differ", "digest"]


def digest(rows: Sequence[str]) -> bytes:
    """16 bytes that differ when any row does."""
    return blake2b("\n".join(rows).encode(), digest_size=16).digest()


def content_digest(tensor: Tensor) -> int:
    """The sum of the bits of a tensor as integers: differs, in practice, between two initialisations."""
    if tensor.device.type == "meta" or not tensor.numel():
        return 0
    whole = tensor.detach().contiguous().view(-1)
    bits = (torch.view_as_real(whole) if whole.is_complex() else whole).view(-1)
    integers = bits.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(bits.element_size(), torch.int64))
    # As words of 8 bytes where memory is read at any address: 16 GiB/s on a core, and 0.5 as 4 bytes each.
    in_word = 8 // integers.element_size() if integers.device.type == "cpu" else 1
    if in_word == 1:
        return int(integers.sum(dtype=torch.int64).item())
    in_words = integers.numel() // in_word * in_word
    words = integers[:in_words]
    if words.storage_offset() % in_word:
        words = words.clone()
    return int((words.view(torch.int64).sum() + integers[in_words:].sum(dtype=torch.int64)).item())


class Exchanges(Protocol):
    """What moves messages for an agreement."""

    def exchange(self, message: Tensor) -> Tensor:
        """Returns the uint8 messages of all ranks, one row each; lengths must agree. Waits."""


def agree(transport: Exchanges, what: str, rows: Sequence[str], *, device: torch.device, why: str, fix: str) -> None:
    """Raises on every rank if any rank holds other rows.

    Communicates 16 bytes to each peer, and the rows only if they differ. Waits.

    Args:
        transport: Of the axis.
        what: What the rows describe, for the message: "layout", "initial values".
        rows: One line per parameter, in the same order on every rank.
        device: Where messages are made.
        why: What would go wrong.
        fix: How to mend it.

    Raises:
        DisagreementError: Names the first two ranks and the first row that differ.
    """
    differing = differ(transport, rows, device=device)
    if not differing:
        return
    raise _disagreement(transport, what, (0, differing[0]), rows, device=device, why=why, fix=fix)


def agree_along(
    transport: Exchanges,
    sizes: Sequence[int],
    what: str,
    rows: Sequence[Sequence[str]],
    *,
    device: torch.device,
    why: str,
    fix: str,
) -> None:
    """`agree` on a grid of ranks, where some rows must be the same along one of its axes only.

    Communicates 16 bytes for each axis to each peer, and the rows only if they differ. Waits.

    Args:
        transport: Of all ranks of the grid, those of its first axis together.
        sizes: Of the axes.
        what: What the rows describe, for the message.
        rows: For each axis, what ranks along it must hold alike.
        device: Where messages are made.
        why: What would go wrong.
        fix: How to mend it.

    Raises:
        DisagreementError: On every rank of the grid. Names two ranks and the first row that differ.
    """
    own = torch.frombuffer(bytearray(b"".join(map(digest, rows))), dtype=torch.uint8).to(device)
    digests = transport.exchange(own).cpu().view(-1, len(rows), own.numel() // len(rows))
    for number, (size, held) in enumerate(zip(sizes, rows, strict=True)):
        step = prod(sizes[:number])
        for rank in range(len(digests)):
            first = rank - rank // step % size * step
            if not torch.equal(digests[rank, number], digests[first, number]):
                raise _disagreement(transport, what, (first, rank), held, device=device, why=why, fix=fix)


def _disagreement(
    transport: Exchanges,
    what: str,
    ranks: tuple[int, int],
    rows: Sequence[str],
    *,
    device: torch.device,
    why: str,
    fix: str,
) -> DisagreementError:
    """The error for two ranks that hold different rows. Exchanges the rows of all ranks; waits."""
    texts = _exchange_texts(transport, "\n".join(("rows", *rows)), device)
    first, second = (texts[rank].split("\n")[1:] for rank in ranks)
    at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    found = {
        f"rank_{rank}": held[at] if at < len(held) else f"nothing after {len(held)} parameters"
        for rank, held in zip(ranks, (first, second), strict=True)
    }
    return DisagreementError(f"Ranks {ranks[0]} and {ranks[1]} hold different {what}.", **found, why=why, fix=fix)


def differ(transport: Exchanges, rows: Sequence[str], *, device: torch.device) -> list[int]:
    """The ranks that hold other rows than rank 0. Communicates 16 bytes to each peer; waits."""
    own = torch.frombuffer(bytearray(digest(rows)), dtype=torch.uint8).to(device)
    digests = transport.exchange(own).cpu()
    return [rank for rank in range(len(digests)) if not torch.equal(digests[rank], digests[0])]


def _exchange_texts(transport: Exchanges, text: str, device: torch.device) -> list[str]:
    raw = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    length = torch.tensor([raw.numel()], dtype=torch.int64).view(torch.uint8).to(device)
    lengths = transport.exchange(length).cpu().view(torch.int64).flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: raw.numel()] = raw
    rows = transport.exchange(padded).cpu()
    return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]
