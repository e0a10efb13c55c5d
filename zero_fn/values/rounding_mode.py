"""How the result of a step is rounded into a parameter that rests in bfloat16
and has no master in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from zero_fn.errors import LayoutError

__all__ = ["Mode", "ParameterRounding"]

Mode = Literal["stochastic", "kahan"]


@dataclass(frozen=True, slots=True)
class ParameterRounding:
    """What `precision(round=, seed=)` asks for."""

    mode: Mode
    seed: int = 0  # of the random numbers of "stochastic"

    def __post_init__(self) -> None:
        """Refuses what cannot be."""
        if self.mode not in get_args(Mode):
            raise LayoutError(
                'round is neither "stochastic" nor "kahan".',
                got=repr(self.mode),
                fix='round="stochastic"',
            )
        if self.seed and self.mode != "stochastic":
            raise LayoutError(
                f"round={self.mode!r} draws no random numbers, and was given a seed.",
                seed=self.seed,
                fix='leave it out; or round="stochastic"',
            )

    def __str__(self) -> str:
        return f"{self.mode}, seed {self.seed}" if self.seed else self.mode
