"""Memory that nobody has written: a pattern marks it in `materialize`,
and the first forward warns of buffers.

[Note: emptied buffers] `to_empty()` gives memory to buffers, too. Those that no state_dict holds,
such as the frequencies of rotary embeddings, are easily forgotten. So they get the pattern. Whoever
replaces or writes one leaves no pattern there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zero_fn.errors import StateError, warn_once

__all__ = [
    "SHOWN",
    "filled",
    "is_filled",
    "mark_emptied_buffers",
    "meta_buffers_of",
    "note_meta_buffers",
    "require_memory",
    "warn_of_unwritten_buffers",
]

SHOWN = 8
"""The most names that an error lists."""

# Lies in the `__dict__` of a module until the first forward: names of buffers.
_ON_META = "_zero_fn_on_meta"
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
    """All bytes of the storage of a tensor, which the tensor fills;
    its dims may lie in any order."""
    own = _own(tensor).detach()
    memory = own.as_strided((own.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
    return memory.view(torch.uint8)


def _own(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor: parallelize_module makes DTensors of the buffers
    of the modules that it cuts."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def note_meta_buffers(root: nn.Module) -> None:
    """Notes which buffers are on `meta`, in a module and those below it."""
    for module in root.modules():
        if names := [
            name
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.is_meta
        ]:
            module.__dict__[_ON_META] = names


def meta_buffers_of(module: nn.Module) -> list[str]:
    """The noted buffers of a module that are still on `meta`."""
    names = module.__dict__.get(_ON_META, ())
    return [
        name
        for name in names
        if (buffer := module._buffers.get(name)) is not None and buffer.is_meta
    ]


def mark_emptied_buffers(module: nn.Module, names: Sequence[str]) -> None:
    """Fills buffers that `to_empty()` took from `meta` with the pattern."""
    for name in names:
        buffer = module._buffers[name]
        if buffer is not None and not buffer.is_meta:
            filled(buffer)


def warn_of_unwritten_buffers(root: nn.Module) -> None:
    """At the first forward, warns of buffers that have the pattern:
    `to_empty()` gave them memory, and nobody values."""
    missed = [
        f"{name}.{attribute}".lstrip(".")
        for name, module in root.named_modules()
        for attribute in module.__dict__.pop(_ON_META, ())
        if (buffer := module._buffers.get(attribute)) is not None
        and (buffer.is_meta or is_filled(buffer))
    ]
    if missed:
        warn_once(
            "Buffers that were on meta hold garbage: nobody wrote into them.",
            first=", ".join(missed[:SHOWN]),
            why="to_empty() gives memory without values, "
            "and a state_dict lacks buffers that are not persistent",
            fix="write them, as the module computes them; or model = zf.materialize(model, "
            "device), which calls reset_parameters() and the _init_weights() of transformers",
        )


def require_memory(names: Sequence[str]) -> None:
    """Refuses parameters on `meta`, by name: they cannot be sent, and what ranks send next would
    not be what others wait for.

    Raises:
        StateError: There are some.
    """
    if names:
        raise StateError(
            f"{len(names)} parameters are on meta, and other ranks are to be sent their values.",
            first=", ".join(names[:SHOWN]),
            fix="values of files: zf.load_pretrained(model, folder), or weights=folder beside a "
            "DeepSpeed config; initial ones: model = zf.materialize(model, device); or "
            "model.to_empty(device=...) and load_state_dict()",
        )
