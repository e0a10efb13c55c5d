"""Collectives over two data axes: one axis after the other, each in its own process group.

    all-gather       over the second axis that cuts a tensor, then over the first
    reduce-scatter   over the first axis, then of that piece over the second: scattered if that axis cuts it, else to all
    any, exchange    over one axis, then over the other

A tensor that lies on one of the axes (experts) travels along the other only; its gradients hold the sum over that axis.

So what travels over the second axis is 1/n of the tensor, n ranks on the first: let the second be the slow one. A mean is the
mean over the second axis of means over the first, each summed in the order of its ranks.

[Note: hops] The last hop of an all-gather is under way when the call returns; those before it were waited for. A reduction
issues its later hops when it is waited for. Schedules wait in the same order on every rank, so ranks stay in step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from zero_fn.collectives import Contribution, Segment
from zero_fn.errors import DisagreementError, LostRankError
from zero_fn.guarded import Guarded, Watched

__all__ = ["Hierarchy", "Hops", "Links", "Waits"]

_Item = TypeVar("_Item", Segment, Contribution)


class Hops:
    """A collective of several hops under way. `wait` runs the hops that are left and may be called again."""

    __slots__ = ("_hops", "_owner")

    def __init__(self, owner: Hierarchy, hops: Iterator[Watched]) -> None:
        self._owner, self._hops = owner, hops

    def wait(self) -> None:
        """Waits until the result may be used. Raises what `Watched.wait` does."""
        with self._owner.telling_others():
            for hop in self._hops:
                hop.wait()


class Hierarchy:
    """The transport of a module over two data axes, in place of the `Guarded` of one."""

    def __init__(self, members: Sequence[Guarded]) -> None:
        """Joins the transports of two axes, the innermost first."""
        self._members = tuple(members)

    def member(self, number: int) -> Guarded:
        """The transport along one axis."""
        return self._members[number]

    @property
    def pads(self) -> bool:
        """Whether `Segment.whole` must have room for `n` full pieces."""
        return any(member.pads for member in self._members)

    def prepared(self, segments: Sequence[Segment]) -> Sequence[Segment]:
        """The same segments: which of them an axis takes is decided in each all-gather."""
        return segments

    def all_gather(self, segments: Sequence[Segment], what: str) -> Hops:
        """Fills each segment from the pieces of all ranks on its route."""
        with self.telling_others():
            last: list[Watched] = []
            for first, chosen in _by_first(segments):
                self._complete_own_pieces(first, chosen, what)
                last.append(self._members[first].all_gather(chosen, what))
            return Hops(self, iter(last))

    def reduce_scatter(self, contributions: Sequence[Contribution], what: str) -> Hops:
        """Writes into each `out` the mean over all ranks of this rank's piece."""
        with self.telling_others():
            chains = [
                _reduced(self._members[first], self._members[1 - first], chosen, what)
                for first, chosen in _by_first(contributions)
            ]
            heads = [next(chain) for chain in chains]
        return Hops(self, (hop for head, chain in zip(heads, chains, strict=True) for hop in _chained(head, chain)))

    def any(self, bits: Tensor, what: str, *, check: int = 0) -> Hops:
        """Ors a uint8 tensor of 0 and 1 over the ranks, in place. `check` is a number that must be the same on every rank."""
        with self.telling_others():
            # Waited for here: which ranks wait for the result depends on the bits, and the next hop must not.
            self._members[0].any(bits, what, check=check).wait()
            return Hops(self, iter([self._members[1].any(bits, what, check=check)]))

    def exchange(self, message: Tensor, what: str = "digests") -> Tensor:
        """Returns the uint8 messages of all ranks, one row each, the ranks of the inner axis together. Waits."""
        with self.telling_others():
            rows = self._members[0].exchange(message, what)
            return self._members[1].exchange(rows.reshape(-1), what).reshape(-1, message.numel())

    def give_up(self) -> None:
        """After a failure elsewhere: tells the peers that nothing more will come."""
        for member in self._members:
            member.give_up()

    @contextmanager
    def telling_others(self) -> Iterator[None]:
        """A failure on one axis is told to the ranks of the other, which would wait for this one."""
        try:
            yield
        except (LostRankError, DisagreementError):
            self.give_up()
            raise

    def _complete_own_pieces(self, first: int, segments: Sequence[Segment], what: str) -> None:
        """Gathers this rank's pieces on the first axis over the second, where that axis cuts them."""
        second = self._members[1 - first]
        cut = [
            (segment.piece(self._members[first].rank), segment.route.numel)
            for segment in segments
            if segment.route is not None and segment.route.numel is not None
        ]
        if cut:
            padded = [_Padded(own, numel, second) for own, numel in cut]
            second.all_gather([place.segment for place in padded], what).wait()
            for place in padded:
                place.copy_back()


class _Padded:
    """Room for the pieces of a tensor; a copy where the transport would write padding beyond its end."""

    def __init__(self, own: Tensor, piece_numel: int, transport: Guarded) -> None:
        self._own = self._place = own
        if transport.pads and piece_numel * transport.size > own.numel():
            self._place = own.new_empty(piece_numel * transport.size)
            self._place[: own.numel()] = own
        self.segment = Segment(self._place, own.numel(), piece_numel)

    def copy_back(self) -> None:
        if self._place is not self._own:
            self._own.copy_(self._place[: self._own.numel()])


def _reduced(first: Guarded, second: Guarded, contributions: Sequence[Contribution], what: str) -> Iterator[Watched]:
    """The hops of reductions that begin on the same axis."""
    pieces: list[Contribution] = []
    later: list[Contribution] = []
    shared: list[Tensor] = []  # pieces that the second axis does not cut: all its ranks need them
    alone: list[Tensor] = []
    for contribution in contributions:
        addend, out, dtype = contribution.addend, contribution.out, contribution.sum_dtype
        if addend.route is not None and addend.route.is_alone:
            pieces.append(contribution)
            alone.append(out)
            continue
        own = addend.piece_bounds(first.rank)[1]
        is_cut = addend.route is not None and addend.route.numel is not None
        total = out if out.dtype == dtype and not is_cut else torch.empty(own, dtype=dtype, device=out.device)
        pieces.append(Contribution(addend, total, dtype))
        if not own:
            continue  # on every rank of the second axis
        if addend.route is not None and addend.route.numel is not None:
            later.append(Contribution(Segment(total, own, addend.route.numel), out, dtype))
        else:
            part = Segment(total, own, -(-own // second.size))
            later.append(Contribution(part, Segment(out, own, part.piece_numel).piece(second.rank), dtype))
            shared.append(out)
    yield first.reduce_scatter(pieces, what)
    for out in alone:
        out.div_(second.size)  # the mean over an axis whose ranks have added up on the way here
    if not alone or later:
        yield second.reduce_scatter(later, what)
    if shared:
        padded = [_Padded(out, -(-out.numel() // second.size), second) for out in shared]
        yield second.all_gather([place.segment for place in padded], what)
        for place in padded:
            place.copy_back()


def _chained(head: Watched, chain: Iterator[Watched]) -> Iterator[Watched]:
    yield head
    yield from chain


def _by_first(items: Sequence[_Item]) -> list[tuple[int, list[_Item]]]:
    """Items by the axis their route begins on."""
    found: dict[int, list[_Item]] = {}
    for item in items:
        route = (item if isinstance(item, Segment) else item.addend).route
        assert route is not None, "a tensor over two axes has no route"
        found.setdefault(route.first, []).append(item)
    return sorted(found.items())


Links = Guarded | Hierarchy
"""What a module sends and receives through."""

Waits = Watched | Hops
"""A collective under way."""
