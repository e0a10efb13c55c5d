"""How much memory an operation makes, counted: every storage that it allocates or resizes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Storages"]

_resize = torch.UntypedStorage.resize_


class Storages(TorchDispatchMode):
    """Bytes of the storages made, or given memory, inside the block that are alive, now and at most.

    A storage that is a range of another is no memory of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, tuple[int, int]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if type(t) is Tensor}
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if type(tensor) is Tensor and tensor.untyped_storage()._cdata not in given:
                self._note(tensor.untyped_storage())
        return made

    def __enter__(self) -> Storages:
        def resized(storage: torch.UntypedStorage, nbytes: int) -> None:
            _resize(storage, nbytes)
            if storage._cdata in self._alive or nbytes:
                self._note(storage)

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._alive:
            weakref.finalize(storage, self._drop, storage._cdata)
        self._drop(storage._cdata)
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        if not any(first <= start and end <= last for first, last in self._alive.values()):
            self._alive[storage._cdata] = start, end
        self.now += end - start if storage._cdata in self._alive else 0
        self.peak = max(self.peak, self.now)

    def _drop(self, key: int) -> None:
        start, end = self._alive.pop(key, (0, 0))
        self.now -= end - start
