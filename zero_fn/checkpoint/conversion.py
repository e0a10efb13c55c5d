"""Writes one checkpoint anew in another format, in one process, a buffer at a time.

zero_fn    what `zf.save` writes
hf         safetensors under the names of the model, as `from_pretrained` of transformers wants them
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from zero_fn.checkpoint.format.contents import Contents
from zero_fn.checkpoint.format.files import StoredBox, require_dtype
from zero_fn.checkpoint.format.folders import (
    AVERAGES,
    CUT,
    KINDS,
    Draft,
    tensors_name,
    write_manifest,
)
from zero_fn.checkpoint.format.values import encoded
from zero_fn.checkpoint.format.writer import Writer
from zero_fn.checkpoint.huggingface.read import packed, weights_name, write_index
from zero_fn.errors import CheckpointError
from zero_fn.values.box import whole_box

__all__ = ["Format", "Tell", "convert", "verify"]

Format = Literal["zero_fn", "hf"]

Tell = Callable[[int], object]
"""Is called with how many bytes have just been read."""

_FILE_NBYTES = 5 * 10**9


def verify(source: Contents, tell: Tell) -> int:
    """Reads every tensor and compares it with its digests. Communicates nothing."""
    total = 0
    for key in source.pieces:
        first = source.first(key)
        source.require_all(key, whole_box(first.shape))
        source.verify(key, whole_box(first.shape))
        nbytes = prod(first.shape) * first.dtype.itemsize
        tell(nbytes)
        total += nbytes
    return total


def convert(
    source: Contents,
    target: Path,
    to: Format,
    *,
    dtype: torch.dtype | None,
    only: Sequence[str],
    tell: Tell,
) -> None:
    """Writes a checkpoint in another format.

    Communicates nothing; a whole folder is there at the end, or none.
    """
    parted = (
        [name for name in source.said(0, "extra") if source.differs_by_rank("extra", name)]
        if "extra" in only
        else []
    )
    parted += [
        name for name in source.said(0, "buffers") if source.differs_by_rank("buffers", name)
    ]
    if parted:
        raise CheckpointError(
            "Ranks have saved different values under one name, "
            "and the result has room for those of one rank.",
            names=", ".join(parted),
            fix="zf.load on as many ranks, or --only model --only optimizer",
        )
    draft = Draft(target, kinds=KINDS if to == "zero_fn" else ())
    draft.make()
    saved_by = uuid.uuid4().hex if to == "zero_fn" else ""
    conversion = _Conversion(source, Writer(draft.path, saved_by), dtype, only, tell)
    try:
        if to == "zero_fn":
            conversion.to_ours()
            write_manifest(draft.path, saved_by, 1)
        else:
            conversion.to_safetensors()
        draft.commit()
    except BaseException:
        draft.drop()
        raise
    finally:
        conversion.writer.close()


class _Conversion:
    """A checkpoint on its way into a folder of another format. Arguments: see `convert`."""

    def __init__(
        self,
        source: Contents,
        writer: Writer,
        dtype: torch.dtype | None,
        only: Sequence[str],
        tell: Tell,
    ) -> None:
        self._source = source
        self.writer = writer
        self._dtype = dtype
        self._only = only
        self._tell = tell

    def to_ours(self) -> None:
        """Writes what `zf.save` would write on one rank, but for the manifest."""
        source, tensors = self._source, dict[str, Tensor]()
        says: dict[str, Any] = {"aliases": source.aliases if "model" in self._only else {}}
        if "optimizer" in self._only:
            says["groups"] = [
                {
                    "params": names,
                    "options": encoded(options, f"optimizer.param_groups[{number}]", tensors),
                }
                for number, (names, options) in enumerate(self._groups())
            ]
            says["values"] = {
                name: {
                    state: encoded(value, f"optimizer.state[{name!r}][{state!r}]", tensors)
                    for state, value in source.values_of(name).items()
                }
                for name in source.options
            }
        if "extra" in self._only:
            found = source.said(0, "extra").items()
            extra = {name: source.value(0, value) for name, value in found}
            says["extra"] = encoded(extra, "extra", tensors)
        for kind in CUT:
            self._write(kind, tensors_name(kind, 0, 0), list(self._pieces(kind)))
        if tensors:
            pieces = {}
            for name, tensor in tensors.items():
                require_dtype(name, tensor.dtype)
                pieces[name] = StoredBox.of_whole(name, tensor)
            self.writer.make("extra", tensors_name("extra", 0, 0), list(pieces.values()))
            for name, piece in pieces.items():
                self.writer.append(piece, tensors[name])
        self.writer.finish_part(0, says)

    def to_safetensors(self) -> None:
        """Writes files of at most 5 GB, or of one tensor, and their index."""
        files = packed(list(self._pieces("model")), _FILE_NBYTES)
        for number, each in enumerate(files):
            self._write("model", weights_name(number, len(files)), each)
        self.writer.finish()
        write_index(self.writer.folder, files)

    def _write(self, kind: str, name: str, pieces: list[StoredBox]) -> None:
        """Writes tensors, a buffer at a time, into a file; none if there are none."""
        if not pieces:
            return
        self.writer.make(kind, name, pieces)
        for piece in pieces:
            key, whole = (kind, piece.name), whole_box(piece.shape)
            self._source.require_all(key, whole)
            for _, values in self._source.read(key, whole):
                self.writer.append(piece, values.to(piece.dtype))
                self._tell(values.nbytes)

    def _pieces(self, kind: str) -> Iterator[StoredBox]:
        is_asked = ("extra" if kind == AVERAGES else kind) in self._only
        for key in self._source.pieces if is_asked else ():
            if key[0] == kind:
                first = self._source.first(key)
                is_cast = kind == "model" and first.dtype.is_floating_point
                dtype = (self._dtype if is_cast else None) or first.dtype
                yield StoredBox(key[1], dtype, first.shape, whole_box(first.shape))

    def _groups(self) -> list[tuple[list[str], dict[str, Any]]]:
        """The groups of the optimizer: names of parameters, and their options."""
        source, names_of = self._source, dict[str, list[str]]()
        for name, said in source.options.items():
            names_of.setdefault(repr(said), []).append(name)
        return [(names, source.value(*source.options[names[0]])) for names in names_of.values()]
