"""Several disks as one tier: every byte has one place, both ways are exact, and a fault is named with its path."""

import errno
import sys
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zero_fn as zf
from tests.units.storage.disks import answers, filled, overwrite, reserved, small_disk
from zero_fn.storage.files import STRIPE_NBYTES, extents_of, share_of
from zero_fn.storage.host_memory import PAGE_NBYTES, Slab
from zero_fn.storage.tier_storage import BLOCK_NBYTES, DiskStorage
from zero_fn.values.tiers import cpu

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="opens files without a name again")

PAGES = 5 * STRIPE_NBYTES // PAGE_NBYTES


@pytest.fixture
def disks(tmp_path):
    paths = [tmp_path / name for name in ("first", "second", "third")]
    for path in paths:
        path.mkdir()
    return [str(path) for path in paths]


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, PAGES - 1), st.integers(1, PAGES)), min_size=1, max_size=6),
    st.integers(0, PAGES),
)
def test_every_page_has_one_place_inside_what_its_file_reserves(count, ranges, pages_taken):
    """However a range is cut, its pages are at the places that they have in the whole."""
    places = {}
    for first, pages in [(0, 2 * PAGES), *ranges]:
        end = 0
        for start, nbytes, disk, offset in extents_of(first * PAGE_NBYTES, pages * PAGE_NBYTES, count, BLOCK_NBYTES):
            assert start == end and nbytes <= BLOCK_NBYTES
            end = start + nbytes
            for at in range(0, nbytes, PAGE_NBYTES):
                page = first + (start + at) // PAGE_NBYTES
                assert places.setdefault(page, (disk, offset + at)) == (disk, offset + at)
        assert end == pages * PAGE_NBYTES
    assert len(set(places.values())) == len(places)
    taken = Counter()
    for page in range(pages_taken):
        disk, offset = places[page]
        taken[disk] = max(taken[disk], offset + PAGE_NBYTES)
    shares = [share_of(disk, pages_taken * PAGE_NBYTES, count) for disk in range(count)]
    assert shares == [taken[disk] for disk in range(count)]
    assert sum(shares) == pages_taken * PAGE_NBYTES


def test_bytes_come_back_from_every_offset_and_lie_on_all_disks(disks):
    disk = DiskStorage(zf.nvme(*disks), "states")
    pad, size = 3 * PAGE_NBYTES, 9 * STRIPE_NBYTES + 5 * PAGE_NBYTES
    reserved(disk, pad)
    slabs = {}
    for seed in range(2):
        offset = reserved(disk, size)
        slabs[offset] = filled(size, seed)
        disk.write(offset, slabs[offset].memory).wait()
    for offset, slab in slabs.items():
        back = Slab(size, cpu(), "test", forked=False)
        disk.read(offset, back.memory).wait()
        assert torch.equal(back.memory, slab.memory)
    assert disk.nbytes == sum(file.nbytes for file in disk.files) == pad + 2 * size
    sizes = [file.nbytes for file in disk.files]
    assert max(sizes) - min(sizes) <= STRIPE_NBYTES


def test_a_fault_is_named_with_its_path(disks, monkeypatch):
    disk = DiskStorage(zf.nvme(*disks), "states")
    slab = filled(6 * STRIPE_NBYTES, 0)
    offset = reserved(disk, slab.nbytes)
    disk.write(offset, slab.memory).wait()
    overwrite(disk.files[1], b"neither", STRIPE_NBYTES + 100)
    with pytest.raises(zf.errors.StorageError, match=r"block of states in \S*second does not hold"):
        disk.read(offset, slab.memory).wait()
    third = disk.files[2]
    answers(monkeypatch, lambda request, result: -errno.EIO if request.file is third else result)
    with pytest.raises(zf.errors.StorageError, match=r"Writing to states in \S*third failed"):
        disk.write(offset, slab.memory).wait()


def test_a_disk_too_small_leaves_all_as_they_were(disks, tmp_path):
    with small_disk(tmp_path / "small", "size=3m") as path:
        disk = DiskStorage(zf.nvme(disks[0], path, disks[1]), "states")
        reserved(disk, 3 * STRIPE_NBYTES)
        before = [file.nbytes for file in disk.files]
        with pytest.raises(zf.errors.TierError, match=r"states in \S*small need"):
            reserved(disk, 6 * STRIPE_NBYTES)
        assert [file.nbytes for file in disk.files] == before
        assert reserved(disk, STRIPE_NBYTES) == 3 * STRIPE_NBYTES
    limited = DiskStorage(zf.nvme(*disks, limit="4MiB"), "states")
    with pytest.raises(zf.errors.TierError, match=r"first, \S*second, \S*third need .* 4\.00 MiB can be taken"):
        reserved(limited, STRIPE_NBYTES * 3)


def test_training_on_several_disks_changes_no_bit(disks):
    def trained(tier):
        torch.manual_seed(0)
        model = zf.offload(nn.Sequential(*(nn.Linear(700, 700) for _ in range(2))), params=tier, grads=tier, optim=tier)
        stock = torch.optim.AdamW(model.parameters(), lr=0.01)
        planned = zf.plan(model, stock)
        optimizer = zf.streamed(stock)
        for step in range(2):
            optimizer.zero_grad()
            model(torch.full((2, 700), 1.0 + step)).square().mean().backward()
            optimizer.step()
        assert dict(zf.memory(model, optimizer).tiers) == dict(planned.memory.tiers)
        assert str(tier) in str(zf.describe(model, optimizer))
        return [p.detach().clone() for p in model.parameters()]

    assert all(map(torch.equal, trained(zf.nvme(*disks)), trained(zf.nvme(disks[0]))))
