"""Disks that fail: small ones, read-only ones, and answers of the kernel that are not those hoped for."""

import errno
import os
import resource
import subprocess
from contextlib import contextmanager

import pytest
import torch

from zero_fn.storage import Slab
from zero_fn.storage.io import Request, Threads
from zero_fn.values.tiers import cpu

__all__ = ["Lazy", "answers", "failing", "filled", "limited", "old_disk", "overwrite", "reserved", "small_disk"]


class Lazy(Threads):
    """Begins requests when somebody waits for them."""

    def submit(self, requests):
        self._begun.extend(requests)


def reserved(shelf, nbytes):
    """The place of a range of its own."""
    (place,) = shelf.reserve([nbytes])
    return place


def filled(nbytes, seed=0):
    """Memory with random bytes."""
    slab = Slab(nbytes, cpu(), "test")
    slab.memory.random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return slab


def overwrite(file, values, offset=0):
    """What flips bits, or another program, does to a file without a name."""
    with open(f"/proc/self/fd/{file.fd}", "r+b", buffering=0) as opened:
        os.pwrite(opened.fileno(), values, offset)
        os.fsync(opened.fileno())


@contextmanager
def limited(what, value):
    """Inside, the process has this soft limit: a number of `resource`."""
    before = resource.getrlimit(what)
    resource.setrlimit(what, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def small_disk(path, options="size=1m"):
    """A file system in memory of its own at `path`; skips the test where mounting is not allowed."""
    return _mounted(path, ["mount", "-t", "tmpfs", "-o", options, "tmpfs", path])


def old_disk(path):
    """A file system of 16 MB that takes direct I/O and cannot reserve room (ext2, as NFS before 4.2 and some of FUSE); skips
    the test where it cannot be made."""
    image = path.with_suffix(".image")
    image.write_bytes(bytes(16 << 20))
    return _mounted(path, ["mkfs.ext2", "-q", image], ["mount", "-o", "loop", image, path])


@contextmanager
def _mounted(path, *commands):
    path.mkdir(exist_ok=True)
    for command in commands:
        try:
            subprocess.run(command, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"cannot mount: {error}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@contextmanager
def failing(code=errno.EIO, *, reads=True, writes=True, where=True):
    """Inside, the kernel refuses what any engine asks for, except where the disk is well (`where=False`)."""
    with pytest.MonkeyPatch.context() as patched:
        if where:
            answers(patched, lambda request, result: -code if (writes if request.is_write else reads) else result)
        yield


def answers(monkeypatch, change):
    """From now on the kernel answers requests of any engine with `change(request, answer)`. Returns a list of all answers."""
    advance = Request.advance
    given = []

    def changed(request, result):
        given.append(change(request, result))
        advance(request, given[-1])

    monkeypatch.setattr(Request, "advance", changed)
    return given
