"""`on_ranks`: a test that is one program, which ranks run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tests.support.ranks import Ranks

__all__ = ["on_ranks"]


def on_ranks(
    n: int, *, fixture: str = "ranks", deadline_s: float = 60.0
) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Makes a test of a program: `n` ranks run it. It is given `folder`, one for all ranks, if it takes that, and the
    parameters of the test."""

    def test_of(program: Callable[..., object]) -> Callable[..., None]:
        taken = inspect.signature(program).parameters
        own = {"folder": "tmp_path"}  # the fixture behind an argument

        def test(**given: Any) -> None:
            ranks: Ranks = given.pop(fixture)
            arguments = {name: str(given[own[name]]) if name in own else given[name] for name in taken}
            ranks(n, deadline_s=deadline_s).run(program, **arguments)

        test.__doc__ = program.__doc__
        names = [fixture, *(own.get(name, name) for name in taken)]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        test.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
        return test

    return test_of
