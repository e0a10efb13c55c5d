"""Blocks in which local gradients are summed over several backwards, and reduced once at the end."""

from __future__ import annotations

from zero_fn.runtime.run import Run

__all__ = ["begin_accumulation", "end_accumulation"]


def begin_accumulation(run: Run) -> None:
    """A block begins, which may be inside another."""
    if not run.module.accumulating:
        run.recover()  # what a backward before left must not be taken for a part of this sum
        run.forwards.is_fresh = True
    run.module.accumulating += 1


def end_accumulation(run: Run, *, failed: bool) -> None:
    """A block ends: the outermost reduces what was summed, or drops it after an exception. All ranks call it."""
    module = run.module
    module.accumulating -= 1
    if module.accumulating:
        return
    is_reduced = False
    try:
        if not failed:
            _reduce(run)  # hooks of the user run inside
            is_reduced = True
    finally:
        if not is_reduced:
            run.backwards.recover()
            run.backwards.settling.drop()
            module.control.read()
            for unit in module.live_units():
                unit.gradients.take()
        for unit in module.live_units():
            unit.mark_stale()


def _reduce(run: Run) -> None:
    """Reduces and settles all local gradients."""
    module, units, settling = run.module, run.module.live_units(), run.backwards.settling
    if not units:
        return
    for unit in units:
        unit.gradients.unmark()
    local = [grad is not None for unit in units for grad in unit.gradients.local]
    union = iter(module.control.any(local, "which gradients were accumulated"))
    for unit in units:
        present = [next(union) for _ in unit.slots]
        if any(present):
            settling.settle(unit, unit.gradients.reduce(exact=True, present=present))
    settling.decide()
    module.control.read()
    module.away.finish_gradients(unit.groups for unit in units)
