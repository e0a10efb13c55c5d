"""Files from rank to rank, where these have no folder in common:
from the memory of a host into that of another."""

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
    group: dist.ProcessGroup,
    folder: Path,
    sends: Mapping[int, Iterable[str]],
    sources: Iterable[int],
) -> None:
    """Sends files of a folder to other ranks, and writes those that come into the same folder here,
    by the same names; waits.

    Args:
        group: Its ranks.
        folder: The folder.
        sends: Names by rank. A rank that is named, with no files too,
            must have this rank among its sources.
        sources: The ranks that send to this one.

    Raises:
        LostRankError: A rank has ended.
        OSError: A file could not be read, or not written.
            The other files have been sent, and have come.
    """
    failures: list[OSError] = []  # raised at the end: others wait for what comes after them
    waits = [
        wait
        for peer, names in sends.items()
        for wait in _sent(group, folder, peer, names, failures)
    ]
    for peer in sources:
        _write(group, folder, peer, failures)
    for wait in waits:
        wait()
    if failures:
        raise failures[-1]


def _sent(
    group: dist.ProcessGroup, folder: Path, peer: int, names: Iterable[str], failures: list[OSError]
) -> list[Callable[[], None]]:
    """Begins to send files: first their names and sizes, then the bytes in parts.

    Each of the results waits for a message.
    """
    files: list[tuple[str, int]] = []
    parts: list[Tensor] = []
    try:
        for name in names:
            nbytes = os.path.getsize(folder / name)
            if nbytes:
                whole = torch.from_file(str(folder / name), size=nbytes, dtype=torch.uint8)
                parts += torch.split(whole, _PART_NBYTES)
            files.append((name, nbytes))
    except OSError as error:
        failures.append(error)
    text = json.dumps(files).encode()
    messages = [
        torch.tensor([len(text)]),
        torch.frombuffer(bytearray(text), dtype=torch.uint8),
        *parts,
    ]
    return [begin_send(group, message, peer, _TAG) for message in messages]


def _write(group: dist.ProcessGroup, folder: Path, peer: int, failures: list[OSError]) -> None:
    """Writes the files that come from a rank."""
    length = int(receive(group, torch.empty(1, dtype=torch.int64), peer, _TAG))
    text = receive(group, torch.empty(length, dtype=torch.uint8), peer, _TAG)
    for name, nbytes in json.loads(bytes(text.tolist())):
        parts = _parts(group, peer, nbytes)
        try:
            with open(folder / name, "xb") as file:
                for part in parts:
                    file.write(memoryview(part.numpy()))  # type: ignore[arg-type]
        except OSError as error:
            failures.append(error)
            for _ in parts:  # they come whether there is room for them or not
                pass


def _parts(group: dist.ProcessGroup, peer: int, nbytes: int) -> Iterator[Tensor]:
    room = torch.empty(min(nbytes, _PART_NBYTES), dtype=torch.uint8)
    for at in range(0, nbytes, _PART_NBYTES):
        yield receive(group, room[: nbytes - at], peer, _TAG)
