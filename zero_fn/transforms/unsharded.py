"""Whole parameters outside forward (`unsharded`), and telling the runtime that
shards were edited (`refresh`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial

from torch import Tensor, nn

from zero_fn.errors import StateError
from zero_fn.runtime.blocks import Body, UserBlock, opened
from zero_fn.runtime.registry import require_idle, runs_of, units_of, with_parameters
from zero_fn.runtime.slot import Slot
from zero_fn.runtime.uncompiled import uncompiled
from zero_fn.runtime.unit import Unit
from zero_fn.runtime.whole_leaves import begin_whole, end_whole
from zero_fn.transport.agree import agree_along
from zero_fn.values.digests import content_digests
from zero_fn.values.dtensors import local_of

__all__ = ["refresh", "unsharded"]


@uncompiled
def unsharded(*modules: nn.Module, writeback: bool = False) -> AbstractContextManager[None]:
    """Makes the parameters of modules whole, plain tensors inside the block (as
    FSDP's `summon_full_params`).

        with zf.unsharded(model.head):
            nearest = (x @ model.head.weight.detach().T).argmax(-1)

    Inside, `named_parameters()` and `state_dict()` give whole plain parameters in the dtype at
    rest, and forwards use them without communication. They are copies. Without `writeback`, edits
    are dropped when the block ends. They cannot train: a backward that reaches one raises;
    `zf.accumulate(model, unshard=True)` is the block in which whole parameters train. A parameter
    that tensor parallelism placed is a DTensor on its model axes.

    Communicates: one all-gather of every unit (wrap group) of the modules, and with `writeback` 16
    bytes to each peer; before the first forward what that compares over ranks. All ranks enter and
    leave together, and inside send nothing.

    Args:
        *modules: Transformed modules, or modules inside them. The whole unit of each is gathered.
            Parts without parameters are passed over.
        writeback: Put edits back into the shards at the end. Every rank must have made the same
            edits. Whether a parameter is trained (`requires_grad`) is kept, too.

    Returns:
        A context manager.

    Raises:
        StateError: A module was not transformed, or its unit is running, accumulating, or open in
            another block. In backward: a gradient reached a whole parameter.
        DisagreementError: With `writeback`, the edits differ between ranks; nothing is written.
    """
    return opened(_unsharded, modules, writeback=writeback)


@uncompiled
def _unsharded(block: UserBlock, modules: Sequence[nn.Module], *, writeback: bool) -> Body:
    runs = runs_of(*with_parameters(modules), verb="unsharded")
    units = list({id(unit): unit for module in modules for unit in units_of(module)}.values())
    require_idle(units, "unsharded")
    for unit in units:
        unit.follow_moved()
    for run in runs:
        run.agree()  # now, with all ranks: a forward inside may be that of one rank alone
    for unit in units:
        unit.mark_stale()
    block.units = units
    for run in runs:
        run.blocks.append(block)
    begin_whole(units)
    for unit in units:
        for slot, whole in zip(unit.slots, unit.visible.leaves or (), strict=True):
            if whole.requires_grad:
                whole.register_post_accumulate_grad_hook(partial(_refuse_gradient, slot))  # type: ignore[no-untyped-call]
    finished = False
    try:
        yield
        finished = True
    finally:
        for run in runs:
            run.buffers.note_block()
        closed = [_close(unit) for unit in units]
        if writeback and finished:
            edited = [list(map(local_of, wholes)) for wholes in closed]
            for unit, wholes in zip(units, edited, strict=True):
                _require_equal_edits(unit, wholes)
            for unit, wholes in zip(units, edited, strict=True):
                unit.memory.scatter(dict(zip(unit.slots, wholes, strict=True)))
            for unit, left in zip(units, closed, strict=True):
                for slot, own in zip(unit.slots, left, strict=True):
                    slot.initial = None
                    slot.parameter.requires_grad_(own.requires_grad)
        for run in runs:
            run.blocks.remove(block)


def _refuse_gradient(slot: Slot, whole: Tensor) -> None:
    """Called by autograd: a whole parameter was used outside the
    forward of a transformed module."""
    whole.grad = None
    raise StateError(
        f"A backward reached the whole parameter {slot.fqn!r} of an unsharded() block.",
        parameter=slot,
        why="its gradient would be dropped with the whole parameter, which is a copy, "
        "and not be reduced over ranks",
        fix="with zf.accumulate(model, unshard=True): forward, loss and backward inside it; or "
        "read the parameter in a method that gathers: model = zf.register_forward_method(model, 'method'); or "
        "with torch.no_grad() if no gradient is wanted",
    )


def _close(unit: Unit) -> list[Tensor]:
    """Registers the resting parameters again; returns the whole ones, as the user left them."""
    registered = [slot.places[0].registered for slot in unit.slots]
    leaves = end_whole(unit)
    return [own if own is not None else leaf for own, leaf in zip(registered, leaves, strict=True)]


def _require_equal_edits(unit: Unit, wholes: list[Tensor]) -> None:
    for slot, whole in zip(unit.slots, wholes, strict=True):
        if tuple(whole.shape) != slot.path.shape:
            raise StateError(
                f"{slot.fqn!r} has another shape at the end of unsharded().",
                before=list(slot.path.shape),
                after=list(whole.shape),
                fix="edit values in place; change shapes before the transform",
            )
    if unit.run.transport.axes:
        digests = content_digests(wholes)
        agree_along(
            unit.run.transport,
            "edits",
            [
                ([hop.axis for hop in slot.path.hops], f"{slot}, sum of bits {each}")
                for slot, each in zip(unit.slots, digests, strict=True)
            ],
            why="each rank would keep its part of another tensor; nothing was written",
            fix="make the same edit on every rank (same seed), "
            "or broadcast the edited tensor first",
        )


def refresh(module: nn.Module) -> None:
    """Tells zero_fn that shards were edited or replaced outside an optimizer.

    Gathered copies are dropped. Parameters that `.to()`, `to_empty()` or
    `load_state_dict(assign=True)` moved to other memory are taken over. A backward of an earlier
    forward is refused. The next forward does the first two by itself; call this to meet errors at
    once, or between a forward and its backward. Communicates nothing.

    Args:
        module: A transformed module.

    Raises:
        StateError: `module` was not transformed.
        PlacementError: A parameter was replaced by one that is not sharded as its unit is.
    """
    runs_of(module, verb="refresh")
    for unit in units_of(module):
        unit.follow_moved()
        unit.mark_stale()
        unit.generation += 1
