"""Parameters that are changed at rest while a forward of their model is open,
as momentum encoders are (MoCo, ALBEF, BLIP).

What was gathered before such a change is out of date. A unit that does not run is gathered anew
when it is entered. For one that runs, the changed parameters are gathered at once, into the tensors
that its modules see. All ranks make the same changes, as ever.

[Note: who writes] torch counts changes of a DTensor, but none by `_foreach_` operations or through
`.data`. So while a forward is open, DTensor has another table of handlers, in which each operation
that writes has ours. Outside forwards, optimizers write at no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zero_fn.runtime.slot import Slot, slot_on
from zero_fn.runtime.unit import Unit, unit_of
from zero_fn.tiers.tier_tensor import written_by
from zero_fn.values.dtensors import local_of

__all__ = ["copy_handlers", "note_edited", "watch_edits"]

_dispatcher: Any = DTensor._op_dispatcher
_stock: dict[Any, Callable[..., object]] = _dispatcher._custom_op_handlers
# The same, with our handlers for operations that write. [Note: who writes]
_watching: dict[Any, Callable[..., object]] = {}
# Who watches, and the function that each is told by.
_open: dict[object, Callable[[Iterable[Slot]], object]] = {}


def watch_edits(
    watcher: object, *, is_open: bool, tell: Callable[[Iterable[Slot]], object] = tuple
) -> None:
    """To be called when a forward, or another watcher, has begun, and when it has ended.

    `tell` is called with what was written.
    """
    if is_open:
        _open[watcher] = tell
        _dispatcher._custom_op_handlers = _watching or _made()
    elif watcher in _open:
        del _open[watcher]
        _dispatcher._custom_op_handlers = _watching if _open else _stock


def copy_handlers() -> None:
    """To be called when DTensor has got handlers, which open forwards are to have as well."""
    if _watching:
        _made()


def note_edited(slots: Iterable[Slot]) -> None:
    """Parameters were changed at rest. Communicates one all-gather for each unit that runs."""
    changed = _by_unit(slots)
    _let_go(changed)
    _show_again(changed)


def _by_unit(slots: Iterable[Slot]) -> dict[Unit, list[Slot]]:
    """Parameters by their units, without those of units whose parameters a
    block of the user has whole."""
    found: dict[Unit, list[Slot]] = {}
    for slot in slots:
        unit = unit_of(slot)
        if unit is not None and unit.visible.leaves is None:
            found.setdefault(unit, []).append(slot)
    return found


def _let_go(changed: dict[Unit, list[Slot]]) -> None:
    """Drops what units that do not run have gathered, and waits for what is under way."""
    for unit in changed:
        if not unit.running:
            unit.mark_stale()


def _show_again(changed: dict[Unit, list[Slot]]) -> None:
    """Writes parameters of units that run into the tensors that their modules see.

    Communicates an all-gather each; waits.
    """
    with torch.inference_mode(False), torch.no_grad():
        for unit, slots in changed.items():
            if not unit.running:
                continue
            for slot, whole in zip(slots, unit.memory.wholes(slots), strict=True):
                unit.gather.outdate()
                if (seen := slot.places[0].seen) is not None:
                    # `.data`, because this is no change that the forward has made.
                    local_of(seen).data.copy_(whole)


def _made() -> dict[Any, Callable[..., object]]:
    _watching.update(_stock)
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if name.startswith("aten::") and packet.endswith("_") and not packet.endswith("__"):
            _watching[getattr(getattr(torch.ops.aten, packet), overload or "default")] = _write
    return _watching


def _write(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    written = written_by(operation, args, kwargs)
    slots: dict[Slot, None] = {}
    for arg in (*args, *kwargs.values()):
        for each in arg if isinstance(arg, list | tuple) else (arg,):
            if (
                id(each) in written
                and isinstance(each, Tensor)
                and (slot := slot_on(each)) is not None
            ):
                slots[slot] = None
    changed = _by_unit(slots)
    # Before: an all-gather under way reads this memory,
    # and some end with a copy of what they have read to the same place.
    _let_go(changed)
    _dispatcher._custom_op_handlers = _stock
    try:
        found: object = operation(*args, **kwargs)
    finally:
        _dispatcher._custom_op_handlers = _watching
    _show_again(changed)
    for tell in _open.values():
        tell(slots)
    return found
