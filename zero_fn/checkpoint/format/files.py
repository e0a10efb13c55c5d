"""Files of a checkpoint: tensors in the safetensors format,
all else in JSON, each byte under a digest.

    tensors    8 bytes: length of the header | header, JSON | elements, tensor after tensor
    JSON       {"xxh3": digest of the body, "body": {...}}

The safetensors library is not used: it takes and gives whole tensors, and here they pass through a
buffer. Digests are xxh3 of 64 bits, of each MiB of a tensor, so that a part of a tensor can be read
and verified alone.
"""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from zero_fn.errors import CheckpointError, StorageError
from zero_fn.values.box import Box, whole_box
from zero_fn.values.dtypes import DTYPES_IN_FILES, NAMES_IN_FILES

__all__ = [
    "BUFFER_NBYTES",
    "StoredBox",
    "TensorFile",
    "TensorReader",
    "damaged",
    "disk",
    "read_json",
    "require_dtype",
    "require_form",
    "sync_folder",
    "understood",
    "write_json",
]

BUFFER_NBYTES = 64 << 20
"""Bytes of tensors that are in memory at a time, beside those that rest there."""

BLOCK_NBYTES = 1 << 20
"""Bytes of a tensor that have a digest of their own."""

_CHUNK_NBYTES = 128 << 10
"""Bytes of a block that are read and hashed at a time: they stay in the cache of the processor."""


@contextmanager
def disk(path: str | Path, doing: str) -> Iterator[None]:
    """Inside, an error of the operating system becomes a `StorageError`;
    `doing` says what failed."""
    try:
        yield
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, str(error.errno))
        raise StorageError(
            f"{doing} failed.",
            path=path,
            why=f"{code}: {error.strerror}",
            fix="a folder that exists, on a disk that all ranks share (df, mount); "
            "earlier checkpoints are unchanged",
        ) from error


@dataclass(slots=True)
class StoredBox:
    """A box of a tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole tensor
    box: Box
    offset: int = 0  # the first byte of the box, after the header
    digests: list[str] = field(default_factory=list)  # of each block, 16 hexadecimal digits
    rank: int = 0  # that has written the box
    # One function for all boxes of a file.
    open: Callable[[], TensorReader] | None = field(default=None, repr=False)
    path: Path = Path()  # of the file, in a checkpoint of `zf.save`

    @property
    def nbytes(self) -> int:
        """How many bytes its elements have."""
        return self.box.numel * self.dtype.itemsize

    @staticmethod
    def of_whole(name: str, tensor: Tensor) -> StoredBox:
        """A whole tensor, which is to be written."""
        shape = tuple(tensor.shape)
        return StoredBox(name, tensor.dtype, shape, whole_box(shape))

    def entry(self) -> dict[str, Any]:
        """What the manifest says of the box."""
        return {
            "dtype": NAMES_IN_FILES[self.dtype],
            "shape": self.shape,
            "starts": self.box.starts,
            "sizes": self.box.sizes,
            "offset": self.offset,
            "xxh3": "".join(self.digests),
        }

    @staticmethod
    def of_entry(
        name: str, entry: Mapping[str, Any], rank: int, open: Callable[[], TensorReader], path: Path
    ) -> StoredBox:
        """The box of which a manifest says this; the reverse of `entry`."""
        digests = entry["xxh3"]
        box, shape = Box(tuple(entry["starts"]), tuple(entry["sizes"])), tuple(entry["shape"])
        each = [digests[at : at + 16] for at in range(0, len(digests), 16)]
        found = StoredBox(
            name,
            DTYPES_IN_FILES[entry["dtype"]],
            shape,
            box,
            entry["offset"],
            each,
            rank,
            open,
            path,
        )
        if (
            box.meet(whole_box(shape)) not in (box, None)
            or prod(max(size, 1) for size in shape) > _MOST >> 4
        ):
            raise ValueError(f"{name} of {shape} has no such box")
        if len(each) != -(-found.nbytes // BLOCK_NBYTES):
            raise ValueError(f"{name} has {len(each)} digests")
        return found


def require_dtype(name: str, dtype: torch.dtype) -> None:
    """Requires that a tensor can be written."""
    if dtype not in NAMES_IN_FILES:
        raise CheckpointError(
            f"{name} is of a dtype that safetensors does not have.",
            dtype=dtype,
            fix="leave it out (where=), or keep its parts as tensors of other dtypes: "
            "torch.view_as_real(z)",
        )


def _header(pieces: list[StoredBox], saved_by: str) -> bytes:
    """Lays boxes out in a file, one after the other, and returns the header of the file."""
    table: dict[str, Any] = {
        "__metadata__": {
            "format": "pt",
            "zero_fn": saved_by,
            # For `HuggingFaceStorageReader` of torch.distributed.checkpoint:
            # where each piece lies in its tensor.
            "DCP_VERSION": "1.0",
            "DCP_SHARDING_INFO": json.dumps(
                {piece.name: {"saved_offsets": piece.box.starts} for piece in pieces}
            ),
        }
    }
    end = 0
    for piece in pieces:
        piece.offset, end = end, end + piece.nbytes
        table[piece.name] = {
            "dtype": NAMES_IN_FILES[piece.dtype],
            "shape": piece.box.sizes,
            "data_offsets": [piece.offset, end],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class TensorFile:
    """A file of tensors that is being written.

    The boxes may come in any order, the elements of a box come in theirs.
    """

    def __init__(self, path: Path, pieces: list[StoredBox], saved_by: str) -> None:
        """Makes the file, and writes its header."""
        self._path = path
        self._pieces = pieces
        pieces.sort(key=lambda piece: -piece.dtype.itemsize)  # so that elements are aligned
        header = _header(pieces, saved_by)
        self._begin = len(header)
        self._digest = xxhash.xxh3_64_hexdigest(header)
        self.nbytes = len(header) + sum(piece.nbytes for piece in pieces)
        self._written = {piece.name: 0 for piece in pieces}
        self._hashers = {piece.name: xxhash.xxh3_64() for piece in pieces}
        with disk(path, "Making a file of a checkpoint"):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            _write(self._fd, memoryview(header), 0)

    def append(self, piece: StoredBox, values: Tensor) -> None:
        """Writes the next elements of a box: on the host, contiguous."""
        view = bytes_of(values)
        written = self._written[piece.name]
        hasher = self._hashers[piece.name]
        # Written block by block, so that a block is in the cache of the
        # processor when it is written.
        while view:
            part = view[: BLOCK_NBYTES - written % BLOCK_NBYTES]
            view = view[len(part) :]
            hasher.update(part)
            with disk(self._path, f"Writing {piece.name}"):
                _write(self._fd, part, self._begin + piece.offset + written)
            written += len(part)
            if written % BLOCK_NBYTES == 0 or written == piece.nbytes:
                piece.digests.append(hasher.hexdigest())
                hasher.reset()
        self._written[piece.name] = written

    def finish(self) -> dict[str, Any]:
        """Makes sure that the file is on the disk; returns what a manifest says of it."""
        missing = [
            piece.name for piece in self._pieces if self._written[piece.name] != piece.nbytes
        ]
        assert not missing, f"not written: {missing}"
        with disk(self._path, "Writing a checkpoint"):
            os.fsync(self._fd)
        self.close()
        tensors = {piece.name: piece.entry() for piece in self._pieces}
        return {
            "nbytes": self.nbytes,
            "begin": self._begin,
            "xxh3": self._digest,
            "tensors": tensors,
        }

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def bytes_of(values: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    return memoryview(values.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _write(fd: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.pwrite(fd, view, offset)
        offset += count
        view = view[count:]


class TensorReader:
    """A file of tensors that is read, block by block."""

    _room: memoryview | None = None
    _fd = -1

    def __init__(self, path: Path, begin: int, nbytes: int, digest: str | None = None) -> None:
        """Opens the file; `begin` bytes, of this digest if one is known,
        come before the elements."""
        self._path = path
        self._begin = begin
        with disk(path, "Reading a checkpoint"):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            found = os.fstat(self._fd).st_size
        if found != nbytes:
            raise damaged(path, expected=f"{nbytes} bytes", found=f"{found} bytes")
        if digest is not None:
            header = memoryview(bytearray(begin))
            self._fill(header, 0)
            if xxhash.xxh3_64_hexdigest(header) != digest:
                raise damaged(
                    path, tensor="its header", why="its digest is not that of the manifest"
                )

    def read(self, piece: StoredBox, first: int, last: int, out: Tensor | None) -> None:
        """Reads some elements of a box, and verifies the blocks that they are in;
        with `out` None it only verifies."""
        begin, end = first * piece.dtype.itemsize, last * piece.dtype.itemsize
        target = None if out is None else bytes_of(out)
        if not piece.digests:
            if target is not None:
                self._fill(target, self._begin + piece.offset + begin)
            return
        for at in range(begin // BLOCK_NBYTES * BLOCK_NBYTES, end, BLOCK_NBYTES):
            stop = min(at + BLOCK_NBYTES, piece.nbytes)
            hasher = xxhash.xxh3_64()
            for low in range(at, stop, _CHUNK_NBYTES):
                high = min(low + _CHUNK_NBYTES, stop)
                is_direct = target is not None and begin <= low and high <= end
                view = (
                    target[low - begin : high - begin]
                    if target is not None and is_direct
                    else self._scratch(high - low)
                )
                self._fill(view, self._begin + piece.offset + low)
                hasher.update(view)
                if target is not None and not is_direct:
                    first_byte, last_byte = max(low, begin), min(high, end)
                    if first_byte < last_byte:
                        found = view[first_byte - low : last_byte - low]
                        target[first_byte - begin : last_byte - begin] = found
            if hasher.hexdigest() != piece.digests[at // BLOCK_NBYTES]:
                raise damaged(
                    self._path,
                    tensor=piece.name,
                    rank=piece.rank,
                    where=f"bytes {at} to {stop} of its part",
                    why="their digest is not that of the manifest",
                )

    def located(self, piece: StoredBox, first: int) -> tuple[Path, int]:
        """The file, and the byte where an element of a box begins there."""
        return self._path, self._begin + piece.offset + first * piece.dtype.itemsize

    def _scratch(self, nbytes: int) -> memoryview:
        """Memory for bytes that are only verified: this reader has its own,
        so that threads may read other files."""
        if self._room is None:
            self._room = memoryview(bytearray(_CHUNK_NBYTES))
        return self._room[:nbytes]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    __del__ = close  # of a reader, or a source of readers, that raised while it was made

    def _fill(self, view: memoryview, offset: int) -> None:
        with disk(self._path, "Reading a checkpoint"):
            while view:
                count = os.preadv(self._fd, [view], offset)
                if not count:
                    raise damaged(self._path, why="it ends too early")
                offset += count
                view = view[count:]


def read_header(path: Path) -> tuple[int, int, dict[str, Any]]:
    """Reads the header of a safetensors file: bytes before the elements,
    bytes of the file, and its table."""
    with disk(path, "Reading a checkpoint"), path.open("rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length <= min(nbytes, _HEADER_NBYTES) else b""
    try:
        table: dict[str, Any] = json.loads(text)
        table.pop("__metadata__", None)
        require_form(table, {str: {"dtype": str, "shape": [int], "data_offsets": [int]}})
        for name, entry in table.items():
            first, last = entry["data_offsets"]
            if last - first != DTYPES_IN_FILES[entry["dtype"]].itemsize * prod(entry["shape"]):
                raise ValueError(f"{name} does not have the bytes of its shape")
            if 8 + length + last > nbytes:
                raise ValueError(f"it ends before {name} does")
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise damaged(path, why=f"it is no safetensors file, or not all of it: {error}") from error
    return 8 + length, nbytes, table


_HEADER_NBYTES = 100_000_000
"""The most bytes that the format allows for a header."""


def damaged(path: Path, **facts: object) -> CheckpointError:
    """The error for a file that is not what was written."""
    return CheckpointError(
        "A file of a checkpoint is damaged.",
        file=path,
        **facts,
        fix="load another one: zf.checkpoints(folder) lists those that there are",
    )


@contextmanager
def understood(path: Path, why: str) -> Iterator[None]:
    """Inside, an error of Python means that a file holds what its writer does not write;
    `why` says so in words."""
    try:
        yield
    except CheckpointError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise damaged(path, why=f"{why}: {error!r}") from error


_MOST = 1 << 63
"""Numbers in files are smaller."""


def require_form(value: object, form: Any, name: str = "it") -> None:
    """Requires that a value of JSON is made up as its writer makes it up.

    `form` is a class, where `int` means a number that is not negative; `[form]`, a list;
    `{str: form}`, by name; or the form of each entry by its name, which ends in "?" if
    it may be missing.
    """
    kind = form if isinstance(form, type) else type(form)
    if not isinstance(value, kind) or (
        kind is int and (type(value) is not int or not 0 <= value < _MOST)
    ):
        raise ValueError(f"{name} is no {kind.__name__}, or out of bounds")
    if isinstance(value, list) and isinstance(form, list):
        for item in value:
            require_form(item, form[0], name)
    elif isinstance(value, dict) and isinstance(form, dict):
        entries = dict.fromkeys(value, form[str]) if str in form else form
        for key, each in entries.items():
            if key.rstrip("?") in value or not key.endswith("?"):
                require_form(value[key.rstrip("?")], each, key)


def write_json(path: Path, body: object) -> None:
    """Writes a file of values with their digest, and makes sure that it is on the disk."""
    text = json.dumps(body, separators=(",", ":"), allow_nan=False)
    with disk(path, "Writing a checkpoint"):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _write(fd, memoryview(_signed(text)), 0)
            os.fsync(fd)
        finally:
            os.close(fd)


def read_json(path: Path, form: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the values that `write_json` has written; `form` is what they are made up of,
    see `require_form`."""
    with disk(path, "Reading a checkpoint"):
        found = path.read_bytes()
    try:
        body: dict[str, Any] = json.loads(found)["body"]
        is_whole = (
            _signed(found.decode()[len(_BEFORE) + 16 + len(_BETWEEN) : -len(_AFTER)]) == found
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise damaged(path, why="its digest is not that of its text")
    with understood(path, "unknown field, of a newer version or damaged"):
        require_form(body, form)
    return body


_BEFORE, _BETWEEN, _AFTER = '{"xxh3":"', '","body":', "}\n"


def _signed(text: str) -> bytes:
    return f"{_BEFORE}{xxhash.xxh3_64_hexdigest(text.encode())}{_BETWEEN}{text}{_AFTER}".encode()


def sync_folder(path: Path) -> None:
    """Makes sure that the names in a folder are on the disk."""
    with disk(path, "Writing a checkpoint"):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
