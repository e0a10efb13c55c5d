"""`autoplan`: the stage and the tiers that fit a budget of memory and
take the least predicted time.

Each stage is tried with nothing in a tier, then with the optimizer states there, then also the
gradients, then also the parameters. Of two tiers (the host beside an accelerator, and a disk) the
nearer never holds what is used less often. From the bytes that `plan` counts these are predicted:

    memory      bytes at rest and in flight, plus activations; with all buffers where the host is
                the device
    collectives bytes sent / speed of the axis + collectives * its latency
    fetches     bytes that forward and backward read and write on the disk / its speeds; reads and
                writes share the disk
    optimizer   N (2 k + 12) / speed of memory, k bytes of state for each of N elements: param and
                states read and written, gradient read
    disk        bytes that the optimizer reads and writes on the disk / its speeds
    link        the larger of bytes to the accelerator / that speed and bytes from it / that speed

The seconds of a step are those of the forward and backward, and those of the optimizer:

    on a CPU           max(compute + collectives, disk)  +  max(optimizer, disk)
    on an accelerator  max(compute, collectives, link, disk)  +  max(optimizer, link, disk)

On a CPU collectives need the cores, too.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from math import inf, prod
from operator import sub
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW, Optimizer

from zero_fn.errors import MeshError, StateError, TierError
from zero_fn.inspect.memory import MemoryUse
from zero_fn.inspect.planned_bytes import Plan, plan
from zero_fn.inspect.table import table
from zero_fn.planning.links import LinkSpeeds, of_all_ranks
from zero_fn.planning.models import on_meta
from zero_fn.runtime.registry import units_of
from zero_fn.runtime.unit import Unit
from zero_fn.streamed import Link
from zero_fn.streamed.pieces import Planner
from zero_fn.transforms.offload import offload
from zero_fn.transforms.shard import replicate, shard_grads, shard_optimizer, shard_params
from zero_fn.values.mesh import Axis, mesh_axis
from zero_fn.values.tiers import (
    IN_MEMORY,
    Cpu,
    Nvme,
    Tier,
    Tiers,
    bytes_text,
    is_accelerator,
    nbytes_of_text,
)
from zero_fn.values.units import Units

__all__ = [
    "STAGES",
    "Mesh",
    "Proposal",
    "Proposals",
    "autoplan",
    "predicted",
    "proposal_of",
    "proposals_table",
    "without_collecting",
]

M = TypeVar("M", bound=nn.Module)

Mesh = tuple[tuple[str, int], ...]
"""Names and sizes of the axes of a mesh."""

STAGES: dict[str, Callable[..., Any]] = {
    "replicate": replicate,
    "shard_optimizer": shard_optimizer,
    "shard_grads": shard_grads,
    "shard_params": shard_params,
}


def _staged(transform: str, module: M, mesh: DeviceMesh, options: Mapping[str, Any]) -> M:
    """A module in one of the stages.

    Options that only other stages have (`persist_below=`, for replicas) are left out.
    """
    own = inspect.signature(STAGES[transform]).parameters
    known = inspect.signature(shard_params).parameters
    taken = {name: value for name, value in options.items() if name in own or name not in known}
    placed: M = STAGES[transform](module, mesh, **taken)
    return placed


@dataclass(frozen=True, slots=True)
class Proposal:
    """A placement with its tiers, and the bytes and seconds that are predicted for it on this rank.

    Attributes:
        transform: What is placed along the axes: the name of a sharding transform for one axis.
        tiers: What is offloaded, and to which tier.
        device_type: Type of the device that computes.
        memory: Bytes at rest in memory and in tiers, with their padding and all buffers of tiers.
        in_flight: Most bytes of gathered units and whole gradients at one moment of a step.
        sent: Bytes that a rank sends in a step.
        excess: The largest part that it takes of the memory, or of the limit of a tier.
        compute_s, collectives_s: Seconds of computation, and of collectives,
            in a forward and backward.
        latency_s: Seconds of collectives beside those of their bytes.
        fetch_s, fetch_link_s: Seconds for which the disk, and the link to an accelerator, move
            parameters and gradients in these.
        optimizer_s, disk_s, link_s: Seconds of an optimizer's step in memory,
            on the disk, and on the link.
        mesh: Names and sizes of the axes, the outermost first.
        activations: Bytes of activations that the plan command found; 0 of `autoplan`.
        recompute: Whether those of repeated blocks are checkpointed.
        tokens: Tokens of all ranks in a step; 0 if not known.
    """

    transform: str
    tiers: Tiers
    device_type: str
    memory: MemoryUse
    in_flight: int
    sent: int
    excess: float
    compute_s: float
    collectives_s: float
    latency_s: float
    fetch_s: float
    fetch_link_s: float
    optimizer_s: float
    disk_s: float
    link_s: float
    mesh: Mesh
    activations: int = 0
    recompute: bool = False
    tokens: int = 0

    @property
    def fits(self) -> bool:
        """Whether it fits the budget and the limits of the tiers."""
        return self.excess <= 1

    @property
    def order(self) -> tuple[bool, float]:
        """What comes first: what fits, the fastest first; then what exceeds least."""
        return not self.fits, self.step_s if self.fits else self.excess

    @property
    def nbytes(self) -> int:
        """Most bytes of device memory in a step, without activations.

        If the device is the host, with buffers.
        """
        return self.memory.by_memory(self.device_type)[0] + self.in_flight

    @property
    def host(self) -> int:
        """Beside an accelerator, bytes of host memory."""
        return self.memory.by_memory(self.device_type)[1]

    @property
    def disk(self) -> int:
        """Bytes on a disk."""
        disks = {tier for tier in self._kinds.values() if isinstance(tier, Nvme)}
        return sum(self.memory.tiers.get(str(disk), 0) for disk in disks)

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
        parts = {
            "compute": self.compute_s,
            "collectives": self.collectives_s,
            "optimizer": self.optimizer_s,
            "disk": max(self.fetch_s, self.disk_s),
            "link": max(self.fetch_link_s, self.link_s),
        }
        return max(parts, key=lambda name: parts[name])

    @property
    def ranks(self) -> int:
        """Those of the mesh."""
        return prod(size for _, size in self.mesh)

    def numbers(self, usd_per_hour: float | None = None) -> dict[str, Any]:
        """What it needs, by name, as JSON takes it; with the price of a device, also what
        1e9 tokens cost."""
        found = {
            "placement": self.transform,
            "mesh": dict(self.mesh),
            "elsewhere": self.away,
            "recompute": self.recompute,
            "fits": self.fits,
            "at_rest_bytes": self.nbytes - self.in_flight,
            "in_flight_bytes": self.in_flight,
            "activations_bytes": self.activations,
            "device_bytes": self.nbytes + self.activations,
            "host_bytes": self.host,
            "disk_bytes": self.disk,
            "sent_bytes": self.sent,
            "latency_seconds": self.latency_s,
            "step_seconds": self.step_s,
            "bound_by": self.bound,
        }
        if self.tokens:
            found["tokens_per_second"] = speed = self.tokens / self.step_s
            if usd_per_hour is not None:
                found["usd_per_1e9_tokens"] = 1e9 / speed / 3600 * usd_per_hour * self.ranks
        return found

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
            f"{', '.join(kinds)} on {'disk' if isinstance(tier, Nvme) else 'host'}"
            for tier, kinds in found.items()
        )
        return ", ".join(words) or "nothing"

    @property
    def _kinds(self) -> dict[str, Tier]:
        rows = {
            "parameters": self.tiers.params,
            "gradients": self.tiers.grads,
            "states": self.tiers.optim,
        }
        return {kind: tier for kind, tier in rows.items() if tier is not None}

    def place(self, module: M, mesh: DeviceMesh, **options: Any) -> M:
        """Applies a proposal of `autoplan` to a module: the sharding transform,
        and `offload` if something is offloaded.

        Args:
            module: The module that was planned, or one like it.
            mesh: The axis that it was planned for.
            **options: Options of the sharding transform: those that
                `autoplan` was given, and `donate=`.

        Returns:
            A new module; see the transforms. If `tier` is not None, give the optimizer of its
            parameters to `zf.streamed`.
        """
        placed, tiers = _staged(self.transform, module, mesh, options), self.tiers
        if tiers.optim is None:
            return placed
        return offload(
            placed, params=tiers.params, grads=tiers.grads, optim=tiers.optim, donate=True
        )


@dataclass(frozen=True, slots=True)
class Proposals:
    """All combinations that `autoplan` tried: first those that fit, the fastest first.

    Printable as a table.

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
        tiers = {str(proposal.tier) for proposal in self.all if proposal.tier is not None}
        where = "".join(f", and {tier}" for tier in sorted(tiers))
        return "\n".join(
            [f"budget {bytes_text(self.budget)} per rank{where}", *proposals_table(self.all)]
        )


def proposals_table(rows: Sequence[Proposal], usd_per_hour: float | None = None) -> list[str]:
    """A line for each proposal. Columns in which all have nothing are left out."""
    numbers = [each.numbers(usd_per_hour) for each in rows]
    is_large = any(row["device_bytes"] >= 10**9 for row in numbers)
    units = {"bytes": ("GB", 1e9) if is_large else ("MB", 1e6), "seconds": ("ms", 1e-3)}
    columns: dict[str, list[str]] = {}
    right = []
    for name in numbers[0]:
        values = [row[name] for row in numbers]
        if name == "fits" or not any(values):
            continue
        *words, last = name.split("_")
        unit, size = units.get(last, (last, 1))
        if type(values[0]) in (int, float):
            right.append(len(columns))
        columns[" ".join([*words, unit])] = [_cell(value, size) for value in values]
    columns[""] = ["" if each.fits else "does not fit" for each in rows]
    return table([list(columns), *zip(*columns.values(), strict=True)], right=right)


def _cell(value: object, size: float) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, int | float):
        return f"{value / size:,.1f}"
    if isinstance(value, Mapping):
        return " x ".join(f"{name} {length}" for name, length in value.items())
    return str(value)


def _adamw(parameters: Iterable[Tensor]) -> Optimizer:
    return AdamW(parameters, fused=True)


def autoplan(
    module: nn.Module,
    mesh: DeviceMesh,
    budget: int | str,
    *,
    links: LinkSpeeds,
    tier: Tier | Sequence[Tier] | None = None,
    optimizer: Callable[[Iterable[Tensor]], Optimizer] = _adamw,
    activations: int | str | None = None,
    compute_s: float = 0.0,
    units: Units = None,
    persist_below: int = 0,
) -> Proposals:
    """Predicts memory and step time of every stage, with more and more of the training
    state on a disk or on the host.

        links = zf.distributed.measure_links(mesh["dp"], path="/local_nvme")
        disk = zf.nvme("/local_nvme")
        found = zf.planning.autoplan(model, mesh["dp"], "6GiB", links=links, tier=disk)
        print(found)
        model = found.best.place(model, mesh["dp"])
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        optimizer = optimizer if found.best.tier is None else zf.streamed(optimizer)

    Communicates a few numbers over `mesh`, which all its ranks must call this for: each prediction
    is the largest of all ranks, so all decide alike. On torch's fake process group nothing is
    communicated.

    Args:
        module: Any module that is neither sharded nor offloaded yet, `zf.precision(model)` for one;
            on `meta` too. No memory is taken for it.
        mesh: One axis, `mesh["dp"]`.
        budget: Bytes of memory of the device per rank, as a number or as text.
        links: Speeds, of `measure_links` over the same axis.
        tier: Where states of the optimizer, gradients and parameters may rest: `zf.nvme(path)`;
            beside an accelerator also `zf.cpu()`, or both:
            `(zf.cpu(limit="100GiB"), zf.nvme(path))`. A rank has at most `limit=` bytes there in
            all, those of host buffers included.
        optimizer: A function that makes the optimizer from parameters,
            whose states are counted; left out, AdamW.
        activations: Bytes of activations, as a number or as text: zero_fn cannot predict them.
        compute_s: Seconds of a forward and backward on one rank; the same in every stage.
        units, persist_below: As the sharding transforms take them.

    Returns:
        All combinations, first those that fit, the fastest first. Of equally fast ones the lower
        stage comes first, then the one with less in tiers.

    Raises:
        TierError: No combination fits; or `links` lacks the speed of a disk or an
            accelerator that is needed; or `tier` is the memory that the model computes in,
            or more than one of a kind.
        StateError: `module` is sharded or offloaded already.
        MeshError: `mesh` is not one axis, or not the one that was measured.
        PlacementError: `tier` is given, and the optimizer does not treat every element alone.
    """
    axis = mesh_axis(mesh, verb="autoplan")
    sharding = {"units": units, "persist_below": persist_below}
    if any(
        unit.run.transport.axes or slot.home.tiers != IN_MEMORY
        for unit in units_of(module)
        for slot in unit.slots
    ):
        raise StateError(
            "autoplan takes a module that is neither sharded nor offloaded.",
            got="a module that rests sharded or replicated over an axis, or in a tier",
            fix="call autoplan before those transforms; "
            "zf.plan(model) predicts what this one holds and sends",
        )
    if axis.size > 1 and axis.name not in links.sent:
        raise MeshError(
            f"autoplan does not know how fast axis {axis} is.",
            measured=", ".join(map(repr, links.sent)) or "no axis",
            fix=f'links = zf.distributed.measure_links(mesh["{axis.name}"]), '
            "over the axis that is planned",
        )
    tiers = _ordered(tier, axis, links)
    nbytes = nbytes_of_text(budget, "budget")
    room = nbytes - (nbytes_of_text(activations, "activations") if activations is not None else 0)
    bare = on_meta(module)
    with without_collecting():
        ways = [
            (transform, chosen, {**numbers, "compute_s": compute_s})
            for transform in STAGES
            for chosen, numbers in predicted(
                _staged(transform, bare, mesh, sharding), tiers, optimizer, links
            )
        ]
    # Ranks of torch's fake process group do not exist, so there are no predictions of theirs.
    if axis.size > 1 and axis.backend != "fake":
        own = [number for *_, numbers in ways for number in numbers.values()]
        largest = iter(of_all_ranks(axis, own, "predictions of autoplan").amax(0).tolist())
        for *_, numbers in ways:
            numbers.update({name: next(largest) for name in numbers})
    mesh_of = ((axis.name, axis.size),)
    proposals = [proposal_of(*way, axis.device_type, room, mesh_of) for way in ways]
    # Of equal proposals the earlier stays first.
    proposals.sort(key=lambda proposal: proposal.order)
    nearest = proposals[0]
    if not nearest.fits:
        takes = {"memory": nearest.nbytes, "host": nearest.host, "disk": nearest.disk}
        raise TierError(
            f"No placement fits {bytes_text(room)} of memory per rank.",
            nearest=f"{nearest.transform}, {nearest.away} elsewhere"
            if tiers
            else nearest.transform,
            takes=", ".join(
                f"{where} {bytes_text(taken)}" for where, taken in takes.items() if taken
            ),
            **({"tiers": ", ".join(map(str, tiers))} if tiers else {}),
            ranks=axis.size,
            fix="more ranks, more memory, smaller units (units=...)"
            + ("" if tiers else ", or a disk: tier=zf.nvme('/local_nvme')"),
        )
    return Proposals(nbytes, tuple(proposals))


@contextmanager
def without_collecting() -> Iterator[None]:
    """Python's garbage collector would look at the layouts of a large model again and again:
    a quarter of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _ordered(tier: Tier | Sequence[Tier] | None, axis: Axis, links: LinkSpeeds) -> list[Tier]:
    """The tiers that were given, the nearer one first; an error if one cannot be planned for."""
    given = [] if tier is None else [tier] if isinstance(tier, Cpu | Nvme) else list(tier)
    hosts = [each for each in given if isinstance(each, Cpu)]
    disks = [each for each in given if isinstance(each, Nvme)]
    if max(len(hosts), len(disks)) > 1 or len(hosts) + len(disks) < len(given):
        raise TierError(
            "autoplan looks at one tier of each kind.",
            tier=", ".join(map(str, given)),
            fix="tier=zf.nvme('/disk0', '/disk1') for several disks, tier=(zf.cpu(), "
            "zf.nvme('/local_nvme')) for both kinds",
        )
    if hosts and not is_accelerator(axis.device_type):
        raise TierError(
            "The model computes in the memory of the host, so the host is no tier beside it.",
            axis=axis,
            device=axis.device_type,
            fix="leave zf.cpu() out; budget= says how many bytes of host memory a rank may use",
        )
    needed = ["disk_read", "disk_write"] if disks else []
    needed += (
        ["device_memory", "to_device", "from_device"] if is_accelerator(axis.device_type) else []
    )
    missing = [name for name in needed if getattr(links, name) is None]
    if missing:
        paths = disks[0].paths if disks else ()
        path = f", path={paths if len(paths) > 1 else paths[0]!r}" if paths else ""
        raise TierError(
            "autoplan does not know how fast bytes move from and to a tier or an accelerator.",
            axis=axis,
            **({"tier": disks[0]} if disks else {}),
            missing=", ".join(missing),
            fix=f'links = zf.distributed.measure_links(mesh["{axis.name}"]{path}), '
            "on the machine that will train",
        )
    return [*hosts, *disks]


def _choices(tiers: Sequence[Tier]) -> Iterator[Tiers]:
    """All choices of tiers in which parameters are no farther than gradients,
    and these no farther than states.

    The first has nothing in a tier.
    """
    places: tuple[Tier | None, ...] = (None, *tiers)
    for optim, grads, params in product(range(len(places)), repeat=3):
        if params <= grads <= optim:
            yield Tiers(places[params], places[grads], places[optim])


def predicted(
    placed: nn.Module,
    tiers: Sequence[Tier],
    optimizer: Callable[[Iterable[Tensor]], Optimizer | Planner],
    links: LinkSpeeds,
    *,
    backwards: int = 1,
) -> Iterator[tuple[Tiers, dict[str, float]]]:
    """For each choice of tiers, the bytes and seconds of a placed module on this rank, by name.

    Seconds end with "_s"; bytes in a tier have its name.
    """
    units, stock = units_of(placed), optimizer(placed.parameters())
    states = 0
    for chosen in _choices(tiers):
        _rest_in(chosen, units)
        planned = plan(placed, stock, backwards=backwards)
        without = plan(placed, backwards=backwards)
        held, padding = planned.memory, planned.padding
        states = states or held.optimizer
        slots = (slot for unit in units for slot in unit.slots if slot.parameter.requires_grad)
        touched = 2 * states + 12 * sum(slot.path.local_numel for slot in slots)
        is_stepped_there = is_accelerator(planned.device_type) and chosen.optim is None
        memory = (links.device_memory or 1.0) if is_stepped_there else links.memory
        latency_s = sum(
            count * links.latency.get(along, 0.0) for along, count in planned.collectives.items()
        )
        sent_s = sum(
            nbytes / links.sent[along] for along, nbytes in planned.sent_by_axis.items() if nbytes
        )
        fetch_s, both_s = (_disk_s(found, tiers, links) for found in (without, planned))
        yield (
            chosen,
            {
                "parameters": held.parameters + padding.parameters,
                "gradients": held.gradients + padding.gradients,
                "optimizer": held.optimizer,
                "buffers": held.buffers,
                **{str(tier): held.tiers.get(str(tier), 0) for tier in tiers},
                "in_flight": planned.in_flight_nbytes,
                "sent": planned.sent_nbytes,
                "collectives_s": latency_s + sent_s,
                "latency_s": latency_s,
                "fetch_s": fetch_s,
                "fetch_link_s": _link_s(without.link, links),
                "optimizer_s": touched / memory,
                "disk_s": both_s - fetch_s,
                "link_s": _link_s(Link(*map(sub, planned.link, without.link)), links),
            },
        )


def _rest_in(tiers: Tiers, units: Sequence[Unit]) -> None:
    """Lets what units on `meta` have rest in these tiers, as `offload` would,
    in place: only layouts are made anew."""

    for unit in units:
        for group in unit.memory.groups:
            group.vacate()
            group.kind = replace(group.kind, home=replace(group.kind.home, tiers=tiers))
            for slot in group.slots:
                slot.home, slot.kind = group.kind.home, group.kind
        unit.memory.lay_out()
        unit.gradients.forget_layout()


def _disk_s(planned: Plan, tiers: Sequence[Tier], links: LinkSpeeds) -> float:
    """Seconds that the disk is busy in a step; 0 without a disk."""
    moved = [planned.moved.get(str(tier), (0, 0)) for tier in tiers if isinstance(tier, Nvme)]
    return sum(
        read / (links.disk_read or 1.0) + written / (links.disk_write or 1.0)
        for read, written in moved
    )


def _link_s(link: Link, links: LinkSpeeds) -> float:
    """Seconds that the link needs for so many bytes, both ways at once."""
    return max(
        link.to_device / (links.to_device or 1.0), link.from_device / (links.from_device or 1.0)
    )


def proposal_of(
    transform: str,
    chosen: Tiers,
    numbers: Mapping[str, float],
    device_type: str,
    room: int,
    mesh: Mesh,
) -> Proposal:
    """What was predicted, by name, where `room` bytes of device memory may be taken."""
    tiers = {str(tier): tier for tier in (chosen.params, chosen.grads, chosen.optim) if tier}
    whole = {name: int(number) for name, number in numbers.items() if not name.endswith("_s")}
    seconds: dict[str, Any] = {
        name: number for name, number in numbers.items() if name.endswith("_s")
    }
    held = MemoryUse(
        whole["parameters"],
        whole["gradients"],
        whole["optimizer"],
        whole["buffers"],
        {name: whole[name] for name in tiers if whole[name]},
    )
    memory, host = held.by_memory(device_type)
    parts = [(memory + whole["in_flight"]) / room if room > 0 else inf]
    for name, tier in tiers.items():
        if tier.limit_nbytes is not None:
            taken = host if isinstance(tier, Cpu) else whole[name]
            parts.append(taken / tier.limit_nbytes)
    return Proposal(
        transform,
        chosen,
        device_type,
        held,
        whole["in_flight"],
        whole["sent"],
        max(parts),
        mesh=mesh,
        **seconds,
    )
