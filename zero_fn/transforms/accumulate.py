"""Several backwards, one reduction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from zero_fn.errors import StateError
from zero_fn.runtime.entry import units_of
from zero_fn.runtime.step import Step

__all__ = ["accumulate", "steps_of"]


@contextmanager
def accumulate(*modules: nn.Module) -> Iterator[None]:
    """Sums the gradients of several backwards on each rank and reduces them once, when the block ends.

        with zf.accumulate(model):
            for x, y in microbatches:
                (loss(model(x), y) / len(microbatches)).backward()
        optimizer.step()

    Inside, whole local gradients are held, in the dtype of the sum, for every stage; every stage therefore gives the same
    numbers. To hold only shards, reduce after each backward instead: leave the block out.

    Communicates: one reduction per block in place of one per backward. Parameters of stages 1 and 2 are gathered once;
    those of stage 3 in each forward and backward.

    Args:
        *modules: Transformed modules.

    Returns:
        A context manager. After an exception inside, what was accumulated is dropped. Blocks may nest; the outermost
        reduces.

    Raises:
        StateError: A module was not transformed, or (from `optimizer.step()`) a step inside the block.
    """
    steps = steps_of(*modules, verb="accumulate")
    for step in steps:
        step.begin_accumulation()
    failed = True
    try:
        yield
        failed = False
    finally:
        for step in steps:
            step.end_accumulation(failed=failed)


def steps_of(*modules: nn.Module, verb: str) -> list[Step]:
    """The running states of transformed modules, each once.

    Raises:
        StateError: A module has none: it was not transformed.
    """
    steps: dict[int, Step] = {}
    for module in modules:
        units = units_of(module)
        if not units:
            raise StateError(
                f"{verb} was given a module that no transform returned.",
                module=type(module).__name__,
                fix=f"model = zf.shard_params(model, mesh['dp']), then zf.{verb}(model)",
            )
        steps.update((id(unit.step), unit.step) for unit in units)
    return list(steps.values())
