"""`autoplan`: which placement and tiers fit a budget at the least predicted time.

For each stage, with nothing in a tier, then the states of the optimizer, then gradients, then parameters, too:

    memory      at rest and in flight as `plan` says, with all buffers, plus activations
    collectives bytes sent, by axis / speed of the axis
    fetches     bytes that forward and backward read and write in the tier / its speeds    reads and writes share the disk
    optimizer   N (2 k + 12) / speed of memory, k bytes of state for each of N elements    param and states read and written,
    disk        bytes that a step reads and writes in the tier / its speeds                gradient read
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW, Optimizer

from zero_fn.collectives import transport
from zero_fn.errors import MeshError, StateError, TierError
from zero_fn.guarded import Guarded
from zero_fn.held import Held
from zero_fn.home import Home
from zero_fn.mesh import Axis, mesh_axis
from zero_fn.plan.links import LinkSpeeds
from zero_fn.plan.moved import Moved
from zero_fn.plan.predict import plan
from zero_fn.plan.proposals import STAGES, Proposal, Proposals, staged
from zero_fn.runtime.entry import units_of
from zero_fn.tiers import IN_MEMORY, Nvme, Tiers, bytes_text, nbytes_of_text
from zero_fn.transforms.offload import offloaded

__all__ = ["autoplan"]

_NOTHING = Moved(0, 0)


def _adamw(parameters: Iterable[Tensor]) -> Optimizer:
    return AdamW(parameters, fused=True)


def autoplan(
    module: nn.Module,
    mesh: DeviceMesh,
    budget: int | str,
    *,
    links: LinkSpeeds,
    tier: Nvme | None = None,
    optimizer: Callable[[Iterable[Tensor]], Optimizer] = _adamw,
    activations: int | str | None = None,
    compute_s: float = 0.0,
    **options: Any,
) -> Proposals:
    """Predicts memory and step time of every stage, with more and more of the training state on a disk.

        links = zf.measure_links(mesh["dp"], path="/local_nvme")
        found = zf.autoplan(model, mesh["dp"], "6GiB", links=links, tier=zf.nvme("/local_nvme"))
        print(found)
        model = found.best.place(model, mesh["dp"])
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        optimizer = optimizer if found.best.tier is None else zf.streamed(optimizer)

    Communicates a few numbers over `mesh`, which all its ranks must call this for: each prediction is the largest of all
    ranks, so all decide alike. On torch's fake process group nothing is communicated.

    Args:
        module: Any module, not transformed yet; on `meta` too. No memory is taken for it.
        mesh: One axis, `mesh["dp"]`.
        budget: Bytes of memory per rank, as a number or as text.
        links: Speeds, of `measure_links` over the same axis.
        tier: `zf.nvme(path)`, to consider for states of the optimizer, gradients and parameters.
        optimizer: Makes the optimizer over parameters, whose states are counted; left out, AdamW.
        activations: Bytes of them, as a number or as text; nobody but you knows.
        compute_s: Seconds of a forward and backward on one rank; the same in every stage.
        **options: Of the sharding transforms: `units=`, `persist_below=`.

    Returns:
        All combinations, those that fit first, by time; of equal ones the lower stage, and the one with less in the tier.

    Raises:
        TierError: None fits; or `links` has no speed of a disk, and `tier` is given.
        StateError: `module` is transformed already.
        MeshError: `mesh` is not one axis, or not the one that was measured.
        PlacementError: `tier` is given, and the optimizer does not treat every element alone.
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
    proposals = [
        proposal
        for transform in STAGES
        for proposal in _proposals(module, mesh, transform, tier, optimizer, links, compute_s, options)
    ]
    found = _fitted(_largest(axis, proposals), room)
    if not found[0].fits:
        least = min(found, key=lambda proposal: proposal.nbytes)
        raise TierError(
            f"No placement fits {bytes_text(room)} of memory per rank.",
            least=f"{bytes_text(least.nbytes)}: {least.transform}, {least.away} in {least.tier or 'another tier'}",
            ranks=axis.size,
            fix="more ranks, more memory, smaller units (units=...)"
            + ("" if tier is not None else ", or a disk: tier=zf.nvme('/local_nvme')"),
        )
    return Proposals(nbytes, tuple(found))


def _proposals(
    module: nn.Module,
    mesh: DeviceMesh,
    transform: str,
    tier: Nvme | None,
    optimizer: Callable[[Iterable[Tensor]], Optimizer],
    links: LinkSpeeds,
    compute_s: float,
    options: dict[str, Any],
) -> Iterator[Proposal]:
    """One stage, as this rank sees it: with nothing in the tier, then what is used least, then more."""
    away = (Tiers(optim=tier), Tiers(grads=tier, optim=tier), Tiers(tier, tier, tier)) if tier is not None else ()
    states = 0
    for tiers in (IN_MEMORY, *away):
        proposal = Proposal(transform, tiers, Held(0, 0, 0), 0, 0, False, compute_s, 0.0, 0.0, 0.0, 0.0)
        placed = staged(transform, _on_meta(module), mesh, options)
        if tiers != IN_MEMORY:
            placed = offloaded(placed, Home(tiers=tiers), reserves=False)
        planned, without = plan(placed, optimizer(placed.parameters())), plan(placed)
        held, padding = planned.held, planned.padding
        states = states or held.optimizer
        slots = (slot for unit in units_of(placed) for slot in unit.slots if slot.parameter.requires_grad)
        fetched, moved = (found.moved.get(str(tier), _NOTHING) for found in (without, planned))
        yield replace(
            proposal,
            held=Held(
                held.parameters + padding.parameters, held.gradients + padding.gradients, held.optimizer, held.buffers
            ),
            in_flight=planned.in_flight_nbytes,
            disk=held.tiers.get(str(tier), 0),
            collectives_s=sum(sent / links.sent[along] for along, sent in planned.sent_by_axis.items() if sent),
            fetch_s=_disk_s(fetched, links),
            optimizer_s=(2 * states + 12 * sum(slot.local_numel for slot in slots)) / links.memory,
            disk_s=_disk_s(Moved(moved.read - fetched.read, moved.written - fetched.written), links),
        )


def _disk_s(moved: Moved, links: LinkSpeeds) -> float:
    """Seconds of a disk for so many bytes; 0 where there is none, and nothing moves."""
    return moved.read / (links.disk_read or 1.0) + moved.written / (links.disk_write or 1.0)


def _numbers(held: Held) -> tuple[int, ...]:
    return held.parameters, held.gradients, held.optimizer, held.buffers


def _times(proposal: Proposal) -> tuple[float, ...]:
    return proposal.collectives_s, proposal.fetch_s, proposal.optimizer_s, proposal.disk_s


def _largest(axis: Axis, proposals: Sequence[Proposal]) -> list[Proposal]:
    """The same with the largest of each number over all ranks, so that all ranks decide alike."""
    # Ranks of torch's fake process group are pretended: they have nothing to say.
    if axis.size == 1 or axis.backend == "fake":
        return list(proposals)
    rows = [[*_numbers(p.held), p.in_flight, p.disk, *_times(p)] for p in proposals]
    own = torch.tensor(rows, dtype=torch.float64).flatten().view(torch.uint8).to(axis.device_type)
    links = Guarded(transport(axis), axis)
    found = links.exchange(own, "predictions of autoplan").cpu().view(torch.float64).amax(0).view(len(rows), -1)
    agreed = []
    for proposal, (parameters, gradients, optimizer, buffers, in_flight, disk, *times) in zip(
        proposals, found.tolist(), strict=True
    ):
        held = Held(int(parameters), int(gradients), int(optimizer), int(buffers))
        collectives_s, fetch_s, optimizer_s, disk_s = times
        agreed.append(
            replace(
                proposal,
                held=held,
                in_flight=int(in_flight),
                disk=int(disk),
                collectives_s=collectives_s,
                fetch_s=fetch_s,
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
