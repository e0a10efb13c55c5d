"""Several backwards, one reduction."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack

from torch import nn

from zero_fn.errors import LayoutError
from zero_fn.runtime.blocks import Body, UserBlock, opened
from zero_fn.runtime.registry import require_idle, runs_of, with_parameters
from zero_fn.runtime.run import Run
from zero_fn.runtime.uncompiled import uncompiled
from zero_fn.runtime.whole_leaves import begin_whole, end_whole, local_gradients, register_resting

__all__ = ["accumulate"]


@uncompiled
def accumulate(*modules: nn.Module, unshard: bool = False) -> AbstractContextManager[None]:
    """Sums the gradients of several backwards on each rank,
    and reduces them over ranks once, when the block ends.

        with zf.accumulate(model):
            for x, y in microbatches:
                (loss(model(x), y) / len(microbatches)).backward()
        optimizer.step()

    Like `no_sync()` of DDP and FSDP. Inside, each rank holds whole gradients in the dtype of the
    sum, at every stage, so every stage gives the same numbers. `.grad` cannot be read before the
    end: it is not reduced yet. `zero_grad()` drops what was summed so far. To hold only shards of
    gradients, leave the block out: each backward then reduces.

    With `unshard=True`, parameters inside are whole plain leaves of autograd, and so are their
    gradients. That is for code that takes gradients in ways of its own, such as the schedules of
    `torch.distributed.pipelining`.

        with zf.accumulate(stage.submod, unshard=True):
            schedule.step(x, target=y, losses=losses)
        optimizer.step()

    `.grad` of those leaves is the sum on this rank and may be read, divided or set to None; it is
    reduced, and added to what the resting parameters had, when the block ends. The rank holds whole
    parameters and gradients until then.

    Communicates: one reduction in each block, in place of one in each backward. Parameters of
    stages 1 and 2 are gathered once; those of stage 3 in each forward and backward, or once with
    `unshard=True`. All ranks enter and leave together.

    Args:
        *modules: Transformed modules, or parts of them; parts without parameters are passed over.
        unshard: Gather all parameters once, at the beginning, and keep them whole until the end.

    Returns:
        A context manager. After an exception inside, what was accumulated is dropped, and `.grad`
        is what it was before. Blocks may nest; the outermost one reduces.

    Raises:
        StateError: A module was not transformed, or `unshard=True` inside a block that has begun.
            Inside the block: `optimizer.step()` and, without `unshard`, any read of `.grad`.
        LayoutError: `unshard=True`, and parameters travel in a format (`precision(gather=)`).
    """
    return opened(_accumulated, modules, unshard=unshard, accumulates=True)


@uncompiled
def _accumulated(block: UserBlock, modules: Sequence[nn.Module], *, unshard: bool) -> Body:
    runs = runs_of(*with_parameters(modules), verb="accumulate")
    if unshard:
        _require_exact(runs)
        require_idle(
            (unit for run in runs for unit in run.live_units()), "accumulate(unshard=True)"
        )
    for run in runs:
        run.begin_accumulation(block)
    failed = True
    try:
        if unshard:
            for run in runs:
                run.prepare()
                run.buffers.note_begun()
            block.units = [unit for run in runs for unit in run.live_units()]
            begin_whole(block.units)
        yield
        failed = False
    finally:
        if unshard:
            for run in runs:
                _take_over(run, failed=failed)
        with ExitStack() as ends:  # every module's, should a hook of the user raise in one
            for run in reversed(runs):
                ends.callback(run.end_accumulation, block, failed=failed)


def _require_exact(runs: Sequence[Run]) -> None:
    for slot in (slot for run in runs for unit in run.live_units() for slot in unit.slots):
        if slot.kind.gather is not None:
            raise LayoutError(
                "Parameters that travel in a format cannot be whole leaves in "
                "accumulate(unshard=True).",
                parameter=slot,
                gather=slot.kind.gather,
                why="leaves are whole as they rest, and forwards would compute with other numbers "
                "than without unshard=True",
                fix="accumulate(model); or precision(...) without gather=: "
                "gradients may travel in a format",
            )


def _take_over(run: Run, *, failed: bool) -> None:
    """The gradients of whole parameters become local sums of the unit."""
    run.buffers.note_ended()
    for unit in run.live_units():
        if unit.visible.leaves is None:
            # An error came before the unit was gathered, or an interrupt while it was registered.
            register_resting(unit)
            continue
        leaves = end_whole(unit)
        changed = {
            slot: leaf for slot, leaf in zip(unit.slots, leaves, strict=True) if leaf._version
        }
        if changed:  # they had version 0 when they were registered
            unit.memory.scatter(changed)
        if not failed:
            unit.gradients.add_pending(local_gradients(unit, leaves))
