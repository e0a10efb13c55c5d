"""Several backwards, one reduction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from zero_fn.runtime.entry import steps_of

__all__ = ["accumulate"]


@contextmanager
def accumulate(*modules: nn.Module) -> Iterator[None]:
    """Sums the gradients of several backwards on each rank and reduces them once, when the block ends.

        with zf.accumulate(model):
            for x, y in microbatches:
                (loss(model(x), y) / len(microbatches)).backward()
        optimizer.step()

    Inside, whole local gradients are held, in the dtype of the sum, for every stage; every stage therefore gives the same
    numbers. `.grad` cannot be read before the end: it is not reduced yet. `zero_grad()` drops what was summed so far. To
    hold only shards, reduce after each backward instead: leave the block out.

    Communicates: one reduction per block in place of one per backward. Parameters of stages 1 and 2 are gathered once;
    those of stage 3 in each forward and backward.

    Args:
        *modules: Transformed modules.

    Returns:
        A context manager. After an exception inside, what was accumulated is dropped, and `.grad` is what it was before.
        Blocks may nest; the outermost reduces.

    Raises:
        StateError: A module was not transformed; or, inside the block, from `optimizer.step()` and whatever reads `.grad`.
    """
    steps = steps_of(*modules, verb="accumulate")
    for step in steps:
        step.begin_accumulation()
    failed = True
    try:
        yield
        failed = False
    finally:
        with ExitStack() as ends:  # every module's, should a hook of the user raise in one
            for step in reversed(steps):
                ends.callback(step.end_accumulation, failed=failed)
