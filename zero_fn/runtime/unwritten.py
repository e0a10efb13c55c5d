"""Finds memory that nobody has written: it is filled with a pattern when a module on `meta` gets it.

[Note: emptied buffers] `to_empty()` gives memory to buffers, too. Those that no state_dict holds, such as the frequencies of
rotary embeddings, are easily forgotten. `to_empty()` calls `_apply` of each module. So modules that have buffers on `meta`
when they are transformed get an `_apply` that fills such memory; the first forward checks whether somebody wrote it.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zero_fn.errors import StateError

__all__ = ["SHOWN", "filled", "is_filled", "note_emptied_buffers", "require_memory", "require_written_buffers"]

SHOWN = 8
"""The most names that an error lists."""

_UNWRITTEN = 0xFB  # of each byte: in float32 that is -2.6e36, which nobody draws


def filled(memory: Tensor) -> Tensor:
    """The same memory, filled with the pattern that marks it as not written."""
    _bytes_of(memory).fill_(_UNWRITTEN)
    return memory


def is_filled(tensor: Tensor) -> bool:
    """Whether all of a tensor is the pattern: nobody has written it."""
    own = _bytes_of(tensor)
    return own.numel() > 0 and bool(own[0] == _UNWRITTEN) and bool((own == _UNWRITTEN).all())


def _bytes_of(tensor: Tensor) -> Tensor:
    """All bytes of the storage of a tensor, which the tensor fills; its dims may lie in any order."""
    memory = tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
    return memory.view(torch.uint8)


class _Apply:
    """Stands in for `_apply` of one module. [Note: emptied buffers]

    Attributes:
        emptied: Names of the buffers that got memory.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.emptied: set[str] = set()

    def __call__(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        module = self._module()
        assert module is not None, "a module is called that is gone"
        before = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        type(module)._apply(module, function, recurse)  # type: ignore[no-untyped-call]
        for name in before:
            buffer = module._buffers[name]
            if buffer is not None and not buffer.is_meta:
                filled(buffer)
                self.emptied.add(name)
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> _Apply:
        twin = memo[id(self)] = _Apply(copy.deepcopy(self._module(), memo))  # type: ignore[arg-type]
        twin.emptied = set(self.emptied)
        return twin


def note_emptied_buffers(root: nn.Module) -> None:
    """From now on, notes when buffers on `meta` get memory, in a module and those below it."""
    for module in root.modules():
        if any(buffer is not None and buffer.is_meta for buffer in module._buffers.values()):
            module.__dict__.setdefault("_apply", _Apply(module))


def require_written_buffers(root: nn.Module) -> None:
    """Checks that buffers that got memory have got values, too.

    Raises:
        StateError: Some have not.
    """
    missed = list(_missed(root))
    if missed:
        raise StateError(
            f"to_empty() gave memory to {len(missed)} buffers, and nobody gave them values.",
            first=", ".join(missed[:SHOWN]),
            why="their values are what that memory held before, and a state_dict lacks buffers that are not persistent",
            fix="write them, as the module computes them; or model = zf.materialize(model, device), which calls "
            "reset_parameters() and the _init_weights() of transformers",
        )
    for module in root.modules():
        if isinstance(module.__dict__.get("_apply"), _Apply):
            del module.__dict__["_apply"]


def require_memory(names: Sequence[str]) -> None:
    """Checks that no parameter is on `meta`: it cannot be sent, and what ranks send next would not be what others wait for.

    Args:
        names: Those that are.

    Raises:
        StateError: Some are.
    """
    if names:
        raise StateError(
            f"{len(names)} parameters are on meta, and other ranks are to be sent their values.",
            first=", ".join(names[:SHOWN]),
            fix="values of files: zf.load_pretrained(model, folder), or weights=folder beside a DeepSpeed config; initial "
            "ones: model = zf.materialize(model, device); or model.to_empty(device=...) and load_state_dict()",
        )


def _missed(root: nn.Module) -> Iterator[str]:
    for name, module in root.named_modules():
        found = module.__dict__.get("_apply")
        for attribute, buffer in module._buffers.items() if isinstance(found, _Apply) else ():
            if attribute in found.emptied and buffer is not None and not buffer.is_meta and is_filled(buffer):
                yield f"{name}.{attribute}".lstrip(".")
