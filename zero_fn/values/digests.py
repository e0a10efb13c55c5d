"""Digests of the values of tensors: by them ranks compare what they hold."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from zero_fn.values.strides import as_flat

__all__ = ["content_digest", "content_digests"]


def content_digest(tensor: Tensor) -> int:
    """The sum of the bits of a tensor as integers.

    In practice it differs between two initialisations.
    """
    return content_digests([tensor])[0]


def content_digests(tensors: Iterable[Tensor]) -> list[int]:
    """The sums of the bits of tensors. The host waits for a device once, not for each tensor."""
    sums = [_sum_of_bits(tensor) for tensor in tensors]
    found = dict.fromkeys(range(len(sums)), 0)
    for device in {each.device for each in sums}:
        places = [place for place, each in enumerate(sums) if each.device == device]
        found.update(
            zip(places, torch.stack([sums[place] for place in places]).tolist(), strict=True)
        )
    return list(found.values())


def _sum_of_bits(tensor: Tensor) -> Tensor:
    if tensor.device.type == "meta" or not tensor.numel():
        return torch.zeros((), dtype=torch.int64, device="cpu")  # also under a default device
    whole = tensor.detach().contiguous()
    whole = as_flat(whole)  # a single element may have any stride; a view as words needs 1
    bits = (torch.view_as_real(whole) if whole.is_complex() else whole).view(-1)
    integers = bits.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(bits.element_size(), torch.int64)
    )
    # Summed as words of 8 bytes: on a core of a CPU 16 GiB/s, and 0.5 with 4 bytes each,
    # which CUDA would copy as 8 first.
    in_word = 8 // integers.element_size()
    in_words = integers.numel() // in_word * in_word
    words = integers[:in_words]
    if words.storage_offset() % in_word:
        words = words.clone()
    return words.view(torch.int64).sum() + integers[in_words:].sum(dtype=torch.int64)
