"""Memory of a buffer serves the next of its size, once no tensor is on it, and is given up with its last user."""

import gc
import resource
import sys

import pytest
import torch

from zero_fn.storage.pool import BufferPool, Landing

NBYTES = 8 << 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts page faults and mappings of Linux")


def buffers_of(nbytes):
    return BufferPool(nbytes, torch.uint8, torch.device("cpu"))


def mappings():
    with open("/proc/self/maps") as maps:
        return sum(1 for _ in maps)


def test_live_buffers_are_apart_and_the_memory_of_a_dead_one_serves_the_next():
    buffers = buffers_of(NBYTES)
    first, second = buffers.take(), buffers.take()
    first.fill_(1)
    second.fill_(2)
    assert first.sum() == NBYTES
    place = first.data_ptr()
    view = first.view(torch.float32)[5:9]
    del first
    third = buffers.take()
    assert third.data_ptr() != place, "a view is a tensor on it"
    value = view.view(torch.uint8).tolist()
    del view
    assert buffers.take().data_ptr() == place
    assert value == [1] * 16


def test_buffers_that_come_and_go_fault_no_pages():
    buffers = buffers_of(NBYTES)
    live = []
    before = 0
    for number in range(40):
        if number == 10:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        live.append(buffers.take().fill_(1))
        if len(live) == 3:
            del live[0]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 30 * 20  # of 2,048 pages each


def test_all_who_ask_share_and_the_last_takes_the_memory_along():
    before = mappings()
    one, other = buffers_of(NBYTES + 4096), buffers_of(NBYTES + 4096)
    place = one.take().data_ptr()
    assert other.take().data_ptr() == place
    live = [one.take() for _ in range(4)]
    live.clear()
    assert mappings() > before
    kept = one.take()
    del one, other
    gc.collect()
    assert kept.fill_(3).sum() == 3 * kept.numel()
    del kept
    assert mappings() <= before + 1


def test_memory_that_a_disk_fills_serves_whatever_fits_and_no_two_at_once():
    landing = Landing()
    first = landing.take(3 * 4096)
    part, address = first[:10], first.data_ptr()
    del first
    assert landing.take(4096).data_ptr() != address, "a tensor on it is left"
    del part
    held = [landing.take(2 * 4096), landing.take(4096)]
    assert [each.data_ptr() == address for each in held] == [True, False]
    assert [each.numel() for each in held] == [2 * 4096, 4096]
    del held
    assert landing.take(5 * 4096).numel() == 5 * 4096
    assert len(landing._free) == 1, "those that were too small are gone"
