"""`describe(model)`: a table of what rests where."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.optim import Optimizer

from zero_fn.runtime.entry import runs_of, units_of
from zero_fn.runtime.slot import Slot
from zero_fn.runtime.unit import Unit
from zero_fn.streamed import Streamed
from zero_fn.surface.held import padding_nbytes
from zero_fn.surface.table import table
from zero_fn.values.home import Sharded
from zero_fn.values.tiers import IN_MEMORY

__all__ = ["Description", "UnitRow", "describe"]


@dataclass(frozen=True, slots=True)
class UnitRow:
    """The parameters of one unit that rest alike.

    Attributes:
        unit: Name of the unit; "root" for the module itself.
        parameters: Number of parameters.
        elements: Elements of the whole parameters, together.
        shard_elements: Elements that this rank holds at rest.
        padding_nbytes: Bytes that alignment and uneven cuts add on this rank, for the whole unit (on its first row).
        placement: Of parameters, gradients and optimizer state in this order: `R` whole, `S(dim)` sharded.
        tier: Where they rest: the type of the device, or the tiers that `offload` gave parameters, gradients and states.
        dtypes: Dtypes at rest, in compute, and of gradient sums.
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
    """What `describe` returns: rows, and a table when printed.

    Attributes:
        axis: The data-parallel axis; of two, the innermost first.
        rows: One per unit and kind of parameter.
        optimizer: Where the states of a streamed optimizer are, if one was given.
    """

    axis: str
    rows: tuple[UnitRow, ...]
    optimizer: str | None = None

    def __str__(self) -> str:
        header = ("unit", "params", "elements", "here", "padding B", "P G O", "tier", "rest/compute/sum", "frozen")
        rows = [header] + [
            (
                row.unit,
                str(row.parameters),
                f"{row.elements:,}",
                f"{row.shard_elements:,}",
                f"{row.padding_nbytes:,}",
                row.placement,
                row.tier,
                row.dtypes,
                str(row.frozen or ""),
            )
            for row in self.rows
        ]
        lines = table(rows, right={1, 2, 3, 4, 8})
        return "\n".join([f"axis {self.axis}", *lines, *([self.optimizer] if self.optimizer else [])])


def describe(module: nn.Module, optimizer: Optimizer | None = None) -> Description:
    """Lists, for each unit, its elements, where its parameters, gradients and states rest, and their dtypes.

    Args:
        module: A transformed module.
        optimizer: The optimizer; if it is streamed, where its states are is said below the table.

    Returns:
        A `Description`: rows, printable as a table. Communicates nothing.

    Raises:
        StateError: `module` was not transformed.
    """
    axes = runs_of(module, verb="describe")[0].transport.axes
    rows: list[UnitRow] = []
    for unit in units_of(module):
        unit.follow_moved()
        kinds: dict[tuple[str, str, str], list[Slot]] = {}
        for slot in unit.slots:
            kinds.setdefault((_placement(slot), _tier(slot), _dtypes(slot)), []).append(slot)
        padding = sum(padding_nbytes(unit))
        for (placement, tier, dtypes), slots in kinds.items():
            rows.append(_row(unit, slots, padding, placement, tier, dtypes))
            padding = 0
    return Description(", ".join(map(str, axes)) or "none", tuple(rows), _states(optimizer))


def _states(optimizer: Optimizer | None) -> str | None:
    return repr(optimizer).partition("\n")[0] if isinstance(optimizer, Streamed) else None


def _row(unit: Unit, slots: list[Slot], padding: int, placement: str, tier: str, dtypes: str) -> UnitRow:
    return UnitRow(
        unit.name or "root",
        len(slots),
        sum(slot.path.numel for slot in slots),
        sum(slot.path.local_numel for slot in slots),
        padding,
        placement,
        tier,
        dtypes,
        sum(not slot.parameter.requires_grad for slot in slots),
    )


def _placement(slot: Slot) -> str:
    """P G O on the data axis; on each of several, by name; and on the model axes, where the parameter does not change."""
    cut = "R" if slot.path.cut is None else f"S({slot.path.cut.dim})"
    states = (Sharded.PARAMS, Sharded.GRADS, Sharded.OPTIMIZER)
    found = []
    for hop in slot.path.hops:
        text = " ".join(cut if hop.level >= state else "R" for state in states)
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
    return str(tiers) if slot.kind.must_be_streamed else f"{tiers}, the device's own"


def _dtypes(slot: Slot) -> str:
    return "/".join(_short(dtype) for dtype in (slot.dtype, slot.kind.compute_dtype, slot.kind.sum_dtype))


def _short(dtype: torch.dtype) -> str:
    text = str(dtype).removeprefix("torch.")
    return {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}.get(text, text)
