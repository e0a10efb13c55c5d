"""`python -m zero_fn checkpoint`: lists checkpoints, verifies them,
and converts them into other formats.

    python -m zero_fn checkpoint ls runs/a
    python -m zero_fn checkpoint verify runs/a
    python -m zero_fn checkpoint convert runs/a weights --to hf --dtype bf16

Reads folders of `zf.save`, DeepSpeed and torch.distributed.checkpoint. Exits with 0 if all is well,
with 1 and the error if not, with 2 if it was called in another way.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from zero_fn.checkpoint.conversion import Tell, convert, verify
from zero_fn.checkpoint.format.contents import Contents
from zero_fn.checkpoint.format.folders import KINDS, checkpoints
from zero_fn.checkpoint.others.find import find_checkpoint, opened
from zero_fn.errors import ZeroError
from zero_fn.values.dtypes import SHORT_NAMES
from zero_fn.values.tiers import bytes_text

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Runs the command with what follows its name; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        with torch.no_grad():
            options.run(options)
    except ZeroError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m zero_fn checkpoint", description="Folders of checkpoints."
    )
    commands = parser.add_subparsers(required=True)

    found = commands.add_parser("ls", help="list the checkpoints of a folder")
    found.set_defaults(run=_list)
    checked = commands.add_parser("verify", help="read all of a checkpoint and compare its digests")
    checked.set_defaults(run=_verify)
    written = commands.add_parser(
        "convert", help="write it in another format, one buffer at a time"
    )
    written.set_defaults(run=_convert)
    for command in (found, checked, written):
        command.add_argument(
            "folder",
            type=Path,
            help="a checkpoint, or a folder of checkpoints (the newest is taken)",
        )
    written.add_argument("target", type=Path, help="the folder to make")
    written.add_argument(
        "--to",
        choices=("zero_fn", "hf"),
        required=True,
        help="the format; hf is safetensors",
    )
    written.add_argument("--dtype", choices=SHORT_NAMES, help="cast floating-point tensors to it")
    written.add_argument(
        "--only", choices=KINDS, action="append", help="keep this alone; may be repeated"
    )
    return parser


def _list(options: argparse.Namespace) -> None:
    folder = Path(os.path.abspath(options.folder))
    own = checkpoints(folder)
    for each in own:
        print(each)
    if not own:
        print(find_checkpoint(folder))


def _verify(options: argparse.Namespace) -> None:
    with _source(options.folder, "verify") as (source, tell):
        nbytes = verify(source, tell)
    print(f"{source.path}  {bytes_text(nbytes)} of tensors, all as they were written")


def _convert(options: argparse.Namespace) -> None:
    only = tuple(options.only or (KINDS if options.to != "hf" else KINDS[:1]))
    with _source(options.folder, "convert", has_states="optimizer" in only) as (source, tell):
        target = Path(os.path.abspath(options.target))
        convert(
            source, target, options.to, dtype=SHORT_NAMES.get(options.dtype), only=only, tell=tell
        )
    print(target)


@contextmanager
def _source(
    folder: Path, doing: str, *, has_states: bool = True
) -> Iterator[tuple[Contents, Tell]]:
    """Opens the checkpoint that a folder means.

    Yields it, and a bar that is told of bytes, where tqdm is installed.
    """
    source = opened(
        find_checkpoint(Path(os.path.abspath(folder))), lambda name: name, has_states=has_states
    )
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        tqdm = None
    bar = (
        None
        if tqdm is None
        else tqdm(unit="B", unit_scale=True, desc=doing, disable=None, file=sys.stderr)
    )
    try:
        yield source, (lambda nbytes: None) if bar is None else bar.update
    finally:
        source.close()
        if bar is not None:
            bar.close()
