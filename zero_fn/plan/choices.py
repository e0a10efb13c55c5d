"""Which tiers `autoplan` looks at, and what may rest in which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from zero_fn.errors import TierError
from zero_fn.mesh import Axis
from zero_fn.plan.links import LinkSpeeds
from zero_fn.tiers import Cpu, Nvme, Tier, Tiers, is_accelerator

__all__ = ["choices", "ordered"]


def ordered(tier: Tier | Sequence[Tier] | None, axis: Axis, links: LinkSpeeds) -> list[Tier]:
    """The tiers to look at, the nearer one first.

    Raises:
        TierError: See `autoplan`.
    """
    given = [] if tier is None else [tier] if isinstance(tier, Cpu | Nvme) else list(tier)
    hosts = [each for each in given if isinstance(each, Cpu)]
    disks = [each for each in given if isinstance(each, Nvme)]
    if max(len(hosts), len(disks)) > 1 or len(hosts) + len(disks) < len(given):
        raise TierError(
            "autoplan looks at one tier of each kind.",
            tier=", ".join(map(str, given)),
            fix="tier=zf.nvme('/disk0', '/disk1') for several disks, tier=(zf.cpu(), zf.nvme('/local_nvme')) for both kinds",
        )
    if hosts and not is_accelerator(axis.device_type):
        raise TierError(
            "Memory of the host is what the model computes in.",
            axis=axis,
            device=axis.device_type,
            fix="leave zf.cpu() out; budget= says how much of it there is",
        )
    if disks and (links.disk_read is None or links.disk_write is None):
        paths = disks[0].paths
        raise TierError(
            "autoplan does not know how fast the disk is.",
            tier=disks[0],
            fix=f"links = zf.measure_links(mesh, path={paths if len(paths) > 1 else paths[0]!r})",
        )
    of_device = {name: getattr(links, name) for name in ("device_memory", "to_device", "from_device")}
    if is_accelerator(axis.device_type) and None in of_device.values():
        raise TierError(
            "autoplan does not know how fast the accelerator is.",
            device=axis.device_type,
            missing=", ".join(name for name, speed in of_device.items() if speed is None),
            fix="links = zf.measure_links(mesh) on a machine that has one",
        )
    return [*hosts, *disks]


def choices(tiers: Sequence[Tier]) -> Iterator[Tiers]:
    """What may rest where: what is used less is never nearer. Nothing elsewhere comes first."""
    places: tuple[Tier | None, ...] = (None, *tiers)
    for optim, grads, params in product(range(len(places)), repeat=3):
        if params <= grads <= optim:
            yield Tiers(places[params], places[grads], places[optim])
