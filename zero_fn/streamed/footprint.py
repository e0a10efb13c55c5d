"""What the states of an optimizer will take, and what a streamed step will move: arithmetic on its chunks.

A step reads and writes every chunk of a disk, but for those that the last step left in the buffers of their store, which it
begins with. It goes back and forth, so that is the first chunks in one step and the last ones in the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_fn.resting import local_of
from zero_fn.runtime.registry import slot_of
from zero_fn.storage import whole_pages
from zero_fn.streamed.chunk import Chunk
from zero_fn.streamed.optimizer import Streamed
from zero_fn.streamed.parcels import parcels_away
from zero_fn.streamed.planned import BUFFER_NBYTES, Planner
from zero_fn.streamed.store import BUFFERS, ring_form
from zero_fn.streamed.visits import sizes_of_visits
from zero_fn.tiers import IN_MEMORY, Cpu, Nvme, Tier, is_accelerator, is_away

__all__ = ["NO_LINK", "Footprint", "Link", "footprint"]

Rooms = Mapping[tuple[Tier | None, torch.device], Sequence[Chunk]]


class Link(NamedTuple):
    """Bytes per step between the host and an accelerator.

    Attributes:
        to_device, from_device: Each way.
    """

    to_device: int
    from_device: int


NO_LINK = Link(0, 0)


@dataclass(slots=True)
class Footprint:
    """Bytes of an optimizer on this rank.

    Attributes:
        states_nbytes: States in memory of the device, or in its own as a tier.
        buffers_nbytes: Host memory that states, parameters and gradients pass through.
        tiers: States in other tiers, in whole pages.
        read, written: Bytes that a step moves from and to each tier: states, parameters and gradients. Of two steps in a
            row, the mean.
        link: Bytes of parameters and gradients that a step moves between the host and an accelerator.
    """

    states_nbytes: int = 0
    buffers_nbytes: int = 0
    tiers: Counter[Tier] = field(default_factory=Counter)
    read: Counter[Tier] = field(default_factory=Counter)
    written: Counter[Tier] = field(default_factory=Counter)
    link: Link = NO_LINK


def footprint(optimizer: Optimizer) -> Footprint:
    """What a stock or streamed optimizer takes and moves. Communicates nothing, takes no memory.

    Args:
        optimizer: A streamed one; or a stock one, which is taken to be streamed without a tier, `zf.streamed(optimizer)`,
            if any of its parameters has a state in another tier.

    Raises:
        TierError: Parameters or gradients rest in another tier, and nobody said where the states are to be.
        PlacementError: The optimizer does not treat every element alone, and has to be streamed.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if isinstance(optimizer, Streamed):
        return _streamed(parameters, optimizer.rooms())
    slots = map(slot_of, parameters)
    planner = Planner(optimizer, None, 1.0, BUFFER_NBYTES)
    if any(slot is not None and slot.kind.must_be_streamed for slot in slots):
        return _streamed(parameters, planner.planned(parameters, 0).rooms)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    schemas = planner.schemas(trained)
    sizes = (local_of(p).numel() * sum(dtype.itemsize for _, dtype in s) for p, s in zip(trained, schemas, strict=True))
    return Footprint(states_nbytes=sum(sizes))


def _streamed(parameters: Sequence[Tensor], rooms: Rooms) -> Footprint:
    found = Footprint()
    on_disk: dict[Tier, list[Chunk]] = {}
    visiting: list[int] = []
    for (tier, device), chunks in rooms.items():
        nbytes = sum(chunk.nbytes for chunk in chunks)
        if isinstance(tier, Nvme):
            on_disk.setdefault(tier, []).extend(chunks)
        elif tier is not None and is_away(tier, device.type):
            found.tiers[tier] += _slab_nbytes(nbytes)
        else:
            found.states_nbytes += nbytes if tier is None else _slab_nbytes(nbytes)
        if is_accelerator(device.type):
            _add_visits(found, tier, parameters, chunks)
        visiting += sizes_of_visits(chunks, parameters) if tier is not None else []
    for tier, chunks in on_disk.items():
        sizes = [whole_pages(chunk.nbytes) for chunk in chunks]
        count, size = ring_form(len(sizes), max(sizes))
        found.buffers_nbytes += count * size
        found.tiers[tier] += sum(sizes)
        found.written[tier] += sum(sizes)
        kept = sum(sizes[:BUFFERS]) + sum(sizes[-BUFFERS:])
        found.read[tier] += sum(sizes) - min(kept // 2, sum(sizes))
    _add_parcels(found, parameters)
    count, size = ring_form(len(visiting), max(visiting, default=0))
    found.buffers_nbytes += count * size
    return found


def _slab_nbytes(nbytes: int) -> int:
    return max(whole_pages(nbytes), whole_pages(1))


def _add_visits(found: Footprint, tier: Tier | None, parameters: Sequence[Tensor], chunks: Sequence[Chunk]) -> None:
    """A step is where the states are: on the host if they are in a tier. Gradients that are on the other side come there,
    and parameters come and go back."""
    on_host, (there, back) = tier is not None, found.link
    for chunk in chunks:
        for cut in chunk.cuts:
            parameter = parameters[cut.piece.parameter]
            if not parameter.requires_grad:
                continue
            slot, nbytes = slot_of(parameter), cut.piece.numel * parameter.dtype.itemsize
            value = nbytes * ((slot is not None and slot.kind.is_away) != on_host)
            gradient = nbytes * ((slot is not None and slot.kind.is_gradient_away) != on_host)
            there, back = there + value + gradient * (not on_host), back + value + gradient * on_host
            # Of the host as a tier: that of the states, to which the others come, or the one from which they come.
            tiers = slot.home.tiers if slot is not None else IN_MEMORY
            of_value, of_gradient = (tier, tier) if on_host else (tiers.params, tiers.grads)
            if isinstance(of_value, Cpu):
                found.read[of_value] += value
                found.written[of_value] += value
            if isinstance(of_gradient, Cpu):
                (found.written if on_host else found.read)[of_gradient] += gradient
    found.link = Link(there, back)


def _add_parcels(found: Footprint, parameters: Sequence[Tensor]) -> None:
    """The way of parameters and gradients in other tiers through the step."""
    for kind, by_record in parcels_away(parameters).items():
        largest = count = 0
        for tier, parcels in by_record.values():
            if isinstance(tier, Cpu):
                continue  # they are stepped where they are
            nbytes = sum(parcel.nbytes for parcel in parcels)
            found.read[tier] += nbytes if kind != "compute copies" else 0
            found.written[tier] += nbytes if kind != "gradients" else 0
            largest = max(largest, *(parcel.nbytes for parcel in parcels))
            count += len(parcels)
        count, size = ring_form(count, largest)
        found.buffers_nbytes += count * size
