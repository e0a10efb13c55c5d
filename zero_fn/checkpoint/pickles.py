"""Files of `torch.save` as values, without running what is in them.

A pickle is a program that calls what it names. Here it can name nothing but what `_ADMITTED` lists: tensors, which become
the places of their elements in the file, and a few classes, which become records of what they were given. Anything else is
refused before it is called.

[Note: classes that cannot be changed] The opcode BUILD sets attributes of any object. So whatever a pickle can reach is a
class whose attributes cannot be set, a tuple, or an instance whose `__setstate__` only keeps what it is given.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from zero_fn.checkpoint.files import damaged, disk
from zero_fn.errors import CheckpointError, ZeroError

__all__ = ["ByteRange", "Inert", "PlacedTensor", "read_lone_pickle", "read_pickle", "require_checksum"]

_BLOCK_NBYTES = 1 << 20


class ByteRange(NamedTuple):
    """Bytes of a file under one checksum.

    Attributes:
        path: The file.
        offset, nbytes: Where they are.
        crc32: Their checksum.
    """

    path: Path
    offset: int
    nbytes: int
    crc32: int


class PlacedTensor(NamedTuple):
    """A tensor in a file.

    Attributes:
        span: The bytes that it is in.
        offset: Its first byte, from the beginning of the file.
        dtype, shape, strides: Of the tensor, in elements.
    """

    span: ByteRange
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Unchangeable(type):
    """Classes of which nothing can be set. [Note: classes that cannot be changed]"""

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"it sets {name} of a class")


class Inert(metaclass=_Unchangeable):
    """An object of a class that is not looked for: what it was made with.

    Attributes:
        args: Of its constructor.
        state: What its class would have restored.
    """

    __slots__ = ("args", "state")

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Inert:
        """Made by a call, or by the opcode that calls this alone."""
        self = super().__new__(cls)
        self.args, self.state = args, {}
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Dict(dict[Any, Any], metaclass=_Unchangeable):
    """An `OrderedDict`, which may have attributes: they are dropped."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        pass


class _Text(metaclass=_Unchangeable):
    """Bytes, as old protocols write them: `_codecs.encode(text, "latin1")`."""

    __slots__ = ()

    def __new__(cls, text: str, _: str) -> Any:
        return text.encode("latin1")


class _View(metaclass=_Unchangeable):
    """`_rebuild_tensor_v2` and `_rebuild_tensor_v3`: a tensor in a storage."""

    __slots__ = ()

    def __new__(cls, storage: _Storage, first: int, shape: Any, strides: Any, *others: Any) -> Any:
        dtype = next((other for other in others if isinstance(other, torch.dtype)), storage.dtype)
        shape, strides = tuple(shape), tuple(strides)
        if len(shape) != len(strides) or min((first, *shape, *strides)) < 0:
            raise pickle.UnpicklingError("a tensor has a shape that no tensor has")
        last = first + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if 0 not in shape and (last + 1) * dtype.itemsize > storage.span.nbytes:
            raise pickle.UnpicklingError("a tensor is larger than its bytes")
        return PlacedTensor(storage.span, storage.span.offset + first * dtype.itemsize, dtype, shape, strides)


class _OfParameter(metaclass=_Unchangeable):
    """`_rebuild_parameter`: the tensor in it."""

    __slots__ = ()

    def __new__(cls, values: Any, *_: Any) -> Any:
        return values


class _OfType(metaclass=_Unchangeable):
    """`_rebuild_from_type_v2`: the tensor that a function makes, which may have attributes."""

    __slots__ = ()

    def __new__(cls, make: Any, kind: Any, args: Any, _: Any) -> Any:
        if make is not _View:
            raise pickle.UnpicklingError("a tensor is made in a way of its own")
        return make(*args)


class _Storage(NamedTuple):
    span: ByteRange
    dtype: torch.dtype


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
    ("_codecs", "encode"): _Text,
    ("torch", "Size"): tuple,
    ("torch", "Tensor"): Inert,
    ("torch", "device"): Inert,
    ("torch._utils", "_rebuild_tensor_v2"): _View,
    ("torch._utils", "_rebuild_tensor_v3"): _View,
    ("torch._utils", "_rebuild_parameter"): _OfParameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _OfType,
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
"""What a pickle may name, and what stands for it."""


class _Reader(pickle.Unpickler):
    """Reads a pickle in which nothing is called but what stands in `_ADMITTED`."""

    def __init__(self, file: IO[bytes], path: Path, records: _Records | None = None) -> None:
        super().__init__(file)
        self._path, self._records = path, records

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a name.

        Raises:
            CheckpointError: Nothing does.
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
        if kind != "storage" or not isinstance(dtype, torch.dtype) or self._records is None:
            raise pickle.UnpicklingError(f"it refers to {pid!r}")
        return _Storage(self._records.span(f"data/{key}"), dtype)


class _Records:
    """The records of an archive of `torch.save`: a zip file without compression."""

    def __init__(self, path: Path, offset: int, nbytes: int | None) -> None:
        """Reads where they are; the archive is the bytes of a file from `offset` on."""
        self.path, self._offset = path, offset
        self._file: IO[bytes] = open(path, "rb")  # noqa: SIM115
        size = os.fstat(self._file.fileno()).st_size
        self._window = _Excerpt(self._file, offset, size - offset if nbytes is None else nbytes)
        try:
            self._archive = zipfile.ZipFile(self._window)
            inside = next(name for name in self._archive.namelist() if name.endswith("data.pkl"))
        except BaseException:
            self._file.close()
            raise
        self._prefix = inside.removesuffix("data.pkl")

    def __enter__(self) -> _Records:
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()
        self._file.close()

    def value(self) -> Any:
        """What was saved, with places of tensors.

        Raises:
            CheckpointError: It is damaged, or names what is not admitted.
        """
        names = self._archive.namelist()
        if f"{self._prefix}byteorder" in names and self._archive.read(f"{self._prefix}byteorder") != b"little":
            raise pickle.UnpicklingError("its numbers begin with their highest byte")
        return _Reader(io.BytesIO(self._archive.read(f"{self._prefix}data.pkl")), self.path, self).load()

    def span(self, name: str) -> ByteRange:
        """Where a record is."""
        found = self._archive.getinfo(self._prefix + name)
        if found.compress_type != zipfile.ZIP_STORED or found.file_size != found.compress_size:
            raise pickle.UnpicklingError("its tensors are compressed")
        self._window.seek(found.header_offset)
        header = self._window.read(30)
        before = 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        first = found.header_offset + before
        if header[:4] != b"PK\3\4" or first + found.file_size > self._window.nbytes:
            raise pickle.UnpicklingError("a tensor is not where its archive says")
        return ByteRange(self.path, self._offset + first, found.file_size, found.CRC)


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
    """What `torch.save` has written into a file, or into some bytes of it. Elements of tensors are not read.

    Args:
        path: The file.
        offset: Its first byte.
        nbytes: How many there are; None: all.

    Returns:
        The object, with `PlacedTensor` in place of tensors, and `Inert` in place of instances of classes.

    Raises:
        CheckpointError: It is damaged, or names what is not read; nothing of it was run.
        StorageError: The disk refused.
    """
    with _told(path), _Records(path, offset, nbytes) as records:
        return records.value()


def read_lone_pickle(path: Path) -> Any:
    """What `pickle.dump` has written into a file, as `read_pickle`.

    Raises:
        CheckpointError: It is damaged, or names what is not read; nothing of it was run.
        StorageError: The disk refused.
    """
    with _told(path), path.open("rb") as file:
        return _Reader(file, path).load()


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Errors of files that were tampered with, as ours."""
    try:
        with disk(path, "Reading a checkpoint"):
            yield
    except ZeroError:
        raise
    except Exception as error:  # whatever a pickle or a zip file may lead to
        raise damaged(path, why=f"{type(error).__name__}: {error}") from error


def require_checksum(span: ByteRange) -> None:
    """Reads bytes and compares them with their checksum.

    Raises:
        CheckpointError: They are not what was written.
        StorageError: The disk refused.
    """
    found, at = 0, 0
    with disk(span.path, "Reading a checkpoint"), open(span.path, "rb", buffering=0) as file:
        while at < span.nbytes:
            block = os.pread(file.fileno(), min(_BLOCK_NBYTES, span.nbytes - at), span.offset + at)
            if not block:
                break
            found, at = zlib.crc32(block, found), at + len(block)
    if at < span.nbytes or found != span.crc32:
        raise damaged(
            span.path,
            where=f"bytes {span.offset} to {span.offset + span.nbytes}",
            why="their checksum is not that of their archive",
        )
