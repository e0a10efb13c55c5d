"""What `autoplan` returns: stages with tiers, and the bytes and seconds predicted for each. The seconds of a step are

    on a CPU           max(compute + collectives, disk)  +  max(optimizer, disk)        collectives need the cores, too
    on an accelerator  max(compute, collectives, link, disk)  +  max(optimizer, link, disk)

where the first term is the forward and backward, and the second the step of the optimizer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_fn.looking.held import Held
from zero_fn.looking.table import table
from zero_fn.transforms.offload import offload
from zero_fn.transforms.shard import replicate, shard_grads, shard_optimizer, shard_params
from zero_fn.values.tiers import Nvme, Tier, Tiers, bytes_text, is_accelerator

__all__ = ["STAGES", "Proposal", "Proposals", "staged"]

M = TypeVar("M", bound=nn.Module)

_TRANSFORMS: tuple[Callable[..., Any], ...] = (replicate, shard_optimizer, shard_grads, shard_params)
STAGES = {transform.__name__: transform for transform in _TRANSFORMS}


def staged(transform: str, module: M, mesh: DeviceMesh, options: Mapping[str, Any]) -> M:
    """A module in one of the stages. Options that only other stages have (`persist_below=`, for replicas) are left out."""
    own, known = inspect.signature(STAGES[transform]).parameters, inspect.signature(shard_params).parameters
    taken = {name: value for name, value in options.items() if name in own or name not in known}
    placed: M = STAGES[transform](module, mesh, **taken)
    return placed


@dataclass(frozen=True, slots=True)
class Proposal:
    """One transform with its tiers, and the bytes and seconds that `autoplan` predicts for it on this rank.

    Attributes:
        transform: Name of the sharding transform.
        tiers: What is offloaded, and to which tier.
        device_type: Type of the device that computes.
        held: Bytes at rest in memory and in tiers, with their padding and all buffers of tiers.
        in_flight: Most bytes of gathered units and whole gradients at one moment of a step.
        fits: Whether it fits the budget and the limits of the tiers.
        compute_s, collectives_s: Seconds of computation, and of collectives, in a forward and backward.
        fetch_s, fetch_link_s: Seconds for which the disk, and the link to an accelerator, move parameters and gradients in
            these.
        optimizer_s, disk_s, link_s: Seconds of an optimizer's step in memory, on the disk, and on the link.
    """

    transform: str
    tiers: Tiers
    device_type: str
    held: Held
    in_flight: int
    fits: bool
    compute_s: float
    collectives_s: float
    fetch_s: float
    fetch_link_s: float
    optimizer_s: float
    disk_s: float
    link_s: float

    @property
    def nbytes(self) -> int:
        """Most bytes of device memory in a step, without activations. If the device is the host, with buffers."""
        return self.held.by_memory(self.device_type)[0] + self.in_flight

    @property
    def host(self) -> int:
        """Beside an accelerator, bytes of host memory."""
        return self.held.by_memory(self.device_type)[1]

    @property
    def disk(self) -> int:
        """Bytes on a disk."""
        return sum(self.held.tiers.get(str(tier), 0) for tier in set(self._kinds.values()) if isinstance(tier, Nvme))

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        both = max if is_accelerator(self.device_type) else sum
        computed = both((self.compute_s, self.collectives_s))
        passes = max(computed, self.fetch_s, self.fetch_link_s)
        return passes + max(self.optimizer_s, self.disk_s, self.link_s)

    @property
    def bound(self) -> str:
        """What takes longest in a step, such as "collectives"."""
        parts = {name: getattr(self, f"{name}_s") for name in ("compute", "collectives", "optimizer")}
        parts |= {"disk": max(self.fetch_s, self.disk_s), "link": max(self.fetch_link_s, self.link_s)}
        return max(parts, key=lambda name: parts[name])

    @property
    def tier(self) -> Tier | None:
        """The tier of the optimizer states; None if nothing is offloaded."""
        return self.tiers.optim

    @property
    def away(self) -> str:
        """What is offloaded, in words: "gradients on host, states on disk"."""
        found: dict[Tier, list[str]] = {}
        for kind, tier in self._kinds.items():
            found.setdefault(tier, []).append(kind)
        words = (
            f"{', '.join(kinds)} on {'disk' if isinstance(tier, Nvme) else 'host'}" for tier, kinds in found.items()
        )
        return ", ".join(words) or "nothing"

    @property
    def _kinds(self) -> dict[str, Tier]:
        rows = (("parameters", self.tiers.params), ("gradients", self.tiers.grads), ("states", self.tiers.optim))
        return {kind: tier for kind, tier in rows if tier is not None}

    def place(self, module: M, mesh: DeviceMesh, **options: Any) -> M:
        """Applies the proposal to a module: the sharding transform, and `offload` if something is offloaded.

        Args:
            module: The module that was planned, or one like it.
            mesh: The axis that it was planned for.
            **options: Options of the sharding transform: those that `autoplan` was given, and `donate=`.

        Returns:
            A new module; see the transforms. If `tier` is not None, give the optimizer of its parameters to `zf.streamed`.
        """
        placed, tiers = staged(self.transform, module, mesh, options), self.tiers
        if tiers.optim is None:
            return placed
        return offload(placed, params=tiers.params, grads=tiers.grads, optim=tiers.optim, donate=True)


@dataclass(frozen=True, slots=True)
class Proposals:
    """All combinations that `autoplan` tried: first those that fit, the fastest first. Printable as a table.

    Attributes:
        budget: The budget that `autoplan` was given, in bytes.
        all: Every combination, also those that do not fit.
    """

    budget: int
    all: tuple[Proposal, ...]

    @property
    def best(self) -> Proposal:
        """The fastest that fits."""
        return self.all[0]

    def __str__(self) -> str:
        header = ("transform", "elsewhere", "memory MB", "in flight", "host MB", "disk MB", "step ms", "bound by", "")
        rows: list[tuple[str, ...]] = [header]
        for each in self.all:
            sizes = (each.nbytes / 1e6, each.in_flight / 1e6, each.host / 1e6, each.disk / 1e6, each.step_s * 1e3)
            numbers = (f"{size:,.1f}" for size in sizes)
            rows.append((each.transform, each.away, *numbers, each.bound, "" if each.fits else "does not fit"))
        lines = table(rows, right=range(2, 7))
        tiers = {str(proposal.tier) for proposal in self.all if proposal.tier is not None}
        where = "".join(f", and {tier}" for tier in sorted(tiers))
        return "\n".join([f"budget {bytes_text(self.budget)} per rank{where}", *lines])
