"""What another library has saved: values and tensors in files of `torch.save`,
read without running the code that they name.

torch reads the values (`weights_only=True`), and under `FakeTensorMode` no byte of a tensor:
it says where in the file each tensor lies. It compares no checksums; those of the archive
are compared here.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from zero_fn.checkpoint.format.contents import Contents, range_of
from zero_fn.checkpoint.format.files import StoredBox, TensorReader, damaged, disk
from zero_fn.errors import CheckpointError, ZeroError
from zero_fn.values.box import Box, spans, strides_of, whole_box

__all__ = [
    "Foreign",
    "Stub",
    "TensorInFile",
    "ZipRecord",
    "opened_pickle",
    "read_torch_file",
    "refused",
]

_BLOCK_NBYTES = 1 << 20


class ZipRecord(NamedTuple):
    """Bytes of a file under one checksum: a storage, as `torch.save` writes it."""

    path: Path
    offset: int
    nbytes: int
    crc32: int


class TensorInFile(NamedTuple):
    """A tensor in a file, whose elements have not been read.

    `offset`, in bytes, is from the beginning of the file.
    """

    record: ZipRecord
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def is_in_rows(self) -> bool:
        """Whether the elements lie in the order of rows, without gaps."""
        return self.strides == strides_of(self.shape)

    @property
    def spanned(self) -> int:
        """Elements of the storage from the first of the tensor to its last."""
        if 0 in self.shape:
            return 0
        dims = zip(self.shape, self.strides, strict=True)
        return sum((size - 1) * stride for size, stride in dims) + 1


class Stub:
    """An instance of a class that is not imported: what it was made with,
    and what its class would have restored."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Stub:
        self = super().__new__(cls)
        self.args = args
        self.state = {}
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


_STUBS = (
    "argparse.Namespace",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
)

_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, set, torch.dtype)


def read_torch_file(path: Path, offset: int = 0, nbytes: int | None = None) -> Any:
    """What `torch.save` has written into a file, or into `nbytes` of it: a `TensorInFile` for each
    tensor, a `Stub` for each instance of a class.

    None of its code is run.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with opened_pickle(path) as file, safe_globals([(Stub, name) for name in _STUBS]):
        excerpt: Any = _Excerpt(
            file, offset, os.fstat(file.fileno()).st_size - offset if nbytes is None else nbytes
        )
        records = _records(excerpt, path)
        excerpt.seek(0)
        try:
            with FakeTensorMode():
                found = torch.load(excerpt, weights_only=True)
        except pickle.UnpicklingError as error:  # its text ends in advice that nobody should take
            excerpt.seek(0)
            for name in get_unsafe_globals_in_checkpoint(excerpt):
                raise refused(path, name) from None
            text = (
                str(error)
                .partition("WeightsUnpickler error:")[2]
                .partition("Check the documentation")[0]
            )
            raise pickle.UnpicklingError(text.strip()) from error
        return _in_file(found, records, path)


def refused(path: Path, name: str) -> CheckpointError:
    """The error for a file that names what is not read."""
    return CheckpointError(
        "A file of a checkpoint names something that is not read.",
        file=path,
        named=name,
        why="a pickle calls what it names; only tensors, "
        "numbers and a few classes of DeepSpeed and torch are read, as values",
        fix="save it without that object (in client_state, or in the state_dict)",
    )


def _records(excerpt: _Excerpt, path: Path) -> dict[int, ZipRecord]:
    """The records of an archive by their first byte; the one that holds the values
    is compared with its checksum."""
    found = {}
    with zipfile.ZipFile(excerpt) as archive:
        for info in archive.infolist():
            name = info.filename.rpartition("/")[2]
            if name == "data.pkl":
                archive.read(info)
            if name == "byteorder" and archive.read(info) != b"little":
                raise pickle.UnpicklingError("its numbers begin with their highest byte")
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise pickle.UnpicklingError("it is compressed")
            excerpt.seek(info.header_offset)
            header = excerpt.read(30)  # its last 4 bytes are the lengths of what follows it
            lengths = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
            first = info.header_offset + 30 + sum(lengths)
            if header[:4] != b"PK\3\4" or first + info.file_size > excerpt.nbytes:
                raise pickle.UnpicklingError("a record is not where its archive says")
            found[first] = ZipRecord(path, excerpt.offset + first, info.file_size, info.CRC)
    return found


def _in_file(value: Any, records: Mapping[int, ZipRecord], path: Path) -> Any:
    """A value that torch has read, with a `TensorInFile` in place of each tensor without bytes."""
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(value, dict):
        return type(value)(
            (_in_file(key, records, path), _in_file(each, records, path))
            for key, each in value.items()
        )
    if isinstance(value, list | tuple):
        return type(value)([_in_file(each, records, path) for each in value])
    if isinstance(value, Stub):
        value.args = _in_file(value.args, records, path)
        value.state = _in_file(value.state, records, path)
        return value
    if isinstance(value, torch.device):
        return value.__reduce__()[1]
    if isinstance(value, _PLAIN):
        return value
    if type(value) is not FakeTensor or value.layout != torch.strided:
        raise refused(path, f"{type(value).__module__}.{type(value).__qualname__}")
    storage: Any = value.untyped_storage()
    record = records[storage._checkpoint_offset]
    first = int(value.storage_offset())
    itemsize = value.dtype.itemsize
    found = TensorInFile(
        record,
        record.offset + first * itemsize,
        value.dtype,
        tuple(value.shape),
        tuple(value.stride()),
    )
    if found.spanned and (first + found.spanned) * itemsize > record.nbytes:
        raise pickle.UnpicklingError("a tensor is larger than its bytes")
    return found


class _Excerpt(io.RawIOBase):
    """Some bytes of a file, as a file."""

    def __init__(self, file: IO[bytes], offset: int, nbytes: int) -> None:
        self._file = file
        self.offset = offset
        self.nbytes = nbytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(offset + (0, self._at, self.nbytes)[whence], 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), max(self.nbytes - self._at, 0))
        found = os.pread(self._file.fileno(), count, self.offset + self._at)
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)


@contextmanager
def opened_pickle(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file; inside, whatever a file that was tampered with
    leads to is a `CheckpointError`."""
    try:
        with disk(path, "Reading a checkpoint"), path.open("rb") as file:
            yield file
    except ZeroError:
        raise
    except Exception as error:  # whatever a pickle or a zip file may lead to
        raise damaged(path, why=f"{type(error).__name__}: {error}") from error


_OF_THE_IMPLEMENTATION = (
    "params",
    "param_names",
    "step",
    "foreach",
    "fused",
    "capturable",
    "differentiable",
)
"""Options of a group that the optimizer to be loaded decides for itself."""


class Foreign(Contents):
    """A checkpoint that `zf.save` has not written; `rename` and what is
    raised are those of `find.opened`."""

    def __init__(
        self, path: Path, rename: Callable[[str], str], *, has_states: bool = True
    ) -> None:
        super().__init__(path, rename)
        self._has_states = has_states  # whether states of the optimizer are wanted
        # What the checkpoint has beside the model and the optimizer, as it was written.
        self.extra: dict[str, Any] = {}
        self._openers: dict[TensorInFile, Callable[[], TensorReader]] = {}
        self._verified: set[ZipRecord] = set()

    # -- what the reader of each format adds -------------------------------------------------------

    def add(
        self,
        kind: str,
        name: str,
        state: str,
        shape: tuple[int, ...],
        tensor: TensorInFile,
        *,
        run: tuple[int, int, int] | None = None,
        cut: tuple[tuple[int, ...], list[tuple[Box, Box]]] | None = None,
    ) -> None:
        """Adds a parameter, a buffer or a state of an optimizer, or some of its elements.

        `run` says which elements of the whole, row by row: the first, how many, and the first of
        them in `tensor`. With `cut` that is a part of a larger one: of this shape, and these boxes
        of the part, in rows, are these of it.
        """
        at, count, first = run or (0, prod(shape), 0)
        whole, pairs = cut or (shape, [(whole_box(shape), whole_box(shape))])
        if first + count > prod(tensor.shape) or (run is None and count != prod(tensor.shape)):
            why = f"{list(tensor.shape)} are fewer elements than it should have"
            raise damaged(tensor.record.path, tensor=name, why=why)
        opened = self._openers.setdefault(tensor, partial(self.open_tensor, tensor))
        is_whole = run is None or 0 in shape
        for box in (whole_box(shape),) if is_whole else spans(shape, at, at + count):
            for inner, outer in pairs:
                meet = box if 0 in shape else box.meet(inner)
                if meet is not None:
                    offset = (
                        first + range_of(meet.within(box), box.sizes)[0]
                    ) * tensor.dtype.itemsize
                    there = outer.around(meet.within(inner))
                    self.add_box(
                        kind,
                        state,
                        StoredBox(name, tensor.dtype, whole, there, offset, open=opened),
                    )
            first += box.numel

    def add_state(self, name: str, state: str, value: Any) -> None:
        """Adds a state of a parameter that is a number."""
        if isinstance(value, TensorInFile):
            value = self.read_tensor(value)
        elif state == "step":  # torch counts steps in tensors
            value = torch.tensor(float(value))
        if isinstance(value, Tensor):
            piece = StoredBox.of_whole(name, value)
            piece.open = partial(_InMemory, value)
            self.add_box("optimizer", state, piece)
        else:
            self.values.setdefault(self.rename(name), (0, {}))[1][state] = value

    def add_group(self, names: list[str], group: Mapping[str, Any]) -> None:
        """Adds the options of a group of parameters; refuses an optimizer that
        steps as none of torch does."""
        options = {
            name: self.value(0, value)
            for name, value in group.items()
            if name not in _OF_THE_IMPLEMENTATION
        }
        if not options.pop("bias_correction", True):
            raise CheckpointError(
                "This optimizer ran without bias correction, and those of torch always correct.",
                checkpoint=self.path,
                fix='load without its states: zf.load(folder, model, only="model")',
            )
        for name in names:
            self.options[self.rename(name)] = (0, options)

    def add_box(self, kind: str, state: str, piece: StoredBox) -> None:
        """Adds a box of a tensor, whose other boxes must have its shape and dtype."""
        if self.add_piece(kind, piece.name, state, piece) is not None:
            raise damaged(self.path, tensor=piece.name, why="its parts have other shapes or dtypes")

    # -- what is read ------------------------------------------------------------------------------

    def value(self, rank: int, encoded: Any) -> Any:
        """A value as it was saved; an instance of a class becomes a dict of its attributes."""
        if isinstance(encoded, TensorInFile):
            return self.read_tensor(encoded)
        if isinstance(encoded, Stub):
            return self.value(rank, encoded.state or encoded.args)
        if isinstance(encoded, dict):
            return {key: self.value(rank, item) for key, item in encoded.items()}
        if isinstance(encoded, list | tuple):
            return type(encoded)(self.value(rank, item) for item in encoded)
        return encoded

    def said(self, rank: int, what: str) -> dict[str, Any]:
        """What the checkpoint has beside the model and the optimizer."""
        return self.extra if what == "extra" else {}

    def read_tensor(self, tensor: TensorInFile) -> Tensor:
        """A whole tensor, in memory."""
        flat = torch.empty(tensor.spanned, dtype=tensor.dtype)
        reader = self._opened(tensor)
        try:
            reader.read(StoredBox.of_whole("", flat), 0, flat.numel(), flat)
        finally:
            reader.close()
        return flat.as_strided(tensor.shape, tensor.strides).contiguous()

    def open_tensor(self, tensor: TensorInFile) -> TensorReader:
        """Opens a tensor from its first element on; in memory,
        where its elements are not in the order of rows."""
        return self._opened(tensor) if tensor.is_in_rows else _InMemory(self.read_tensor(tensor))

    def _opened(self, tensor: TensorInFile) -> TensorReader:
        record = tensor.record
        if record not in self._verified:
            _require_checksum(record)
            self._verified.add(record)
        with disk(record.path, "Reading a checkpoint"):
            nbytes = record.path.stat().st_size
        return TensorReader(record.path, tensor.offset, nbytes)


def _require_checksum(record: ZipRecord) -> None:
    """Reads a record whole, and compares it with its checksum."""
    found, left = 0, record.nbytes
    with disk(record.path, "Reading a checkpoint"), record.path.open("rb") as file:
        file.seek(record.offset)
        while left and (block := file.read(min(_BLOCK_NBYTES, left))):
            found, left = zlib.crc32(block, found), left - len(block)
    if left or found != record.crc32:
        where = f"bytes {record.offset} to {record.offset + record.nbytes}"
        raise damaged(record.path, where=where, why="their checksum is not that of their archive")


class _InMemory(TensorReader):
    """A tensor in memory, read as if it were in a file."""

    def __init__(self, values: Tensor) -> None:
        self._values = values.reshape(-1)

    def read(self, piece: StoredBox, first: int, last: int, out: Tensor | None) -> None:
        if out is not None:
            out.copy_(self._values[first:last])

    def close(self) -> None:
        pass
