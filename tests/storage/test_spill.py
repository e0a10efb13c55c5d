"""Blocks on a disk: what was written comes back to the bit, or a typed error says why not. On both engines."""

from __future__ import annotations

import errno
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.storage.disks import answers, small_disk
from zero_fn.errors import StorageError, TierError
from zero_fn.storage.carrier import Carrier, _chosen, chosen_carrier
from zero_fn.storage.recycled import Recycled
from zero_fn.storage.request import Request
from zero_fn.storage.slab import PAGE_NBYTES, Slab
from zero_fn.storage.spill import BLOCK_NBYTES, Spill
from zero_fn.storage.threads import Threads
from zero_fn.storage.uring import Uring
from zero_fn.tiers import cpu, nvme

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what became of memory and files")

MIB = 1 << 20


@pytest.fixture(params=["uring", "threads"])
def carrier(request: pytest.FixtureRequest) -> Iterator[Carrier]:
    carrier: Carrier
    if request.param == "threads":
        carrier = Threads()
    else:
        try:
            carrier = Uring()
        except OSError as error:
            pytest.skip(f"no io_uring here: {error}")
    yield carrier
    carrier.close()


@pytest.fixture
def spill(tmp_path: Path, carrier: Carrier) -> Spill:
    return Spill(nvme(tmp_path), "states", carrier)


def filled(nbytes: int, seed: int = 0) -> Slab:
    slab = Slab(nbytes, cpu(), "test")
    slab.memory.copy_(torch.randint(256, (slab.nbytes,), dtype=torch.uint8, generator=torch.manual_seed(seed)))
    return slab


def test_blocks_come_back_to_the_bit(spill: Spill, carrier: Carrier) -> None:
    slab = filled(2 * BLOCK_NBYTES + 3 * PAGE_NBYTES)
    carrier.register(slab.memory)
    expected = slab.memory.clone()
    first, second = spill.reserve(slab.nbytes), spill.reserve(slab.nbytes)
    transfers = [spill.write(first, slab.memory), spill.write(second, slab.memory)]
    for transfer in transfers:
        transfer.wait()
    slab.memory.zero_()
    spill.read(second, slab.memory).wait()
    assert torch.equal(slab.memory, expected)
    carrier.forget(slab.memory)
    slab.memory.zero_()
    spill.read(first, slab.memory).wait()
    assert torch.equal(slab.memory, expected)


class Slow(Threads):
    """A carrier that has not begun yet."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Request] = []

    def submit(self, requests: Sequence[Request]) -> None:
        self.waiting.extend(requests)


def test_memory_on_its_way_goes_to_nobody_else_when_those_who_wait_are_gone(tmp_path: Path) -> None:
    """An interrupt drops them; the memory was that of the next tensor then, and the disk wrote into it."""
    carrier, buffers = Slow(), Recycled(2 * BLOCK_NBYTES)
    spill = Spill(nvme(tmp_path), "states", carrier)
    offset = spill.reserve(2 * BLOCK_NBYTES)
    memory = buffers.take()
    taken = memory.data_ptr()
    spill.write(offset, memory)
    del memory
    other = buffers.take()
    assert other.data_ptr() != taken
    carrier.waiting.clear()
    assert buffers.take().data_ptr() == taken
    carrier.close()


@given(
    writes=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9)), min_size=1, max_size=30),
    pages=st.lists(st.integers(1, 5), min_size=8, max_size=8),
)
def test_any_order_of_writes_and_reads_gives_what_was_written_last(
    writes: list[tuple[int, int]], pages: list[int]
) -> None:
    for carrier in (chosen_carrier(), Threads()):
        with tempfile.TemporaryDirectory() as folder:
            spill = Spill(nvme(folder), "states", carrier)
            offsets = [spill.reserve(n * PAGE_NBYTES) for n in pages]
            slab = Slab(sum(pages) * PAGE_NBYTES, cpu(), "test")
            views = list(torch.split(slab.memory, [n * PAGE_NBYTES for n in pages]))
            last: dict[int, int] = {}
            for region, value in writes:
                views[region].fill_(value)
                spill.write(offsets[region], views[region]).wait()
                last[region] = value
            slab.memory.fill_(255)
            for transfer in [spill.read(offsets[region], views[region]) for region in last]:
                transfer.wait()
            assert all(bool((views[region] == value).all()) for region, value in last.items())


@pytest.mark.parametrize("is_write", [True, False])
def test_short_answers_are_continued(spill: Spill, monkeypatch: pytest.MonkeyPatch, is_write: bool) -> None:
    """A short write of a page and a half counts as a page: direct I/O goes on at sectors only."""
    slab = filled(10 * PAGE_NBYTES)
    expected = slab.memory.clone()
    offset = spill.reserve(slab.nbytes)

    def at_most_a_page_and_a_half(request: object, result: int) -> int:
        return min(result, PAGE_NBYTES * 3 // 2)

    if is_write:
        given = answers(monkeypatch, at_most_a_page_and_a_half)
        spill.write(offset, slab.memory).wait()
        monkeypatch.undo()
        slab.memory.zero_()
        spill.read(offset, slab.memory).wait()
    else:
        spill.write(offset, slab.memory).wait()
        slab.memory.zero_()
        given = answers(monkeypatch, at_most_a_page_and_a_half)
        spill.read(offset, slab.memory).wait()
    assert len(given) == 10
    assert torch.equal(slab.memory, expected)


def test_interrupted_requests_are_asked_again(spill: Spill, monkeypatch: pytest.MonkeyPatch) -> None:
    slab = filled(PAGE_NBYTES)
    offset = spill.reserve(slab.nbytes)
    told = iter([-errno.EINTR, -errno.EAGAIN])
    given = answers(monkeypatch, lambda _, result: next(told, result))
    spill.write(offset, slab.memory).wait()
    assert given == [-errno.EINTR, -errno.EAGAIN, PAGE_NBYTES]


@pytest.mark.parametrize("is_write", [True, False])
def test_an_error_of_the_disk_names_file_range_and_errno(
    spill: Spill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_write: bool
) -> None:
    slab = filled(2 * PAGE_NBYTES)
    offset = spill.reserve(slab.nbytes)
    if not is_write:
        spill.write(offset, slab.memory).wait()
    answers(monkeypatch, lambda _, result: -errno.EIO)
    transfer = (spill.write if is_write else spill.read)(offset, slab.memory)
    with pytest.raises(StorageError) as raised:
        transfer.wait()
    assert str(tmp_path) in str(raised.value.facts["file"])
    assert "EIO" in str(raised.value.facts["why"])
    assert "8.00 KiB at offset 0" in str(raised.value.facts["range"])
    transfer.wait()  # said once; nothing is under way


def test_errors_of_the_kernel_itself_reach_the_caller(spill: Spill) -> None:
    """No injection: the descriptor is closed, as a failed mount would do."""
    slab = filled(PAGE_NBYTES)
    offset = spill.reserve(slab.nbytes)
    keep = os.dup(spill.file.files[0].fd)
    os.close(spill.file.files[0].fd)
    with pytest.raises(StorageError, match="EBADF"):
        spill.write(offset, slab.memory).wait()
    os.dup2(keep, spill.file.files[0].fd)
    os.close(keep)


def test_a_file_that_was_cut_raises(spill: Spill) -> None:
    slab = filled(4 * PAGE_NBYTES)
    offset = spill.reserve(slab.nbytes)
    spill.write(offset, slab.memory).wait()
    os.ftruncate(spill.file.files[0].fd, 2 * PAGE_NBYTES)
    with pytest.raises(StorageError, match="stopped short") as raised:
        spill.read(offset, slab.memory).wait()
    assert f"{2 * PAGE_NBYTES} B" in str(raised.value.facts["why"])


def edited(spill: Spill, at: int, change: int) -> None:
    """Flips bits of one byte of the file behind the back of its owner."""
    with open(f"/proc/self/fd/{spill.file.files[0].fd}", "r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ change]), at)
        os.fsync(file.fileno())


@given(at=st.integers(0, 3 * PAGE_NBYTES - 1), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found(at: int, bit: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        spill = Spill(nvme(folder), "states", chosen_carrier())
        slab = filled(3 * PAGE_NBYTES)
        offset = spill.reserve(slab.nbytes)
        spill.write(offset, slab.memory).wait()
        spill.read(offset, slab.memory).wait()
        edited(spill, at, 1 << bit)
        with pytest.raises(StorageError, match=r"(?s)does not hold what was written.*flipped bits"):
            spill.read(offset, slab.memory).wait()
        edited(spill, at, 1 << bit)
        spill.read(offset, slab.memory).wait()


@given(first=st.integers(0, 510), apart=st.integers(1, 511))
def test_swapped_words_are_found_inside_a_sector_and_beyond(first: int, apart: int) -> None:
    second = min(first + apart, 511)
    with tempfile.TemporaryDirectory() as folder:
        spill = Spill(nvme(folder), "states", chosen_carrier())
        slab = filled(PAGE_NBYTES)
        words = slab.memory.view(torch.int64)
        words.copy_(torch.arange(len(words)))
        offset = spill.reserve(slab.nbytes)
        spill.write(offset, slab.memory).wait()
        words[[first, second]] = words[[second, first]]
        with open(f"/proc/self/fd/{spill.file.files[0].fd}", "r+b") as file:
            file.write(slab.memory.numpy().data)
        with pytest.raises(StorageError, match="does not hold what was written"):
            spill.read(offset, slab.memory).wait()


def test_a_lost_write_is_told_from_damage(spill: Spill) -> None:
    slab, old = filled(PAGE_NBYTES), bytes(filled(PAGE_NBYTES).memory.tolist())
    offset = spill.reserve(slab.nbytes)
    spill.write(offset, slab.memory).wait()
    slab.memory.add_(1)
    spill.write(offset, slab.memory).wait()
    with open(f"/proc/self/fd/{spill.file.files[0].fd}", "r+b") as file:
        file.write(old)
    with pytest.raises(StorageError, match=r"(?s)the bytes of generation 1.*lost a write"):
        spill.read(offset, slab.memory).wait()


def test_a_full_disk_is_found_before_anything_is_written(tmp_path: Path, carrier: Carrier) -> None:
    with small_disk(tmp_path / "disk") as path:
        spill = Spill(nvme(path), "states", carrier)
        offset = spill.reserve(MIB // 2)
        slab = filled(MIB // 2)
        spill.write(offset, slab.memory).wait()
        with pytest.raises(
            TierError, match=r"(?s)states in .* need 2\.50 MiB of disk, 1\.00 MiB can be taken.*No space"
        ):
            spill.reserve(2 * MIB)
        spill.read(offset, slab.memory).wait()  # what was there is there
        assert spill.reserve(MIB // 2) == MIB // 2  # and what fits, fits
        spill.file.close()


def test_a_limit_of_the_process_on_files_counts_as_a_full_disk(spill: Spill) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))
    try:
        with pytest.raises(TierError, match="File too large"):
            spill.reserve(2 * MIB)
        spill.reserve(MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_the_limit_of_the_tier_holds(tmp_path: Path, carrier: Carrier) -> None:
    spill = Spill(nvme(tmp_path, limit="1MiB"), "states", carrier)
    spill.reserve(MIB)
    with pytest.raises(TierError, match=r"(?s)1\.00 MiB can be taken.*limit of the tier"):
        spill.reserve(PAGE_NBYTES)


@pytest.mark.parametrize("path", ["missing", "a_file", "/proc"])
def test_a_path_that_takes_no_files_raises(tmp_path: Path, carrier: Carrier, path: str) -> None:
    (tmp_path / "a_file").touch()
    with pytest.raises(StorageError, match="No file can be made in"):
        Spill(nvme(tmp_path / path), "states", carrier)


def test_a_read_only_path_raises(tmp_path: Path, carrier: Carrier) -> None:
    with small_disk(tmp_path / "disk", "size=1m,ro") as path, pytest.raises(StorageError, match="EROFS"):
        Spill(nvme(path), "states", carrier)


def test_a_path_that_vanishes_takes_nothing_with_it(tmp_path: Path, carrier: Carrier) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    spill, slab = Spill(nvme(folder), "states", carrier), filled(PAGE_NBYTES)
    offset, expected = spill.reserve(slab.nbytes), slab.memory.clone()
    spill.write(offset, slab.memory).wait()
    folder.rmdir()
    spill.read(offset, slab.memory.zero_()).wait()
    assert torch.equal(slab.memory, expected)
    with pytest.raises(StorageError, match="ENOENT"):
        Spill(nvme(folder), "states", carrier)


@pytest.mark.parametrize("has_unnamed", [True, False])
def test_jobs_on_one_path_share_no_file(
    tmp_path: Path, carrier: Carrier, monkeypatch: pytest.MonkeyPatch, has_unnamed: bool
) -> None:
    if not has_unnamed:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    one, other = (Spill(nvme(tmp_path), "states", carrier) for _ in range(2))
    first, second = filled(PAGE_NBYTES, seed=1), filled(PAGE_NBYTES, seed=2)
    expected = first.memory.clone()
    one.write(one.reserve(PAGE_NBYTES), first.memory).wait()
    other.write(other.reserve(PAGE_NBYTES), second.memory).wait()
    one.read(0, first.memory.zero_()).wait()
    assert torch.equal(first.memory, expected)
    for spill in (one, other):
        status = os.fstat(spill.file.files[0].fd)
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_nlink == 0
    assert list(tmp_path.iterdir()) == []


def test_a_dropped_spill_gives_its_room_back(tmp_path: Path, carrier: Carrier) -> None:
    spill = Spill(nvme(tmp_path), "states", carrier)
    spill.reserve(64 * MIB)
    fd = spill.file.files[0].fd
    del spill
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


KILLED = """
import sys, time
from zero_fn.storage import Slab, Spill, chosen_carrier
from zero_fn.tiers import cpu, nvme
slab = Slab(64 << 20, cpu(), "test")
spill = Spill(nvme(sys.argv[1]), "states", chosen_carrier())
offset = spill.reserve(64 << 20)
print("open", flush=True)
while True:
    spill.write(offset, slab.memory).wait()
"""


def test_a_killed_job_leaves_nothing_behind(tmp_path: Path) -> None:
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


def test_threads_carry_requests_where_io_uring_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> Uring:
        raise PermissionError(errno.EPERM, "seccomp")

    monkeypatch.setattr("zero_fn.storage.carrier.Uring", refused)
    assert str(_chosen()) == "4 threads"


def test_memory_that_cannot_be_registered_is_used_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        ring = Uring()
    except OSError as error:
        pytest.skip(f"no io_uring here: {error}")
    from zero_fn.storage import uring

    call = uring._syscall

    def refuses(number: int, *args: object, waits: bool = True) -> int:
        if number == uring._REGISTER:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return call(number, *args, waits=waits)

    monkeypatch.setattr(uring, "_syscall", refuses)
    slab = filled(PAGE_NBYTES)
    ring.register(slab.memory)
    assert "without registered buffers" in str(ring)
    spill = Spill(nvme(tmp_path), "states", ring)
    spill.write(spill.reserve(PAGE_NBYTES), slab.memory).wait()
    spill.read(0, slab.memory).wait()
    ring.close()


def test_a_full_ring_takes_more_requests_than_it_has_entries(spill: Spill) -> None:
    slab = filled(300 * PAGE_NBYTES)
    expected = slab.memory.clone()
    spill.reserve(slab.nbytes)
    views = torch.split(slab.memory, PAGE_NBYTES)
    transfers = [spill.write(i * PAGE_NBYTES, view) for i, view in enumerate(views)]
    for transfer in reversed(transfers):
        transfer.wait()
    slab.memory.zero_()
    transfers = [spill.read(i * PAGE_NBYTES, view) for i, view in enumerate(views)]
    for transfer in transfers:
        transfer.wait()
    assert torch.equal(slab.memory, expected)


def test_memory_dropped_in_the_midst_of_a_request_is_forgotten_after_it(
    spill: Spill, carrier: Carrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector runs when it likes: a ring that it entered again waited for an answer that was taken already."""
    slab, gone = filled(PAGE_NBYTES), filled(PAGE_NBYTES)
    carrier.register(slab.memory)
    carrier.register(gone.memory)
    offset = spill.reserve(PAGE_NBYTES)
    answers(monkeypatch, lambda request, result: (carrier.forget(gone.memory), result)[1])
    spill.write(offset, slab.memory).wait()
    monkeypatch.undo()
    spill.read(offset, slab.memory).wait()
    if isinstance(carrier, Uring):
        assert [memory is slab.memory for memory in carrier._registered] == [True]
