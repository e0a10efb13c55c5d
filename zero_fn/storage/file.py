"""A file of reserved size that nobody else can name, freed with the process however that ends."""

from __future__ import annotations

import errno
import os
import tempfile
import weakref

from zero_fn.errors import StorageError, TierError
from zero_fn.tiers import bytes_text

__all__ = ["SpillFile", "too_small"]

_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


class SpillFile:
    """An open file without a name.

    Attributes:
        fd: The open file.
        name: What errors call it.
        nbytes: Bytes reserved on the disk.
        is_direct: Whether reads and writes pass the page cache by.
    """

    def __init__(self, path: str, what: str) -> None:
        """Makes an empty file.

        Raises:
            StorageError: The path is missing, is no folder, or cannot be written.
        """
        self.name = f"{what} in {path}"
        self.nbytes = 0
        try:
            self.fd, self.is_direct = _opened(path)
        except OSError as error:
            raise StorageError(
                f"No file can be made in {path!r}.",
                path=os.path.abspath(path),
                needed_for=what,
                why=f"{errno.errorcode.get(error.errno or 0, error.errno)}: {error.strerror}",
                fix="give a folder that exists and can be written, on a local disk: zf.nvme('/local_nvme')",
            ) from error
        self.close = weakref.finalize(self, os.close, self.fd)

    def reserve(self, nbytes: int) -> None:
        """Makes sure that the disk has room for `nbytes` in all, before anything relies on it.

        Raises:
            TierError: It has not. The file is as it was.
            StorageError: The disk failed.
        """
        if nbytes <= self.nbytes:
            return
        try:
            _allocate(self.fd, self.nbytes, nbytes - self.nbytes)
        except OSError as error:
            os.ftruncate(self.fd, self.nbytes)
            if error.errno not in _FULL:
                raise StorageError(
                    f"Room for {self.name} could not be reserved.",
                    needs=bytes_text(nbytes),
                    why=f"{errno.errorcode.get(error.errno or 0, error.errno)}: {error.strerror}",
                    fix="check the disk (dmesg), or choose another path: zf.nvme('/other_disk')",
                ) from error
            room = os.fstatvfs(self.fd)
            raise too_small(
                self.name, nbytes, room.f_bavail * room.f_frsize + self.nbytes, str(error.strerror)
            ) from error
        self.nbytes = nbytes

    def shrink(self, nbytes: int) -> None:
        """Gives back what was reserved beyond `nbytes`."""
        if nbytes < self.nbytes:
            os.ftruncate(self.fd, nbytes)
            self.nbytes = nbytes


def too_small(name: str, nbytes: int, room_nbytes: int, bound: str) -> TierError:
    """The error for a disk, or a limit, that leaves less room than is needed."""
    return TierError(
        f"{name} need {bytes_text(nbytes)} of disk, {bytes_text(room_nbytes)} can be taken.",
        needs=f"{nbytes} B",
        can_be_taken=f"{room_nbytes} B",
        bound=bound,
        why="room is reserved before anything moves; nothing was lost",
        fix="free that much, choose another disk: zf.nvme('/other_disk'), or use more ranks",
    )


def _allocate(fd: int, offset: int, nbytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, offset, nbytes)
        return
    room = os.fstatvfs(fd)  # macOS: nothing is reserved, but what is free now is asked for
    if nbytes > room.f_bavail * room.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(fd, offset + nbytes)


def _opened(path: str) -> tuple[int, bool]:
    """An open file without a name, and whether it takes direct I/O (some file systems in memory do not)."""
    direct = getattr(os, "O_DIRECT", 0)
    try:
        return _unnamed(path, direct), bool(direct)
    except OSError as error:
        if error.errno != errno.EINVAL or not direct:
            raise
    return _unnamed(path, 0), False


def _unnamed(path: str, flags: int) -> int:
    flags |= os.O_RDWR | os.O_CLOEXEC
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(path, flags | os.O_TMPFILE | os.O_EXCL, 0o600)
        except OSError as error:
            # A file system without unnamed files, or a kernel that takes the flag for O_DIRECTORY.
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOSYS):
                raise
    made, name = tempfile.mkstemp(prefix=".zero_fn.", dir=path)  # a name no other job has, mode 0600
    try:
        return os.open(name, flags)
    finally:
        os.unlink(name)
        os.close(made)
