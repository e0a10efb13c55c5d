"""Files that are damaged for a while, and are whole again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

__all__ = ["flip", "flipped", "instead"]


@contextmanager
def instead(path: Path, raw: bytes) -> Iterator[None]:
    """Inside, the file has these bytes."""
    whole = path.read_bytes()
    path.write_bytes(raw)
    try:
        yield
    finally:
        path.write_bytes(whole)


def flip(path: Path, at: int = -1, bit: int = 0) -> bytes:
    """The bytes of a file, of which one bit is another."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1 << bit
    return bytes(raw)


def flipped(paths: list[Path], times: int, random: Random) -> Iterator[Path]:
    """Flips one bit of one of these files after another, and yields the file; a byte of any is as likely."""
    sizes = [path.stat().st_size for path in paths]
    for path in random.choices(paths, sizes, k=times):
        with instead(path, flip(path, random.randrange(path.stat().st_size), random.randrange(8))):
            yield path
