"""The one rule by which requests are joined: what one transform asks for holds,
and two that ask must ask for the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from zero_fn.errors import LayoutError

__all__ = ["agreed"]

T = TypeVar("T")


def agreed(
    one: T | None,
    other: T | None,
    what: str,
    *,
    fix: str,
    error: type[LayoutError] = LayoutError,
    shown: Callable[[T], object] = lambda value: value,
) -> T | None:
    """What one or both of two transforms ask for; None stands for "not asked".

    `what`: a noun in the plural, for the error.

    Raises:
        LayoutError: Both ask, for different values.
    """
    if one is not None and other is not None and one != other:
        raise error(
            f"Two transforms ask for different {what}.",
            first=shown(one),
            second=shown(other),
            fix=fix,
        )
    return one if one is not None else other
