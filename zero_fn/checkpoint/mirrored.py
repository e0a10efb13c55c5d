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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zero_fn.checkpoint.format.files import disk, read_json
from zero_fn.checkpoint.format.folders import part_name
from zero_fn.errors import CheckpointError

__all__ = ["MARK", "Hosts", "copies_in", "drawn_word", "ranks_of_copy", "word_of"]

MARK = ".mirror"


@dataclass(frozen=True)
class Hosts:
    """Which ranks share memory, and which rank of the next host keeps the files of each."""

    names: Sequence[str]  # of the host of each rank

    def beside(self, rank: int) -> list[int]:
        """The ranks on the host of a rank."""
        return [other for other, name in enumerate(self.names) if name == self.names[rank]]

    def is_first(self, rank: int) -> bool:
        """Whether it is the first rank of its host, which acts for the others."""
        return self.beside(rank)[0] == rank

    def neighbour(self, rank: int) -> int | None:
        """The rank that keeps the files of a rank; None if there is one host."""
        order = list(dict.fromkeys(self.names))
        if len(order) == 1:
            return None
        following = order[(order.index(self.names[rank]) + 1) % len(order)]
        there = self.beside(self.names.index(following))
        return there[self.beside(rank).index(rank) % len(there)]

    def kept_by(self, rank: int) -> list[int]:
        """The ranks whose files a rank keeps."""
        return [other for other in range(len(self.names)) if self.neighbour(other) == rank]


def word_of(folder: Path) -> str:
    """By which word the copies of a run are found; nothing if it has none."""
    with disk(folder, "Looking for a mirror"), suppress(FileNotFoundError, NotADirectoryError):
        word = (folder / MARK).read_text().strip()
        if not word.isalnum():
            raise CheckpointError(
                "The file that names the copies of a run is damaged.", file=folder / MARK, fix="remove the file"
            )
        return word
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
            drawn.write_text(word)
            drawn.replace(folder / MARK)
    return word


def ranks_of_copy(name: str) -> int:
    """How many ranks have made a copy, by the name of its folder; 0 if it is none."""
    time_ns, _, ranks = name.partition("-")
    return int(ranks) if time_ns.isdigit() and ranks.isdigit() else 0


def copies_in(folder: Path) -> dict[str, list[int]]:
    """The copies on this host, and whose parts of each are complete."""
    found = dict[str, list[int]]()
    with disk(folder, "Looking for copies"):
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
    for name in names:
        parts = found.setdefault(name, []) if ranks_of_copy(name) else []
        for rank in range(ranks_of_copy(name)):
            with suppress(CheckpointError):
                if (folder / name / part_name(rank)).exists():
                    read_json(folder / name / part_name(rank), {"rank": int})
                    parts.append(rank)
    return found
