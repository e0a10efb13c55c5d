"""The offloaded state of a module: shelves for parameters and gradients,
and gradients on their way there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from zero_fn.errors import StorageError
from zero_fn.storage import TierStorage, stagings_for, storage_on
from zero_fn.storage.pool import Landing
from zero_fn.storage.stored_files import StoredFiles
from zero_fn.tiers.parcels import Form, record_nbytes, staged_nbytes
from zero_fn.tiers.record import Record
from zero_fn.transport.agree import Outcome
from zero_fn.transport.line import Line
from zero_fn.values.tiers import Shelved

__all__ = ["OffloadedState"]


class OffloadedState:
    """The shelves of one transformed module, and its gradients that are being written to them.

    If a disk fails during a backward, the error is kept until the end of the backward,
    when all ranks are told.
    """

    def __init__(self, transport: Line) -> None:
        self._transport = transport
        self._shelves: dict[Shelved, TierStorage] = {}
        self._reserved: dict[Shelved, list[int]] = {}
        self.landing = Landing()
        # Files of other programs in which parameters rest, read in place.
        self.files: StoredFiles | None = None
        self._writing: deque[Record] = deque()
        self._failure: StorageError | None = None

    def shelf(self, what: Shelved) -> TierStorage:
        """The shelf for parameters, or for gradients, of the module in a tier."""
        if what not in self._shelves:
            kind, tier = what
            self._shelves[what] = storage_on(tier, kind)
        return self._shelves[what]

    def shelves(self) -> list[tuple[str, TierStorage]]:
        """All shelves, each with the name of what it holds."""
        known: list[tuple[str, TierStorage]] = [
            (kind, shelf) for (kind, _), shelf in self._shelves.items()
        ]
        return known if self.files is None else [*known, ("parameters", self.files)]

    def reserve(self, records: dict[Shelved, list[list[Form]]], device: torch.device) -> None:
        """Makes room for all records of the module, which will be laid out in this order."""
        for what, forms in records.items():
            sizes = [record_nbytes(each) for each in forms]
            self._reserved[what] = self.shelf(what).reserve(sizes)
            self.shelf(what).stage(max(map(staged_nbytes, forms)), stagings_for(device.type))

    def place_for(self, what: Shelved, forms: list[Form], device: torch.device) -> int:
        """The place of the next record: the next one that was reserved, or a new one;
        none if it will be in files."""
        if self.files is not None and what[0] == "parameters":
            return 0
        reserved = self._reserved.get(what)
        self.shelf(what).stage(staged_nbytes(forms), stagings_for(device.type))
        return reserved.pop(0) if reserved else self.shelf(what).reserve([record_nbytes(forms)])[0]

    def note(self, failure: StorageError | None) -> None:
        """Keeps a failure of a tier until the end of the backward."""
        self._failure = self._failure or failure

    def write_gradients(self, record: Record, values: dict[int, Tensor]) -> None:
        """Begins to write gradients, flat, by number in their record:
        one record for each staging buffer.

        On an accelerator those of one record come to the host while those of
        the record before are written.
        """
        with self._failing_at_the_end():
            for other in self._writing:
                other.go_on()
            self._finish_writing(down_to=stagings_for(record.device.type) - 1)
            self._writing.append(record)
            record.begin_writing(values)

    def finish_gradients(self) -> None:
        """Waits until all gradients are in their tier. A collective, if any may be in another tier.

        Raises:
            StorageError: On every rank, if a tier has failed on any in this backward.
        """
        if not any(kind == "gradients" for kind, _ in self._shelves):
            return
        with self._failing_at_the_end():
            self._finish_writing()
        self._writing.clear()
        failure, self._failure = self._failure, None
        found = Outcome(self._transport, failure, "Writing gradients").failed_on_any_rank()
        if found is not None:
            raise found

    def _finish_writing(self, *, down_to: int = 0) -> None:
        while len(self._writing) > down_to:
            self._writing.popleft().finish_writing()

    @contextmanager
    def _failing_at_the_end(self) -> Iterator[None]:
        """Keeps the error of a disk until all ranks are told."""
        try:
            yield
        except StorageError as error:
            self.note(error)
