"""Digests see what a disk does wrong, and are the same with and without a compiler."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zero_fn.kernels import Library
from zero_fn.kernels.checksum import SECTOR_NBYTES, digests

BLOCK_NBYTES = 8 * SECTOR_NBYTES


def filled(sectors: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (sectors * SECTOR_NBYTES,), dtype=torch.uint8, generator=generator)


def stated(memory: Tensor, block_nbytes: int) -> list[int]:
    """The formula of the module, in Python's integers."""
    found = []
    for block in memory.split(block_nbytes):
        value = 0
        for sector in block.split(SECTOR_NBYTES):
            words = [int.from_bytes(bytes(word.tolist()), "little") for word in sector.split(8)]
            value = (value * 6364136223846793005 + sum(words)) % 2**64
        found.append(value)
    return found


@given(sectors=st.integers(1, 20), block=st.integers(1, 20), seed=st.integers(0, 9))
def test_digests_follow_the_formula_with_and_without_a_compiler(sectors: int, block: int, seed: int) -> None:
    memory = filled(sectors, seed)
    expected = stated(memory, block * SECTOR_NBYTES)
    assert digests(memory, block * SECTOR_NBYTES) == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zero_fn.kernels.checksum.library", lambda: Library(None, None, "for this test"))
        assert digests(memory, block * SECTOR_NBYTES) == expected


def test_long_memory_has_the_digests_of_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many calls it takes."""
    memory = filled(8 * 5 + 3)
    expected = digests(memory, BLOCK_NBYTES)
    for kept_nbytes in (1, BLOCK_NBYTES, 2 * BLOCK_NBYTES + 1):
        monkeypatch.setattr("zero_fn.kernels.checksum._KEPT_NBYTES", kept_nbytes)
        assert digests(memory, BLOCK_NBYTES) == expected
    assert len(expected) == 6


def test_whatever_a_disk_does_wrong_changes_the_digest() -> None:
    block = filled(8)
    flipped = block.clone()
    flipped[1000] ^= 16
    first, second, *rest = block.split(SECTOR_NBYTES)
    wrong = [flipped, torch.cat([second, first, *rest]), torch.cat([second, second, *rest]), torch.zeros_like(block)]
    assert len({digests(b, BLOCK_NBYTES)[0] for b in (block, *wrong)}) == 5
    assert digests(block.clone(), BLOCK_NBYTES) == digests(block, BLOCK_NBYTES)
