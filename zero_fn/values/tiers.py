"""Kinds of memory in which training state can rest, as values.

    cpu()              memory of the host, pinned where there is an accelerator to copy to
    nvme("/scratch")   files on a disk, or on several, unnamed, read and written past the page cache

A tier says where and how much; making the memory or the file is the business of `storage`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from zero_fn.errors import LayoutError, TierError

__all__ = [
    "IN_MEMORY",
    "Cpu",
    "Nvme",
    "Tier",
    "Tiers",
    "bytes_text",
    "cpu",
    "is_accelerator",
    "is_away",
    "nbytes_of_text",
    "nvme",
]

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
    """Files in folders of local disks.

    Attributes:
        paths: The folders, one on each disk.
        limit_nbytes: The most that may be taken by this rank, on all of them; None is what is free.
    """

    paths: tuple[str, ...]
    limit_nbytes: int | None

    def __str__(self) -> str:
        limit = "" if self.limit_nbytes is None else f", limit={self.limit_nbytes}"
        return f"nvme({', '.join(map(repr, self.paths))}{limit})"


Tier = Cpu | Nvme


@dataclass(frozen=True, slots=True)
class Tiers:
    """The tiers of the three states of a parameter; None is the memory of the device.

    Attributes:
        params: Where the resting parameter is between uses.
        grads: Where its gradient is from backward to the step.
        optim: Where the states of its optimizer are between steps.
        fraction: Of the bytes of those states, how much is in that tier; the rest stays on the device.
    """

    params: Tier | None = None
    grads: Tier | None = None
    optim: Tier | None = None
    fraction: float = 1.0

    def join(self, other: Tiers) -> Tiers:
        """The tiers that satisfy both.

        Raises:
            LayoutError: The two ask for different tiers of the same state.
        """
        for name in ("params", "grads", "optim"):
            one, two = getattr(self, name), getattr(other, name)
            if one is not None and two is not None and (one != two or self._differs(name, other)):
                raise LayoutError(
                    f"Two transforms ask for different tiers of {name}.",
                    first=one,
                    second=two,
                    fix=f"pass one offload(model, {name}=...) per parameter; select parameters with where=",
                )
        return Tiers(
            self.params or other.params,
            self.grads or other.grads,
            self.optim or other.optim,
            self.fraction if self.optim is not None else other.fraction,
        )

    def __str__(self) -> str:
        part = f" ({self.fraction:g} of it)" if self.fraction != 1 else ""
        named = ((name, getattr(self, name)) for name in ("params", "grads", "optim"))
        return ", ".join(f"{name} in {tier}" for name, tier in named if tier is not None) + part

    def _differs(self, name: str, other: Tiers) -> bool:
        return name == "optim" and self.fraction != other.fraction


IN_MEMORY = Tiers()


def is_away(tier: Tier | None, device_type: str) -> bool:
    """Whether what rests in a tier is elsewhere than in the memory of a device of this type.

    Where a model computes on the CPU, `cpu()` is that memory.
    """
    return tier is not None and (is_accelerator(device_type) or not isinstance(tier, Cpu))


def is_accelerator(device_type: str) -> bool:
    """Whether devices of this type have memory that is not the host's."""
    return device_type not in ("cpu", "meta")


def cpu(*, pinned: bool = True, limit: int | str | None = None) -> Cpu:
    """The memory of the host as a tier.

    Where the model itself computes on the CPU this is the device's own memory: nothing is copied.

    Args:
        pinned: Register the memory with the accelerator, so that copies run beside computation. Without an accelerator
            there is nothing to register with, and memory stays as it is.
        limit: The most bytes this rank may take for each of what it holds there (parameters, gradients, the states of an
            optimizer), as a number or as text: `"4GiB"`, `"500MB"`. None: what is available.

    Returns:
        A value; no memory is taken.

    Raises:
        TierError: `limit` is not a size.
    """
    return Cpu(pinned, None if limit is None else nbytes_of_text(limit, "limit"))


def nvme(path: str | os.PathLike[str], *more: str | os.PathLike[str], limit: int | str | None = None) -> Nvme:
    """A folder of a local disk as a tier; with more paths, folders of several disks that are used as one.

    Files in it have no name, so that jobs cannot meet in one, nobody else can open them, and any death of the process
    frees them.

    Args:
        path: An existing folder on a local disk; on a network file system it works, slowly.
        *more: Folders of other disks. What rests in the tier is cut into stripes of 2 MiB that lie on the disks in turn and
            are read and written at once (RAID-0), so the tier is as large as the smallest of them times their number.
        limit: The most bytes this rank may take on all disks, with all tiers that are equal to this one together, as a number
            or as text: `"200GiB"`. None: what is free.

    Returns:
        A value; no file is made.

    Raises:
        TierError: `limit` is not a size, or a path is given twice.
    """
    paths = tuple(os.fspath(folder) for folder in (path, *more))
    if len(set(paths)) < len(paths):
        raise TierError(
            "nvme() was given a path twice.",
            paths=", ".join(paths),
            why="stripes on one disk would wait for one another",
            fix="name one folder on each disk: zf.nvme('/disk0', '/disk1')",
        )
    return Nvme(paths, None if limit is None else nbytes_of_text(limit, "limit"))


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
