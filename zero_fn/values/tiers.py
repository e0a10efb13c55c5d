"""Tiers: the kinds of memory, beside that of the device, in which training state can rest.

    cpu()              host memory, pinned if there is an accelerator
    nvme("/scratch")   unnamed files on one or several disks, read and written past the page cache

A tier is a value: it says where bytes rest, and how many may.
`zero_fn.storage` makes the memory or the file.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from zero_fn.errors import TierError
from zero_fn.values.join_rule import agreed

__all__ = [
    "IN_MEMORY",
    "Cpu",
    "Nvme",
    "Shelved",
    "Tier",
    "Tiers",
    "bytes_text",
    "cpu",
    "is_accelerator",
    "is_away",
    "is_disk",
    "nbytes_of_text",
    "nvme",
]

_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


@dataclass(frozen=True, slots=True)
class Cpu:
    """Host memory.

    Attributes:
        pinned: Whether the memory is registered with the accelerator, if there is one.
        limit_nbytes: Most bytes that this rank may take; None: all that is available.
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
        limit_nbytes: Most bytes that this rank may take, on all disks together;
            None: all that is free.
    """

    paths: tuple[str, ...]
    limit_nbytes: int | None

    def __str__(self) -> str:
        limit = "" if self.limit_nbytes is None else f", limit={self.limit_nbytes}"
        return f"nvme({', '.join(map(repr, self.paths))}{limit})"


Tier = Cpu | Nvme


@dataclass(frozen=True, slots=True)
class Tiers:
    """The tiers of the three states of a parameter; None is the memory of the device."""

    params: Tier | None = None  # between uses
    grads: Tier | None = None  # from backward to the step
    optim: Tier | None = None  # between steps
    # The part of the optimizer's states, in bytes, that is in that tier;
    # the rest stays on the device.
    fraction: float = 1.0

    def join(self, other: Tiers) -> Tiers:
        """The tiers that both ask for.

        Raises:
            LayoutError: The two ask for different tiers, or different fractions, of the same state.
        """
        params, grads, optim = (
            agreed(
                getattr(self, state),
                getattr(other, state),
                f"tiers of {state}",
                fix=f"pass one offload(model, {state}=...) per parameter; "
                "select parameters with where=",
            )
            for state in ("params", "grads", "optim")
        )
        fraction = agreed(
            None if self.optim is None else self.fraction,
            None if other.optim is None else other.fraction,
            "fractions of the optimizer states",
            fix="pass one offload(model, optim=..., fraction=...) per parameter; "
            "select parameters with where=",
        )
        return Tiers(params, grads, optim, 1.0 if fraction is None else fraction)

    @property
    def are_stepped_in_place(self) -> bool:
        """Whether states are stepped in memory of the host, and nothing rests on a disk."""
        return isinstance(self.optim, Cpu) and not any(
            isinstance(tier, Nvme) for tier in (self.params, self.grads)
        )

    def __str__(self) -> str:
        part = f" ({self.fraction:g} of it)" if self.fraction != 1 else ""
        named = ((name, getattr(self, name)) for name in ("params", "grads", "optim"))
        return ", ".join(f"{name} in {tier}" for name, tier in named if tier is not None) + part


IN_MEMORY = Tiers()


def is_away(tier: Tier | None, device_type: str) -> bool:
    """Whether a tier is other memory than that of a device of this type.

    `cpu()` is not, for a model that computes there.
    """
    return tier is not None and (is_accelerator(device_type) or not isinstance(tier, Cpu))


def is_disk(name: str) -> bool:
    """Whether a tier is on disks, of which there is the text alone."""
    return name.startswith("nvme(")


def is_accelerator(device_type: str) -> bool:
    """Whether devices of this type have memory of their own, beside the host's."""
    return device_type not in ("cpu", "meta")


def cpu(*, pinned: bool = True, limit: int | str | None = None) -> Cpu:
    """The memory of the host as a tier.

    Where the model itself computes on the CPU this is the device's own memory: nothing is copied.

    Args:
        pinned: Register the memory with the accelerator, so that copies run beside computation.
            Without an accelerator this does nothing.
        limit: Most bytes that this rank may take for each of parameters, gradients and the
            states of an optimizer, as a number or as text: `"4GiB"`, `"500MB"`. None: all
            that is available.

    Returns:
        A value; no memory is taken.

    Raises:
        TierError: `limit` is not a size.
    """
    return Cpu(pinned, None if limit is None else nbytes_of_text(limit, "limit"))


def nvme(
    path: str | os.PathLike[str], *more: str | os.PathLike[str], limit: int | str | None = None
) -> Nvme:
    """A folder of a local disk as a tier; with more paths,
    folders of several disks that are used as one.

    Files in the folder have no name: two jobs never share a file, no other process can open one,
    and the disk is freed when the process ends, however it ends.

    Args:
        path: An existing folder on a local disk; on a network file system it works, slowly.
        *more: Folders of other disks. The bytes of the tier are cut into stripes of 2 MiB that lie
            on the disks in turn and are read and written at once (RAID-0). So the tier holds as
            many bytes as the smallest disk, times their number.
        limit: Most bytes that this rank may take on all disks, in this tier and in all that are
            equal to it, as a number or as text: `"200GiB"`. None: all that is free.

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
    """Bytes of a size that is given as a number, or as text such as `"4GiB"`, `"500 MB"`, `"1.5G"`.

    Raises:
        TierError: `size` is not a positive size.
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


Shelved = tuple[str, Tier]
"""A kind of state ("parameters", their "compute copies" and "codes",
or "gradients") and the tier it rests in."""
