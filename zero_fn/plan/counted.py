"""Bytes of units: at rest, sent, and moved from and to other tiers.

With Ψ elements, n ranks, b bytes per element at rest, c in compute, and k of optimizer state, a rank that owns Ψ/n holds:

    home       parameters                     gradients    optimizer
    NOTHING    Ψ b          (+ Ψ c if cast)   Ψ b          Ψ k
    OPTIMIZER  Ψ c          (+ Ψ/n b if cast) Ψ b          Ψ/n k
    GRADS      Ψ c          (+ Ψ/n b if cast) Ψ/n b        Ψ/n k
    PARAMS     Ψ/n b                          Ψ/n b        Ψ/n k

In plain float32 with Adam (b = 4, k = 8) the rows are 16 Ψ, 8 Ψ + 8 Ψ/n, 4 Ψ + 12 Ψ/n and 16 Ψ/n. A gather sends this rank's
shard to n - 1 peers; a reduce-scatter sends every peer its piece: (n - 1)/n Ψ b each.

What rests in another tier takes no memory of the device. It takes its bytes there, in whole pages for each unit, and for each
kind (parameters, gradients) and disk a staging of host memory, as large as the largest unit; beside an accelerator two.

Source: ZeRO, Rajbhandari et al. 2020, section 5 and figure 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from zero_fn.held import Held
from zero_fn.runtime.away import Shelved
from zero_fn.runtime.record import parcels_of, record_nbytes
from zero_fn.runtime.slot import Slot
from zero_fn.runtime.unit import Unit
from zero_fn.storage import stagings_for
from zero_fn.streamed import Link
from zero_fn.tiers import Cpu, Tier, is_accelerator

__all__ = ["Moved", "add_moved", "at_rest", "device_type_of", "link_of", "sent_nbytes"]


class Moved(NamedTuple):
    """Bytes per step, in whole pages.

    Attributes:
        read: From the tier.
        written: To it.
    """

    read: int
    written: int


def device_type_of(units: Sequence[Unit]) -> str:
    """The type of the device that computes; the CPU where that is not known yet."""
    return next((slot.device_type for unit in units for slot in unit.slots if slot.device_type != "meta"), "cpu")


def at_rest(units: Sequence[Unit], *, optimizer_nbytes_per_element: int) -> Held:
    """Bytes of the elements that this rank holds between backward and `zero_grad`, without padding.

    Args:
        units: Those of a module.
        optimizer_nbytes_per_element: Bytes of optimizer state per element of a trained parameter: 8 for Adam in float32,
            4 for SGD with momentum.

    Returns:
        States that `offload(optim=...)` sends to another tier are counted there; the buffers of the streamed optimizer, which
        depend on it, are not counted: `streamed.footprint` does.
    """
    parameters = gradients = optimizer = 0
    tiers, largest = Counter[str](), dict[Shelved, int]()
    for unit in units:
        for (kind, tier), forms in unit.forms_away().items():
            nbytes = record_nbytes(forms)
            tiers[str(tier)] += nbytes
            largest[kind, tier] = max(nbytes, largest.get((kind, tier), 0))
        for slot in unit.slots:
            parameters += slot.resting_nbytes
            if slot.parameter.requires_grad:
                gradients += slot.gradient_numel * slot.dtype.itemsize if not slot.is_gradient_away else 0
                states = slot.local_numel * optimizer_nbytes_per_element
                away = slot.states_away_nbytes(states)
                optimizer += states - away
                if away:
                    tiers[str(slot.home.tiers.optim)] += away
    stagings = stagings_for(device_type_of(units))
    buffers = sum(nbytes * stagings for (_, tier), nbytes in largest.items() if not isinstance(tier, Cpu))
    return Held(parameters, gradients, optimizer, buffers, dict(tiers))


def sent_nbytes(slot: Slot, *, times_gathered: int, is_exact: bool, pads: bool) -> Counter[str]:
    """Bytes this rank sends in a step for one parameter, by the name of the axis.

    Over two axes the first carries what one axis would, and the second what is left to be gathered or summed of this rank's
    piece on the first.

    Args:
        slot: The parameter.
        times_gathered: How often its unit is gathered.
        is_exact: Whether gradients travel in the dtype of their sum; along the second axis they always do.
        pads: Whether the transport sends padding.
    """
    total: Counter[str] = Counter()
    numel, cuts = slot.numel, (slot.layout, slot.sublayout)
    for axis, cut, is_first in zip(slot.along if numel else (), cuts, (True, False), strict=False):
        rank, size = (slot.rank, slot.size) if is_first else (axis.rank, axis.size)
        piece = slot.piece_numel if is_first else cut.shard_numel if cut is not None else -(-numel // size)
        own = min(piece, numel - min(rank * piece, numel))
        gathered = (piece if pads else own) * (size - 1)
        scattered = piece * (size - 1) if pads else numel - own
        if cut is not None:
            times = times_gathered if is_first or not slot.is_hosted else 1
            total[axis.name] += times * gathered * slot.compute_dtype.itemsize
        if slot.parameter.requires_grad:
            summed = slot.sum_dtype if is_exact or not is_first else slot.compute_dtype
            total[axis.name] += scattered * summed.itemsize
            total[axis.name] += gathered * slot.dtype.itemsize if cut is None else 0
        numel = own
    return +total


def add_moved(unit: Unit, times_gathered: int, read: Counter[Tier], written: Counter[Tier]) -> None:
    """Adds what forward and backward move, by tier: parameters, or their compute copies, are read for each gather, gradients
    written once."""
    away = unit.forms_away()
    for (kind, tier), forms in away.items():
        parcels = parcels_of(forms)
        if kind == "gradients":
            trained = [slot.parameter.requires_grad for slot in unit.slots if (kind, tier) in slot.shelved()]
            for parcel in parcels:
                some = [trained[piece.parameter] for piece in parcel.pieces]
                written[tier] += parcel.nbytes if any(some) else 0
                read[tier] += parcel.nbytes if any(some) and not all(some) else 0  # what is beside them stays
        elif kind == "compute copies" or ("compute copies", tier) not in away:
            read[tier] += times_gathered * sum(parcel.nbytes for parcel in parcels)


def link_of(unit: Unit, times_gathered: int) -> Link:
    """What forward and backward move between the host and an accelerator: what comes from a tier passes the host, and so does
    what goes there. Gradients are counted as they rest, though those that a smaller dtype holds travel in it."""
    there = back = 0
    away = unit.forms_away()
    for slot in unit.slots:
        if is_accelerator(slot.device_type) and slot.is_away:
            dtype = slot.compute_dtype if ("compute copies", slot.home.tiers.params) in away else slot.dtype
            there += times_gathered * slot.local_numel * dtype.itemsize
        if is_accelerator(slot.device_type) and slot.is_gradient_away and slot.parameter.requires_grad:
            back += slot.local_numel * slot.dtype.itemsize
    return Link(there, back)
