"""Numbers, strings, lists, dicts and tensors as JSON, and back:
what a checkpoint holds beside parameters.

Never pickle.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from zero_fn.errors import CheckpointError

__all__ = ["decoded", "encoded"]

_DICTS = {"$items": dict, "$counter": Counter, "$ordered": OrderedDict}
_TAGS = ("$tuple", "$tensor", "$number", "$bytes", *_DICTS)


def encoded(value: object, path: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON can hold it."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$number": float(value).hex()}
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if type(value) is list:
        return [encoded(item, f"{path}[{at}]", tensors) for at, item in enumerate(value)]
    if type(value) is tuple:
        return {
            "$tuple": [encoded(item, f"{path}[{at}]", tensors) for at, item in enumerate(value)]
        }
    tag = next((tag for tag, kind in _DICTS.items() if type(value) is kind), None)
    if isinstance(value, dict) and tag is not None:
        items = [
            (encoded(key, f"a key of {path}", tensors), encoded(item, f"{path}[{key!r}]", tensors))
            for key, item in value.items()
        ]
        if tag == "$items" and all(isinstance(key, str) and key not in _TAGS for key, _ in items):
            return dict(items)
        return {tag: [list(item) for item in items]}
    if isinstance(value, DTensor):
        raise CheckpointError(
            f"{path} is sharded, and extra= holds plain values.",
            fix="an optimizer beside the first: zf.save(folder, model, (muon, adamw)); "
            "an average: zf.ema(model); else value.full_tensor()",
        )
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {"$tensor": path}
    raise CheckpointError(
        f"{path} cannot be saved.",
        got=f"{type(value).__module__}.{type(value).__qualname__}",
        why="a checkpoint holds numbers, strings, bytes, lists, tuples, dicts and plain tensors, "
        "and runs no code when it is read",
        fix="give an object whose state_dict() is made of those; numpy arrays as tensors, "
        "sets as lists, a defaultdict as dict(value)",
    )


def decoded(value: Any, tensor: Callable[[str], Any]) -> Any:
    """The value that `encoded` was given; `tensor` finds a tensor by its path."""
    if isinstance(value, list):
        return [decoded(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value)) if len(value) == 1 else None
    if tag == "$number":
        return float.fromhex(value[tag])
    if tag == "$bytes":
        return bytes.fromhex(value[tag])
    if tag == "$tensor":
        return tensor(value[tag])
    if tag == "$tuple":
        return tuple(decoded(value[tag], tensor))
    if tag in _DICTS:
        return _DICTS[tag](
            {decoded(key, tensor): decoded(item, tensor) for key, item in value[tag]}
        )
    return {key: decoded(item, tensor) for key, item in value.items()}
