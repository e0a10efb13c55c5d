"""The operations of a unit in a graph of the compiler: functions of tensors and constants. (whole_graph.py)

A resting parameter is cut by one axis after the other, and each cut is a hop on the way to the whole one. Gathering undoes
the cuts from the last to the first; gradients are reduced over all axes from the first to the last, as the transports of a
step do it, so that the numbers are those of a module that is not compiled.

[Note: unused parameters] The compiler does not trace these functions but puts calls of them into its graph, which autograd
then runs as they are. Traced, the backward would be given zeros for outputs that nobody used; so it is given None, and a
parameter that the graph does not use stays without gradient, as in a replica.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Sequence
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from zero_fn.collectives.functional import all_gathered, reduce_scattered
from zero_fn.mesh import Axis
from zero_fn.resting import on_spec
from zero_fn.runtime.kind import Lifetime
from zero_fn.runtime.on_model_axes import in_flight

if TYPE_CHECKING:
    from zero_fn.runtime.slot import Slot
    from zero_fn.runtime.unit import Unit

__all__ = ["allow_operations", "at_rest", "gathered", "hosted", "key_of", "on_model_axes", "unit_of"]

PACKED_NUMEL = 32 * 1024
"""Elements of a piece below which it travels together with others."""

_keys = count()
_units: weakref.WeakValueDictionary[str, Unit] = weakref.WeakValueDictionary()


def key_of(unit: Unit) -> str:
    """A new name by which `unit_of` finds the unit: in a graph there are tensors and constants only."""
    key = str(next(_keys))
    _units[key] = unit
    return key


def unit_of(key: str) -> Unit:
    """The unit with this key."""
    return _units[key]


@cache
def allow_operations() -> None:
    """Tells the compiler to put calls of these functions into its graphs. [Note: unused parameters]"""
    for operation in (at_rest, gathered, hosted, on_model_axes):
        torch.compiler.allow_in_graph(operation)  # type: ignore[no-untyped-call]


def at_rest(parameter: DTensor) -> Tensor:
    """What this rank holds of a resting parameter. `to_local` gives one that nobody used zeros for a gradient (2.11)."""
    return _AtRest.apply(parameter)  # type: ignore[no-untyped-call, no-any-return]


def gathered(key: str, chosen: tuple[int, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
    """The whole parameters of some slots, from their local ones and, after those, from the parts that stay."""
    return _Gathered.apply(unit_of(key), chosen, *tensors)  # type: ignore[no-untyped-call, no-any-return]


def hosted(key: str, chosen: tuple[int, ...], *local: Tensor) -> tuple[Tensor, ...]:
    """The parts on the first axis of slots that are cut by a second one, flat. They stay from forward to backward."""
    slots = [unit_of(key).slots[i] for i in chosen]
    flats = [_flat(slot, tensor).to(slot.kind.compute_dtype) for slot, tensor in zip(slots, local, strict=True)]
    return tuple(_gather_over([_hops(slot)[1] for slot in slots], flats))


def on_model_axes(key: str, chosen: tuple[int, ...], *wholes: Tensor) -> tuple[Tensor, ...]:
    """The whole parameters as the forward takes them: on their model axes, where they were placed."""
    return tuple(in_flight([unit_of(key).slots[i] for i in chosen], wholes))


class _AtRest(torch.autograd.Function):
    """A resting parameter to its local tensor; in backward, a gradient of that to one at rest."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.spec = parameter._spec
        ctx.set_materialize_grads(False)
        local = parameter._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> DTensor | None:
        return None if grad is None else on_spec(grad, ctx.spec)


class _Gathered(torch.autograd.Function):
    """Local parameters to whole ones; in backward, gradients of whole ones to the means of this rank's pieces."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, chosen: tuple[int, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        slots = [unit.slots[i] for i in chosen]
        ctx.unit, ctx.slots, ctx.extra = unit, slots, len(tensors) - len(slots)
        ctx.set_materialize_grads(False)
        parts = iter(tensors[len(slots) :])
        flats, left = [], []
        for slot, local in zip(slots, tensors, strict=False):
            hops = [hop for hop in _hops(slot) if hop.is_cut]
            if slot.kind.inner is Lifetime.ALWAYS:
                flats.append(next(parts))
                hops.pop()
            else:
                flats.append(_flat(slot, local).to(slot.kind.compute_dtype))
            left.append(hops)
        while any(left):  # the innermost cut is undone first
            deepest = max(map(len, left))
            at = [k for k, hops in enumerate(left) if len(hops) == deepest]
            for k, whole in zip(at, _gather_over([left[k].pop() for k in at], [flats[k] for k in at]), strict=True):
                flats[k] = whole
        wholes = tuple(_shaped(slot, flat, slot.path.shape) for slot, flat in zip(slots, flats, strict=True))
        frozen = [whole for whole, local in zip(wholes, tensors, strict=False) if not local.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return wholes

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        slots: list[Slot] = ctx.slots
        found: list[Tensor | None] = [None] * len(slots)
        at = [k for k, grad in enumerate(grads) if grad is not None and ctx.needs_input_grad[2 + k]]
        flats = [_flat(slots[k], grad).to(slots[k].kind.compute_dtype) for k in at if (grad := grads[k]) is not None]
        hops = [_hops(slots[k]) for k in at]
        for number in range(max(map(len, hops), default=0)):
            here = [j for j in range(len(at)) if number < len(hops[j])]
            sums = [slots[at[j]].kind.sum_dtype for j in here]
            means = _reduce_over([hops[j][number] for j in here], [flats[j] for j in here], sums)
            for j, mean in zip(here, means, strict=True):
                flats[j] = mean
        for k, flat in zip(at, flats, strict=True):
            slot = slots[k]
            mean = flat.to(slot.dtype)
            if slot.path.route is not None and slot.path.route.is_alone:
                mean = mean / ctx.unit.transport.member(1 - slot.path.route.first).size
            found[k] = _shaped(slot, mean, slot.path.local_shape)
        return None, None, *found, *((None,) * ctx.extra)


def _gather_over(hops: Sequence[_Hop], flats: Sequence[Tensor]) -> list[Tensor]:
    """What is whole after one hop each."""
    wholes = list(flats)
    for run in _runs((hop.axis, flat.dtype, hop.piece_numel) for hop, flat in zip(hops, flats, strict=True)):
        axis = hops[run[0]].axis
        pieces = [_padded(flats[k], hops[k].piece_numel) for k in run]
        rows = all_gathered(_joined(pieces, 1), axis).view(axis.size, -1)
        for k, whole in zip(run, torch.split(rows, [piece.numel() for piece in pieces], 1), strict=True):
            wholes[k] = whole.reshape(-1).narrow(0, 0, hops[k].numel)
    return wholes


def _reduce_over(hops: Sequence[_Hop], flats: Sequence[Tensor], sums: Sequence[torch.dtype]) -> list[Tensor]:
    """What this rank holds of the means after one hop each: its pieces, and all where the axis does not cut."""
    means = list(flats)
    for run in _runs(
        (hop.axis, (flat.dtype, dtype), hop.piece_numel) for hop, flat, dtype in zip(hops, flats, sums, strict=True)
    ):
        axis = hops[run[0]].axis
        addends = [_padded(flats[k], axis.size * hops[k].piece_numel).view(axis.size, -1) for k in run]
        mean = reduce_scattered(_joined(addends, axis.size), sums[run[0]], axis)
        for k, piece in zip(run, torch.split(mean, [hops[k].piece_numel for k in run]), strict=True):
            means[k] = piece
    whole = [k for k, hop in enumerate(hops) if not hop.is_cut]
    gathered_means = _gather_over([hops[k] for k in whole], [means[k] for k in whole])
    for k, mean in zip(whole, gathered_means, strict=True):
        means[k] = mean
    return [mean.narrow(0, 0, hop.own_numel) for mean, hop in zip(means, hops, strict=True)]


class _Hop(NamedTuple):
    """One axis on the way between a resting parameter and the whole one. Numbers are elements.

    Attributes:
        axis: The axis.
        numel: Of what the axis makes whole.
        piece_numel: Of the largest piece of that.
        own_numel: Of what this rank holds of it: all, if the axis does not cut it.
        is_cut: Whether the axis cuts it.
    """

    axis: Axis
    numel: int
    piece_numel: int
    own_numel: int
    is_cut: bool


def _hops(slot: Slot) -> list[_Hop]:
    """From the whole parameter to the resting one: the order in which gradients are reduced."""
    hops = []
    numel = slot.path.numel
    layouts = [layout for layout in (slot.path.layout, slot.path.sublayout) if layout is not None]
    for number, axis in enumerate([hop.axis for hop in slot.path.hops]):
        if number < len(layouts):
            layout = layouts[number]
            hops.append(_Hop(axis, numel, layout.shard_numel, layout.owned_numel(axis.rank), is_cut=True))
        else:
            hops.append(_Hop(axis, numel, -(-numel // axis.size), numel, is_cut=False))
        numel = hops[-1].own_numel
    return hops


def _order(slot: Slot) -> tuple[int, ...]:
    """The dims of a parameter from the outermost in memory to the innermost."""
    if slot.path.cut is not None:
        return slot.path.cut.order
    return tuple(sorted(range(len(slot.path.shape)), key=lambda dim: (-slot.path.stride[dim], dim)))


def _flat(slot: Slot, tensor: Tensor) -> Tensor:
    return tensor.permute(_order(slot)).reshape(-1)


def _shaped(slot: Slot, flat: Tensor, shape: Sequence[int]) -> Tensor:
    order = _order(slot)
    inverse = sorted(range(len(order)), key=lambda dim: order[dim])
    return flat.view([shape[dim] for dim in order]).permute(inverse)


def _padded(flat: Tensor, numel: int) -> Tensor:
    return flat if flat.numel() == numel else F.pad(flat, (0, numel - flat.numel()))


def _joined(pieces: Sequence[Tensor], rows: int) -> Tensor:
    """Some pieces as one message, flat: what goes to a rank is one row of each."""
    return pieces[0].reshape(-1) if len(pieces) == 1 else torch.cat([p.view(rows, -1) for p in pieces], 1).reshape(-1)


def _runs(pieces: Iterable[tuple[Axis, Hashable, int]]) -> list[list[int]]:
    """Which tensors travel in one message: small ones of one axis and dtype. From axis, dtype and elements of a piece."""
    found: dict[Hashable, list[int]] = {}
    for position, (axis, dtype, numel) in enumerate(pieces):
        is_large = numel >= PACKED_NUMEL
        found.setdefault((axis, dtype, position if is_large else None), []).append(position)
    return list(found.values())
