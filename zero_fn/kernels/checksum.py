"""Digests of blocks of memory that cost as much as reading them.

The 64-bit words of each sector of 512 bytes are summed, and the sums s of a block make a polynomial in an odd factor f:

    digest = s[0] f^(n-1) + s[1] f^(n-2) + ... + s[n-1]        modulo 2^64

It sees every error in a single word, every run of wrong words in a sector but one in 2^64, and sectors that are lost,
stale or in the wrong place; what it cannot see is words that change places inside one sector.

In C it goes at 108 GB/s on one core in the second-level cache, and beyond it as fast as one load of each cache line, 28 GB/s:
no other hash is faster, with whatever instructions. By numpy, the same digests, it is 12. A sum by torch waits for all its
threads, and beside other work on the same cores that took ten times as long; two threads in C were no faster beside a disk.

[Note: giving the interpreter away] Every call that releases the interpreter may wait 5 ms to have it back, when another
thread runs Python; 64 MiB are summed in 2.3. So calls in C keep it, for at most so many bytes each.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zero_fn.kernels.compiler import library

__all__ = ["SECTOR_NBYTES", "digests"]

SECTOR_NBYTES = 512
_FACTOR = 6364136223846793005  # odd: no sum of one sector is lost; 5 modulo 8: its powers repeat as late as they can
_KEPT_NBYTES = 64 << 20


def digests(memory: Tensor, block_nbytes: int) -> list[int]:
    """The digest, 64 bits, of each block.

    Args:
        memory: uint8, on the CPU, a multiple of 512 bytes, aligned to 8.
        block_nbytes: A multiple of 512; the last block may be shorter.
    """
    functions = library().kept
    if functions is None:
        return _by_numpy(memory, block_nbytes)
    step = max(_KEPT_NBYTES // block_nbytes, 1) * block_nbytes
    return [digest for part in torch.split(memory, step) for digest in _in_c(functions, part, block_nbytes)]


def _in_c(functions: ctypes.CDLL, memory: Tensor, block_nbytes: int) -> list[int]:
    found = (ctypes.c_uint64 * -(-memory.numel() // block_nbytes))()
    functions.zero_fn_digests(
        ctypes.c_void_p(memory.data_ptr()),
        ctypes.c_int64(memory.numel()),
        ctypes.c_int64(block_nbytes),
        ctypes.c_uint64(_FACTOR),
        found,
    )
    return list(found)


Words = npt.NDArray[np.uint64]


def _by_numpy(memory: Tensor, block_nbytes: int) -> list[int]:
    words = memory.numpy().view(np.uint64).reshape(-1, SECTOR_NBYTES // 8)
    sums: Words = np.add.reduce(words, axis=1)
    sectors = block_nbytes // SECTOR_NBYTES
    whole = len(sums) // sectors * sectors
    parts = [sums[:whole].reshape(-1, sectors), *([sums[whole:].reshape(1, -1)] if whole < len(sums) else [])]
    return [int(value) for part in parts for value in np.add.reduce(part * _powers(part.shape[1]), axis=1)]


@lru_cache(maxsize=16)
def _powers(count: int) -> Words:
    """Of the factor, the largest first."""
    factors = np.full(count, _FACTOR, dtype=np.uint64)
    factors[:1] = 1
    return np.ascontiguousarray(np.multiply.accumulate(factors)[::-1])
