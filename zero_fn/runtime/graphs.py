"""Forwards whose backward may come, as all ranks remember them.

[Note: forwards that wait] After a backward every rank must remember the same uses, or the next schedule would differ between
ranks. Which uses may still have a backward does differ: a graph may be alive on some ranks only, and nothing tells beforehand
whether a backward will pass through a frozen use. So the message that begins a backward also carries which uses may run after
it, or-ed over ranks, and those are kept. If every use runs now, on any rank, nothing is kept, and no rank has to read that.
"""

from __future__ import annotations

import weakref

from zero_fn.runtime.passes import BackwardPass, ForwardPass
from zero_fn.runtime.use import UnitUse
from zero_fn.values.schedule import Enter, Exit, Use

__all__ = ["Graphs"]

_REMEMBERED_USES = 4096  # forwards whose backward never came are forgotten beyond this, the same on every rank


class Graphs:
    """The graphs of one transformed module that a backward may pass through.

    Attributes:
        trace: The Enter and Exit brackets of the forwards.
    """

    def __init__(self) -> None:
        self.trace: list[Enter | Exit] = []
        self._uses: dict[Use, weakref.ref[UnitUse]] = {}  # a use is alive as long as its graph
        self._retained: set[Use] = set()  # uses whose backward has run and may run again (`retain_graph=True`)

    def add(self, forward: ForwardPass) -> None:
        """Remembers a forward, if it recorded a graph."""
        if any(use.has_graph for use in forward.uses.values()):
            self.trace += forward.trace
            self._uses.update((key, weakref.ref(use)) for key, use in forward.uses.items())

    def use(self, key: Use) -> UnitUse | None:
        """A use of an earlier forward; None once its graph is gone."""
        reference = self._uses.get(key)
        return reference() if reference is not None else None

    def uses_of(self, unit: int) -> list[UnitUse]:
        """The uses of a unit whose graph is there."""
        return [use for key in self._uses if key.unit == unit and (use := self.use(key)) is not None]

    def entered(self) -> list[Use]:
        """All uses, in the order of the forwards."""
        return [bracket.use for bracket in self.trace if isinstance(bracket, Enter)]

    @property
    def is_waiting(self) -> bool:
        """Whether any forward has had no backward yet."""
        return any(bracket.use not in self._retained for bracket in self.trace)

    @property
    def is_held(self) -> bool:
        """Whether this rank still holds the graph of a forward that has had no backward yet."""
        return any(use not in self._retained and self.use(use) is not None for use in self._uses)

    def offsets(self) -> dict[int, int]:
        """For each unit, the number of its next use: one above the highest that is remembered."""
        offsets: dict[int, int] = {}
        for bracket in self.trace:
            if isinstance(bracket, Enter):
                offsets[bracket.use.unit] = max(offsets.get(bracket.use.unit, 0), bracket.use.number + 1)
        return offsets

    def leave(self, backward: BackwardPass) -> None:
        """A backward has ended: uses that it did not pass through, or retained, wait for a backward of their own.

        [Note: forwards that wait]
        """
        if backward.keeps_graph:
            met = {use for use in self._uses if backward.has_met(use)}
            self._retained |= met
            for key in met:
                use = self.use(key)
                if use is not None:
                    use.has_arrived = False
            return
        self.trace = [bracket for bracket in self.trace if bracket.use in backward.waiting]
        self._uses = {use: held for use, held in self._uses.items() if use in backward.waiting}
        self._retained &= self._uses.keys()

    def limit(self) -> None:
        """Forgets all graphs if there are too many."""
        if len(self.trace) > 2 * _REMEMBERED_USES:
            self.forget()

    def forget(self) -> None:
        """Forgets all graphs: no backward can come."""
        self.trace, self._uses, self._retained = [], {}, set()
