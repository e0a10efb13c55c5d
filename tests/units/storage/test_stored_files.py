"""Ranges of files that others have written: read as they are, wherever they begin and end, and never changed."""

import os

import pytest
import torch

from zero_fn.errors import StateError, StorageError
from zero_fn.storage.io import Threads
from zero_fn.storage.stored_files import FileRange, StoredFiles
from zero_fn.storage.tier_storage import BLOCK_NBYTES
from zero_fn.values.tiers import nvme

NBYTES = BLOCK_NBYTES + 9_001


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(torch.randint(256, (NBYTES,), dtype=torch.uint8).numpy().tobytes())
    return path


def read(files, part):
    memory = files.borrow(files.place([part]), part.room_nbytes)
    for before in (0, 1):  # what is behind the end of the file is no part of the range
        files.read(files.nbytes - part.room_nbytes, memory.fill_(before)).wait()
    return bytes(memory[part.before : part.before + part.nbytes].numpy())


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize(
    ("first", "nbytes"), [(0, 1), (4095, 2), (4096, 4096), (5000, NBYTES - 5000), (NBYTES - 1, 1), (0, NBYTES)]
)
def test_a_range_is_read_wherever_it_begins_and_ends(file, first, nbytes, threads):
    files = StoredFiles(nvme(file.parent))
    if threads:
        files._backend = Threads()
    assert read(files, FileRange(str(file), first, nbytes)) == file.read_bytes()[first : first + nbytes]


def test_what_changes_between_two_reads_is_found(file):
    files = StoredFiles(nvme(file.parent))
    part = FileRange(str(file), 5000, 3000)
    place, memory = files.place([part]), files.borrow(0, part.room_nbytes)
    for _ in range(2):
        files.read(place, memory).wait()
    with file.open("r+b") as other:
        other.seek(5000 + 2999)
        other.write(bytes([file.read_bytes()[5000 + 2999] ^ 1]))
    with pytest.raises(StorageError, match="does not hold what was written"):
        files.read(place, memory).wait()


def test_a_file_that_ends_before_a_range_does_is_an_error(file):
    files = StoredFiles(nvme(file.parent))
    part = FileRange(str(file), 5000, 3000)
    place, memory = files.place([part]), files.borrow(0, part.room_nbytes)
    os.truncate(file, 7999)
    with pytest.raises(StorageError, match="stopped short"):
        files.read(place, memory).wait()


def test_nothing_is_written(file):
    files = StoredFiles(nvme(file.parent))
    place = files.place([FileRange(str(file), 0, 4096)])
    with pytest.raises(StateError, match="read in place"):
        files.write(place, files.borrow(place, 4096))
