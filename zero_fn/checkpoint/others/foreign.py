"""A checkpoint of another library: its tensors lie in files of `torch.save`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_fn.checkpoint.format.boxes import spans, whole_box
from zero_fn.checkpoint.format.contents import Contents
from zero_fn.checkpoint.format.files import StoredBox, TensorReader, damaged, disk
from zero_fn.checkpoint.others.pickles import ByteRange, Inert, PlacedTensor, require_checksum
from zero_fn.errors import CheckpointError

__all__ = ["Foreign"]

_OF_THE_IMPLEMENTATION = ("params", "param_names", "step", "foreach", "fused", "capturable", "differentiable")
"""Options of a group that the optimizer to be loaded decides for itself."""


class Foreign(Contents):
    """A checkpoint that `zf.save` has not written.

    Attributes:
        extra: What the checkpoint has beside the model and the optimizer, as it was written.

    The checksums in files of `torch.save` are of whole storages: a storage is verified whole before the first read from it.
    """

    def __init__(self, path: Path, rename: Callable[[str], str], *, has_states: bool = True) -> None:
        """Reads what is in the checkpoint, but for the elements of tensors.

        Args:
            path: The folder that has the files.
            rename: The name in the model for a name in the checkpoint.
            has_states: Whether states of the optimizer are wanted.

        Raises:
            CheckpointError: The checkpoint is damaged, or of a kind that is not read.
            StorageError: The disk refused.
        """
        super().__init__(path, rename)
        self._has_states = has_states
        self.extra: dict[str, Any] = {}
        self._openers: dict[PlacedTensor, Callable[[], TensorReader]] = {}
        self._verified: set[ByteRange] = set()

    # -- what the reader of each format adds ---------------------------------------------------------------------------

    def add(
        self,
        kind: str,
        name: str,
        state: str,
        shape: tuple[int, ...],
        tensor: PlacedTensor,
        *,
        run: tuple[int, int, int] | None = None,
    ) -> None:
        """Adds a parameter, a buffer or a state of an optimizer, or some of its elements.

        Args:
            kind: "model" or "optimizer".
            name: The name of the parameter or buffer.
            state: The name of the state, or nothing.
            shape: The shape of the whole.
            tensor: What the file has.
            run: Which elements of the whole, in the order of rows: the first, how many, and the first of them in `tensor`.
                None: all.

        Raises:
            CheckpointError: The file has fewer elements.
        """
        at, count, first = run or (0, prod(shape), 0)
        if first + count > prod(tensor.shape) or (run is None and count != prod(tensor.shape)):
            raise damaged(
                tensor.span.path, tensor=name, why=f"{list(tensor.shape)} are fewer elements than it should have"
            )
        opened = self._openers.setdefault(tensor, partial(self.open_tensor, tensor))
        for box in (whole_box(shape),) if run is None or 0 in shape else spans(shape, at, at + count):
            offset = first * tensor.dtype.itemsize
            self.add_box(kind, state, StoredBox(name, tensor.dtype, shape, box, offset, open=opened))
            first += box.numel

    def add_state(self, name: str, state: str, value: Any) -> None:
        """Adds a state of a parameter that is a number."""
        if isinstance(value, PlacedTensor):
            value = self.read_tensor(value)
        elif state == "step":  # torch counts steps in tensors
            value = torch.tensor(float(value))
        if isinstance(value, Tensor):
            box, opened = whole_box(value.shape), partial(_InMemory, value)
            self.add_box("optimizer", state, StoredBox(name, value.dtype, tuple(value.shape), box, open=opened))
        else:
            self.values.setdefault(self.rename(name), (0, {}))[1][state] = value

    def add_group(self, names: list[str], group: Mapping[str, Any]) -> None:
        """Adds the options of a group of parameters.

        Raises:
            CheckpointError: The optimizer steps in a way that no optimizer of torch does.
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
        """Adds a box of a tensor.

        Raises:
            CheckpointError: Another box of the tensor has another shape or dtype.
        """
        if self.add_piece(kind, piece.name, state, piece) is not None:
            raise damaged(self.path, tensor=piece.name, why="its parts have other shapes or dtypes")

    # -- what is read --------------------------------------------------------------------------------------------------

    def value(self, rank: int, encoded: Any) -> Any:
        """A value as it was saved; an instance of a class becomes a dict of its attributes."""
        if isinstance(encoded, PlacedTensor):
            return self.read_tensor(encoded)
        if isinstance(encoded, Inert):
            return self.value(rank, encoded.state or encoded.args)
        if isinstance(encoded, dict):
            return {key: self.value(rank, item) for key, item in encoded.items()}
        if isinstance(encoded, list | tuple):
            return type(encoded)(self.value(rank, item) for item in encoded)
        return encoded

    def said(self, rank: int, what: str) -> dict[str, Any]:
        """What the checkpoint has beside the model and the optimizer."""
        return self.extra if what == "extra" else {}

    def read_tensor(self, tensor: PlacedTensor) -> Tensor:
        """A whole tensor, in memory.

        Raises:
            CheckpointError: The bytes are not those that were written.
            StorageError: The disk refused.
        """
        flat = torch.empty(tensor.spanned, dtype=tensor.dtype)
        reader = self._opened(tensor)
        try:
            reader.read(StoredBox("", flat.dtype, tuple(flat.shape), whole_box(flat.shape)), 0, flat.numel(), flat)
        finally:
            reader.close()
        return flat.as_strided(tensor.shape, tensor.strides).contiguous()

    def open_tensor(self, tensor: PlacedTensor) -> TensorReader:
        """Opens a tensor from its first element on; in memory, where its elements are not in the order of rows."""
        return self._opened(tensor) if tensor.is_in_rows else _InMemory(self.read_tensor(tensor))

    def _opened(self, tensor: PlacedTensor) -> TensorReader:
        if tensor.span not in self._verified:
            require_checksum(tensor.span)
            self._verified.add(tensor.span)
        with disk(tensor.span.path, "Reading a checkpoint"):
            nbytes = tensor.span.path.stat().st_size
        return TensorReader(tensor.span.path, tensor.offset, nbytes)


class _InMemory(TensorReader):
    """A tensor in memory, read as if it were in a file."""

    def __init__(self, values: Tensor) -> None:
        self._values = values.reshape(-1)

    def read(self, piece: StoredBox, first: int, last: int, out: Tensor | None) -> None:
        """Copies some of its elements."""
        if out is not None:
            out.copy_(self._values[first:last])

    def close(self) -> None:
        """Nothing is open."""
