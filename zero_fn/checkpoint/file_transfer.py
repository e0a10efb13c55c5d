"""Files from rank to rank, where these have no folder in common:
from the memory of a host into that of another."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zero_fn.checkpoint.agreement import RankMeeting
from zero_fn.transport.rank0_messages import begin_send, receive

__all__ = ["transfer_files"]

_TAG = 0x7A67
_PART_NBYTES = 16 << 20


def transfer_files(meeting: RankMeeting, folder: Path, sends: Mapping[int, Iterable[str]]) -> None:
    """Sends files of a folder to other ranks, and writes those that come into the same folder here,
    by the same names; waits. All ranks call it.

    Communicates names and sizes of all files through rank 0, and the files.

    Args:
        meeting: Its ranks.
        folder: The folder.
        sends: Names by rank.

    Raises:
        LostRankError: A rank has ended.
        OSError: A file could not be read, or not written.
            The other files have been sent, and have come.
    """
    group, failures = meeting.group, list[OSError]()  # raised at the end: others wait for the rest
    files: list[tuple[int, str, int]] = []
    waits: list[Callable[[], None]] = []
    try:
        for peer, names in sends.items():
            files += [(peer, name, os.path.getsize(folder / name)) for name in names]
    except OSError as error:
        failures.append(error)
    said = meeting.all_of(files)
    if group is None:
        return
    for peer, name, nbytes in files:
        whole = torch.from_file(str(folder / name), size=nbytes, dtype=torch.uint8)
        waits += [begin_send(group, part, peer, _TAG) for part in torch.split(whole, _PART_NBYTES)]
    for sender, theirs in enumerate(said):
        for peer, name, nbytes in theirs:
            if peer == meeting.rank:
                _write(folder / name, _parts(group, sender, nbytes), failures)
    for wait in waits:
        wait()
    if failures:
        raise failures[-1]


def _write(path: Path, parts: Iterator[Tensor], failures: list[OSError]) -> None:
    """Writes a file that comes. If it has its name, it is whole."""
    coming = path.with_name(f"{path.name}.coming")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with coming.open("wb") as file:
            for part in parts:
                file.write(memoryview(part.numpy()))  # type: ignore[arg-type]
        coming.replace(path)
    except OSError as error:
        failures.append(error)
        for _ in parts:  # they come whether there is room for them or not
            pass


def _parts(group: ProcessGroup, peer: int, nbytes: int) -> Iterator[Tensor]:
    room = torch.empty(min(nbytes, _PART_NBYTES), dtype=torch.uint8)
    for at in range(0, nbytes, _PART_NBYTES):
        yield receive(group, room[: nbytes - at], peer, _TAG)
