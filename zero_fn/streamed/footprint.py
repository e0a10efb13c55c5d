"""Bytes that the states of an optimizer will take, and bytes that a streamed step will move:
arithmetic on its chunks.

A step reads and writes every chunk on a disk, except that it does not read the chunks that the last
step left in the buffers. Every second step goes backwards, so these are the last chunks in one step
and the first ones in the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from zero_fn.runtime.slot import slot_of
from zero_fn.storage import BUFFERS, staging_form, whole_pages
from zero_fn.storage.stored_files import StoredFiles
from zero_fn.streamed.inner_optimizer import require_streamable
from zero_fn.streamed.optimizer import Streamed
from zero_fn.streamed.pieces import Chunk, Planner, rooms_of
from zero_fn.streamed.shared_blocks import sent_along
from zero_fn.streamed.tier_places import groups_of
from zero_fn.tiers.parcels import record_nbytes
from zero_fn.values.dtensors import local_of
from zero_fn.values.tiers import IN_MEMORY, Cpu, Nvme, Tier, is_accelerator, is_away

__all__ = ["NO_LINK", "Footprint", "Link", "footprint"]


class Link(NamedTuple):
    """Bytes per step between the host and an accelerator."""

    to_device: int  # bytes in each direction
    from_device: int


NO_LINK = Link(0, 0)


@dataclass(slots=True)
class Footprint:
    """Bytes of an optimizer on this rank."""

    # States in the memory of the device, also where `zf.cpu()` is that memory.
    states_nbytes: int = 0
    # Buffers in host memory through which states, parameters and gradients pass.
    buffers_nbytes: int = 0
    tiers: Counter[Tier] = field(default_factory=Counter)  # states in other tiers, in whole pages
    # Bytes of states, parameters and gradients that a step moves from and to each tier:
    # the mean of two steps in a row.
    read: Counter[Tier | StoredFiles] = field(default_factory=Counter)
    written: Counter[Tier | StoredFiles] = field(default_factory=Counter)
    # Bytes that a step sends, by the name of the axis.
    sent: Counter[str] = field(default_factory=Counter)
    # Bytes of parameters and gradients that a step moves between the host and an accelerator.
    link: Link = NO_LINK

    def __add__(self, other: Footprint) -> Footprint:
        return Footprint(
            self.states_nbytes + other.states_nbytes,
            self.buffers_nbytes + other.buffers_nbytes,
            self.tiers + other.tiers,
            self.read + other.read,
            self.written + other.written,
            self.sent + other.sent,
            Link(
                self.link.to_device + other.link.to_device,
                self.link.from_device + other.link.from_device,
            ),
        )


def footprint(optimizer: Optimizer | Planner) -> Footprint:
    """The bytes that a stock or streamed optimizer takes and moves, or one that a planner will cut.

    Communicates nothing, takes no memory.
    """
    planner = optimizer if isinstance(optimizer, Planner) else Planner(optimizer)
    parameters = [
        parameter for group in planner.inner.param_groups for parameter in group["params"]
    ]
    if isinstance(optimizer, Streamed):
        return _streamed(parameters, optimizer.states.chunks)
    kinds = [slot.kind for slot in map(slot_of, parameters) if slot is not None]
    if planner.codes or any(kind.must_be_streamed or kind.rounding is not None for kind in kinds):
        require_streamable(planner.inner, elementwise=False)
        return _streamed(parameters, planner.chunks(parameters, shares=True))
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    rows = zip(trained, planner.kept(trained, in_pieces=False), strict=True)
    sizes = (local_of(p).numel() * sum(dtype.itemsize for _, dtype in schema) for p, schema in rows)
    return Footprint(states_nbytes=sum(sizes))


def _streamed(parameters: Sequence[Tensor], chunks: Sequence[Chunk]) -> Footprint:
    found = Footprint()
    times = Counter(chunks)  # records that are alike share theirs
    windows = {chunk: chunk.window_nbytes for chunk in times}
    rings = [list(filter(None, map(windows.get, chunks)))]
    cuts = [
        cut
        for chunk in times
        for cut in chunk.cuts
        if cut.coded is not None and cut.parameter.requires_grad
    ]
    found.sent.update(
        sent_along({c.parameter: len(c.coded.names) for c in cuts if c.coded and c.coded.divided})
    )
    for chunk, count in times.items():
        beside = count * chunk.beside_nbytes
        if chunk.is_stepped_on_host:
            found.buffers_nbytes += beside
        else:
            found.states_nbytes += beside
    on_disk: dict[Tier, list[int]] = {}
    for (tier, device), members in rooms_of(times).items():
        size_of = {chunk: chunk.nbytes for chunk in members}
        sizes = [size_of[chunk] for chunk in chunks if chunk in size_of]
        if isinstance(tier, Nvme):
            on_disk.setdefault(tier, []).extend(map(whole_pages, sizes))
        elif tier is not None and is_away(tier, device.type):
            found.tiers[tier] += whole_pages(sum(sizes))
        else:
            found.states_nbytes += sum(sizes) if tier is None else whole_pages(sum(sizes))
        if is_accelerator(device.type):
            _add_link(found, tier, {chunk: times[chunk] for chunk in members})
    for disk, sizes in on_disk.items():
        rings.append(sizes)
        found.tiers[disk] += sum(sizes)
        found.written[disk] += sum(sizes)
        kept = sum(sizes[:BUFFERS]) + sum(sizes[-BUFFERS:])
        found.read[disk] += sum(sizes) - min(kept // 2, sum(sizes))
    for group in groups_of(parameters):
        for (kind, tier), forms in group.forms_away():
            if not isinstance(tier, Cpu):  # where they are stepped in place
                found.read[tier] += record_nbytes(forms) if kind != "compute copies" else 0
                found.written[tier] += record_nbytes(forms) if kind != "gradients" else 0
    for sizes in rings:
        count, size = staging_form(len(sizes), max(sizes, default=0))
        found.buffers_nbytes += count * size
    return found


def _add_link(found: Footprint, tier: Tier | None, times: Mapping[Chunk, int]) -> None:
    """Adds the bytes that cross the link to an accelerator,
    for chunks that are there so many times.

    A step is computed where the states are: on the host if they are in a tier. Gradients on the
    other side are copied there, and parameters there and back.
    """
    on_host, (there, back) = tier is not None, found.link
    for chunk, count in times.items():
        for cut in chunk.cuts:
            parameter = cut.parameter
            if not parameter.requires_grad:
                continue
            slot, dtypes = slot_of(parameter), (cut.dtype, cut.gradient_dtype)
            value, gradient = (
                count * cut.piece.numel * dtype.itemsize * (is_away != on_host)
                for dtype, is_away in zip(dtypes, cut.away, strict=True)
            )
            there = there + value + gradient * (not on_host)
            back = back + value + gradient * on_host
            # Bytes of host memory as a tier: of the states, to which values come,
            # or of parameters and gradients that leave.
            tiers = slot.home.tiers if slot is not None else IN_MEMORY
            of_value, of_gradient = (tier, tier) if on_host else (tiers.params, tiers.grads)
            if isinstance(of_value, Cpu):
                found.read[of_value] += value
                found.written[of_value] += value
            if isinstance(of_gradient, Cpu):
                (found.written if on_host else found.read)[of_gradient] += gradient
    found.link = Link(there, back)
