"""The resting parameters of a unit: their memory, and how they follow moves and replacements by the user."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zero_fn.errors import PlacementError, StateError
from zero_fn.resting import as_plain, local_of, resting_parameter, set_local
from zero_fn.runtime.away import Away
from zero_fn.runtime.group import Groups, groups_of
from zero_fn.runtime.kind import Shelved
from zero_fn.runtime.parcels import Form
from zero_fn.runtime.record import Record
from zero_fn.runtime.registry import Replacement, note_replacement
from zero_fn.runtime.slot import Slot
from zero_fn.runtime.tier_tensor import TierTensor, same_place
from zero_fn.transport.agree import Outcome
from zero_fn.transport.line import Line, Work
from zero_fn.values.home import ReshardAfter

__all__ = ["AtRest"]


class AtRest:
    """The resting parameters of a unit.

    Attributes:
        slots: The parameters.
        groups: The groups of parameters by kind, with their buffers.
        is_evicted: Whether `evict` has moved the parameters to another tier, so that they cannot be used.
        is_moved: Whether values were assigned to a parameter (`.data =`) in a forward: the next gather takes them over.
        moving: While moved parameters are taken over: each, and its values where it was moved to. An interrupt in the midst
            leaves them here, and the next `follow_moved` takes them over.
    """

    def __init__(self, unit: str, slots: Sequence[Slot], transport: Line, away: Away, owner: object) -> None:
        self.slots = slots
        self._unit, self._transport, self._away = unit, transport, away
        self.groups = Groups()
        self.is_evicted = self.is_moved = False
        self.moving: list[tuple[nn.Parameter, Tensor]] | None = None
        self._owner: Callable[[], object] = weakref.ref(owner)
        self._known: list[Record] = []  # records of the earlier groups, which new groups may take over

    def form_groups(self, dtypes: Sequence[torch.dtype], devices: Sequence[torch.device]) -> None:
        """Groups the parameters by how they rest, compute and are summed. `dtypes` and `devices`: of each at rest."""
        self._known = self.groups.records()
        self.groups.members = groups_of(self.slots, dtypes, devices)
        self.groups.reshards_after_backward = any(s.home.reshard_after is ReshardAfter.BACKWARD for s in self.slots)

    def allocate(self, requires_grad: Sequence[bool]) -> None:
        """Allocates the memory, and registers parameters on it. Their values are still to be written."""
        self._lay_out()
        for slot, flag in zip(self.slots, requires_grad, strict=True):
            parameter = resting_parameter(slot.resting_local(), slot.spec, requires_grad=flag)
            slot.adopt(parameter, slot.flat)
            slot.register(parameter)

    @property
    def is_current(self) -> bool:
        """Whether modules still hold the same parameters, on the same memory."""
        with as_plain():
            return self.moving is None and all(map(Slot.is_current, self.slots))

    def require_in_memory(self, unit: str) -> None:
        """Raises where the parameters were evicted."""
        if self.is_evicted:
            raise StateError(
                "The model is evicted: its parameters are not in memory.",
                unit=unit or "root",
                fix="bring it back first: evicted = zf.evict(model, optimizer, to=...); ...; evicted.restore()",
            )

    def follow_moved(self) -> None:
        """Takes over parameters that `.to`, `to_empty`, `deepcopy` or `load_state_dict(assign=True)` moved elsewhere.

        Raises:
            PlacementError: A parameter was replaced by one that is not sharded as the unit is.
        """
        with torch.inference_mode(False), torch.no_grad():  # memory made in inference mode could never be trained
            if self.moving is None:
                self.moving = [(parameter, local_of(parameter)) for parameter in map(_successor, self.slots)]
            self.form_groups([local.dtype for _, local in self.moving], [local.device for _, local in self.moving])
            self._lay_out()
            values: dict[Slot, Tensor] = {}
            for slot, (parameter, local) in zip(self.slots, self.moving, strict=True):
                if not same_place(local, slot.flat):
                    values[slot] = local
                    parameter = _on_other_memory(parameter, slot.resting_local(), slot)
                slot.adopt(parameter, slot.flat)
                slot.register(parameter)
            self.write(values)
        self.is_moved = False

    def vacate(self) -> None:
        """Drops the memory of the parameters, whose values were moved elsewhere."""
        self.is_evicted = True
        if all(isinstance(slot.flat, TierTensor) for slot in self.slots):
            return  # the values are in another tier already
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

    def gather_whole(self, slots: Sequence[Slot] | None = None) -> list[Tensor]:
        """New tensors with all whole parameters, or some, in the dtype at rest. Communicates one all-gather; waits."""
        wholes, pending = self.issue_whole(slots)
        if pending is not None:
            pending.wait()
        return wholes

    def issue_whole(self, slots: Sequence[Slot] | None = None) -> tuple[list[Tensor], Work | None]:
        """Whole parameters as of `gather_whole`, and the all-gather that is still to be waited for, if there is one.

        Raises:
            StorageError: The tier of resting parameters failed, on this rank or another: on every rank.
        """
        if self.groups.is_away:
            failure = self.groups.arrive(exact=True)
            failed = Outcome(self._transport, failure, f"Fetching {self._unit}").failed_on_any_rank()
            if failed is not None:
                raise failed
        wholes, segments = [], []
        for slot in self.slots if slots is None else slots:
            own = slot.flat
            if isinstance(own, TierTensor):
                own = own.record.values(own.number)
            elif slots is not None and not slot.is_current():  # values were assigned to it in a forward
                own = slot.path.flat_of(local_of(slot.parameter))
            if slot.path.layout is None:
                wholes.append(slot.path.whole_view(own).to(slot.flat.device, copy=True))
                continue
            whole, segment = slot.path.to_gather(own, slot.flat.device)
            segments.append(segment)
            wholes.append(whole)
        self.groups.let_go()
        return wholes, self._transport.all_gather(segments, f"whole parameters of {self._unit}") if segments else None

    def modules(self) -> list[nn.Module]:
        """The modules that hold the parameters, each once."""
        found = {id(place.module): place.module for slot in self.slots for place in slot.places}
        return list(found.values())

    @property
    def is_gone(self) -> bool:
        """Whether the modules of the parameters were taken out of the model, and nobody holds them."""
        if not self.slots or not self.slots[0].places[0].is_gone:  # each forward asks
            return False
        return all(place.is_gone for slot in self.slots for place in slot.places)

    def _lay_out(self) -> None:
        self.groups.lay_out(self._record_for)
        self._known = []

    def _record_for(self, what: Shelved, forms: list[Form], device: torch.device, record_type: type[Record]) -> Record:
        """Room in another tier: the earlier record, where nothing has changed, or a new one."""
        for known in self._known:
            is_alike = (known.shelf.tier, known.forms, known.device) == (what[1], forms, device)
            if type(known) is record_type and is_alike:
                self._known.remove(known)
                return known
        record = record_type(self._away.shelf(what), forms, device, self._away.place_for(what, forms, device))
        record.owner = self._owner
        return record


def _successor(slot: Slot) -> nn.Parameter:
    """The parameter that is registered now in the place of a slot's.

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
    """A resting parameter on other memory: the same object where torch allows that. A plain one cannot lose its memory to a
    tier, and no tensor can change its device, so another parameter takes their place."""
    is_plain = not isinstance(parameter, DTensor | TierTensor)
    if parameter.device != view.device or (is_plain and isinstance(view, TierTensor)):
        successor = resting_parameter(view, slot.spec, requires_grad=parameter.requires_grad)
        note_replacement(parameter, Replacement(slot.fqn, successor, "a cast or a move of the module"))
        return successor
    set_local(parameter, view)
    return parameter
