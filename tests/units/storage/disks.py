"""Disks that fail: small ones, read-only ones, and answers of the kernel that are not those hoped for."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from zero_fn.storage import Slab, TierStorage
from zero_fn.storage.files import SpillFile
from zero_fn.storage.io import Request, Threads
from zero_fn.values.tiers import cpu

__all__ = ["Lazy", "answers", "failing", "filled", "old_disk", "overwrite", "reserved", "small_disk"]


class Lazy(Threads):
    """Begins requests when somebody waits for them."""

    def submit(self, requests: Sequence[Request]) -> None:
        self._begun.extend(requests)


def reserved(shelf: TierStorage, nbytes: int) -> int:
    """The place of a range of its own."""
    (place,) = shelf.reserve([nbytes])
    return place


def filled(nbytes: int, seed: int = 0) -> Slab:
    """Memory with random bytes."""
    slab = Slab(nbytes, cpu(), "test")
    slab.memory.random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return slab


def overwrite(file: SpillFile, values: bytes | bytearray | memoryview, offset: int = 0) -> None:
    """What flips bits, or another program, does to a file without a name."""
    with open(f"/proc/self/fd/{file.fd}", "r+b", buffering=0) as opened:
        os.pwrite(opened.fileno(), values, offset)
        os.fsync(opened.fileno())


@contextmanager
def small_disk(path: Path, options: str = "size=1m") -> Iterator[Path]:
    """A file system in memory of its own at `path`; skips the test where mounting is not allowed."""
    path.mkdir(exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@contextmanager
def old_disk(path: Path) -> Iterator[Path]:
    """A file system of 16 MB that takes direct I/O and cannot reserve room (ext2, as NFS before 4.2 and some of FUSE); skips
    the test where it cannot be made."""
    path.mkdir(exist_ok=True)
    image = path.with_suffix(".image")
    image.write_bytes(bytes(16 << 20))
    for command in (["mkfs.ext2", "-q", image], ["mount", "-o", "loop", image, path]):
        try:
            subprocess.run(command, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"cannot make an old file system: {error}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@contextmanager
def failing(code: int = errno.EIO, *, reads: bool = True, writes: bool = True, where: bool = True) -> Iterator[None]:
    """Inside, the kernel refuses what any engine asks for.

    Args:
        code: Its answer, a number of `errno`.
        reads: Whether it refuses reads.
        writes: Whether it refuses writes.
        where: False changes nothing: to be said on the ranks whose disk is well.
    """
    advance = Request.advance

    def refused(request: Request, result: int) -> None:
        advance(request, -code if (writes if request.is_write else reads) else result)

    if where:
        Request.advance = refused  # type: ignore[method-assign]
    try:
        yield
    finally:
        Request.advance = advance  # type: ignore[method-assign]


def answers(monkeypatch: pytest.MonkeyPatch, change: Callable[[Request, int], int]) -> list[int]:
    """From now on the kernel answers requests of any engine with `change(request, answer)`. Returns a list of all answers."""
    advance = Request.advance
    given: list[int] = []

    def changed(request: Request, result: int) -> None:
        given.append(change(request, result))
        advance(request, given[-1])

    monkeypatch.setattr(Request, "advance", changed)
    return given
