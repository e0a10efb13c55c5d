"""Where the training state of a parameter rests: the value that transforms join.

A home has three coordinates: placement, dtype and tier. ZeRO is three placements per parameter, of
the parameter P, its gradient G and its optimizer state O:

    |            | P         | G         | O         |
    | NOTHING    | Replicate | Replicate | Replicate |  plain data parallelism
    | OPTIMIZER  | Replicate | Replicate | Shard     |  ZeRO-1
    | GRADS      | Replicate | Shard     | Shard     |  ZeRO-2
    | PARAMS     | Shard     | Shard     | Shard     |  ZeRO-3

Sharding P without G, or G without O, would save nothing that the row above does not, so the rows
form a chain and the join of two is the larger one. Together with the dtypes and the tiers they form
a join-semilattice: joining is idempotent, commutative and associative, which is why transforms
compose in any order.

Source: ZeRO, Rajbhandari et al. 2020, section 5 (P_os, P_os+g, P_os+g+p).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

import torch

from zero_fn.errors import LayoutError
from zero_fn.values.join_rule import agreed
from zero_fn.values.rounding_mode import ParameterRounding
from zero_fn.values.tiers import IN_MEMORY, Tiers
from zero_fn.values.wire import Wire

__all__ = ["Home", "ReshardAfter", "Stage"]

T = TypeVar("T")


class Stage(IntEnum):
    """How much of a parameter's state is sharded; each member includes those before it."""

    NOTHING = 0
    OPTIMIZER = 1
    GRADS = 2
    PARAMS = 3


class ReshardAfter(IntEnum):
    """When gathered parameters are freed, if they rest sharded or in another tier.

    Later: fewer gathers, more memory.
    """

    FORWARD = 0
    BACKWARD = 1

    @classmethod
    def named(cls, moment: str) -> ReshardAfter:
        """The member for the `reshard_after=` of a user: "forward" or "backward".

        Raises:
            LayoutError: `moment` is neither.
        """
        if moment not in ("forward", "backward"):
            raise LayoutError(
                "reshard_after names no moment.",
                got=repr(moment),
                fix='reshard_after="forward" or "backward"',
            )
        return cls[moment.upper()]


@dataclass(frozen=True, slots=True)
class Home:
    """Where P, G and O of one parameter rest, in which tiers,
    and the dtypes they have in flight."""

    stage: Stage = Stage.NOTHING  # how much of the state is sharded over the axis
    compute: torch.dtype | None = None  # of the gathered parameter; None: the dtype at rest
    # Of sums of gradients over ranks and microbatches; None: float32 for gradients of 16
    # bits or less, else their own.
    reduce: torch.dtype | None = None
    grads: torch.dtype | None = None  # of gradients at rest; None: that of their parameter
    reshard_after: ReshardAfter = ReshardAfter.FORWARD  # when the gathered parameter is freed
    tiers: Tiers = IN_MEMORY
    # Rounding of results into parameters that rest in bfloat16; None: by the optimizer.
    round: ParameterRounding | None = None
    gather: Wire | None = None  # the format in which parameters travel; None: as they are
    scatter: Wire | None = None  # the format in which gradients travel

    def join(self, other: Home) -> Home:
        """The least home that gives both what they ask for.

        Raises:
            LayoutError: The two ask for different dtypes, roundings or tiers.
        """
        dtypes = "{} dtypes of the same parameter"
        formats = "formats in which the same parameter travels ({}=)"
        return Home(
            max(self.stage, other.stage),
            _agreed("compute", self.compute, other.compute, dtypes),
            _agreed("reduce", self.reduce, other.reduce, dtypes),
            _agreed("grads", self.grads, other.grads, dtypes),
            max(self.reshard_after, other.reshard_after),
            self.tiers.join(other.tiers),
            _agreed("round", self.round, other.round, "roundings of the same parameter"),
            _agreed("gather", self.gather, other.gather, formats),
            _agreed("reduce", self.scatter, other.scatter, formats),
        )

    def compute_dtype(self, resting: torch.dtype) -> torch.dtype:
        """The dtype of the gathered parameter, for one that rests in the dtype `resting`.

        Only floating point is cast.
        """
        return self.compute if self.compute is not None and resting.is_floating_point else resting

    def sum_dtype(self, resting: torch.dtype) -> torch.dtype:
        """The dtype in which gradients are summed, for a parameter that
        rests in the dtype `resting`."""
        computed = self.compute_dtype(resting)
        if self.reduce is not None and resting.is_floating_point:
            return self.reduce
        return torch.float32 if computed.is_floating_point and computed.itemsize < 4 else computed

    def gradient_dtype(self, resting: torch.dtype) -> torch.dtype:
        """The dtype in which gradients rest, for a parameter that rests in the dtype `resting`."""
        return self.grads if self.grads is not None and resting.is_floating_point else resting


def _agreed(name: str, one: T | None, other: T | None, what: str) -> T | None:
    """What two calls of `precision` ask for by the argument `name`.

    `what`: as in `agreed`, with a place for the name.
    """
    fix = f"pass one precision(model, {name}=...) per parameter; select parameters with where="
    return agreed(one, other, what.format(name), fix=fix)
