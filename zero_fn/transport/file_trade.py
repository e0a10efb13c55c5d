"""Files from rank to rank, where these have no folder in common: from the memory of a host into that of another."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from zero_fn.transport.meeting import lost_ranks
from zero_fn.transport.waiting import deadline

__all__ = ["trade_files"]

_TAG = 0x7A67
_PART_NBYTES = 16 << 20


def trade_files(
    group: dist.ProcessGroup, folder: Path, sends: Mapping[int, Iterable[str]], sources: Iterable[int]
) -> None:
    """Sends files of a folder to other ranks, and writes those that come into the same folder here, by the same names; waits.

    Args:
        group: Its ranks.
        folder: The folder.
        sends: Names by rank. A rank that is named, with no files too, must have this rank among its sources.
        sources: The ranks that send to this one.

    Raises:
        LostRankError: A rank has ended.
        OSError: A file could not be read, or not written. The other files have been sent, and have come.
    """
    trade = _Trade(group)
    for peer, names in sends.items():
        trade.send(peer, folder, names)
    for peer in sources:
        trade.receive(peer, folder)
    trade.finish()


class _Trade:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._sent: list[tuple[int, dist.Work, Tensor]] = []  # keeps what is on its way
        self._failure: OSError | None = None  # raised at the end: others wait for what comes after it

    def send(self, peer: int, folder: Path, names: Iterable[str]) -> None:
        """Begins to send files. First their names and sizes, then the bytes in parts."""
        files, parts = list[tuple[str, int]](), list[Tensor]()
        try:
            for name in names:
                nbytes = os.path.getsize(folder / name)
                if nbytes:
                    whole = torch.from_file(str(folder / name), size=nbytes, dtype=torch.uint8)
                    parts += torch.split(whole, _PART_NBYTES)
                files.append((name, nbytes))
        except OSError as error:
            self._failure = error
        text = json.dumps(files).encode()
        for message in (torch.tensor([len(text)]), torch.frombuffer(bytearray(text), dtype=torch.uint8), *parts):
            with lost_ranks(here=f"rank {self._group.rank()}, sending to rank {peer}"):
                self._sent.append((peer, self._group.send([message], peer, _TAG), message))

    def receive(self, peer: int, folder: Path) -> None:
        """Writes the files that come from a rank."""
        length = int(self._take(torch.empty(1, dtype=torch.int64), peer))
        for name, nbytes in json.loads(bytes(self._take(torch.empty(length, dtype=torch.uint8), peer).tolist())):
            parts = self._parts(peer, nbytes)
            try:
                with open(folder / name, "xb") as file:
                    for part in parts:
                        file.write(memoryview(part.numpy()))  # type: ignore[arg-type]
            except OSError as error:
                self._failure = error
                for _ in parts:  # they come whether there is room for them or not
                    pass

    def finish(self) -> None:
        """Waits until everything was sent."""
        for peer, work, _ in self._sent:
            with lost_ranks(here=f"rank {self._group.rank()}, sending to rank {peer}"):
                work.wait(timedelta(seconds=deadline()))
        if self._failure is not None:
            raise self._failure

    def _parts(self, peer: int, nbytes: int) -> Iterator[Tensor]:
        room = torch.empty(min(nbytes, _PART_NBYTES), dtype=torch.uint8)
        for at in range(0, nbytes, _PART_NBYTES):
            yield self._take(room[: nbytes - at], peer)

    def _take(self, message: Tensor, peer: int) -> Tensor:
        with lost_ranks(here=f"rank {self._group.rank()}, waiting for rank {peer}"):
            self._group.recv([message], peer, _TAG).wait(timedelta(seconds=deadline()))
        return message
