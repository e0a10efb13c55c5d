"""Blocks on a disk: what was written comes back to the bit, or a typed error says why not. On both engines."""

import ctypes
import errno
import os
import resource
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.messages import refused
from tests.units.storage.disks import Lazy, answers, filled, limited, old_disk, overwrite, reserved, small_disk
from zero_fn.errors import StorageError, TierError
from zero_fn.storage.host_memory import PAGE_NBYTES, Slab
from zero_fn.storage.io import Threads
from zero_fn.storage.pool import BufferPool
from zero_fn.storage.tier_storage import BLOCK_NBYTES, DiskStorage
from zero_fn.storage.uring import Uring, _of_process, io_backend
from zero_fn.values.tiers import cpu, nvme

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what became of memory and files")

MIB = 1 << 20


@pytest.fixture(params=[Uring, Threads])
def carrier(request):
    try:
        carrier = request.param()
    except OSError as error:
        pytest.skip(f"no io_uring here: {error}")
    return carrier


@pytest.fixture
def disk(tmp_path, carrier):
    return DiskStorage(nvme(tmp_path), "states", carrier)


@pytest.mark.parametrize("sizes", [[2 * BLOCK_NBYTES + 3 * PAGE_NBYTES] * 2, [PAGE_NBYTES] * 300])
def test_ranges_come_back_to_the_bit(disk, sizes):
    """Of several blocks; and more of them than a ring has entries."""
    slab = filled(sum(sizes))
    expected, views, places = slab.memory.clone(), torch.split(slab.memory, sizes), disk.reserve(sizes)
    for act in (disk.write, disk.read):
        for transfer in reversed(list(map(act, places, views))):
            transfer.wait()
        if act == disk.write:
            slab.memory.zero_()
    assert torch.equal(slab.memory, expected)


def test_memory_on_its_way_goes_to_nobody_else_when_those_who_wait_are_gone(tmp_path):
    """An interrupt drops them; the memory was that of the next tensor then, and the disk wrote into it."""
    carrier, buffers = Lazy(), BufferPool(2 * BLOCK_NBYTES, torch.uint8, torch.device("cpu"))
    disk = DiskStorage(nvme(tmp_path), "states", carrier)
    offset = reserved(disk, 2 * BLOCK_NBYTES)
    memory = buffers.take()
    taken = memory.data_ptr()
    disk.write(offset, memory)
    del memory
    other = buffers.take()
    assert other.data_ptr() != taken
    carrier._begun.clear()
    assert buffers.take().data_ptr() == taken


def test_io_uring_carries_where_the_kernel_has_it():
    """Threads would, silently, at a third of the speed beside a busy interpreter; and tests of the ring would be skipped."""
    params = (ctypes.c_char * 120)()
    fd = ctypes.CDLL(None).syscall(425, 1, ctypes.byref(params))
    if fd < 0:
        pytest.skip("no io_uring here")
    os.close(fd)
    is_new = bool(struct.unpack_from("<30I", params)[5] & 1)  # both rings in one mapping, since Linux 5.4
    assert isinstance(_of_process.__wrapped__(os.getpid()), Uring) is is_new


def test_a_staging_buffer_is_lent_once_what_was_written_from_it_has_left(tmp_path):
    """An interrupt may come before anybody waits: the disk would get the bytes of whoever borrows it next."""
    disk = DiskStorage(nvme(tmp_path), "states", Lazy())
    place, other = reserved(disk, BLOCK_NBYTES), reserved(disk, BLOCK_NBYTES)
    disk.stage(BLOCK_NBYTES, 1)
    transfers = []
    for place_of_it, value in ((place, 1), (other, 2)):
        memory = disk.borrow(place_of_it, BLOCK_NBYTES).fill_(value)
        transfers.append(disk.write(place_of_it, memory))
        disk.give_back(memory)
    for (place_of_it, value), written in zip(((place, 1), (other, 2)), transfers, strict=True):
        written.wait()
        found = filled(BLOCK_NBYTES)
        disk.read(place_of_it, found.memory).wait()
        assert torch.equal(found.memory, torch.full_like(found.memory, value))


def test_an_interrupt_before_a_staging_buffer_is_lent_keeps_none(disk):
    place = reserved(disk, PAGE_NBYTES)
    disk.stage(PAGE_NBYTES, 1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(disk._backend), "settle", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            disk.borrow(place, PAGE_NBYTES)
    assert disk.borrow(place, PAGE_NBYTES).data_ptr() == disk.stagings.views[0].data_ptr()


@given(
    writes=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9)), min_size=1, max_size=30),
    pages=st.lists(st.integers(1, 5), min_size=8, max_size=8),
)
def test_any_order_of_writes_and_reads_gives_what_was_written_last(writes, pages):
    for carrier in (io_backend(), Threads()):
        with tempfile.TemporaryDirectory() as folder:
            disk = DiskStorage(nvme(folder), "states", carrier)
            offsets = [reserved(disk, n * PAGE_NBYTES) for n in pages]
            slab = Slab(sum(pages) * PAGE_NBYTES, cpu(), "test")
            views = list(torch.split(slab.memory, [n * PAGE_NBYTES for n in pages]))
            last = {}
            for region, value in writes:
                views[region].fill_(value)
                disk.write(offsets[region], views[region]).wait()
                last[region] = value
            slab.memory.fill_(255)
            for transfer in [disk.read(offsets[region], views[region]) for region in last]:
                transfer.wait()
            assert all(bool((views[region] == value).all()) for region, value in last.items())


@pytest.mark.parametrize("is_write", [True, False])
def test_short_answers_are_continued(disk, is_write):
    """A short write of a page and a half counts as a page: direct I/O goes on at sectors only."""
    slab = filled(10 * PAGE_NBYTES)
    expected = slab.memory.clone()
    offset = reserved(disk, slab.nbytes)

    def done(acts, is_short):
        with pytest.MonkeyPatch.context() as patched:
            given = answers(patched, lambda _, result: min(result, PAGE_NBYTES * 3 // 2) if is_short else result)
            acts(offset, slab.memory).wait()
        return len(given)

    written = done(disk.write, is_write)
    slab.memory.zero_()
    assert (written, done(disk.read, not is_write)) == ((10, 1) if is_write else (1, 10))
    assert torch.equal(slab.memory, expected)


def test_interrupted_requests_are_asked_again(disk, monkeypatch):
    slab = filled(PAGE_NBYTES)
    offset = reserved(disk, slab.nbytes)
    told = iter([-errno.EINTR, -errno.EAGAIN])
    given = answers(monkeypatch, lambda _, result: next(told, result))
    disk.write(offset, slab.memory).wait()
    assert given == [-errno.EINTR, -errno.EAGAIN, PAGE_NBYTES]


@pytest.mark.parametrize("is_write", [True, False])
def test_an_error_of_the_disk_names_file_range_and_errno(disk, tmp_path, monkeypatch, is_write):
    slab = filled(2 * PAGE_NBYTES)
    offset = reserved(disk, slab.nbytes)
    if not is_write:
        disk.write(offset, slab.memory).wait()
    answers(monkeypatch, lambda _, result: -errno.EIO)
    transfer = (disk.write if is_write else disk.read)(offset, slab.memory)
    with pytest.raises(StorageError) as raised:
        transfer.wait()
    assert str(tmp_path) in str(raised.value.facts["file"])
    assert "EIO" in str(raised.value.facts["why"])
    assert "8.00 KiB at offset 0" in str(raised.value.facts["range"])
    transfer.wait()  # said once; nothing is under way


def test_errors_of_the_kernel_itself_reach_the_caller(disk):
    """No injection: something cut the file, and the descriptor is closed, as a failed mount would do."""
    slab = filled(4 * PAGE_NBYTES)
    offset, fd = reserved(disk, slab.nbytes), disk.files[0].fd
    disk.write(offset, slab.memory).wait()
    os.ftruncate(fd, 2 * PAGE_NBYTES)
    with refused("disk_stops_short"):
        disk.read(offset, slab.memory).wait()
    keep = os.dup(fd)
    os.close(fd)
    with pytest.raises(StorageError, match="EBADF"):
        disk.write(offset, slab.memory).wait()
    os.dup2(keep, fd)
    os.close(keep)


def test_a_lost_write_is_told_from_damage(disk):
    slab, old = filled(PAGE_NBYTES), bytes(filled(PAGE_NBYTES).memory.tolist())
    offset = reserved(disk, slab.nbytes)
    disk.write(offset, slab.memory).wait()
    slab.memory.add_(1)
    disk.write(offset, slab.memory).wait()
    overwrite(disk.files[0], old)
    with refused("disk_lost_a_write"):
        disk.read(offset, slab.memory).wait()
    overwrite(disk.files[0], b"neither")
    with refused("disk_gives_other_bytes"):
        disk.read(offset, slab.memory).wait()


@pytest.mark.parametrize(
    ("made", "nbytes", "more"),
    [(small_disk, MIB // 2, 2 * MIB), (old_disk, 3 * MIB + PAGE_NBYTES, 61 * MIB - PAGE_NBYTES)],
    ids=["small", "old"],
)
def test_a_full_disk_is_found_before_anything_is_written(tmp_path, carrier, made, nbytes, more):
    """A file system that cannot reserve has its room written; it failed with EINVAL and the advice to check the disk."""
    with made(tmp_path / "disk") as path:
        disk, slab = DiskStorage(nvme(path), "states", carrier), filled(nbytes)
        offset, expected = reserved(disk, nbytes), slab.memory.clone()
        assert os.fstat(disk.files[0].fd).st_blocks * 512 >= nbytes
        disk.write(offset, slab.memory).wait()
        with pytest.raises(TierError, match="No space left"):
            reserved(disk, more)
        disk.read(offset, slab.memory.zero_()).wait()
        assert torch.equal(slab.memory, expected)
        assert reserved(disk, MIB // 2) == nbytes  # what fits, fits


def test_a_limit_of_the_process_on_the_size_of_files_is_named(disk):
    """It said that all that is free on the disk can be taken."""
    reserved(disk, MIB // 2)
    with limited(resource.RLIMIT_FSIZE, MIB):
        with refused("disk_takes_no_file_so_large"):
            reserved(disk, 2 * MIB)
        reserved(disk, MIB // 2)


@pytest.mark.parametrize("has_unnamed", [True, False])
def test_a_limit_of_the_process_on_open_files_is_named(tmp_path, monkeypatch, has_unnamed):
    """It said to give another folder."""
    if not has_unnamed:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    disks = []
    with refused("disk_takes_no_more_open_files"), limited(resource.RLIMIT_NOFILE, 1024):
        while True:
            disks.append(DiskStorage(nvme(tmp_path), "states"))


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.EIO])
def test_what_a_file_system_says_that_cannot_reserve(tmp_path, monkeypatch, code):
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(code, os.strerror(code))))
    disk = DiskStorage(nvme(tmp_path), "states")
    with refused("disk_cannot_reserve") if code == errno.EIO else nullcontext():
        assert [reserved(disk, 9 * MIB), reserved(disk, PAGE_NBYTES)] == [0, 9 * MIB]
        assert os.fstat(disk.files[0].fd).st_size == 9 * MIB + PAGE_NBYTES


def test_room_is_given_back_when_an_interrupt_comes(disk, monkeypatch):
    reserve = os.posix_fallocate

    def interrupted(fd, begin, nbytes):
        reserve(fd, begin, nbytes)
        raise KeyboardInterrupt

    reserved(disk, PAGE_NBYTES)
    monkeypatch.setattr(os, "posix_fallocate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reserved(disk, 9 * MIB)
    assert os.fstat(disk.files[0].fd).st_size == disk.nbytes == PAGE_NBYTES


@pytest.mark.parametrize("path", ["missing", "a_file", "/proc"])
def test_a_path_that_takes_no_files_raises(tmp_path, carrier, path):
    (tmp_path / "a_file").touch()
    with refused("disk_has_no_such_path") if path == "missing" else pytest.raises(StorageError):
        DiskStorage(nvme(tmp_path / path), "states", carrier)


def test_a_path_that_vanishes_takes_nothing_with_it(tmp_path, carrier):
    folder = tmp_path / "gone"
    folder.mkdir()
    disk, slab = DiskStorage(nvme(folder), "states", carrier), filled(PAGE_NBYTES)
    offset, expected = reserved(disk, slab.nbytes), slab.memory.clone()
    disk.write(offset, slab.memory).wait()
    folder.rmdir()
    disk.read(offset, slab.memory.zero_()).wait()
    assert torch.equal(slab.memory, expected)


@pytest.mark.parametrize("has_unnamed", [True, False])
def test_jobs_on_one_path_share_no_file(tmp_path, carrier, monkeypatch, has_unnamed):
    if not has_unnamed:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    disks = [DiskStorage(nvme(tmp_path), "states", carrier) for _ in range(2)]
    first, second = filled(PAGE_NBYTES, seed=1), filled(PAGE_NBYTES, seed=2)
    expected = first.memory.clone()
    for disk, slab in zip(disks, (first, second), strict=True):
        disk.write(reserved(disk, PAGE_NBYTES), slab.memory).wait()
        status = os.fstat(disk.files[0].fd)
        assert stat.S_IMODE(status.st_mode) == 0o600 and status.st_nlink == 0
    disks[0].read(0, first.memory.zero_()).wait()
    assert torch.equal(first.memory, expected)
    assert list(tmp_path.iterdir()) == []


def test_a_dropped_spill_gives_its_room_back(tmp_path, carrier):
    disk = DiskStorage(nvme(tmp_path), "states", carrier)
    reserved(disk, 64 * MIB)
    fd = disk.files[0].fd
    del disk
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


KILLED = """
import sys, time
from zero_fn.storage import DiskStorage, Slab
from zero_fn.values.tiers import cpu, nvme
slab = Slab(64 << 20, cpu(), "test")
disk = DiskStorage(nvme(sys.argv[1]), "states")
(offset,) = disk.reserve([64 << 20])
print("open", flush=True)
while True:
    disk.write(offset, slab.memory).wait()
"""


def test_a_killed_job_leaves_nothing_behind(tmp_path):
    with small_disk(tmp_path / "disk", "size=128m") as path:
        empty = os.statvfs(path).f_bfree
        job = subprocess.Popen([sys.executable, "-c", KILLED, path], stdout=subprocess.PIPE, text=True)
        assert job.stdout is not None
        assert job.stdout.readline() == "open\n"
        assert os.statvfs(path).f_bfree == empty - (64 * MIB) // PAGE_NBYTES
        job.send_signal(signal.SIGKILL)
        job.wait()
        job.stdout.close()
        assert list(path.iterdir()) == []
        deadline_s = time.monotonic() + 10  # the kernel ends what was under way, then frees the file
        while os.statvfs(path).f_bfree != empty and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert os.statvfs(path).f_bfree == empty


def test_threads_carry_requests_where_io_uring_is_refused(monkeypatch):
    def refused():
        raise PermissionError(errno.EPERM, "seccomp")

    monkeypatch.setattr("zero_fn.storage.uring.Uring", refused)
    assert str(_of_process.__wrapped__(0)) == "4 threads"


ENDED = """
import sys
import torch
import zero_fn as zf
tier = zf.nvme(sys.argv[1])
model = zf.offload(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), params=tier, grads=tier)
optimizer = zf.streamed(torch.optim.AdamW(model.parameters(), fused=True), tier)
def step():
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
step()
step()
"""


def test_a_program_ends_without_a_word(tmp_path):
    """Finalizers run when modules have been taken apart already."""
    done = subprocess.run([sys.executable, "-c", ENDED, tmp_path], capture_output=True, text=True, check=True)
    assert done.stderr == ""
