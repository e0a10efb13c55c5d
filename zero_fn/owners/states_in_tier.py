"""States of whole tensors in another tier: a record for each tensor,
brought into memory when it is stepped.

A state at rest is a `TierTensor`, which whoever reads it fetches. A step fetches the states of the
next tensor while it computes one, and writes those of the one before. On the host they are used
where they lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from zero_fn.storage import storage_on
from zero_fn.tiers.parcels import Form, record_nbytes
from zero_fn.tiers.record import Record
from zero_fn.tiers.tier_tensor import TierTensor
from zero_fn.values.strides import dense_stride, flat_in
from zero_fn.values.tiers import Tier, bytes_text

__all__ = ["STAGINGS", "Shelf"]

STAGINGS = 3
"""Buffers before a disk: of the tensor that is stepped, of the next one,
and of the one that is being written."""


class Shelf:
    """The states of the tensors that this rank owns, in one tier."""

    def __init__(self, tier: Tier, what: str) -> None:
        self.storage = storage_on(tier, what)
        self._writing: Record | None = None

    def __str__(self) -> str:
        return f"{bytes_text(self.storage.nbytes)} of states in {self.storage.tier}"

    def fetch(self, states: Mapping[str, Any]) -> None:
        """Begins to bring states into memory."""
        record = _record_of(states)
        if record is not None:
            record.fetch()

    def bring(self, states: Mapping[str, Any]) -> dict[str, Any]:
        """States in memory, where they are stepped. Waits."""
        record, found = _record_of(states), dict(states)
        if record is None:
            return found
        record.arrive()

        def there(value: Any) -> Any:
            if not isinstance(value, TierTensor):
                return value
            flat = record.values(value.number)
            own = flat.as_strided(value.shape, value.stride(), flat.storage_offset())
            return own if _is_in_place(record) else own.to(record.device, copy=True)

        found = dict(tree_map(there, found))
        record.drop()
        return found

    def keep(self, earlier: Mapping[str, Any], states: Mapping[str, Any]) -> dict[str, Any]:
        """States at rest, after a step, in the room of the earlier ones if they have the same form.

        Begins to write them.
        """
        leaves, form = tree_flatten(dict(states))
        large = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel() > 1]
        rooms = [leaf for leaf in tree_leaves(dict(earlier)) if isinstance(leaf, TierTensor)]
        if not large:
            return dict(states)
        if [(each.shape, each.dtype) for each in rooms] != [
            (each.shape, each.dtype) for each in large
        ]:
            rooms = self._rooms_for(large)
        record = rooms[0].record
        values = {
            room.number: flat_in(value, room.stride())
            for room, value in zip(rooms, large, strict=True)
        }
        self.finish()
        record.begin_writing(values)
        self._writing = record
        resting = iter(rooms)
        at_rest = [
            next(resting) if isinstance(leaf, Tensor) and leaf.numel() > 1 else leaf
            for leaf in leaves
        ]
        return dict(tree_unflatten(at_rest, form))

    def finish(self) -> None:
        """Waits until all is written."""
        if self._writing is not None:
            self._writing.finish_writing()
            self._writing = None

    def _rooms_for(self, values: Sequence[Tensor]) -> list[TierTensor]:
        """Room for such states, in one record."""
        forms = [Form(value.numel(), value.dtype) for value in values]
        nbytes = record_nbytes(forms)
        (place,) = self.storage.reserve([nbytes])
        self.storage.stage(nbytes, STAGINGS)
        record = Record(self.storage, forms, values[0].device, place)
        return [
            TierTensor(record, at, value.shape, dense_stride(value))
            for at, value in enumerate(values)
        ]


def _record_of(states: Mapping[str, Any]) -> Record | None:
    return next(
        (leaf.record for leaf in tree_leaves(dict(states)) if isinstance(leaf, TierTensor)), None
    )


def _is_in_place(record: Record) -> bool:
    """Whether states are stepped where they rest."""
    return record.shelf.is_addressable and record.device.type == "cpu"
