"""The resting parameters of a unit: their memory, and following those that users moved or replaced."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zero_fn.errors import PlacementError, StateError
from zero_fn.resting import local_of, resting_parameter, set_local
from zero_fn.runtime.away import Away
from zero_fn.runtime.everywhere import Told
from zero_fn.runtime.group import Groups, groups_of
from zero_fn.runtime.kind import Shelved
from zero_fn.runtime.record import Form, Record, record_of
from zero_fn.runtime.registry import Replacement, note_replacement
from zero_fn.runtime.slot import Slot
from zero_fn.runtime.tier_tensor import TierTensor, same_place
from zero_fn.transport.links import Links, Waits
from zero_fn.values.home import ReshardAfter

__all__ = ["AtRest"]


class AtRest:
    """The resting parameters of a unit.

    Attributes:
        slots: The parameters.
        groups: The groups of parameters by kind, with their buffers.
        is_evicted: Whether they are in another tier, and cannot be used.
    """

    def __init__(self, unit: str, slots: Sequence[Slot], transport: Links, away: Away, owner: object) -> None:
        self.slots = slots
        self._unit, self._transport, self._away = unit, transport, away
        self.groups = Groups()
        self.is_evicted = False
        self._owner: Callable[[], object] = weakref.ref(owner)
        self._known: list[Record] = []  # of the groups of before

    def form_groups(self, dtypes: Sequence[torch.dtype], devices: Sequence[torch.device]) -> None:
        """Decides how the parameters, of these dtypes on these devices, rest, compute and are summed."""
        self._known = self.groups.records()
        self.groups.members = groups_of(self.slots, dtypes, devices)
        self.groups.reshards_after_backward = any(s.home.reshard_after is ReshardAfter.BACKWARD for s in self.slots)

    def allocate(self, requires_grad: Sequence[bool]) -> None:
        """Lays out the memory, and registers parameters on it. Their values are still to be written."""
        self._lay_out()
        for slot, flag in zip(self.slots, requires_grad, strict=True):
            parameter = resting_parameter(slot.resting_local(), slot.spec, requires_grad=flag)
            slot.adopt(parameter, slot.flat)
            slot.register(parameter)

    @property
    def is_current(self) -> bool:
        """Whether modules still hold the parameters, on the memory, that this knows."""
        return all(map(Slot.is_current, self.slots))

    def require_in_memory(self, unit: str) -> None:
        """Raises where the parameters were evicted, or the `.data` of one was assigned."""
        if self.is_evicted:
            raise StateError(
                "The model is evicted: its parameters are not in memory.",
                unit=unit or "root",
                fix="bring it back first: evicted = zf.evict(model, optimizer, to=...); ...; evicted.restore()",
            )
        for slot in self.slots:
            slot.refuse_assignment()

    def follow_moved(self) -> None:
        """Takes over parameters that `.to`, `to_empty`, `deepcopy` or `load_state_dict(assign=True)` moved elsewhere.

        Raises:
            PlacementError: A parameter was replaced by one that is not sharded as the unit is.
        """
        with torch.inference_mode(False), torch.no_grad():  # memory made in inference mode could never be trained
            moved = [_successor(slot) for slot in self.slots]
            locals_ = [local_of(parameter) for parameter in moved]
            self.form_groups([parameter.dtype for parameter in moved], [local.device for local in locals_])
            self._lay_out()
            values: dict[Slot, Tensor] = {}
            for slot, parameter, local in zip(self.slots, moved, locals_, strict=True):
                if not same_place(local, slot.flat):
                    values[slot] = local
                    parameter = _on_other_memory(parameter, slot.resting_local(), slot)
                slot.adopt(parameter, slot.flat)
                slot.register(parameter)
            self.write(values)

    def vacate(self) -> None:
        """Drops the memory of parameters, whose values were taken elsewhere."""
        self.is_evicted = True
        if all(isinstance(slot.flat, TierTensor) for slot in self.slots):
            return  # it is in another tier already
        for group in self.groups:
            group.vacate()

    def write(self, values: Mapping[Slot, Tensor]) -> None:
        """Fills the memory of parameters with this rank's elements of them. No communication."""
        with torch.no_grad():
            for group in self.groups:
                group.write({s: values[s] for s in group.slots if s in values and values[s].device.type != "meta"})

    def scatter(self, wholes: Mapping[Slot, Tensor]) -> None:
        """Writes this rank's part of whole parameters back to rest. No communication."""
        self.write({slot: slot.path.owned(local_of(whole)) for slot, whole in wholes.items()})

    def gather_whole(self) -> list[Tensor]:
        """New tensors with the whole parameters in the dtype at rest. Communicates one all-gather; waits."""
        wholes, pending = self.issue_whole()
        if pending is not None:
            pending.wait()
        return wholes

    def issue_whole(self) -> tuple[list[Tensor], Waits | None]:
        """Whole parameters as of `gather_whole`, and the all-gather that is still to be waited for, if there is one.

        Raises:
            StorageError: The tier of resting parameters failed, on this rank or another: on every rank.
        """
        if self.groups.is_away:
            failure = self.groups.arrive(exact=True)
            failed = Told(self._transport, failure, f"Fetching {self._unit}").failure()
            if failed is not None:
                raise failed
        wholes, segments = [], []
        for slot in self.slots:
            own = slot.flat
            if isinstance(own, TierTensor):
                own = record_of(own).values(own.number)
            if slot.path.layout is None:
                wholes.append(slot.path.whole_view(own).to(slot.flat.device, copy=True))
                continue
            flat = torch.empty(slot.path.layout.padded_numel, dtype=slot.dtype, device=slot.flat.device)
            flat.narrow(0, slot.path.start, slot.path.local_numel).copy_(own)
            segments.append(slot.path.segment(flat))
            wholes.append(slot.path.whole_view(flat))
        self.groups.let_go()
        return wholes, self._transport.all_gather(segments, f"whole parameters of {self._unit}") if segments else None

    def modules(self) -> list[nn.Module]:
        """The modules that hold the parameters, each once."""
        found = {id(place.module): place.module for slot in self.slots for place in slot.places}
        return list(found.values())

    @property
    def is_gone(self) -> bool:
        """Whether these modules were taken out of the model, and nobody holds them."""
        return bool(self.slots) and all(place.is_gone for slot in self.slots for place in slot.places)

    def _lay_out(self) -> None:
        self.groups.lay_out(self._record_for)
        self._known = []

    def _record_for(self, what: Shelved, forms: list[Form], device: torch.device, record_type: type[Record]) -> Record:
        """Room in another tier; that of before, where nothing has changed."""
        for known in self._known:
            is_alike = (known.shelf.tier, known.forms, known.device) == (what[1], forms, device)
            if type(known) is record_type and is_alike:
                self._known.remove(known)
                return known
        record = record_type(self._away.shelf(what), forms, device, self._away.place_for(what, forms, device))
        record.owner = self._owner
        return record


def _successor(slot: Slot) -> nn.Parameter:
    """What is registered now where the resting parameter of a slot was.

    Raises:
        PlacementError: It is not sharded as the parameter was.
    """
    parameter = slot.places[0].registered
    if (
        parameter is None
        or isinstance(parameter, DTensor) != (slot.spec is not None)
        or tuple(parameter.shape) != slot.full_shape
        or local_of(parameter).shape != slot.path.local_shape
    ):
        found = "nothing" if parameter is None else f"{type(parameter.data).__name__} of {list(parameter.shape)}"
        raise PlacementError(
            f"{slot.fqn!r} was replaced after the transform.",
            expected=f"{slot}, {list(slot.path.local_shape)} of it on this rank",
            got=found,
            why="it would be trained on this rank alone and never reduced",
            fix="replace parameters before the transform, or edit values in `with zf.unsharded(model, writeback=True):`",
        )
    return parameter


def _on_other_memory(parameter: nn.Parameter, view: Tensor, slot: Slot) -> nn.Parameter:
    """A resting parameter on other memory. Another one takes the place of a plain one, which cannot lose its memory, and of
    one on another device, which a tensor cannot leave."""
    is_plain = not isinstance(parameter, DTensor | TierTensor)
    if parameter.device != view.device or (is_plain and isinstance(view, TierTensor)):
        successor = resting_parameter(view, slot.spec, requires_grad=parameter.requires_grad)
        note_replacement(parameter, Replacement(slot.fqn, successor, "a cast or a move of the module"))
        return successor
    set_local(parameter, view)
    return parameter
