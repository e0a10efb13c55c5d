"""What goes wrong in a step, found before the optimizer uses it:
gradients that are not finite, and spikes.

[Note: where it began] The first gradient of a backward that is not finite says where: backward goes
from the last unit to the first, and what is behind a gradient that is not finite is mostly not
finite either. Each rank looks at its own, whole gradients as they arrive, before ranks sum them up;
after that all ranks have what one has brought in.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from zero_fn.transport.agree import exchange_bytes
from zero_fn.transport.line import Line
from zero_fn.values.watching import Watch

__all__ = ["Spike", "Spikes"]

FACTOR = 10.0
"""A gradient norm, a loss or a step is a spike if it is so many
times the median of those before."""

_BEFORE = 100  # how many are compared
_ENOUGH = 10  # with fewer nothing is a spike

_NOWHERE = 1 << 31


@dataclass(frozen=True, slots=True)
class Spike:
    """Something that went wrong in a step.

    Attributes:
        step: Steps before it.
        what: "gradient" or "loss", or "step", for its seconds.
        value: The norm of all gradients, the loss, or the seconds.
        usual: The median of those before; 0 if there were too few.
        rank, unit: Where the first gradient was that is not finite;
            -1 and "" if all gradients of all ranks are finite.
    """

    step: int
    what: str
    value: float
    usual: float
    rank: int = -1
    unit: str = ""

    @property
    def is_finite(self) -> bool:
        """Whether it is a number."""
        return isfinite(self.value)

    def __str__(self) -> str:
        where = f", first in unit {self.unit} of rank {self.rank}" if self.unit else ""
        if not self.is_finite:
            return f"step {self.step}: {self.what} is {self.value}{where}"
        return (
            f"step {self.step}: {self.what} is {self.value:.3g}, "
            f"{self.value / self.usual:.0f} times the median{where}"
        )


class Spikes(Watch):
    """Looks at gradients as they arrive, and compares numbers with those before."""

    def __init__(self) -> None:
        self._before: dict[str, deque[float]] = {}
        # Largest elements of gradients, by unit in the order of arrival.
        self._arrived: dict[str, list[Tensor]] = {}

    def arrived(self, unit: str, grads: Sequence[Tensor | None]) -> None:
        """Notes the largest element of each gradient.

        The host does not wait for it. [Note: where it began]
        """
        present = [grad for grad in grads if grad is not None and grad.is_floating_point()]
        if present:
            with torch.no_grad():
                largest = torch._foreach_norm(present, float("inf"))
                self._arrived.setdefault(unit or "root", []).append(torch.stack(largest).max())

    def look_at(self, step: int, what: str, value: float, line: Line | None = None) -> Spike | None:
        """What is wrong with a number, if anything is.

        With a `line` ranks tell one another where it began, if it is not finite: a collective, for
        which `value` must be the same on all.
        """
        before = self._before.setdefault(what, deque(maxlen=_BEFORE))
        usual = median(before) if len(before) >= _ENOUGH else 0.0
        if isfinite(value):
            before.append(value)
            return Spike(step, what, value, usual) if usual and value > FACTOR * usual else None
        rank, unit = self._began(line) if line is not None else (-1, "")
        return Spike(step, what, value, usual, rank, unit)

    def forget(self) -> None:
        """A step ends."""
        self._arrived = {}

    def _began(self, line: Line) -> tuple[int, str]:
        """The rank and the unit; -1 and "" if all gradients are finite. A collective."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        own = [_NOWHERE, -1, ""]
        for at, (unit, largest) in enumerate(self._arrived.items()):
            if not torch.stack(largest).isfinite().all():
                own = [at, rank, unit]
                break
        exchange = partial(line.exchange, what="where a gradient is not finite")
        said = exchange_bytes(exchange, json.dumps(own).encode())
        _, rank, unit = min(map(json.loads, said))
        return rank, unit
