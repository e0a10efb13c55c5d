"""The order in which a pass over chunks reads, computes and writes: no memory is taken again before its bytes have left."""

from __future__ import annotations

from typing import Any

from zero_fn.storage import BUFFERS
from zero_fn.streamed.pipeline import Pass, Transfers


class _Under:
    """Something under way, which notes that it was waited for."""

    def __init__(self, log: list[tuple[str, int]], chunk: int) -> None:
        self._log, self._chunk = log, chunk

    def wait(self) -> None:
        self._log.append(("written", self._chunk))


class _Noting:
    """A lane without bytes that notes what it is asked for."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []

    def fetch(self, chunk: int) -> tuple[Any, Transfers]:
        self.log.append(("fetch", chunk))
        return None, ()

    def keep(self, chunk: int, memory: object) -> Transfers:
        self.log.append(("write", chunk))
        return [_Under(self.log, chunk)]

    def forget(self) -> None:
        raise AssertionError("the pass was whole")


def test_a_chunk_has_been_written_before_its_memory_is_read_into_again() -> None:
    """A slow disk would get the bytes of another chunk. Disks of tests are never that slow."""
    lane = _Noting()
    Pass([lane], range(3 * BUFFERS), lambda chunk, memory: None).run()
    at = {event: index for index, event in enumerate(lane.log)}
    for chunk in range(2 * BUFFERS):
        assert at["written", chunk] < at["fetch", chunk + BUFFERS]
    assert all(("written", chunk) in at for chunk in range(3 * BUFFERS))
