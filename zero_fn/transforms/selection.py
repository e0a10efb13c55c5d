"""`where=`: which parameters a transform is about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from zero_fn.errors import LayoutError
from zero_fn.values.units import NamedParameter

__all__ = ["Where", "selected"]

Where = str | Sequence[str] | Callable[[str, nn.Parameter], bool] | None
"""Patterns of parameter names (`"layers.*.weight"`),
or a predicate of name and parameter; None: every parameter."""


def selected(named: Sequence[NamedParameter], where: Where) -> list[NamedParameter]:
    """The parameters that `where` selects; a tied one is selected by any of its names.

    Raises:
        LayoutError: It selects none.
    """
    if where is None:
        return list(named)
    if callable(where):
        chosen = [parameter for parameter in named if where(parameter.fqn, parameter.parameter)]
    else:
        patterns = (where,) if isinstance(where, str) else tuple(where)
        chosen = [
            parameter
            for parameter in named
            if any(
                fnmatchcase(f"{module}.{attribute}".lstrip("."), pattern)
                for module, attribute in parameter.places
                for pattern in patterns
            )
        ]
    if not chosen:
        raise LayoutError(
            "where= selects no parameter.",
            where=where if not callable(where) else getattr(where, "__name__", where),
            parameters=", ".join(parameter.fqn for parameter in named[:6])
            + (", ..." if len(named) > 6 else ""),
            fix="match parameter names as named_parameters() gives them: where='layers.*'",
        )
    return chosen
