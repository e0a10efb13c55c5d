"""`describe(model)`: a table of where parameters, gradients and optimizer states rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from torch import nn
from torch.distributed.tensor import Shard

from zero_fn.inspect.memory import padding_nbytes
from zero_fn.inspect.table import table
from zero_fn.owners import ByOwner
from zero_fn.runtime.leg import Leg, form_text
from zero_fn.runtime.parameter_kind import dtypes_text
from zero_fn.runtime.registry import runs_of, units_of
from zero_fn.runtime.slot import Slot
from zero_fn.streamed import Streamed
from zero_fn.values.chained_optimizer import Optimizers, members_of
from zero_fn.values.home import Stage
from zero_fn.values.tiers import IN_MEMORY, Tiers

__all__ = ["Description", "UnitRow", "describe", "home_of"]

# End of a row's tier that was asked for and is where the device computes.
_OWN = ", the device's own"


@dataclass(frozen=True, slots=True)
class UnitRow:
    """A row of the table of `describe`: the parameters of one unit (wrap group) that rest alike.

    Attributes:
        unit: Name of the unit; "root" for the module itself.
        parameters: Number of parameters.
        elements: Number of elements of the whole parameters, together.
        shard_elements: Number of elements that this rank holds between uses.
        padding_nbytes: Bytes of padding on this rank, from alignment and uneven cuts;
            of all the unit, on its first row.
        placement: Placements of parameters, gradients and optimizer states, in this order:
            `R` is whole, `S(dim)` sharded.
        tier: Where they rest: the type of the device, or the tiers that `offload` gave parameters,
            gradients and states.
        dtypes: The dtypes of the parameters at rest, of the computation, and of gradient sums; also
            of gradients at rest, if that is another one than of parameters.
        frozen: Number of parameters that are not trained.
    """

    unit: str
    parameters: int
    elements: int
    shard_elements: int
    padding_nbytes: int
    placement: str
    tier: str
    dtypes: str
    frozen: int


@dataclass(frozen=True, slots=True)
class Description:
    """Where the training state of a module rests, as rows; printed, a table. Made by `describe`.

    Attributes:
        axis: The data-parallel axis; of two axes the innermost first.
        rows: One row for each unit (wrap group) and kind of parameter in it.
        optimizer: Where the states of a streamed optimizer rest, if one was given.
        legs: With `legs=True`, the legs of each unit and kind of parameter, a line each.
    """

    axis: str
    rows: tuple[UnitRow, ...]
    optimizer: str | None = None
    legs: tuple[str, ...] = ()

    def __str__(self) -> str:
        header = (
            "unit",
            "params",
            "elements",
            "here",
            "padding B",
            "P G O",
            "tier",
            "rest/compute/sum",
            "frozen",
        )
        rows = [
            [
                f"{cell:,}" if isinstance(cell, int) else cell.removesuffix(_OWN)
                for cell in astuple(row)
            ]
            for row in self.rows
        ]
        lines = table([header, *rows], right={1, 2, 3, 4, 8})
        if any(row.tier.endswith(_OWN) for row in self.rows):
            lines.append("cpu() is the device's own memory: nothing is copied")
        return "\n".join(
            [f"axis {self.axis}", *lines, *([self.optimizer] if self.optimizer else []), *self.legs]
        )


def describe(
    module: nn.Module, optimizer: Optimizers | None = None, *, legs: bool = False
) -> Description:
    """Lists the units of a transformed module: elements, dtypes, and where parameters,
    gradients and optimizer states rest.

        print(zf.describe(model))

    A unit is what is gathered and reduced together (a wrap group of FSDP). Communicates nothing.

    Args:
        module: A transformed module.
        optimizer: Its optimizer, or a sequence of them. A line below the table says where
            states of streamed ones rest.
        legs: Whether to list, below the table, how parameters come from
            rest to whole (up) and gradients
            to rest (down). `->` is a copy, a cast or coding on this rank, `==axis==>` a collective.

    Returns:
        A `Description` with one row for each unit and kind of parameter; printed, it is a table.

    Raises:
        StateError: `module` was not transformed.
    """
    axes = runs_of(module, verb="describe")[0].transport.axes
    rows: list[UnitRow] = []
    ways: list[str] = []
    for unit in units_of(module):
        unit.follow_moved()
        kinds: dict[tuple[str, str, str], list[Slot]] = {}
        for slot in unit.slots:
            how = (_placement(slot), _tier(slot), dtypes_text(slot.kind))
            kinds.setdefault(how, []).append(slot)
        padding = sum(padding_nbytes(unit))
        for (placement, tier, dtypes), slots in kinds.items():
            elements = sum(slot.path.numel for slot in slots)
            here = sum(slot.path.local_numel for slot in slots)
            frozen = sum(not slot.parameter.requires_grad for slot in slots)
            name = unit.name or "root"
            rows.append(
                UnitRow(name, len(slots), elements, here, padding, placement, tier, dtypes, frozen)
            )
            padding = 0
            if legs:
                slot, kind = slots[0], slots[0].kind
                ways += [
                    f"{name} up: {_way(slot, kind.up)}",
                    f"{name} down: {_way(slot, kind.down)}",
                ]
    own = [each for each in members_of(optimizer) if isinstance(each, Streamed | ByOwner)]
    states = "\n".join(repr(each).partition("\n")[0] for each in own) or None
    return Description(", ".join(map(str, axes)) or "none", tuple(rows), states, tuple(ways))


def _way(slot: Slot, legs: Sequence[Leg]) -> str:
    """The spots that a parameter comes to, and how; "stays" if there is no leg."""
    if not legs:
        return "stays"
    found = f"{legs[0].source.value}"
    for leg, before in zip(legs, [None, *legs], strict=False):
        if before is not None and before.is_kept and not leg.is_kept:
            found += f", kept; {leg.source.value}"
        arrow = "->" if leg.hop is None else f"=={slot.path.hops[leg.hop].axis.name}==>"
        found += f" {arrow} {leg.target.value} ({form_text(leg.form)})"
    return found


def home_of(slot: Slot, tiers: Tiers) -> str:
    """Where a parameter rests, in words that are those of any other that rests alike,
    over axes of the same names."""
    stages = " and ".join(f"stage {int(hop.stage)} over {hop.axis}" for hop in slot.path.hops)
    return f"{stages}, rest/compute/sum {dtypes_text(slot.kind)}, {str(tiers) or 'on the device'}"


def _placement(slot: Slot) -> str:
    """P G O on the data axis; on each of several, by name; and on the model axes,
    where the parameter does not change."""
    cut = "R" if slot.path.cut is None else f"S({slot.path.cut.dim})"
    states = (Stage.PARAMS, Stage.GRADS, Stage.OPTIMIZER)
    found = []
    for hop in slot.path.hops:
        text = " ".join(cut if hop.stage >= state else "R" for state in states)
        found.append(text if len(slot.path.hops) == 1 else f"{hop.axis.name}: {text}")
    if slot.model is not None:
        names = slot.model.mesh.mesh_dim_names or ()
        found += [
            f"{name}: S({placement.dim})" if isinstance(placement, Shard) else f"{name}: R"
            for name, placement in zip(names, slot.model.placements, strict=True)
        ]
    return ", ".join(found) or "R R R"


def _tier(slot: Slot) -> str:
    """The tiers that were asked for, or the memory that everything is in."""
    tiers = slot.home.tiers
    if tiers == IN_MEMORY:
        return slot.flat.device.type
    return str(tiers) if slot.kind.must_be_streamed else f"{tiers}{_OWN}"
