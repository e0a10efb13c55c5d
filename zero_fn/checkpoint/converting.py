"""One checkpoint written anew in another format, by one process and a buffer at a time.

zero_fn    what `zf.save` writes
hf         safetensors under the names of the model, as `from_pretrained` of transformers wants them
dcp        what `torch.distributed.checkpoint` writes; a tensor at a time
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
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

from zero_fn.checkpoint.boxes import whole_box
from zero_fn.checkpoint.contents import Contents, Key
from zero_fn.checkpoint.files import StoredBox, TensorFile, disk, require_dtype, write_json
from zero_fn.checkpoint.folders import KINDS, Draft, part_name, tensors_name, write_manifest
from zero_fn.checkpoint.pretrained import packed, weights_name, write_index
from zero_fn.checkpoint.values import encoded
from zero_fn.errors import CheckpointError

__all__ = ["Format", "Tell", "convert", "verify"]

Format = Literal["zero_fn", "hf", "dcp"]

Tell = Callable[[int], object]
"""Is told how many bytes have been read."""

_FILE_NBYTES = 5 * 10**9


def verify(source: Contents, tell: Tell) -> int:
    """Reads every tensor and compares it with its digests. Communicates nothing.

    Returns:
        How many bytes of tensors there are.

    Raises:
        CheckpointError: Something is not what was written.
        StorageError: The disk refused.
    """
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
    """Writes a checkpoint in another format. Communicates nothing; a whole folder is there at the end, or none.

    Args:
        source: What is read.
        target: The folder that is made.
        to: The format.
        dtype: Of floating-point parameters and buffers; None: as they are.
        only: Which kinds: of "model", "optimizer" and "extra".
        tell: Is told how many bytes have been read.

    Raises:
        CheckpointError: It is damaged, there is such a folder, or the format cannot hold what it has.
        StorageError: The disk refused.
    """
    parted = [name for name in source.said(0, "extra") if source.is_parted("extra", name)] if "extra" in only else []
    parted += [name for name in source.said(0, "buffers") if source.is_parted("buffers", name)]
    if parted:
        raise CheckpointError(
            "Ranks have saved different values under one name, and the result has room for those of one rank.",
            names=", ".join(parted),
            fix="zf.load on as many ranks, or --only model --only optimizer",
        )
    keys = [key for key in source.pieces if key[0] in only and key[0] != "extra"]
    draft = Draft(target, kinds=KINDS if to == "zero_fn" else ())
    draft.make()
    try:
        if to == "zero_fn":
            _write_ours(source, draft.path, keys, dtype, only, tell)
        elif to == "hf":
            _write_files(source, draft.path, keys, dtype, tell)
        else:
            _write_dcp(source, draft.path, keys, dtype, only, tell)
        draft.commit()
    except BaseException:
        draft.drop()
        raise


def _dtype_of(key: Key, dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and key[0] == "model" and dtype.is_floating_point else dtype


def _read(source: Contents, key: Key, dtype: torch.dtype, tell: Tell) -> Iterator[tuple[int, Tensor]]:
    """The elements of a tensor in this dtype, a buffer at a time, with the number of the first."""
    whole = whole_box(source.first(key).shape)
    source.require_all(key, whole)
    for first, values in source.read(key, whole):
        yield first, values.to(dtype)
        tell(values.nbytes)


def _read_piece(source: Contents, kind: str, tell: Tell, piece: StoredBox) -> Iterator[Tensor]:
    return (values for _, values in _read(source, (kind, piece.name), piece.dtype, tell))


def _pieces(source: Contents, keys: Sequence[Key], dtype: torch.dtype | None) -> dict[str, StoredBox]:
    """These tensors as they will be in files, by name."""
    found = {}
    for key in keys:
        first = source.first(key)
        found[key[1]] = StoredBox(key[1], _dtype_of(key, first.dtype, dtype), first.shape, whole_box(first.shape))
    return found


def _groups(source: Contents) -> list[tuple[list[str], dict[str, Any]]]:
    """The groups of the optimizer: names of parameters, and their options."""
    names_of: dict[str, list[str]] = {}
    for name, said in source.options.items():
        names_of.setdefault(repr(said), []).append(name)
    return [(names, source.value(*source.options[names[0]])) for names in names_of.values()]


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


def _write_ours(
    source: Contents, path: Path, keys: list[Key], dtype: torch.dtype | None, only: Sequence[str], tell: Tell
) -> None:
    mark, tensors = uuid.uuid4().hex, dict[str, Tensor]()
    says: dict[str, Any] = {"aliases": source.aliases if "model" in only else {}, "extra": {}}
    if "optimizer" in only:
        says["groups"] = [
            {"params": names, "options": encoded(options, f"optimizer.param_groups[{number}]", tensors)}
            for number, (names, options) in enumerate(_groups(source))
        ]
        says["values"] = {
            name: {
                state: encoded(value, f"optimizer.state[{name!r}][{state!r}]", tensors)
                for state, value in source.values_of(name).items()
            }
            for name in source.options
        }
    if "extra" in only:
        beside = {name: source.value(0, value) for name, value in source.said(0, "extra").items()}
        says["extra"] = encoded(beside, "extra", tensors)
    files = {}
    for kind in KINDS[:2]:
        pieces = list(_pieces(source, [key for key in keys if key[0] == kind], dtype).values())
        file = path / tensors_name(kind, 0, 0)
        read = partial(_read_piece, source, kind, tell)
        files[kind] = [_write_tensors(file, mark, pieces, read)] if pieces else []
    for name, tensor in tensors.items():
        require_dtype(name, tensor.dtype)
    pieces = [StoredBox(name, each.dtype, tuple(each.shape), whole_box(each.shape)) for name, each in tensors.items()]
    file = path / tensors_name("extra", 0, 0)
    in_memory = {name: [tensor.contiguous().view(-1)] for name, tensor in tensors.items()}
    files["extra"] = [_write_tensors(file, mark, pieces, lambda piece: in_memory[piece.name])] if tensors else []
    write_json(path / part_name(0), {"id": mark, "rank": 0, "files": files, **says})
    write_manifest(path, mark, 1)


def _write_files(source: Contents, path: Path, keys: list[Key], dtype: torch.dtype | None, tell: Tell) -> None:
    """Files of at most 5 GB, or of one tensor, and their index."""
    pieces = _pieces(source, [key for key in keys if key[0] == "model"], dtype)
    files = packed(list(pieces.values()), _FILE_NBYTES)
    for number, each in enumerate(files):
        _write_tensors(path / weights_name(number, len(files)), "", each, partial(_read_piece, source, "model", tell))
    write_index(path, files)


class _AsTheyAreRead(DefaultSavePlanner):
    """Plans from tensors without memory, and reads each when it is written."""

    def __init__(self, read: Callable[[tuple[Any, ...]], Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The tensor, or the value."""
        found = super().lookup_object(index)
        return self._read(tuple(self.mappings[index.fqn])) if isinstance(found, Tensor) and found.is_meta else found


def _write_dcp(
    source: Contents, path: Path, keys: list[Key], dtype: torch.dtype | None, only: Sequence[str], tell: Tell
) -> None:
    saved: dict[str, Any] = {}
    places: dict[tuple[Any, ...], Key] = {}
    for key in keys:
        first = source.first(key)
        name, _, state = key[1].rpartition("/") if key[0] == "optimizer" else (key[1], "", "")
        way: tuple[Any, ...] = ("optimizer", "state", name, state) if state else ("model", name)
        inside = saved
        for step in way[:-1]:
            inside = inside.setdefault(step, {})
        inside[way[-1]] = torch.empty(first.shape, dtype=_dtype_of(key, first.dtype, dtype), device="meta")
        places[way] = key
    if "optimizer" in only and source.options:
        states = saved.setdefault("optimizer", {}).setdefault("state", {})
        for name in source.options:
            values = source.values_of(name)
            if values:
                states.setdefault(name, {}).update(values)
        saved["optimizer"]["param_groups"] = [{**options, "params": names} for names, options in _groups(source)]
    if "extra" in only:
        saved |= {name: source.value(0, value) for name, value in source.said(0, "extra").items()}

    def read(way: tuple[Any, ...]) -> Tensor:
        key = places[way]
        whole = torch.empty(source.first(key).shape, dtype=_dtype_of(key, source.first(key).dtype, dtype))
        for at, values in _read(source, key, whole.dtype, tell):
            whole.view(-1)[at : at + values.numel()] = values
        return whole

    try:
        dcp_save(
            saved, storage_writer=FileSystemWriter(path, thread_count=1), planner=_AsTheyAreRead(read), no_dist=True
        )
    except CheckpointException as error:
        with disk(path, "Writing a checkpoint"):
            raise next(iter(error.failures.values()))[0] from error
