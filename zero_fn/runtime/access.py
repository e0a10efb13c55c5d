"""A resting shard used as if it were the whole tensor gets our error, with the fix, in place of torch's.

torch refuses operations on a DTensor and a plain tensor with a message about DTensors. Inside the forward of a
transformed module the mistake is known: the weight of a module was read outside the forward of its unit. Outside every
forward torch's own message remains: 2.13 raises it in C++, where nothing can be told apart.
"""

from __future__ import annotations

import traceback

from zero_fn.errors import ShardedAccessError

__all__ = ["explained", "is_about_shards"]


def is_about_shards(error: RuntimeError) -> bool:
    """Whether torch refused an operation on a resting shard and a plain tensor."""
    return "mixed torch.Tensor and DTensor" in str(error)


def explained(error: RuntimeError, unit: str) -> ShardedAccessError:
    """The error to raise for one about a resting shard that passed through the forward of `unit`."""
    text = str(error)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
    where = f"{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}" if frames else "unknown"
    return ShardedAccessError(
        "A resting parameter was used outside the forward of its unit, where this rank holds only its shard.",
        used_by=f"{text.split(' ', 1)[0].rstrip(':')} at {where}",
        inside=f"the forward of unit {unit or 'root'!r}",
        fix="call the module that owns the weight, put both modules in one unit (units=), or read it inside "
        "`with zf.unsharded(module):`",
    )
