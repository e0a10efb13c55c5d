"""Reads files of `torch.save` as values, without running the code that they name.

A pickle is a program that calls what it names. Here it may name only what `_ADMITTED` lists. Tensors become `PlacedTensor`:
where their elements lie in the file. Instances of a few classes become `Inert`: what they were made with. Any other name is
refused before it is called.

`torch.load(weights_only=True)` does not serve: it reads no `.metadata` of torch.distributed.checkpoint (pickle protocol 4),
compares no checksums (a flipped bit in a tensor is loaded), and does not say where in the file a tensor lies.

[Note: what a pickle cannot change] The opcode BUILD sets attributes of any object on its stack, but calls `__setstate__`
where the object has one. So everything that a pickle can reach is immutable, or has a `__setstate__` of ours.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from zero_fn.checkpoint.format.boxes import strides_of
from zero_fn.checkpoint.format.files import damaged, disk
from zero_fn.errors import CheckpointError, ZeroError

__all__ = ["ByteRange", "Inert", "PlacedTensor", "read_lone_pickle", "read_pickle", "require_checksum"]

_BLOCK_NBYTES = 1 << 20


class ByteRange(NamedTuple):
    """Bytes of a file under one checksum: a storage, as `torch.save` writes it.

    Attributes:
        path: The file.
        offset, nbytes: Where the bytes are in the file.
        crc32: Their checksum.
    """

    path: Path
    offset: int
    nbytes: int
    crc32: int


class PlacedTensor(NamedTuple):
    """A tensor in a file, whose elements have not been read.

    Attributes:
        span: The storage of the tensor.
        offset: The first byte of the tensor, from the beginning of the file.
        dtype, shape, strides: Of the tensor; strides in elements.
    """

    span: ByteRange
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
        return sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)) + 1


class Inert:
    """An instance of a class that is not imported. [Note: what a pickle cannot change]

    Attributes:
        args: The arguments of its constructor.
        state: What its class would have restored.
    """

    __slots__ = ("args", "state")

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Inert:
        self = super().__new__(cls)
        self.args, self.state = args, {}
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Dict(dict[Any, Any]):
    """An `OrderedDict` without its attributes. [Note: what a pickle cannot change]"""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        pass


class _Function:
    """A function that a pickle may call. [Note: what a pickle cannot change]"""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it sets attributes of a function")


class _Storage(NamedTuple):
    span: ByteRange
    dtype: torch.dtype


def _placed(storage: _Storage, first: int, shape: Any, strides: Any, *others: Any) -> PlacedTensor:
    """`_rebuild_tensor_v2` and `_rebuild_tensor_v3`: a tensor in a storage."""
    dtype = next((other for other in others if isinstance(other, torch.dtype)), storage.dtype)
    shape, strides = tuple(shape), tuple(strides)
    if len(shape) != len(strides) or min((first, *shape, *strides)) < 0:
        raise pickle.UnpicklingError("a tensor has a shape that no tensor has")
    found = PlacedTensor(storage.span, storage.span.offset + first * dtype.itemsize, dtype, shape, strides)
    if found.spanned and (first + found.spanned) * dtype.itemsize > storage.span.nbytes:
        raise pickle.UnpicklingError("a tensor is larger than its bytes")
    return found


def _of_type(make: Any, kind: Any, args: Any, _: Any) -> PlacedTensor:
    """`_rebuild_from_type_v2`: a tensor that a function makes, without its attributes."""
    if make is not _PLACED:
        raise pickle.UnpicklingError("a tensor is made in a way of its own")
    return _placed(*args)


_PLACED = _Function(_placed)

_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32, "ShortStorage": torch.int16,
    "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
}  # fmt: skip

_ADMITTED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _Dict,
    ("builtins", "set"): set,
    ("__builtin__", "set"): set,
    ("_codecs", "encode"): _Function(lambda text, _: text.encode("latin1")),  # bytes, as old protocols write them
    ("torch", "Size"): tuple,
    ("torch", "Tensor"): Inert,
    ("torch", "device"): Inert,
    ("torch._utils", "_rebuild_tensor_v2"): _PLACED,
    ("torch._utils", "_rebuild_tensor_v3"): _PLACED,
    ("torch._utils", "_rebuild_parameter"): _Function(lambda values, *_: values),
    ("torch._tensor", "_rebuild_from_type_v2"): _Function(_of_type),
    ("torch.storage", "UntypedStorage"): torch.uint8,
    ("torch.serialization", "_get_layout"): Inert,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
    **{("torch", str(dtype).partition(".")[2]): dtype for dtype in (*_STORAGES.values(), *map(
        torch.__dict__.__getitem__, ("float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64")))},
    **{("torch.distributed.checkpoint.metadata", name): Inert for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")},
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): Inert,
    ("pathlib", "PosixPath"): Inert,
    ("pathlib._local", "PosixPath"): Inert,
    ("argparse", "Namespace"): Inert,
    ("deepspeed.utils.tensor_fragment", "fragment_address"): Inert,
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): Inert,
    **{("deepspeed.runtime.fp16.loss_scaler", name): Inert for name in ("LossScaler", "DynamicLossScaler")},
    ("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"): Inert,
}  # fmt: skip
"""What a pickle may name, and what stands for each name."""


class _Reader(pickle._Unpickler):
    """Reads a pickle in which nothing is called but what stands in `_ADMITTED`.

    The unpickler in Python takes five times as long as the one in C. That one takes 16 bytes for each number below the one by
    which a pickle remembers a value: one flipped bit in `.metadata` took 60 GiB.
    """

    def __init__(self, file: IO[bytes], path: Path, archive: _Archive | None = None) -> None:
        super().__init__(file)
        self._path, self._archive = path, archive

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a name.

        Raises:
            CheckpointError: The name is not admitted.
        """
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise CheckpointError(
                "A file of a checkpoint names something that is not read.",
                file=self._path,
                named=f"{module}.{name}",
                why="a pickle calls what it names; only tensors, numbers and a few classes of DeepSpeed and torch are read, "
                "as values",
                fix="save it without that object (in client_state, or in the state_dict)",
            ) from None

    def persistent_load(self, pid: Any) -> _Storage:
        """Where the bytes of a storage are."""
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or self._archive is None:
            raise pickle.UnpicklingError(f"it refers to {pid!r}")
        return _Storage(self._archive.span(f"data/{key}"), dtype)


class _Archive:
    """What `torch.save` writes, in some bytes of a file: a zip archive without compression."""

    def __init__(self, file: IO[bytes], path: Path, offset: int, nbytes: int) -> None:
        self._path, self._offset, self._bytes = path, offset, _Excerpt(file, offset, nbytes)
        self._zip = zipfile.ZipFile(self._bytes)
        self._prefix = next(n for n in self._zip.namelist() if n.endswith("data.pkl")).removesuffix("data.pkl")

    def value(self) -> Any:
        """The object that was saved, with a `PlacedTensor` for each tensor."""
        order = f"{self._prefix}byteorder"
        if order in self._zip.namelist() and self._zip.read(order) != b"little":
            raise pickle.UnpicklingError("its numbers begin with their highest byte")
        return _Reader(io.BytesIO(self._zip.read(f"{self._prefix}data.pkl")), self._path, self).load()

    def span(self, name: str) -> ByteRange:
        """Where a record of the archive lies in the file."""
        found = self._zip.getinfo(self._prefix + name)
        if found.compress_type != zipfile.ZIP_STORED or found.file_size != found.compress_size:
            raise pickle.UnpicklingError("its tensors are compressed")
        self._bytes.seek(found.header_offset)
        header = self._bytes.read(30)  # its last 4 bytes are the lengths of what follows it
        first = found.header_offset + 30 + sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        if header[:4] != b"PK\3\4" or first + found.file_size > self._bytes.nbytes:
            raise pickle.UnpicklingError("a tensor is not where its archive says")
        return ByteRange(self._path, self._offset + first, found.file_size, found.CRC)


class _Excerpt(io.RawIOBase):
    """Some bytes of a file, as a file."""

    def __init__(self, file: IO[bytes], offset: int, nbytes: int) -> None:
        self._file, self._offset, self.nbytes, self._at = file, offset, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(offset + (0, self._at, self.nbytes)[whence], 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), max(self.nbytes - self._at, 0))
        found = os.pread(self._file.fileno(), count, self._offset + self._at)
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)


def read_pickle(path: Path, offset: int = 0, nbytes: int | None = None) -> Any:
    """The object that `torch.save` has written into a file, or into some bytes of it. Elements of tensors are not read.

    Args:
        path: The file.
        offset: The first byte that `torch.save` has written.
        nbytes: How many bytes it has written; None: all from `offset` on.

    Returns:
        The object, with `PlacedTensor` in place of tensors, and `Inert` in place of instances of classes.

    Raises:
        CheckpointError: The file is damaged, or names what is not read; none of its code was run.
        StorageError: The disk refused.
    """
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size - offset if nbytes is None else nbytes
        return _Archive(file, path, offset, size).value()


def read_lone_pickle(path: Path) -> Any:
    """The object that `pickle.dump` has written into a file; see `read_pickle`.

    Raises:
        CheckpointError: The file is damaged, or names what is not read; none of its code was run.
        StorageError: The disk refused.
    """
    with _opened(path) as file:
        return _Reader(file, path).load()


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file; inside, whatever a file that was tampered with leads to is a `CheckpointError`."""
    try:
        with disk(path, "Reading a checkpoint"), path.open("rb") as file:
            yield file
    except ZeroError:
        raise
    except Exception as error:  # whatever a pickle or a zip file may lead to
        raise damaged(path, why=f"{type(error).__name__}: {error}") from error


def require_checksum(span: ByteRange) -> None:
    """Reads bytes of a file and compares them with their checksum.

    Raises:
        CheckpointError: The bytes are not those that were written.
        StorageError: The disk refused.
    """
    found, left = 0, span.nbytes
    with disk(span.path, "Reading a checkpoint"), span.path.open("rb") as file:
        file.seek(span.offset)
        while left and (block := file.read(min(_BLOCK_NBYTES, left))):
            found, left = zlib.crc32(block, found), left - len(block)
    if left or found != span.crc32:
        raise damaged(
            span.path,
            where=f"bytes {span.offset} to {span.offset + span.nbytes}",
            why="their checksum is not that of their archive",
        )
