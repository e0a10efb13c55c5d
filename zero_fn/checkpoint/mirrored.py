"""Where the copies of `mirror` lie, and which ranks have them.

/dev/shm/zero_fn-WORD/       the copies of one run on this host; WORD is in the file `.mirror` beside its checkpoints
    1764316800123456789-4/   a copy by 4 ranks, begun by rank 0 at this time, in nanoseconds since 1970
        rank-00002.json      rank 2's part of the manifest, which it writes last: its files are complete
        model/ optimizer/ extra/

A copy is complete if parts of all ranks lie on some host. Ranks of a host write into one folder. With several hosts each rank
sends its files to a rank of the next host, so that a host may be lost.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from zero_fn.checkpoint.format.files import disk, read_json
from zero_fn.checkpoint.format.folders import part_name
from zero_fn.errors import CheckpointError

__all__ = ["MARK", "Hosts", "copies_in", "drawn_word", "names_in", "ranks_of_copy", "word_of"]

MARK = ".mirror"


class Hosts:
    """Which ranks share memory, and which rank of the next host keeps the files of each."""

    def __init__(self, names: Sequence[str]) -> None:
        """Takes the name of the host of each rank."""
        self.names = names
        self._ranks = dict[str, list[int]]()
        self._neighbours = dict[int, int]()
        for rank, name in enumerate(names):
            self._ranks.setdefault(name, []).append(rank)
        order = list(self._ranks)
        for name, following in zip(order, order[1:] + order[:1], strict=True):
            there = self._ranks[following]
            if name != following:
                self._neighbours |= {rank: there[at % len(there)] for at, rank in enumerate(self._ranks[name])}

    def beside(self, rank: int) -> list[int]:
        """The ranks on the host of a rank."""
        return self._ranks[self.names[rank]]

    def is_first(self, rank: int) -> bool:
        """Whether it is the first rank of its host, which acts for the others."""
        return self.beside(rank)[0] == rank

    def neighbour(self, rank: int) -> int | None:
        """The rank that keeps the files of a rank; None if there is one host."""
        return self._neighbours.get(rank)

    def kept_by(self, rank: int) -> list[int]:
        """The ranks whose files a rank keeps."""
        return [other for other, keeper in self._neighbours.items() if keeper == rank]


def word_of(folder: Path) -> str:
    """By which word the copies of a run are found; nothing if it has none."""
    with disk(folder, "Looking for a mirror"), suppress(FileNotFoundError, NotADirectoryError):
        found = re.fullmatch(r"(\w+) (\d+)\n", (folder / MARK).read_text())
        if found is None:
            raise CheckpointError(
                "The file that names the copies of a run is damaged.", file=folder / MARK, fix="remove the file"
            )
        # A folder that was copied is another run, and must not go on from the memory of the first.
        return found[1] if int(found[2]) == folder.stat().st_ino else ""
    return ""


def drawn_word(folder: Path) -> str:
    """The word of a run. One that has none gets one, which nobody else has."""
    with disk(folder, "Making the folder of checkpoints"):
        folder.mkdir(parents=True, exist_ok=True)
    word = word_of(folder)
    if not word:
        word = os.urandom(8).hex()
        with disk(folder, "Naming the copies of a run"):
            drawn = folder / f"{MARK}-{word}"
            drawn.write_text(f"{word} {folder.stat().st_ino}\n")
            drawn.replace(folder / MARK)
    return word


def ranks_of_copy(name: str) -> int:
    """How many ranks have made a copy, by the name of its folder; 0 if it is none."""
    time_ns, _, ranks = name.partition("-")
    return int(ranks) if time_ns.isdigit() and ranks.isdigit() else 0


def names_in(folder: Path) -> list[str]:
    """The copies on this host, complete or not."""
    with disk(folder, "Looking for copies"):
        return [path.name for path in folder.iterdir() if ranks_of_copy(path.name)] if folder.exists() else []


def copies_in(folder: Path) -> dict[str, list[int]]:
    """The copies on this host, and whose parts of each are complete."""
    found = dict[str, list[int]]()
    for name in names_in(folder):
        parts = found.setdefault(name, [])
        for rank in range(ranks_of_copy(name)):
            with suppress(CheckpointError):
                if (folder / name / part_name(rank)).exists():
                    read_json(folder / name / part_name(rank), {"rank": int})
                    parts.append(rank)
    return found
