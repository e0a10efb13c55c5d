"""The memory of gathered parameters: one buffer per compute dtype of a unit,
and the views that are cut from it.

[Note: memory that comes and goes] Cutting the buffers of a unit into parameters and into the pieces
that travel costs the host more than an all-gather of small parameters. So it is done once: when a
unit is resharded its buffers lose their memory, not their views, and the next gather gives them
memory again (`UntypedStorage.resize_`, as FSDP does). That is sound only if nobody else holds a
view, who would be left without memory. The views here are never handed out, tensors on the same
storage are, and torch counts the references to a storage: if there are more than those of the views
cut here, the unit drops the buffers as they are, and whoever holds a part of them keeps an ordinary
tensor. On CUDA memory is freed in the order of the stream, as when a tensor dies.

[Note: tensors that are lent] For activation checkpoints inside a unit, modules see gathered
parameters in every backward, on an autograd node of their own. These tensors are made once, too,
and kept from step to step, unless somebody holds or has changed one of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor

from zero_fn.runtime.fsdp_extensions import ExtensionGather
from zero_fn.runtime.group import Group
from zero_fn.runtime.moves import Move
from zero_fn.runtime.rooms import Room, whole_room
from zero_fn.runtime.saved_tensor_hooks import remember_buffer
from zero_fn.runtime.slot import Slot

__all__ = ["Lent", "WholeBuffers"]

_references = torch._C._storage_Use_Count
_use_count: Callable[[Tensor], int] = torch._C.TensorBase._use_count  # type: ignore[attr-defined]
_version, _hooks = attrgetter("_version"), attrgetter("_backward_hooks")


class Lent:
    """Gathered parameters with an autograd history, kept from one backward to the next.
    [Note: tensors that are lent]"""

    __slots__ = ("_state", "is_shown", "tensors", "trained", "use")

    def __init__(self, tensors: list[Tensor], trained: list[bool], use: Any) -> None:
        self.tensors = tensors  # one for each slot
        self.trained = trained  # whether each is
        self.use = use  # that of their autograd node. It must not hold the unit, which holds this
        self._state = self._state_now()
        # Whether modules have seen the tensors since `is_untouched` last returned True.
        self.is_shown = False

    def is_untouched(self) -> bool:
        """Whether nobody else holds one of the tensors, and nobody has changed one.

        To be asked while no module sees them.
        """
        if self.is_shown and self._state_now() == self._state:
            self.is_shown = False
        return not self.is_shown

    def _state_now(self) -> tuple[list[int], list[int], list[int], list[object]]:
        # A tensor may be held from Python, or from C++ alone,
        # by the graph that a recomputation made.
        tensors = self.tensors
        return (
            [*map(getrefcount, tensors)],
            [*map(_use_count, tensors)],
            [*map(_version, tensors)],
            [*map(_hooks, tensors)],
        )


class WholeBuffers:
    """The whole parameters of a unit. [Note: memory that comes and goes]"""

    def __init__(self, unit: object, slots: Sequence[Slot], groups: Sequence[Group]) -> None:
        """Allocates the buffers that have memory during a use only, and cuts all buffers.

        `unit` gathers them again.
        """
        # Parameters, by slot number, whose tensor subclass decides which bytes are
        # sent (`fsdp_pre_all_gather`).
        self.by_extension = {
            i: ExtensionGather(slot) for i, slot in enumerate(slots) if slot.kind.by_extension
        }
        self.rooms: dict[Group, Room] = {}
        # The moves of a gather into the buffers, which hold them: before and after the reference
        # is shared. [Note: what the others hold] (wire_gather.py)
        self.moves: tuple[list[Move], list[Move]] = ([], [])
        # Tensors that the next backward may show again, if there are any.
        self.lent: Lent | None = None
        self._unit = weakref.ref(unit)  # which owns this
        views: dict[Slot, Tensor] = {}
        transient: list[tuple[Tensor, int]] = []  # buffers, and how many parameters each has
        with torch.inference_mode(False):  # the buffers outlive the forward that asks for them
            for group in groups:
                if group.whole is None or group.kind.by_extension:
                    continue
                room = self.rooms[group] = whole_room(group)
                if not group.kind.is_kept:
                    remember_buffer(room.memory, self, unit, len(self.rooms) - 1)
                    transient.append((room.memory, len(group.slots)))
                for slot in group.slots:
                    views[slot] = room.memory.as_strided(
                        slot.path.shape, slot.path.stride, room.starts[slot]
                    )
        self.buffers = [room.memory for room in self.rooms.values()]
        self._views = [views.get(slot, slot.local) for slot in slots]
        # Storages that lose their memory between uses, each with its bytes, and the numbers of
        # references to it from here and from tensors that are lent.
        self._freed: list[tuple[torch.UntypedStorage, int, int, int]] | None = None
        self._transient = transient
        for extended in self.by_extension.values():
            self._add(extended.outputs)

    def note_references(self) -> None:
        """Counts who holds the buffers.

        To be called once all views were cut that do not leave the unit.
        """
        # Not those of simulated tensors, memory that torch's allocator did not give,
        # and what a subclass allocates.
        transient, self._transient = self._transient, []
        if (
            all(type(b) is Tensor and b.untyped_storage().resizable() for b, _ in transient)
            and not self.by_extension
        ):
            storages = [(buffer.untyped_storage(), lent) for buffer, lent in transient]
            self._freed = [
                (each, each.nbytes(), _references(each._cdata), lent) for each, lent in storages
            ]

    def make_products(self) -> None:
        """After the all-gather: tensor subclasses make what modules see from the bytes that
        arrived. (fsdp_extensions.py)"""
        for i, extended in self.by_extension.items():
            self._views[i], made = extended.arrived()
            self._add(made)

    def _add(self, made: Sequence[Tensor]) -> None:
        """Treats memory that a tensor subclass allocated as buffers of the unit,
        so that autograd does not keep it."""
        unit = self._unit()
        assert unit is not None, "a unit that is gone has gathered"
        for buffer in made:
            remember_buffer(buffer, self, unit, len(self.buffers))
            self.buffers.append(buffer)

    def tensors(self) -> list[Tensor]:
        """The whole parameters, one for each slot of the unit: new tensors on the buffers."""
        if self.by_extension:
            return [
                ExtensionGather.marked(v) if i in self.by_extension else v.data
                for i, v in enumerate(self._views)
            ]
        return [view.data for view in self._views]

    def free(self) -> bool:
        """Takes the memory from the buffers, until `renew`.

        Returns:
            False if somebody else holds a part of them, who keeps it:
            the caller then drops this object.
        """
        if self._freed is None:
            return False
        if self.lent is not None and not self.lent.is_untouched():
            self.lent = None
        lends = self.lent is not None
        for storage, _, references, lent in self._freed:
            if _references(storage._cdata) != references + lends * lent or not storage.resizable():
                # Storages that numpy has seen are not resizable: an array must not lose its memory.
                return False
        for storage, *_ in self._freed:
            storage.resize_(0)
        return True

    @property
    def lends(self) -> bool:
        """Whether tensors on the buffers may be kept from step to step."""
        return self._freed is not None

    def renew(self) -> None:
        """Gives the buffers memory again."""
        assert self._freed is not None, "buffers that cannot be freed were kept"
        for storage, nbytes, *_ in self._freed:
            storage.resize_(nbytes)
