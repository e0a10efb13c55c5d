"""What decides how a parameter rests, computes and is summed.

Parameters of a unit that are equal in this make up a group.

A group has up to three placements of its parameters, each a buffer, and the memory of its
gradients. Stages, several axes, precision and offload are only which of these live how
long, and where:

    |                          | rest             | inner    | whole        | gradient at rest     |
    |--------------------------|------------------|----------|--------------|----------------------|
    | replicate                | is whole         | -        | is rest      | whole                |
    | shard_optimizer          | a view of whole  | -        | always       | a view of whole sums |
    | shard_grads              | a view of whole  | -        | always       | a shard              |
    | shard_params             | its own          | -        | during a use | a shard              |
    | shard_params, over two   | its own          | -        | during a use | a shard              |
    | shard_params inside,     | a view of inner  | always   | during a use | a shard              |
    |   less outside (hpZ)     |                  |          |              |                      |
    | + precision(bf16)        | its own, float32 | bf16     | bf16         | float32              |
    | + precision(gather=int8) | its own          | coded    | decoded      |                      |
    | + offload(params=)       | on a shelf       | -        | during a use |                      |
    | + offload(grads=)        |                  |          |              | on a shelf           |

`rest` is what a rank holds of its own, `inner` its part on the first axis once the second has been
gathered, `whole` the parameters as a forward reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from zero_fn.runtime.leg import Leg, Spot
from zero_fn.runtime.path import Path
from zero_fn.values.home import Home, Stage
from zero_fn.values.rounding_mode import ParameterRounding
from zero_fn.values.tiers import Shelved, is_accelerator, is_away
from zero_fn.values.wire import Records, Wire, is_coded

__all__ = ["ParameterKind", "dtypes_text"]

_SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}


@dataclass(frozen=True)
class ParameterKind:
    """What the parameters of a group have in common."""

    home: Home
    dtype: torch.dtype  # at rest
    device: torch.device  # of the resting memory; `meta` before there is any
    device_type: str  # of the device that computes with them
    # Each axis that gradients are summed over: its number, and what it shards.
    hops: tuple[tuple[int, Stage], ...]
    is_cut: bool  # by any axis
    # Whether a tensor subclass decides which bytes are sent for them (fsdp_extensions.py).
    by_extension: bool = False
    # The format in which parameters travel, and gradients; None: as they are.
    gather: Wire | None = None
    scatter: Wire | None = None

    @classmethod
    def of(
        cls,
        path: Path,
        home: Home,
        dtype: torch.dtype,
        device: torch.device,
        *,
        by_extension: bool = False,
    ) -> ParameterKind:
        """The kind of a parameter with this path and home.

        It rests on the device of its mesh, wherever it is now.
        """
        device_type = path.hops[0].axis.device_type if path.hops else device.type
        if device.type not in (device_type, "meta"):
            device = torch.empty(0, device=device_type).device  # with its index
        hops = tuple((hop.number, hop.stage) for hop in path.hops)
        has_formats = (
            path.row_numel > 0 and is_coded(home.compute_dtype(dtype)) and not by_extension
        )
        formats = (home.gather, home.scatter if hops else None) if has_formats else (None, None)
        return cls(
            home, dtype, device, device_type, hops, path.layout is not None, by_extension, *formats
        )

    @cached_property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the gathered parameters."""
        return self.home.compute_dtype(self.dtype)

    @cached_property
    def sum_dtype(self) -> torch.dtype:
        """The dtype in which gradients are summed."""
        return self.home.sum_dtype(self.dtype)

    @cached_property
    def gradient_dtype(self) -> torch.dtype:
        """The dtype in which gradients rest."""
        return self.home.gradient_dtype(self.dtype)

    @cached_property
    def rounding(self) -> ParameterRounding | None:
        """How results in float32 are rounded into the parameters;
        None: they are stepped in the dtype in which they rest."""
        return self.home.round if self.dtype == torch.bfloat16 else None

    # -- which buffers live how long ---------------------------------------------------------------

    @cached_property
    def is_away(self) -> bool:
        """Whether the resting parameters are in another tier than the memory of the device."""
        return is_away(self.home.tiers.params, self.device_type)

    @cached_property
    def is_gradient_away(self) -> bool:
        """Whether the resting gradients are in another tier than the memory of the device."""
        return is_away(self.home.tiers.grads, self.device_type)

    @cached_property
    def has_whole(self) -> bool:
        """Whether whole parameters have a buffer of their own; if not,
        the resting parameters are whole already."""
        return self.is_cut or self.is_other_than_rest or self.is_away

    @cached_property
    def is_other_than_rest(self) -> bool:
        """Whether gathered parameters have other values than resting ones:
        another dtype, or those of a format."""
        return self.compute_dtype != self.dtype or self.gather is not None

    @cached_property
    def is_kept(self) -> bool:
        """Whether whole parameters stay in memory between uses:
        no axis shards the parameters themselves."""
        return not self.is_away and all(stage < Stage.PARAMS for _, stage in self.hops)

    @cached_property
    def inner(self) -> torch.dtype | Wire | None:
        """The form in which this rank's part on the first axis stays in memory: that axis shards
        parameters, the second less (hpZ).

        None: it does not stay.
        """
        stages = [stage for _, stage in self.hops if stage > Stage.NOTHING]
        if self.is_away or len(stages) < 2 or not stages[0] == Stage.PARAMS > stages[1]:
            return None
        if self.gather is None or self.gather.is_difference:
            return self.compute_dtype
        return self.gather

    @cached_property
    def rests(self) -> Spot:
        """Where the resting parameters have their memory: in a buffer of their own,
        in another, or in another tier."""
        if self.is_away and self.device.type != "meta":
            return Spot.TIER
        if not self.is_other_than_rest and self.has_whole and self.is_kept:
            return Spot.WHOLE
        if not self.is_other_than_rest and self.inner is not None:
            return Spot.INNER
        return Spot.REST

    @cached_property
    def lands(self) -> bool:
        """Whether all that a gather takes is read from a tier into memory of the device:
        nothing is sent or copied there."""
        return (
            self.is_away
            and not is_accelerator(self.device_type)
            and not self.is_cut
            and not self.by_extension
        )

    # -- how they come from rest to whole ----------------------------------------------------------

    @cached_property
    def up(self) -> tuple[Leg, ...]:
        """The legs of a gather, in order.

        Those that are kept come first: they are made once after each step.
        """
        if not self.has_whole:
            return ()
        rest = Spot.TIER if self.is_away else self.rests
        hops = [
            number
            for number, (_, stage) in reversed([*enumerate(self.hops)])
            if stage > Stage.NOTHING
        ]
        if self.inner is None:
            return self._legs(rest, Spot.WHOLE, hops, self.gather)
        *others, first = hops
        # Differences travel no further than to the part that is kept.
        if not isinstance(self.inner, Wire):
            kept = self._legs(rest, Spot.INNER, others, self.gather, is_kept=True)
            return kept + self._legs(Spot.INNER, Spot.WHOLE, [first], None)
        kept = (Leg(rest, Spot.INNER, None, self.inner, True),)
        kept += tuple(Leg(Spot.INNER, Spot.INNER, hop, self.inner, True) for hop in others)
        decoded = Leg(Spot.CODES, Spot.WHOLE, None, self.compute_dtype)
        return *kept, Leg(Spot.INNER, Spot.CODES, first, self.inner), decoded

    def _legs(
        self,
        source: Spot,
        target: Spot,
        hops: Sequence[int],
        wire: Wire | None,
        *,
        is_kept: bool = False,
    ) -> tuple[Leg, ...]:
        """The legs from a spot to another, over these hops, as they are or in a format."""
        if wire is not None:
            coded = Leg(source, Spot.CODES, None, wire, is_kept)
            sent = (Leg(Spot.CODES, Spot.CODES, hop, wire, is_kept) for hop in hops)
            return coded, *sent, Leg(Spot.CODES, target, None, self.compute_dtype, is_kept)
        reads_rest = source is Spot.REST and len(hops) == 1 and not self.is_other_than_rest
        before = source if reads_rest else target  # where an all-gather reads this rank's part
        copied = (
            [Leg(source, before, None, self.compute_dtype, is_kept)] if source is not before else []
        )
        return *copied, *(Leg(before, target, hop, self.compute_dtype, is_kept) for hop in hops)

    @cached_property
    def down(self) -> tuple[Leg, ...]:
        """The legs of a reduction of gradients, in order: sums over one axis after the other, and
        all-gathers of what an axis does not cut.

        Sums of several uses travel in the dtype of the sum from the first axis on.
        """
        last = len(self.hops) - 1
        sums = [
            Leg(
                Spot.SUM if number else Spot.LOCAL,
                Spot.GRADIENT if number == last else Spot.SUM,
                number,
                self.scatter or (self.sum_dtype if number else self.compute_dtype),
            )
            for number in range(len(self.hops))
        ]
        uncut = [
            number
            for number, (_, stage) in reversed([*enumerate(self.hops)])
            if stage == Stage.NOTHING
        ]
        back = [Leg(Spot.GRADIENT, Spot.GRADIENT, number, self.gradient_dtype) for number in uncut]
        return *sums, *back

    # -- formats -----------------------------------------------------------------------------------

    def records_of(self, path: Path) -> Records:
        """How a parameter with this path travels."""
        assert self.gather is not None
        return self.gather.records(path.row_numel)

    def records_nbytes(self, path: Path) -> int:
        """Bytes of the records of one parameter while a gather is under way;
        0 if it travels as it is."""
        if self.gather is None:
            return 0
        inner = (
            path.sublayout if self.inner is not None and not isinstance(self.inner, Wire) else None
        )
        return self.records_of(path).nbytes_of(
            inner.padded_numel if inner is not None else path.padded_numel
        )

    # -- tiers -------------------------------------------------------------------------------------

    def shelved(self) -> Iterator[Shelved]:
        """The states that rest in another tier than the memory of the device."""
        for kind, tier in (
            ("parameters", self.home.tiers.params),
            ("gradients", self.home.tiers.grads),
        ):
            if tier is not None and is_away(tier, self.device_type):
                yield kind, tier

    def states_away_nbytes(self, nbytes: int) -> int:
        """How many of `nbytes` bytes of optimizer states are to rest in another tier
        than the memory of the device."""
        tiers = self.home.tiers
        return round(nbytes * tiers.fraction) if is_away(tiers.optim, self.device_type) else 0

    @cached_property
    def must_be_streamed(self) -> bool:
        """Whether only a streamed optimizer can step them, because some of
        their state is in another tier."""
        return any(True for _ in self.shelved()) or is_away(self.home.tiers.optim, self.device_type)

    def resting_nbytes(self, path: Path) -> int:
        """Bytes in memory of the device between uses for the elements of one parameter: at rest,
        and gathered where that is kept."""
        if self.is_away:
            return 0
        own = path.local_numel * self.dtype.itemsize
        kept = path.numel if self.is_kept else path.inner_numel if self.inner is not None else 0
        if isinstance(self.inner, Wire):
            return own + self.records_of(path).nbytes_of(kept)
        if self.is_other_than_rest:
            return own + kept * self.compute_dtype.itemsize
        return kept * self.dtype.itemsize or own


def dtypes_text(kind: ParameterKind) -> str:
    """The dtypes at rest (and how a step is rounded to it), in compute and of gradient sums (and
    the formats in which parameters and gradients travel), as text; and of gradients at rest, if
    that is another one."""
    found = [
        (kind.dtype, kind.rounding),
        (kind.compute_dtype, kind.gather),
        (kind.sum_dtype, kind.scatter),
    ]
    found += [(kind.gradient_dtype, None)] * (kind.gradient_dtype != kind.dtype)
    names = [(str(dtype).removeprefix("torch."), more) for dtype, more in found]
    return "/".join(
        _SHORT.get(name, name) + (f" ({more})" if more is not None else "") for name, more in names
    )
