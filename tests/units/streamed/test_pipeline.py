"""The order in which a pass over chunks reads, computes and writes: no memory is taken again before its bytes have left."""

from types import SimpleNamespace

import torch
from torch import Tensor

from zero_fn.storage import BUFFERS, NOTHING, InMemory
from zero_fn.streamed import windows
from zero_fn.streamed.pipeline import ChunkPipeline


class _Under:
    """Something under way, which notes that it was waited for."""

    def __init__(self, log, chunk):
        self._log, self._chunk = log, chunk

    def wait(self):
        self._log.append(("written", self._chunk))


class _Noting:
    """A lane without bytes that notes what it is asked for."""

    def __init__(self):
        self.log = []

    def fetch(self, chunk):
        self.log.append(("fetch", chunk))
        return InMemory(NOTHING)

    def keep(self, chunk, memory):
        self.log.append(("write", chunk))
        return _Under(self.log, chunk)

    def forget(self):
        raise AssertionError("the pass was whole")


def test_a_chunk_has_been_written_before_its_memory_is_read_into_again():
    """A slow disk would get the bytes of another chunk. Disks of tests are never that slow."""
    lane = _Noting()
    ChunkPipeline([lane], range(3 * BUFFERS), lambda chunk, memory: None).run()
    at = {event: index for index, event in enumerate(lane.log)}
    for chunk in range(2 * BUFFERS):
        assert at["written", chunk] < at["fetch", chunk + BUFFERS]
    assert all(("written", chunk) in at for chunk in range(3 * BUFFERS))


def test_what_is_on_a_device_comes_to_the_host_where_it_has_room(monkeypatch):
    monkeypatch.setattr(windows, "is_accelerator", lambda _: True)
    monkeypatch.setattr(windows, "side_stream", lambda _: SimpleNamespace(copy=Tensor.copy_))
    window, there = windows.Window(None, torch.zeros(64, dtype=torch.uint8), 0), torch.arange(6.0).view(2, 3).t()
    assert window.bring(torch.ones(0)) is None
    assert window.bring(torch.ones(17)) is None
    copy = window.bring(there)
    assert copy is not None
    assert copy is not there
    assert torch.equal(copy, there)
    assert copy.stride() == there.stride()
