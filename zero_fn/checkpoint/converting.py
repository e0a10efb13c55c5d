"""Writes one checkpoint anew in another format, in one process, a buffer at a time.

zero_fn    what `zf.save` writes
hf         safetensors under the names of the model, as `from_pretrained` of transformers wants them
dcp        what `torch.distributed.checkpoint` writes; a tensor at a time
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from zero_fn.checkpoint.format.contents import Contents
from zero_fn.checkpoint.format.files import StoredBox, TensorFile, disk, require_dtype, write_json
from zero_fn.checkpoint.format.folders import AVERAGES, CUT, KINDS, Draft, part_name, tensors_name, write_manifest
from zero_fn.checkpoint.format.values import encoded
from zero_fn.checkpoint.huggingface.read import packed, weights_name, write_index
from zero_fn.errors import CheckpointError
from zero_fn.values.box import whole_box

__all__ = ["Format", "Tell", "convert", "verify"]

Format = Literal["zero_fn", "hf", "dcp"]

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
    source: Contents, target: Path, to: Format, *, dtype: torch.dtype | None, only: Sequence[str], tell: Tell
) -> None:
    """Writes a checkpoint in another format. Communicates nothing; a whole folder is there at the end, or none."""
    parted = (
        [name for name in source.said(0, "extra") if source.differs_by_rank("extra", name)] if "extra" in only else []
    )
    parted += [name for name in source.said(0, "buffers") if source.differs_by_rank("buffers", name)]
    if parted:
        raise CheckpointError(
            "Ranks have saved different values under one name, and the result has room for those of one rank.",
            names=", ".join(parted),
            fix="zf.load on as many ranks, or --only model --only optimizer",
        )
    draft = Draft(target, kinds=KINDS if to == "zero_fn" else ())
    draft.make()
    conversion = _Conversion(source, draft.path, dtype, only, tell)
    try:
        {"zero_fn": conversion.to_ours, "hf": conversion.to_safetensors, "dcp": conversion.to_dcp}[to]()
        draft.commit()
    except BaseException:
        draft.drop()
        raise


class _Conversion:
    """A checkpoint on its way into a folder of another format. Arguments: see `convert`."""

    def __init__(
        self, source: Contents, path: Path, dtype: torch.dtype | None, only: Sequence[str], tell: Tell
    ) -> None:
        self._source = source
        self._path = path
        self._dtype = dtype
        self._only = only
        self._tell = tell

    def to_ours(self) -> None:
        """Writes what `zf.save` would write on one rank."""
        source, mark, tensors = self._source, uuid.uuid4().hex, dict[str, Tensor]()
        says: dict[str, Any] = {"aliases": source.aliases if "model" in self._only else {}}
        if "optimizer" in self._only:
            says["groups"] = [
                {"params": names, "options": encoded(options, f"optimizer.param_groups[{number}]", tensors)}
                for number, (names, options) in enumerate(self._groups())
            ]
            says["values"] = {
                name: {
                    state: encoded(value, f"optimizer.state[{name!r}][{state!r}]", tensors)
                    for state, value in source.values_of(name).items()
                }
                for name in source.options
            }
        says["extra"] = encoded(self._extra(), "extra", tensors)
        pieces = {kind: list(self._pieces(kind)) for kind in CUT}
        for name, tensor in tensors.items():
            require_dtype(name, tensor.dtype)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        pieces["extra"] = [StoredBox(name, tensors[name].dtype, of, whole_box(of)) for name, of in shapes.items()]
        files = {}
        for kind, each in pieces.items():
            path = self._path / tensors_name(kind, 0, 0)
            files[kind] = [_write_tensors(path, mark, each, partial(self._read, kind, tensors))] if each else []
        write_json(self._path / part_name(0), {"id": mark, "rank": 0, "files": files, **says})
        write_manifest(self._path, mark, 1)

    def to_safetensors(self) -> None:
        """Writes files of at most 5 GB, or of one tensor, and their index."""
        files = packed(list(self._pieces("model")), _FILE_NBYTES)
        for number, each in enumerate(files):
            path = self._path / weights_name(number, len(files))
            _write_tensors(path, "", each, partial(self._read, "model", {}))
        write_index(self._path, files)

    def to_dcp(self) -> None:
        """Writes what `torch.distributed.checkpoint` would write on one rank."""
        saved: dict[str, Any] = {}
        found: dict[tuple[Any, ...], tuple[str, StoredBox]] = {}
        for kind in CUT:
            for piece in self._pieces(kind):
                name, _, state = piece.name.rpartition("/") if kind in CUT[1:] else (piece.name, "", "")
                way: tuple[Any, ...] = ("optimizer", "state", name, state) if state else ("model", name)
                way = (f"{state}.tensors", name) if kind == AVERAGES else way
                inside = saved
                for step in way[:-1]:
                    inside = inside.setdefault(step, {})
                inside[way[-1]] = torch.empty(piece.shape, dtype=piece.dtype, device="meta")
                found[way] = kind, piece
        if "optimizer" in self._only and self._source.options:
            optimizer = saved.setdefault("optimizer", {})
            for name in self._source.options:
                if values := self._source.values_of(name):
                    optimizer.setdefault("state", {}).setdefault(name, {}).update(values)
            optimizer["param_groups"] = [{**options, "params": names} for names, options in self._groups()]

        def whole(way: tuple[Any, ...]) -> Tensor:
            kind, piece = found[way]
            out, at = torch.empty(piece.box.numel, dtype=piece.dtype), 0
            for values in self._read(kind, {}, piece):
                out[at : at + values.numel()] = values
                at += values.numel()
            return out.view(piece.shape)

        writer = FileSystemWriter(self._path, thread_count=1)
        try:
            dcp_save(saved | self._extra(), storage_writer=writer, planner=_AsTheyAreRead(whole), no_dist=True)
        except CheckpointException as error:
            with disk(self._path, "Writing a checkpoint"):
                raise next(iter(error.failures.values()))[0] from error

    # -- what there is -------------------------------------------------------------------------------------------------

    def _pieces(self, kind: str) -> Iterator[StoredBox]:
        for key in self._source.pieces if ("extra" if kind == AVERAGES else kind) in self._only else ():
            if key[0] == kind:
                first = self._source.first(key)
                is_cast = self._dtype is not None and kind == "model" and first.dtype.is_floating_point
                dtype = self._dtype if is_cast and self._dtype else first.dtype
                yield StoredBox(key[1], dtype, first.shape, whole_box(first.shape))

    def _read(self, kind: str, in_memory: Mapping[str, Tensor], piece: StoredBox) -> Iterator[Tensor]:
        """The elements of a tensor, a buffer at a time; those of `extra` are in memory."""
        if kind == "extra":
            yield in_memory[piece.name].contiguous().view(-1)
            return
        whole = whole_box(piece.shape)
        self._source.require_all((kind, piece.name), whole)
        for _, values in self._source.read((kind, piece.name), whole):
            yield values.to(piece.dtype)
            self._tell(values.nbytes)

    def _groups(self) -> list[tuple[list[str], dict[str, Any]]]:
        """The groups of the optimizer: names of parameters, and their options."""
        source, names_of = self._source, dict[str, list[str]]()
        for name, said in source.options.items():
            names_of.setdefault(repr(said), []).append(name)
        return [(names, source.value(*source.options[names[0]])) for names in names_of.values()]

    def _extra(self) -> dict[str, Any]:
        if "extra" not in self._only:
            return {}
        return {name: self._source.value(0, value) for name, value in self._source.said(0, "extra").items()}


def _write_tensors(
    path: Path, mark: str, pieces: Sequence[StoredBox], read: Callable[[StoredBox], Iterable[Tensor]]
) -> dict[str, Any]:
    """Writes a file; returns what a manifest says of it. `read` gives the elements of a tensor, a buffer at a time."""
    file = TensorFile(path, list(pieces), mark)
    try:
        for piece in pieces:
            for values in read(piece):
                file.append(piece, values)
        return file.finish()
    finally:
        file.close()


class _AsTheyAreRead(DefaultSavePlanner):
    """Plans from tensors without memory, and reads each when it is written."""

    def __init__(self, read: Callable[[tuple[Any, ...]], Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = super().lookup_object(index)
        return self._read(tuple(self.mappings[index.fqn])) if isinstance(found, Tensor) and found.is_meta else found
