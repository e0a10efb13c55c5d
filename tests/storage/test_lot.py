"""Places on a disk that are used again: each gives what was put there last."""

from __future__ import annotations

from pathlib import Path

import torch

from zero_fn.storage.lot import Lot
from zero_fn.tiers import nvme


def _bytes(number: int, count: int = 5000) -> torch.Tensor:
    return torch.full((count,), number, dtype=torch.uint8)


def test_a_place_that_was_read_ahead_and_freed_gives_what_was_put_there_last(tmp_path: Path) -> None:
    lot = Lot(nvme(tmp_path), "activations")
    places = [lot.put(_bytes(number)) for number in range(5)]
    lot.fetch(places[0], 5000)
    lot.free(places[0], 5000)
    assert lot.put(_bytes(7)) == places[0]
    for place, expected in zip(places, (7, 1, 2, 3, 4), strict=True):
        out = _bytes(0)
        lot.get(place, out)
        assert torch.equal(out, _bytes(expected))
