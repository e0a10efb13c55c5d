"""Text as bytes, split by file, and batches that depend on nothing but the step.

The default text needs no download: the source of Python's own standard library, some 11 MB. Whole files go to the
training or to the validation split, so that no line of a validation file was ever trained on.

The batch of a step is the same for every number of ranks and microbatches; each takes its rows::

    rows of a step:  "(rank microbatch row) time"     row `rank`, then one microbatch after the other
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Corpus", "CorpusError", "rows", "standard_library"]

_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}
_BETWEEN_FILES = b"\0"


class CorpusError(ValueError):
    """The text cannot be trained on."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Two splits of a text.

    Attributes:
        source: Where it came from, to be printed.
        train: Bytes to train on, uint8, 1-D.
        validation: Bytes of other files.
    """

    source: str
    train: Tensor
    validation: Tensor

    @staticmethod
    def load(text: str | None, seq: int) -> Corpus:
        """Reads the standard library, or a file or folder of the user's.

        Args:
            text: A file, a folder (every file in it that is text), or None for the standard library.
            seq: Length of the sequences to be drawn; each split must hold more than one.

        Returns:
            The same corpus on every machine that has the same files.

        Raises:
            CorpusError: No such path, no text in it, or fewer than `seq + 1` bytes in a split.
        """
        if text is None:
            return Corpus.split("Python's standard library", dict(standard_library()), seq)
        path = Path(text).expanduser()
        if not path.exists():
            raise CorpusError(f"no such file or folder: {path}")
        files = {path.name: path.read_bytes()} if path.is_file() else dict(_text_files(path))
        return Corpus.split(str(path), files, seq)

    @staticmethod
    def split(source: str, files: dict[str, bytes], seq: int, fraction: float = 0.1) -> Corpus:
        """Gives whole files to the validation split, in the order of a hash of their names, until it has its fraction.

        A single file is cut: its end validates.
        """
        total = sum(map(len, files.values()))
        train, validation = bytearray(), bytearray()
        if len(files) == 1:
            (text,) = files.values()
            cut = round(len(text) * (1 - fraction))
            train, validation = bytearray(text[:cut]), bytearray(text[cut:])
        else:
            for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()):
                part = validation if len(validation) < fraction * total else train
                part += files[name] + _BETWEEN_FILES
        if min(len(train), len(validation)) <= seq:
            raise CorpusError(
                f"the text is too short: {source} holds {len(train):,} bytes to train on and {len(validation):,} to "
                f"validate on, and each must be longer than a sequence of {seq:,} bytes"
            )
        return Corpus(
            source, torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(validation, dtype=torch.uint8)
        )


def rows(text: Tensor, batch: int, seq: int, *, step: int, seed: int) -> Tensor:
    """The batch of a step: sequences from random places, each with one byte more to predict.

    Shapes: text "bytes" -> "batch (seq + 1)" of int64.

    Args:
        text: One split of a corpus.
        batch: Sequences, over all ranks and microbatches.
        seq: Length of a sequence.
        step: With `seed`, the only thing that the draw depends on.
        seed: Of the run.

    Returns:
        The same rows on every rank.
    """
    draws = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - seq, (batch, 1), generator=draws)
    return text[starts + torch.arange(seq + 1)].long()


def standard_library() -> Iterator[tuple[str, bytes]]:
    """Names and bytes of the modules of Python's standard library, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not _SKIPPED.intersection(name.parts):
            yield name.as_posix(), path.read_bytes()


def _text_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            text = path.read_bytes()
            if text and b"\0" not in text:
                yield name.as_posix(), text
