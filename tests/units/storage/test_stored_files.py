"""Ranges of files that others have written: read as they are, wherever they begin and end, and never changed.

That a change between two reads is found is in `tests/units/checkpoint/test_damage.py`.
"""

import pytest
import torch

from tests.support.messages import refused
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


def test_nothing_is_written(file):
    files = StoredFiles(nvme(file.parent))
    place = files.place([FileRange(str(file), 0, 4096)])
    with refused("parameter_in_a_file_is_changed"):
        files.write(place, files.borrow(place, 4096))


def test_a_file_that_is_gone_is_an_error(tmp_path):
    with refused("file_in_place_is_gone"):
        StoredFiles(nvme(tmp_path)).place([FileRange(str(tmp_path / "weights"), 0, 4096)])
