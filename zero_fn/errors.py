"""The errors a user can meet, each with the facts that led to it and the code that fixes it.

    ZeroError
    |-- LayoutError        (ValueError)    the layout you asked for cannot exist
    |   |-- MeshError                      ... because of the mesh axis
    |   |-- PlacementError                 ... because of what must read or update the tensor
    |   |-- UnitError                      ... because of how parameters are grouped
    |   `-- TierError                      ... because of where the bytes should live
    |-- StateError         (RuntimeError)  a legal call at the wrong moment
    |   |-- StaleError                     an object older than the transform it meets
    |   `-- ShardedAccessError             a resting shard used as if it were the whole tensor
    |-- DisagreementError  (RuntimeError)  ranks do not hold the same program
    |-- LostRankError      (RuntimeError)  a rank ended, or does not answer
    |-- StorageError       (RuntimeError)  a disk did not take or give back what it was asked to
    |-- CheckpointError    (ValueError)    the bytes on disk do not fit the layout in memory
    `-- ConfigError        (ValueError)    a DeepSpeed config, or a sink, that cannot be followed

A message is a summary sentence, then aligned `name : value` lines,
the last of which is always `fix`.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DisagreementError",
    "LayoutError",
    "LostRankError",
    "MeshError",
    "PlacementError",
    "ShardedAccessError",
    "StaleError",
    "StateError",
    "StorageError",
    "TierError",
    "UnitError",
    "ZeroError",
]

_PACKAGE_FOLDER = str(Path(__file__).parent)
_said: set[str] = set()


class ZeroError(Exception):
    """Base of all errors of zero_fn: a sentence that says what is wrong, the facts, and the fix.

    Args:
        summary: One sentence: what is wrong.
        fix: What to write instead; code wherever code exists.
        **facts: Values in reading order, printed as `name : value` lines.
    """

    def __init__(self, summary: str, *, fix: str, **facts: object) -> None:
        rows = {**facts, "fix": fix}
        width = max(map(len, rows))
        body = (f"  {name:<{width}} : {value}" for name, value in rows.items())
        super().__init__("\n".join((summary, *body)))
        self.summary = summary
        self.fix = fix
        self.facts = facts

    def __reduce__(self) -> tuple[object, ...]:
        """Errors cross process boundaries (`launch`, test ranks),
        so they keep summary, fix and facts."""
        return _rebuild, (
            type(self),
            self.summary,
            self.fix,
            {k: str(v) for k, v in self.facts.items()},
        )


class LayoutError(ZeroError, ValueError):
    """What was asked for cannot exist: an option, a module or a tensor does not allow it."""


class MeshError(LayoutError):
    """The mesh is not one named axis, or the axis does not go with those of earlier transforms."""


class PlacementError(LayoutError):
    """A tensor cannot be sharded, offloaded or updated as asked,
    because of what it is or of what reads or updates it."""


class UnitError(LayoutError):
    """Parameters cannot be grouped into units (wrap groups) as asked."""


class TierError(LayoutError):
    """Bytes cannot be stored in the tier (host memory or a disk) asked for:
    it is too small, or not given."""


class StateError(ZeroError, RuntimeError):
    """A legal call at the wrong moment: before a transform, while the module runs,
    or after it was donated, or its states were offloaded."""


class StaleError(StateError):
    """An object is older than the transform it meets, such as an optimizer
    built before `shard_params`."""


class ShardedAccessError(StateError):
    """A shard, which is what parameters are between forwards,
    was used as if it were the whole tensor."""


class DisagreementError(ZeroError, RuntimeError):
    """Ranks hold different values, or are about to issue different collectives."""


class LostRankError(ZeroError, RuntimeError):
    """Another rank ended, or did not answer before the deadline."""


class StorageError(ZeroError, RuntimeError):
    """A disk did not store or give back bytes, or gave back other ones; on this rank or another."""


class CheckpointError(ZeroError, ValueError):
    """A checkpoint or a state_dict is damaged, cannot be written, or does not fit the model."""


class ConfigError(ZeroError, ValueError):
    """A DeepSpeed config, arguments of a trainer, a sink of metrics,
    or a file of measured links cannot be followed."""


def _rebuild(cls: type[ZeroError], summary: str, fix: str, facts: dict[str, object]) -> ZeroError:
    return cls(summary, fix=fix, **facts)


def warn_once(summary: str, *, fix: str, **facts: object) -> None:
    """Warns of something that is allowed but surely not meant, in the form of an error: a
    UserWarning, once a process.

    Args:
        summary: One sentence. A second warning of the same summary is not given.
        fix: What to write instead.
        **facts: Values in reading order.
    """
    if summary in _said:
        return
    _said.add(summary)
    ours = (_PACKAGE_FOLDER, contextlib.__file__)
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        level, frame = level + 1, frame.f_back
    warnings.warn(str(ZeroError(summary, fix=fix, **facts)), UserWarning, stacklevel=level)
