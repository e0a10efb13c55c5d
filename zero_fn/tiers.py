"""Kinds of memory in which training state can rest, as values.

    cpu()              memory of the host, pinned where there is an accelerator to copy to
    nvme("/scratch")   files on a disk, unnamed, read and written past the page cache

A tier says where and how much; making the memory or the file is the business of `storage`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from zero_fn.errors import TierError

__all__ = ["Cpu", "Nvme", "Tier", "bytes_text", "cpu", "nbytes_of_text", "nvme"]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@dataclass(frozen=True, slots=True)
class Cpu:
    """Memory of the host.

    Attributes:
        pinned: Register it with the accelerator, if there is one.
        limit_nbytes: The most that may be taken on this rank; None is what is available.
    """

    pinned: bool
    limit_nbytes: int | None

    def __str__(self) -> str:
        limit = "" if self.limit_nbytes is None else f"limit={self.limit_nbytes}"
        return f"cpu({limit})"


@dataclass(frozen=True, slots=True)
class Nvme:
    """Files in a folder of a local disk.

    Attributes:
        path: The folder.
        limit_nbytes: The most that may be taken by this rank; None is what is free.
    """

    path: str
    limit_nbytes: int | None

    def __str__(self) -> str:
        limit = "" if self.limit_nbytes is None else f", limit={self.limit_nbytes}"
        return f"nvme({self.path!r}{limit})"


Tier = Cpu | Nvme


def cpu(*, pinned: bool = True, limit: int | str | None = None) -> Cpu:
    """The memory of the host as a tier.

    Where the model itself computes on the CPU this is the device's own memory: nothing is copied.

    Args:
        pinned: Register the memory with the accelerator, so that copies run beside computation. Without an accelerator
            there is nothing to register with, and memory stays as it is.
        limit: The most bytes this rank may take, as a number or as text: `"4GiB"`, `"500MB"`. None: what is available.

    Returns:
        A value; no memory is taken.

    Raises:
        TierError: `limit` is not a size.
    """
    return Cpu(pinned, None if limit is None else nbytes_of_text(limit, "limit"))


def nvme(path: str | os.PathLike[str], *, limit: int | str | None = None) -> Nvme:
    """A folder of a local disk as a tier.

    Files in it have no name, so that jobs cannot meet in one, nobody else can open them, and any death of the process
    frees them.

    Args:
        path: An existing folder on a local disk; on a network file system it works, slowly.
        limit: The most bytes this rank may take, as a number or as text: `"200GiB"`. None: what is free.

    Returns:
        A value; no file is made.

    Raises:
        TierError: `limit` is not a size.
    """
    return Nvme(os.fspath(path), None if limit is None else nbytes_of_text(limit, "limit"))


def nbytes_of_text(size: int | str, name: str) -> int:
    """Bytes of a size given as a number or as text such as `"4GiB"`, `"500 MB"`, `"1.5G"`. `name` is the argument's,
    for errors.

    Raises:
        TierError: It is not a positive size.
    """
    nbytes = 0
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?\s*", size)
        if match is not None:
            nbytes = int(float(match[1]) * _UNITS[match[2] or ""])
    elif isinstance(size, int) and not isinstance(size, bool):
        nbytes = size
    if nbytes <= 0:
        raise TierError(
            f"{name} is not a size in bytes.",
            got=repr(size),
            fix=f'{name}=4 * 2**30, or {name}="4GiB"',
        )
    return nbytes


def bytes_text(nbytes: int) -> str:
    """A number of bytes as errors show it: `"1.50 GiB"`."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{size:.2f} {unit}"
