"""A checkpoint of another library: its tensors are places in files of `torch.save`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_fn.checkpoint.boxes import Box, spans, strides_of, whole_box
from zero_fn.checkpoint.contents import Contents
from zero_fn.checkpoint.files import StoredBox, TensorReader, damaged, disk
from zero_fn.checkpoint.pickles import ByteRange, Inert, PlacedTensor, require_checksum
from zero_fn.errors import CheckpointError

__all__ = ["Foreign"]

_OF_THE_IMPLEMENTATION = ("params", "param_names", "step", "foreach", "fused", "capturable", "differentiable")
"""Of what a group of an optimizer says: what the one that is loaded decides for itself."""


class Foreign(Contents):
    """A checkpoint that `zf.save` has not written.

    Attributes:
        extra: What it has beside the model and the optimizer, as it was written.

    The checksums in files of `torch.save` are of whole storages: where one is read from first, it is verified whole.
    """

    def __init__(self, path: Path, rename: Callable[[str], str]) -> None:
        """One of which nothing is known yet.

        Args:
            path: Its folder.
            rename: What names in the checkpoint are in the model.
        """
        super().__init__(path, rename)
        self.extra: dict[str, Any] = {}
        self._openers: dict[ByteRange, Callable[[], TensorReader]] = {}
        self._verified: set[ByteRange] = set()

    # -- what the readers of each library say --------------------------------------------------------------------------

    def add_model(self, name: str, tensor: PlacedTensor) -> None:
        """A whole parameter or buffer."""
        self.add("model", name, "", tensor.shape, tensor)

    def add(
        self,
        kind: str,
        name: str,
        state: str,
        shape: tuple[int, ...],
        tensor: PlacedTensor,
        *,
        box: Box | None = None,
        run: tuple[int, int, int] | None = None,
    ) -> None:
        """A part of a tensor.

        Args:
            kind: "model" or "optimizer".
            name: Of the parameter or buffer.
            state: Of the optimizer, or nothing.
            shape: Of the whole tensor.
            tensor: What the file has.
            box: Which box of the whole that is; None: the whole.
            run: Instead of a box: from which element of the whole on, how many in the order of rows, and from which element
                of what the file has.

        Raises:
            CheckpointError: There is less in the file.
        """
        at, count, first = run or (0, prod(tensor.shape), 0)
        size, is_in_rows = prod(tensor.shape), tensor.strides == strides_of(tensor.shape)
        if first + count > size or (run is None and count != (box.numel if box else prod(shape))):
            raise damaged(
                tensor.span.path, tensor=name, why=f"{list(tensor.shape)} are fewer elements than it should have"
            )
        if is_in_rows:
            opened = self._openers.setdefault(tensor.span, partial(self._opened, tensor.span, tensor.span.offset))
            offset = tensor.offset - tensor.span.offset
        else:  # its elements are in another order: it passes through memory
            opened, offset = partial(self.open_tensor, tensor), 0
        boxes = (box or whole_box(shape),) if run is None or 0 in shape else spans(shape, at, at + count)
        for part in boxes:
            begin = offset + first * tensor.dtype.itemsize
            self.add_box(kind, state, StoredBox(name, tensor.dtype, shape, part, begin, open=opened))
            first += part.numel

    def add_state(self, name: str, state: str, value: Any) -> None:
        """A state of a parameter that is a number."""
        if isinstance(value, PlacedTensor):
            value = self.read(value)
        elif state == "step":  # torch counts steps in tensors
            value = torch.tensor(float(value))
        if isinstance(value, Tensor):
            box, opened = whole_box(value.shape), partial(_InMemory, value)
            self.add_box("optimizer", state, StoredBox(name, value.dtype, tuple(value.shape), box, open=opened))
        else:
            self.values.setdefault(self.rename(name), (0, {}))[1][state] = value

    def add_group(self, names: list[str], group: Mapping[str, Any]) -> None:
        """What the optimizer says of a group of parameters.

        Raises:
            CheckpointError: It steps in a way that no optimizer of torch does.
        """
        options = {name: self.value(0, value) for name, value in group.items() if name not in _OF_THE_IMPLEMENTATION}
        if not options.pop("bias_correction", True):
            raise CheckpointError(
                "This optimizer ran without bias correction, and those of torch always correct.",
                checkpoint=self.path,
                fix='load without its states: zf.load(folder, model, only="model")',
            )
        for name in names:
            self.options[self.rename(name)] = (0, options)

    def add_box(self, kind: str, state: str, piece: StoredBox) -> None:
        """A box of a tensor.

        Raises:
            CheckpointError: Other boxes of it have other shapes or dtypes.
        """
        if self.add_piece(kind, piece.name, state, piece) is not None:
            raise damaged(self.path, tensor=piece.name, why="its parts have other shapes or dtypes")

    # -- what is read of them ----------------------------------------------------------------------------------------------

    def value(self, rank: int, encoded: Any) -> Any:
        """A value as it was saved; what was of a class is a dict of its attributes."""
        if isinstance(encoded, PlacedTensor):
            return self.read(encoded)
        if isinstance(encoded, Inert):
            return self.value(rank, encoded.state or encoded.args)
        if isinstance(encoded, dict):
            return {key: self.value(rank, item) for key, item in encoded.items()}
        if isinstance(encoded, list | tuple):
            return type(encoded)(self.value(rank, item) for item in encoded)
        return encoded

    def said(self, rank: int, what: str) -> dict[str, Any]:
        """What it has beside the model and the optimizer."""
        return self.extra if what == "extra" else {}

    def open_tensor(self, tensor: PlacedTensor) -> TensorReader:
        """Opens the bytes of a tensor, from its first element on."""
        is_in_rows = tensor.strides == strides_of(tensor.shape)
        return self._opened(tensor.span, tensor.offset) if is_in_rows else _InMemory(self.read(tensor))

    def _opened(self, span: ByteRange, begin: int) -> TensorReader:
        self._verify(span)
        with disk(span.path, "Reading a checkpoint"):
            nbytes = span.path.stat().st_size
        return TensorReader(span.path, begin, nbytes)

    def read(self, tensor: PlacedTensor) -> Tensor:
        """A whole tensor, in memory.

        Raises:
            CheckpointError: It is not what was written.
            StorageError: The disk refused.
        """
        self._verify(tensor.span)
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
        count = 0 if 0 in tensor.shape else last + 1
        with disk(tensor.span.path, "Reading a checkpoint"), tensor.span.path.open("rb") as file:
            file.seek(tensor.offset)
            found = bytearray(file.read(count * tensor.dtype.itemsize))
        flat = torch.frombuffer(found, dtype=tensor.dtype) if found else torch.empty(0, dtype=tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.strides).contiguous()

    def _verify(self, span: ByteRange) -> None:
        if span not in self._verified:
            require_checksum(span)
            self._verified.add(span)


class _InMemory(TensorReader):
    """A tensor in memory, read as if it were in a file."""

    def __init__(self, values: Tensor) -> None:
        self._values = values.reshape(-1)

    def read(self, piece: StoredBox, first: int, last: int, out: Tensor | None) -> None:
        """Some of its elements."""
        if out is not None:
            out.copy_(self._values[first:last])

    def close(self) -> None:
        """Nothing is open."""
