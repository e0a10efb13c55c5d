"""Files from rank to rank, where these have no folder in common: from the memory of a host into that of another."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from zero_fn.transport.rank0_messages import begin_send, receive

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
        self._sent: list[Callable[[], None]] = []  # each waits for a message that is on its way
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
            self._sent.append(begin_send(self._group, message, peer, _TAG))

    def receive(self, peer: int, folder: Path) -> None:
        """Writes the files that come from a rank."""
        length = int(receive(self._group, torch.empty(1, dtype=torch.int64), peer, _TAG))
        text = receive(self._group, torch.empty(length, dtype=torch.uint8), peer, _TAG)
        for name, nbytes in json.loads(bytes(text.tolist())):
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
        for wait in self._sent:
            wait()
        if self._failure is not None:
            raise self._failure

    def _parts(self, peer: int, nbytes: int) -> Iterator[Tensor]:
        room = torch.empty(min(nbytes, _PART_NBYTES), dtype=torch.uint8)
        for at in range(0, nbytes, _PART_NBYTES):
            yield receive(self._group, room[: nbytes - at], peer, _TAG)
