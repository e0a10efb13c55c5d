"""`autoplan`: which placement and tier fit a budget at the least predicted time.

For each stage and place of the optimizer's states, with k bytes of state per element and N elements of it on this rank:

    memory      at rest as `plan` says, plus what is whole in flight, plus buffers of a disk, plus activations
    collectives bytes sent, by axis / speed of the axis                     not overlapped: on a CPU both want the cores
    optimizer   N (2 k + 12) / speed of memory                              param and states read and written, gradient read
    disk        (N k - buffers) / speed read + N k / speed written          reads and writes share the disk

    step = compute + collectives + the larger of optimizer and disk
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_fn.collectives import transport
from zero_fn.errors import MeshError, StateError, TierError
from zero_fn.guarded import Guarded
from zero_fn.held import Held
from zero_fn.mesh import Axis, mesh_axis
from zero_fn.plan.links import LinkSpeeds
from zero_fn.plan.predict import plan
from zero_fn.runtime.entry import units_of
from zero_fn.table import table
from zero_fn.tiers import Nvme, bytes_text, nbytes_of_text
from zero_fn.transforms.shard import replicate, shard_grads, shard_optimizer, shard_params

__all__ = ["Proposal", "Proposals", "autoplan"]

_STAGES: tuple[Callable[..., nn.Module], ...] = (replicate, shard_optimizer, shard_grads, shard_params)
_BUFFERS_NBYTES = 4 * (64 << 20)  # of `streamed`


@dataclass(frozen=True, slots=True)
class Proposal:
    """One placement, and what it is predicted to hold and take on this rank.

    Attributes:
        transform: Name of the sharding transform.
        tier: Where the optimizer's states rest; None is the device.
        held: Bytes at rest; the optimizer's are those in memory, buffers included.
        in_flight: Bytes that are whole for a while in a step: gathered units, gradients before they are reduced.
        disk: Bytes on the disk.
        fits: Whether memory, and the tier's limit, suffice.
        compute_s, collectives_s, optimizer_s, disk_s: Seconds of a step.
    """

    transform: str
    tier: Nvme | None
    held: Held
    in_flight: int
    disk: int
    fits: bool
    compute_s: float
    collectives_s: float
    optimizer_s: float
    disk_s: float

    @property
    def nbytes(self) -> int:
        """The most memory that it takes, without activations."""
        return self.held.total + self.in_flight

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.compute_s + self.collectives_s + max(self.optimizer_s, self.disk_s)

    @property
    def bound(self) -> str:
        """What takes most of it."""
        parts = {
            "compute": self.compute_s,
            "collectives": self.collectives_s,
            "optimizer": self.optimizer_s,
            "disk": self.disk_s,
        }
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True, slots=True)
class Proposals:
    """What `autoplan` returns: those that fit first, the fastest of them first. Printable as a table.

    Attributes:
        budget: Bytes of memory that were given.
        all: Every combination that was looked at.
    """

    budget: int
    all: tuple[Proposal, ...]

    @property
    def best(self) -> Proposal:
        """The fastest that fits."""
        return self.all[0]

    def __str__(self) -> str:
        header = ("transform", "states on", "memory MB", "in flight", "disk MB", "step ms", "bound by", "")
        rows = [header] + [
            (
                proposal.transform,
                "device" if proposal.tier is None else str(proposal.tier),
                f"{proposal.nbytes / 1e6:,.1f}",
                f"{proposal.in_flight / 1e6:,.1f}",
                f"{proposal.disk / 1e6:,.1f}",
                f"{proposal.step_s * 1e3:,.1f}",
                proposal.bound,
                "" if proposal.fits else "does not fit",
            )
            for proposal in self.all
        ]
        lines = table(rows, right=range(2, 6))
        return "\n".join([f"budget {bytes_text(self.budget)} per rank", *lines])


def autoplan(
    module: nn.Module,
    mesh: DeviceMesh,
    budget: int | str,
    *,
    links: LinkSpeeds,
    tier: Nvme | None = None,
    optimizer_nbytes_per_element: int = 8,
    activations: int | str | None = None,
    compute_s: float = 0.0,
    **options: Any,
) -> Proposals:
    """Predicts memory and step time of every stage, with the optimizer's states on the device and on a disk.

        links = zf.measure_links(mesh["dp"], path="/local_nvme")
        found = zf.autoplan(model, mesh["dp"], "6GiB", links=links, tier=zf.nvme("/local_nvme"))
        print(found)
        model = getattr(zf, found.best.transform)(model, mesh["dp"])

    Communicates a few numbers over `mesh`, which all its ranks must call this for: each prediction is the largest of all
    ranks, so all decide alike. On torch's fake process group nothing is communicated.

    Args:
        module: Any module, not transformed yet; on `meta` too. No memory is taken for it.
        mesh: One axis, `mesh["dp"]`.
        budget: Bytes of memory per rank, as a number or as text.
        links: Speeds, of `measure_links` over the same axis.
        tier: `zf.nvme(path)`, to consider for the optimizer's states (`zf.streamed`).
        optimizer_nbytes_per_element: Bytes of optimizer state per element: 8 for Adam in float32.
        activations: Bytes of them, as a number or as text; nobody but you knows.
        compute_s: Seconds of a forward and backward on one rank; the same in every stage, so it orders nothing.
        **options: Of the sharding transforms: `units=`, `persist_below=`.

    Returns:
        All combinations, those that fit first, by time; of equal ones the lower stage.

    Raises:
        TierError: None fits; or `links` has no speed of a disk, and `tier` is given.
        StateError: `module` is transformed already.
        MeshError: `mesh` is not one axis, or not the one that was measured.
    """
    axis = mesh_axis(mesh, verb="autoplan")
    if units_of(module):
        raise StateError(
            "autoplan takes a module that is not transformed.",
            got="a module that rests sharded or replicated over an axis",
            fix="call autoplan before the first transform; zf.plan(model) predicts what this one holds and sends",
        )
    if axis.size > 1 and axis.name not in links.sent:
        raise MeshError(
            f"autoplan does not know how fast axis {axis} is.",
            measured=", ".join(map(repr, links.sent)) or "no axis",
            fix="links = zf.measure_links(mesh), over the same axis",
        )
    if tier is not None and (links.disk_read is None or links.disk_write is None):
        raise TierError(
            "autoplan does not know how fast the disk is.",
            tier=tier,
            fix=f"links = zf.measure_links(mesh, path={tier.paths if len(tier.paths) > 1 else tier.paths[0]!r})",
        )
    nbytes = nbytes_of_text(budget, "budget")
    room = nbytes - (nbytes_of_text(activations, "activations") if activations is not None else 0)
    found = _fitted(
        _largest(
            axis,
            [
                proposal
                for transform in _STAGES
                for proposal in _proposals(
                    transform(_on_meta(module), mesh, **options),
                    transform.__name__,
                    links=links,
                    tier=tier,
                    state_nbytes=optimizer_nbytes_per_element,
                    compute_s=compute_s,
                )
            ],
        ),
        room,
    )
    if not found[0].fits:
        least = min(found, key=lambda proposal: proposal.nbytes)
        raise TierError(
            f"No placement fits {bytes_text(room)} of memory per rank.",
            least=f"{bytes_text(least.nbytes)}: {least.transform}, states on {least.tier or 'the device'}",
            ranks=axis.size,
            fix="more ranks, more memory, smaller units (units=...)"
            + ("" if tier is not None else ", or states on a disk: tier=zf.nvme('/local_nvme')"),
        )
    return Proposals(nbytes, tuple(found))


def _proposals(
    module: nn.Module,
    name: str,
    *,
    links: LinkSpeeds,
    tier: Nvme | None,
    state_nbytes: int,
    compute_s: float,
) -> Iterator[Proposal]:
    """With the states on the device and, if there is one, on the tier, as this rank sees it."""
    planned = plan(module, optimizer_nbytes_per_element=state_nbytes)
    parameters = planned.held.parameters + planned.padding.parameters
    gradients = planned.held.gradients + planned.padding.gradients
    states = planned.held.optimizer
    elements = states / state_nbytes if state_nbytes else 0
    on_device = Proposal(
        name,
        tier=None,
        held=Held(parameters, gradients, states),
        in_flight=planned.in_flight_nbytes,
        disk=0,
        fits=False,
        compute_s=compute_s,
        collectives_s=sum(sent / links.sent[along] for along, sent in planned.sent_by_axis.items() if sent),
        optimizer_s=elements * (2 * state_nbytes + 12) / links.memory,
        disk_s=0.0,
    )
    yield on_device
    if tier is not None:
        assert links.disk_read is not None and links.disk_write is not None
        buffers = min(states, _BUFFERS_NBYTES)
        yield replace(
            on_device,
            tier=tier,
            held=Held(parameters, gradients, buffers),
            disk=states,
            disk_s=(states - buffers) / links.disk_read + states / links.disk_write,
        )


def _numbers(held: Held) -> tuple[int, ...]:
    return held.parameters, held.gradients, held.optimizer, held.buffers


def _largest(axis: Axis, proposals: Sequence[Proposal]) -> list[Proposal]:
    """The same with the largest of each number over all ranks, so that all ranks decide alike."""
    # Ranks of torch's fake process group are pretended: they have nothing to say.
    if axis.size == 1 or axis.backend == "fake":
        return list(proposals)
    rows = [[*_numbers(p.held), p.in_flight, p.disk, p.collectives_s, p.optimizer_s, p.disk_s] for p in proposals]
    own = torch.tensor(rows, dtype=torch.float64).flatten().view(torch.uint8).to(axis.device_type)
    links = Guarded(transport(axis), axis)
    found = links.exchange(own, "predictions of autoplan").cpu().view(torch.float64).amax(0).view(len(rows), -1)
    agreed = []
    for proposal, (parameters, gradients, optimizer, buffers, in_flight, disk, *times) in zip(
        proposals, found.tolist(), strict=True
    ):
        held = Held(int(parameters), int(gradients), int(optimizer), int(buffers))
        collectives_s, optimizer_s, disk_s = times
        agreed.append(
            replace(
                proposal,
                held=held,
                in_flight=int(in_flight),
                disk=int(disk),
                collectives_s=collectives_s,
                optimizer_s=optimizer_s,
                disk_s=disk_s,
            )
        )
    return agreed


def _fitted(proposals: Sequence[Proposal], room: int) -> list[Proposal]:
    """Those that fit first, by time; of equal ones the earlier."""
    judged = []
    for proposal in proposals:
        limit = proposal.tier.limit_nbytes if proposal.tier is not None else None
        fits = proposal.nbytes <= room and (limit is None or proposal.disk <= limit)
        judged.append(replace(proposal, fits=fits))
    return sorted(judged, key=lambda proposal: (not proposal.fits, proposal.step_s))


def _on_meta(module: nn.Module) -> nn.Module:
    """A copy without memory: parameters and buffers of the same shapes on `meta`."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, memo)
