"""Checks that all ranks hold the same rows of text (layouts, values): else a later collective would hang or mix up bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from zero_fn.errors import DisagreementError
from zero_fn.values.mesh import Axis

__all__ = ["agree", "agree_along", "content_digest", "content_digests", "differ", "digest", "exchange_bytes"]

Exchange = Callable[[Tensor], Tensor]
"""Sends a message of bytes to all ranks and returns the messages of all, a row each. They must have one length. Waits."""


def digest(rows: Sequence[str]) -> bytes:
    """16 bytes that differ if any row differs."""
    return blake2b("\n".join(rows).encode(), digest_size=16).digest()


def content_digest(tensor: Tensor) -> int:
    """The sum of the bits of a tensor as integers. In practice it differs between two initialisations."""
    return content_digests([tensor])[0]


def content_digests(tensors: Iterable[Tensor]) -> list[int]:
    """The sums of the bits of tensors. The host waits for a device once, not for each tensor."""
    sums = [_sum_of_bits(tensor) for tensor in tensors]
    found = dict.fromkeys(range(len(sums)), 0)
    for device in {each.device for each in sums}:
        places = [place for place, each in enumerate(sums) if each.device == device]
        found.update(zip(places, torch.stack([sums[place] for place in places]).tolist(), strict=True))
    return list(found.values())


def _sum_of_bits(tensor: Tensor) -> Tensor:
    if tensor.device.type == "meta" or not tensor.numel():
        return torch.zeros((), dtype=torch.int64, device="cpu")  # also under a default device
    whole = tensor.detach().contiguous()
    whole = whole.as_strided((whole.numel(),), (1,))  # a single element may have any stride; a view as words needs 1
    bits = (torch.view_as_real(whole) if whole.is_complex() else whole).view(-1)
    integers = bits.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(bits.element_size(), torch.int64))
    # Summed as words of 8 bytes: on a core of a CPU 16 GiB/s, and 0.5 with 4 bytes each, which CUDA would copy as 8 first.
    in_word = 8 // integers.element_size()
    in_words = integers.numel() // in_word * in_word
    words = integers[:in_words]
    if words.storage_offset() % in_word:
        words = words.clone()
    return words.view(torch.int64).sum() + integers[in_words:].sum(dtype=torch.int64)


def agree(exchange: Exchange, what: str, rows: Sequence[str], *, why: str, fix: str) -> None:
    """Raises on every rank if any rank holds other rows. `what` they describe ("layout"), `why` and `fix` are for the error.

    Communicates 16 bytes to each peer, and the rows only if they differ. Waits.

    Raises:
        DisagreementError: Names two ranks and the first row that differ.
    """
    _require_equal(exchange, what, [rows], (), why, fix)


def agree_along(
    exchange: Exchange,
    axes: Sequence[Axis],
    what: str,
    rows: Sequence[tuple[Sequence[Axis], str]],
    *,
    why: str,
    fix: str,
) -> None:
    """`agree` for rows that need not be the same along every axis: experts differ along theirs, shards along those that cut.
    Each row comes with the axes along which it must be. Ranks of the first of `axes` have consecutive numbers in `exchange`.

    Communicates 16 bytes for each axis to each peer, if there are rows. Waits.
    """
    along = [[row for alike, row in rows if axis in alike] for axis in axes]
    if any(along):
        _require_equal(exchange, what, along, [axis.size for axis in axes], why, fix)


def differ(exchange: Exchange, rows: Sequence[str]) -> bool:
    """Whether any rank holds other rows than rank 0. Communicates 16 bytes to each peer; waits."""
    digests = exchange(_bytes(digest(rows)))
    return not torch.equal(digests, digests[:1].expand_as(digests))


def _require_equal(
    exchange: Exchange, what: str, rows: Sequence[Sequence[str]], sizes: Sequence[int], why: str, fix: str
) -> None:
    """Compares, along each axis of a grid of ranks, the rows for that axis. Without sizes there is one axis, of all ranks."""
    found = exchange(_bytes(b"".join(map(digest, rows))))
    digests = found.view(len(found), len(rows), -1)
    step = 1
    for number, (size, held) in enumerate(zip(sizes or [len(digests)], rows, strict=True)):
        for rank in range(len(digests)):
            first = rank - rank // step % size * step
            if not torch.equal(digests[rank, number], digests[first, number]):
                raise _disagreement(exchange, what, (first, rank), held, why, fix)
        step *= size


def _disagreement(
    exchange: Exchange, what: str, ranks: tuple[int, int], rows: Sequence[str], why: str, fix: str
) -> DisagreementError:
    """The error for two ranks that hold different rows. Exchanges the rows of all ranks; waits."""
    texts = exchange_bytes(exchange, "\n".join(("rows", *rows)).encode())
    first, second = (texts[rank].decode().split("\n")[1:] for rank in ranks)
    at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    found = {
        f"rank_{rank}": held[at] if at < len(held) else f"nothing after {len(held)} parameters"
        for rank, held in zip(ranks, (first, second), strict=True)
    }
    return DisagreementError(f"Ranks {ranks[0]} and {ranks[1]} hold different {what}.", **found, why=why, fix=fix)


def exchange_bytes(exchange: Exchange, raw: bytes) -> list[bytes]:
    """What each rank gives, of any length. Waits."""
    lengths = exchange(torch.tensor([len(raw)]).view(torch.uint8)).view(torch.int64).flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(raw)] = _bytes(raw)
    return [row[:length].numpy().tobytes() for row, length in zip(exchange(padded), lengths, strict=True)]


def _bytes(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
