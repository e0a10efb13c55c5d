"""Files on disks, of reserved size and without names: no other process can open one, and the kernel
frees it when the process ends.

One range of bytes lies in several files that are read and written at once,
as RAID-0 does, in stripes of 2 MiB:

    bytes       |- stripe 0 -|- stripe 1 -|- stripe 2 -|- stripe 3 -|- 4 -|
    disk 0      |- stripe 0 -|- stripe 2 -|- 4 -|
    disk 1      |- stripe 1 -|- stripe 3 -|

On one disk the range is not cut.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import tempfile
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from zero_fn.errors import StorageError
from zero_fn.storage.host_memory import too_small
from zero_fn.values.tiers import bytes_text

__all__ = [
    "FULL",
    "STRIPE_NBYTES",
    "Extent",
    "SpillFile",
    "error_text",
    "extents_of",
    "opened",
    "share_of",
]

STRIPE_NBYTES = 2 << 20

FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""Error numbers of the system that mean that there is no room."""

_NO_FALLOCATE = frozenset((errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS))
_ZEROS_NBYTES = 8 << 20


class SpillFile:
    """An open file without a name."""

    def __init__(self, path: str, what: str) -> None:
        """Makes an empty file."""
        self.name = f"{what} in {path}"
        self.nbytes = 0  # reserved on the disk
        try:
            # is_direct: past the page cache.
            self.fd, self.is_direct = opened(partial(_unnamed, path))
        except OSError as error:
            raise _not_made(path, what, error) from error
        self.close = weakref.finalize(self, os.close, self.fd)

    def reserve(self, nbytes: int) -> None:
        """Reserves room on the disk, so that the file has `nbytes` in all."""
        if nbytes <= self.nbytes:
            return
        try:
            _allocate(self.fd, self.nbytes, nbytes)
        except BaseException as error:  # an interrupt, too, leaves what was reserved until then
            os.ftruncate(self.fd, self.nbytes)
            if not isinstance(error, OSError):
                raise
            if error.errno not in FULL:
                raise StorageError(
                    f"Room for {self.name} could not be reserved.",
                    needs=bytes_text(nbytes),
                    why=error_text(error),
                    fix="check the disk (dmesg), or choose another path: zf.nvme('/other_disk')",
                ) from error
            raise too_small(self.name, nbytes, *self._room(error), of="disk") from error
        self.nbytes = nbytes

    def shrink(self, nbytes: int) -> None:
        """Gives back the room beyond `nbytes`."""
        if nbytes < self.nbytes:
            os.ftruncate(self.fd, nbytes)
            self.nbytes = nbytes

    def _room(self, error: OSError) -> tuple[int, str]:
        """How large the file may become, and what sets that bound."""
        room = os.fstatvfs(self.fd)
        free_nbytes = room.f_bavail * room.f_frsize + self.nbytes
        if error.errno != errno.EFBIG:
            return free_nbytes, str(error.strerror)
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        if most == resource.RLIM_INFINITY:
            return self.nbytes, f"{error.strerror}: this file system takes no file so large"
        return min(
            free_nbytes, most
        ), f"{error.strerror}: the limit of the process on the size of a file (ulimit -f)"


def _not_made(path: str, what: str, error: OSError) -> StorageError:
    fix = "give a folder that exists and can be written, on a local disk: zf.nvme('/local_nvme')"
    bound = {}
    if error.errno == errno.EMFILE:
        bound = {
            "bound": (
                f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]} open files "
                "of the process (ulimit -n)"
            )
        }
        fix = (
            "ulimit -n 4096 before the program, "
            "or close files that it holds open (ls -l /proc/PID/fd)"
        )
    return StorageError(
        f"No file can be made in {path!r}.",
        path=os.path.abspath(path),
        needed_for=what,
        why=error_text(error),
        **bound,
        fix=fix,
    )


def error_text(error: OSError) -> str:
    """An error of the system by its name and in words."""
    return f"{errno.errorcode.get(error.errno or 0, error.errno)}: {error.strerror}"


def _allocate(fd: int, begin: int, end: int) -> None:
    """Takes room on the disk for the bytes of a file from `begin` to `end`."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, begin, end - begin)
            return
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                raise
    # A file system that cannot reserve (NFS before 4.2, ext2, some of FUSE), or macOS: writing
    # zeros takes the room. The C library would write single bytes, which direct I/O refuses.
    with mmap.mmap(-1, min(end - begin, _ZEROS_NBYTES)) as zeros, memoryview(zeros) as view:
        while begin < end:
            begin += os.pwrite(fd, view[: end - begin], begin)


def opened(open_with: Callable[[int], int]) -> tuple[int, bool]:
    """Opens a file by a function of flags; returns whether it takes direct I/O, too, which some
    file systems in memory do not."""
    direct = getattr(os, "O_DIRECT", 0)
    try:
        return open_with(direct), bool(direct)
    except OSError as error:
        if error.errno != errno.EINVAL or not direct:
            raise
    return open_with(0), False


def _unnamed(path: str, flags: int) -> int:
    flags |= os.O_RDWR | os.O_CLOEXEC
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(path, flags | os.O_TMPFILE | os.O_EXCL, 0o600)
        except OSError as error:
            # A file system without unnamed files, or a kernel that takes the flag for O_DIRECTORY.
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOSYS):
                raise
    # A name that no other job has; mode 0600.
    made, name = tempfile.mkstemp(prefix=".zero_fn.", dir=path)
    try:
        return os.open(name, flags)
    finally:
        os.unlink(name)
        os.close(made)


class Extent(NamedTuple):
    """Bytes that lie in a row on one disk."""

    start: int  # the first of them in the range that was asked for
    nbytes: int
    disk: int  # its number
    offset: int  # the first byte in the file of the disk


def extents_of(begin: int, nbytes: int, disks: int, largest_nbytes: int) -> Iterator[Extent]:
    """A range of bytes, cut where it continues on another disk or would be
    longer than `largest_nbytes`."""
    start = 0
    while start < nbytes:
        left = min(nbytes - start, largest_nbytes)
        if disks == 1:
            yield Extent(start, left, 0, begin + start)
        else:
            stripe, within = divmod(begin + start, STRIPE_NBYTES)
            left = min(left, STRIPE_NBYTES - within)
            yield Extent(start, left, stripe % disks, stripe // disks * STRIPE_NBYTES + within)
        start += left


def share_of(disk: int, nbytes: int, disks: int) -> int:
    """How many of the first `nbytes` bytes lie on the disk of this number."""
    stripes, rest = divmod(nbytes, STRIPE_NBYTES)
    whole, more = divmod(stripes, disks)
    return (whole + (disk < more)) * STRIPE_NBYTES + (rest if disk == more else 0)
