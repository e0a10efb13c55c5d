"""Which ranks share memory, and which rank of the next host keeps the files of each."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Hosts"]


class Hosts:
    """The hosts of all ranks."""

    def __init__(self, names: Sequence[str]) -> None:
        """Takes the name of the host of each rank."""
        self.names = names
        self._order = list(dict.fromkeys(names))

    @property
    def are_several(self) -> bool:
        return len(self._order) > 1

    def is_first(self, rank: int) -> bool:
        """Whether it is the first rank of its host, which acts for the others."""
        return self.names.index(self.names[rank]) == rank

    def keeper(self, rank: int) -> int:
        """The rank of the next host that keeps the files of a rank."""
        at = self._order.index(self.names[rank])
        own, following = map(self._ranks_on, (self._order * 2)[at : at + 2])
        return following[own.index(rank) % len(following)]

    def _ranks_on(self, host: str) -> list[int]:
        return [rank for rank, name in enumerate(self.names) if name == host]
