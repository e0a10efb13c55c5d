"""Bytes that an optimizer takes on this rank, and bytes that its step sends and moves:
arithmetic on owners and ways."""

from __future__ import annotations

from collections import Counter
from math import prod

from torch import Tensor
from torch.utils._pytree import tree_leaves

from zero_fn.owners.optimizer import ByOwner
from zero_fn.owners.states_in_tier import STAGINGS
from zero_fn.owners.trial import kept_of
from zero_fn.runtime.slot import slot_of
from zero_fn.storage import whole_pages
from zero_fn.streamed.footprint import Footprint, Link
from zero_fn.streamed.tier_places import place_of
from zero_fn.tiers.parcels import Form, record_nbytes
from zero_fn.values.tiers import Cpu, Tier, is_accelerator, is_away

__all__ = ["footprint_of"]


def _sent_of(optimizer: ByOwner) -> Counter[str]:
    """Bytes that this rank sends in a step of all parameters that require gradients,
    by the name of the axis."""
    found = Counter[str]()
    for each in filter(None, map(optimizer.owner_of, _trained(optimizer))):
        slot, itemsize = slot_of(each.parameter), each.parameter.dtype.itemsize
        gradient = slot.kind.gradient_dtype.itemsize if slot is not None else itemsize
        for number, (leg, owner) in enumerate(zip(each.route.legs, each.owner, strict=True)):
            if not each.is_on_way(number):
                continue
            own = prod(each.route.local_shape(number + 1))
            if leg.axis.rank == owner:  # new values
                numel = leg.numel - own if leg.layout is not None else own * (leg.axis.size - 1)
                found[leg.axis.name] += numel * itemsize
            elif leg.layout is not None:
                found[leg.axis.name] += own * (itemsize + gradient)
    return +found


def footprint_of(optimizer: ByOwner) -> Footprint:
    """The bytes that its states take on this rank, that a step sends, and moves from and to tiers.

    Takes no memory.
    """
    found, largest = Footprint(sent=_sent_of(optimizer)), Counter[Tier]()
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for parameter in _trained(optimizer):
        dealt = optimizer.owner_of(parameter)
        device_type = _device_type(parameter)
        _add_moved(found, parameter)
        if dealt is not None and not dealt.is_mine:
            continue
        known = optimizer.state.get(parameter) or kept_of(
            optimizer.inner, group_of[id(parameter)], parameter
        )
        tensors = [leaf for leaf in tree_leaves(dict(known)) if isinstance(leaf, Tensor)]
        forms = [Form(leaf.numel(), leaf.dtype) for leaf in tensors if leaf.numel() > 1]
        tier = optimizer.tier_of(parameter)
        nbytes = (
            record_nbytes(forms)
            if tier is not None
            else sum(form.numel * form.dtype.itemsize for form in forms)
        )
        if tier is None or not is_away(tier, device_type):
            found.states_nbytes += nbytes
            continue
        found.tiers[tier] += nbytes
        if not isinstance(tier, Cpu):
            found.read[tier] += nbytes
            found.written[tier] += nbytes
            largest[tier] = max(largest[tier], nbytes)
        if is_accelerator(device_type):
            found.link = Link(found.link.to_device + nbytes, found.link.from_device + nbytes)
    found.buffers_nbytes += sum(map(whole_pages, largest.values())) * STAGINGS
    return found


def _add_moved(found: Footprint, parameter: Tensor) -> None:
    """Adds what a step moves of a parameter and its gradient, if they rest on a disk: each is read
    as a whole, and what is written is read before, as other tensors may lie beside it."""
    slot, place = slot_of(parameter), place_of(parameter)
    if slot is None or place is None:
        return
    own = [
        parcel.nbytes
        for parcel in place.parcels
        if any(piece.parameter == place.number for piece in parcel.pieces)
    ]
    for tier, times in ((slot.home.tiers.params, (2, 1)), (slot.home.tiers.grads, (1, 0))):
        if tier is not None and not isinstance(tier, Cpu):
            found.read[tier] += times[0] * sum(own)
            found.written[tier] += times[1] * sum(own)


def _trained(optimizer: ByOwner) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _device_type(parameter: Tensor) -> str:
    slot = slot_of(parameter)
    return slot.kind.device_type if slot is not None else parameter.device.type
