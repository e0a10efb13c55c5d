"""What a rank loads: what of the files fills what (`match.py` finds it), and what does not fit.

It is checked, verified and put there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero_fn.checkpoint.agreement import RankMeeting
from zero_fn.checkpoint.format.contents import Contents, Key
from zero_fn.checkpoint.format.folders import AVERAGES, CUT
from zero_fn.checkpoint.live.streamed_states import (
    end_step,
)
from zero_fn.checkpoint.live.tensors import (
    HeldTensor,
    ModelTensors,
    ParcelWindow,
)
from zero_fn.errors import CheckpointError
from zero_fn.runtime.registry import units_of
from zero_fn.runtime.run import run_of
from zero_fn.streamed import Streamed
from zero_fn.transforms.unsharded import refresh
from zero_fn.values.box import Box

__all__ = ["LoadPlan"]

_SHOWN = 30
"""How many lines of what does not fit an error shows."""


@dataclass
class LoadPlan:
    """What this rank loads from files, and what of it does not fit."""

    named: ModelTensors
    model: nn.Module | None
    optimizers: Sequence[Optimizer] = ()
    # Whether floating-point numbers may lose bits in the dtype that they rest in.
    rounds: bool = False
    # Tensors to be filled, and what of the files fills them.
    todo: list[tuple[Key, HeldTensor]] = field(default_factory=list)
    # Tensors that are tied here and were saved separately: they must be equal.
    twins: list[tuple[Key, Key, HeldTensor]] = field(default_factory=list)
    # Names in the files of the parameters that it steps.
    stepped: set[str] = field(default_factory=set)
    # What is to be done once the tensors are filled.
    then: list[Callable[[], object]] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)  # of `extra`
    averages: set[str] = field(default_factory=set)  # names in `extra` of those that are loaded
    wrong: list[str] = field(default_factory=list)  # what does not fit, in words

    def note_unexpected(self, keys: Iterable[Key]) -> None:
        """Notes as wrong what is in the files and on no rank."""
        self.wrong += [f"{name}: in the checkpoint, and not in the {kind}" for kind, name in keys]

    def missed(self, source: Contents) -> list[Key]:
        """What is in the files and has no place on this rank."""
        taken = {key for key, _ in self.todo} | {key for _, key, _ in self.twins}
        taken |= {("model", held.name) for held in self.named.held_tensors}
        kinds = {"model"} if self.model is not None else set()
        kinds |= {"optimizer"} if self.optimizers else set()
        kinds |= {AVERAGES} if self.averages else set()
        return [
            (kind, name)
            for kind, name in source.pieces
            if kind in kinds and (kind, name) not in taken
            if kind != "optimizer" or name.rpartition("/")[0] not in self.stepped
            if kind != AVERAGES or name.rpartition("/")[2] in self.averages
        ]

    def require(self, path: Path) -> None:
        """Raises:
        CheckpointError: Something does not fit; lists all of it.
        """
        if self.wrong:
            more = len(self.wrong) - _SHOWN
            shown = [*self.wrong[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]
            raise CheckpointError(
                "The checkpoint does not fit: nothing was loaded.",
                checkpoint=path,
                **{f"{number}": line for number, line in enumerate(shown, 1)},
                fix="build the model with the sizes and dtypes of the checkpoint; "
                "rename= for other names; strict=False to leave what is in one of them only; "
                + (
                    "from_pretrained inside zero_fn.integrations.transformers.placed, "
                    "where transformers converts names"
                    if self.rounds
                    else "only= for a part"
                ),
            )

    def require_wanted(self, source: Contents, meeting: RankMeeting, *, is_strict: bool) -> None:
        """Where ranks have parameters of different names: refuses what no rank has a place for.

        Sends a byte a tensor.
        """
        source.read_all()
        keys = sorted(key for key in source.pieces if key[0] in CUT)
        missed = set(self.missed(source))
        wanted = meeting.union([key not in missed for key in keys])
        if is_strict:
            self.note_unexpected(
                key for key, is_wanted in zip(keys, wanted, strict=True) if not is_wanted
            )
            self.require(source.path)

    # -- elements ----------------------------------------------------------------------------------

    def verify(self, source: Contents, *, everything: bool) -> None:
        """Compares values that must be equal, and, if `everything`,
        reads all that this rank will read."""
        for key, other, held in self.twins:
            _require_one_value(source, key, other, held.place.box)
        for key, held in self.todo if everything else ():
            source.verify(key, held.place.box)

    def follow(self, named: ModelTensors) -> None:
        """Takes note that the tensors of the model are elsewhere now: they were given memory."""
        there = dict(zip(map(id, self.named.held_tensors), named.held_tensors, strict=True))
        self.todo = [(key, there[id(held)]) for key, held in self.todo]

    def put(self, source: Contents) -> None:
        """Reads everything to where it rests."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, Streamed):
                end_step(optimizer)
        with ParcelWindow() as window:
            for key, held in self.todo:
                if held.in_chunks is None:
                    held.fill(
                        source.first(key).dtype, partial(source.fill, key, held.place.box), window
                    )
        if self.model is not None:
            _note_loaded(self.model)
        for act in self.then:
            act()


def _require_one_value(source: Contents, key: Key, other: Key, box: Box) -> None:
    one, two = source.first(key), source.first(other)
    if (one.shape, one.dtype) == (two.shape, two.dtype):
        pairs = zip(source.read(key, box, parts=2), source.read(other, box, parts=2), strict=True)
        if all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for (_, a), (_, b) in pairs):
            return
    raise CheckpointError(
        f"{key[1]} and {other[1]} are one parameter here, and the files have a value for each.",
        files=source.path,
        why="one of them would be lost",
        fix="untie them before the transform, or leave one of them out: rename=",
    )


def _note_loaded(model: nn.Module) -> None:
    """Tells the units of a model that resting parameters were written: what was gathered before is
    stale, and ranks compare what several of them hold."""
    units = units_of(model)
    if not units:
        return
    refresh(model)
    for unit in units:
        run_of(unit).note_loaded()
        for slot in unit.slots:
            slot.initial = None
