"""Numbers that tell whether a model and its optimizer have the values that they had, however they are cut.

    digest of a tensor = sum over its elements of  bits * h(0, i) * h(1, j) * ...  modulo 2^64,  (i, j, ...) its index

Parts of a tensor have parts of the sum, so ranks add theirs up. Each h is odd, and what is odd has an inverse modulo 2^64: no
element changes alone, and the sum stays. h is drawn anew for each index, so elements that change places change the sum, too.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_fn.checkpoint.format.files import StoredBox
from zero_fn.checkpoint.rank_meeting import Agreement
from zero_fn.checkpoint.writing import Inventory, Writing, shared_out
from zero_fn.runtime.box import Box, spans
from zero_fn.transport.agreement import digest

__all__ = ["StateDigests", "digests_of"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class StateDigests:
    """Digests by the names of tensors: of one rank, or of several together."""

    parts: dict[str, int] = field(default_factory=dict)
    """Of tensors of which ranks hold parts. Of each element that several hold, one of them has counted it."""

    wholes: dict[str, list[str]] = field(default_factory=dict)
    """Of what each rank has whole: plain tensors, and values that are none. Ranks may differ in buffers."""

    def add(self, other: StateDigests) -> None:
        """Takes in those of another rank."""
        for name, part in other.parts.items():
            self.parts[name] = (self.parts.get(name, 0) + part) % 2**64
        for name, found in other.wholes.items():
            self.wholes[name] = sorted({*self.wholes.get(name, ()), *found})

    def differing(self, now: StateDigests) -> list[str]:
        """What is not now as it was here, in words."""
        before, after = self._each(), now._each()
        words = {name: "had other values" for name in before if not after.get(name, set()) <= before[name]}
        words |= dict.fromkeys(before.keys() - after.keys(), "is not there now")
        words |= dict.fromkeys(after.keys() - before.keys(), "was not there")
        return [f"{name}: {words[name]}" for name in dict.fromkeys((*before, *after)) if name in words]

    def _each(self) -> dict[str, set[str]]:
        found = {name: set(each) for name, each in self.wholes.items()}
        for name, part in self.parts.items():
            found.setdefault(name, set()).add(f"{part:016x}")
        return found


def digests_of(model: nn.Module, optimizer: Optimizer | None) -> tuple[StateDigests, str]:
    """Digests of what this rank would save, and a word that differs if tensors are cut otherwise. Communicates nothing."""
    plan, found, sums = Inventory(), StateDigests(), _Sums()
    plan.add(model, optimizer, {}, None)
    writing = Writing(Path(), 0, plan, "", shared_out(plan, Agreement("", 0, 1, True)), make=lambda *_: sums)
    writing.begin(copies=False)
    writing.write_values()
    layout = []
    for share in writing.each():
        name, box = share.piece.name, share.piece.box
        layout.append(f"{name} {share.piece.shape} {box}")
        if share.held.place.replica is None:
            found.wholes[name] = [f"{sums.of(name):016x}"]
        else:
            found.parts[name] = sums.of(name)
    for group in plan.says.get("groups", ()):
        for name, value in group["options"].items():
            found.wholes[f"{name} of the group of {(*group['params'], 'nothing')[0]}"] = [_digest_of(value)]
    for owner, values in plan.says.get("values", {}).items():
        found.wholes |= {f"{owner}/{name}": [_digest_of(value)] for name, value in values.items()}
    return found, digest([torch.__version__, *sorted(layout)]).hex()


def _digest_of(value: Any) -> str:
    return digest([json.dumps(value)]).hex()


class _Sums:
    """Takes elements as a file does, and keeps sums of them by the name of the tensor."""

    def __init__(self) -> None:
        self._sums, self._taken = Counter[str](), Counter[int]()

    def of(self, name: str) -> int:
        """The sum of a tensor."""
        return self._sums[name] % 2**64

    def append(self, piece: StoredBox, values: Tensor) -> None:
        """Adds the next elements of a box."""
        first = self._taken[id(piece)]
        self._taken[id(piece)] += values.numel()
        for part in spans(piece.box.sizes, first, first + values.numel()):
            self._sums[piece.name] += _sum(values[: part.numel].view(part.sizes), piece.box.around(part))
            values = values[part.numel :]

    def finish(self) -> dict[str, Any]:
        """Nothing is in a file."""
        return {}

    def close(self) -> None:
        """Nothing is open."""


def _sum(values: Tensor, box: Box) -> int:
    """The sum of a box, which has these values: over the last dim, then over the one before it, ..."""
    bits = values.detach().view(_INTEGERS[values.dtype.itemsize]).numpy()
    for dim in reversed(
        range(bits.ndim)
    ):  # torch has no such loop for integers, and would make numbers of 8 bytes first
        bits = np.asarray(np.einsum("...i,i->...", bits, _weights(dim, box.starts[dim], box.sizes[dim])))
    return int(bits)


@functools.lru_cache(64)
def _weights(dim: int, start: int, size: int) -> np.ndarray[Any, Any]:
    """h(dim, i) of each i."""
    numbers = torch.arange(start, start + size, device="cpu").add_(dim << 48).mul_(-0x61C8864680B583EB)
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        numbers.bitwise_xor_(numbers >> shift).mul_(factor)
    return numbers.bitwise_xor_(numbers >> 31).bitwise_or_(1).numpy()
