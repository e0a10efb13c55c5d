"""What a transformed model has: its units, the modules at which they are entered,
and the runs of these."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from zero_fn.errors import StateError
from zero_fn.runtime.call_hooks import ENTRY_POINTS
from zero_fn.runtime.entry_point import EntryPoint, Method
from zero_fn.runtime.run import Run, run_of
from zero_fn.runtime.unit import Unit

__all__ = [
    "entry_points_below",
    "methods_of",
    "require_idle",
    "runs_of",
    "units_of",
    "with_parameters",
]


def entry_points_below(module: nn.Module) -> list[tuple[str, EntryPoint]]:
    """The entry points at a module and below it, with module names:
    two at an anchor with a parameter of another unit."""
    return [
        (name, entry)
        for name, child in module.named_modules()
        for entry in child.__dict__.get(ENTRY_POINTS, ())
    ]


def methods_of(module: nn.Module) -> list[Method]:
    """All methods below a module that enter a unit."""
    return [
        value
        for child in module.modules()
        for value in child.__dict__.values()
        if isinstance(value, Method)
    ]


def units_of(module: nn.Module) -> list[Unit]:
    """The units of a module and of everything below it, each once."""
    return list({id(entry.unit): entry.unit for _, entry in entry_points_below(module)}.values())


def with_parameters(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules that have parameters: other parts of a model belong to no unit."""
    return [module for module in modules if next(module.parameters(), None) is not None]


def runs_of(*modules: nn.Module, verb: str) -> list[Run]:
    """The running states of transformed modules, each once.

    Raises:
        StateError: A module has none: it was not transformed.
    """
    runs: dict[int, Run] = {}
    for module in modules:
        units = units_of(module)
        if not units:
            raise StateError(
                f"{verb} was given a module that no transform returned.",
                module=type(module).__name__,
                fix=f"transform it before you call {verb}: "
                "model = zf.shard_params(model, mesh['dp'])",
            )
        runs.update((id(unit.run), run_of(unit)) for unit in units)
    return list(runs.values())


def require_idle(units: Iterable[Unit], verb: str) -> None:
    """Puts units at rest whose last pass raised, and refuses units in use.

    Raises:
        StateError: A forward runs, gradients wait to be reduced,
            or an `accumulate` or `unsharded` block is open.
    """
    for unit in units:
        run_of(unit).recover()
        if unit.is_in_use or run_of(unit).accumulating:
            raise StateError(
                f"{verb} was called while the module is in use.",
                unit=unit.name or "root",
                fix=f"call {verb} outside forward, accumulate() and unsharded()",
            )
