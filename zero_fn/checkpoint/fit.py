"""How tensors in files fit a model: found by name, checked, verified, and put where they rest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from zero_fn.checkpoint.boxes import ranges
from zero_fn.checkpoint.contents import Contents, Key
from zero_fn.checkpoint.files import BUFFER_NBYTES
from zero_fn.checkpoint.folders import KINDS
from zero_fn.checkpoint.leaves import Leaf, Named, ParcelWindow
from zero_fn.checkpoint.together import Together
from zero_fn.errors import CheckpointError
from zero_fn.runtime.entry import units_of
from zero_fn.runtime.run import run_of
from zero_fn.transforms.loading import keeps_every_bit
from zero_fn.transforms.unsharded import refresh

__all__ = ["Fit"]

_SHOWN = 30
"""Lines of what does not fit that an error shows."""


@dataclass
class Fit:
    """How tensors in files fit a model on this rank.

    Attributes:
        named, model: What is to be loaded.
        rounds: Whether floating-point numbers may lose bits in the dtype that they rest in.
        todo: Tensors to be filled, with the key of each in the files.
        twins: Keys of one tensor here, of which the files have several values that must be the same.
        wrong: What does not fit, in words.
    """

    named: Named
    model: nn.Module | None
    rounds: bool = False
    todo: list[tuple[Key, Leaf]] = field(default_factory=list)
    twins: list[tuple[Key, Key, Leaf]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    # -- names, shapes, dtypes -----------------------------------------------------------------------------------------

    def match_model(self, source: Contents, *, is_strict: bool) -> None:
        """Finds the tensors of the model in the files.

        Raises:
            CheckpointError: The pieces of one do not make up the whole.
        """
        for leaf in self.named.leaves:
            self.match_leaf(source, ("model", self.name_of(source, leaf.name)), leaf, is_strict=is_strict)

    def match_leaf(self, source: Contents, key: Key, leaf: Leaf, *, is_strict: bool = True) -> None:
        if key not in source.pieces:
            if is_strict:
                self.wrong.append(f"{leaf.name}: not in the checkpoint")
            return
        piece = source.first(key)
        if piece.shape != leaf.place.shape:
            self.wrong.append(f"{leaf.name}: {list(piece.shape)} in the checkpoint, {list(leaf.place.shape)} here")
        elif not (_is_near if self.rounds else keeps_every_bit)(piece.dtype, leaf.dtype):
            self.wrong.append(f"{leaf.name}: {piece.dtype} in the checkpoint, and bits would be lost in {leaf.dtype}")
        else:
            source.require_all(key, leaf.place.box)
            self.todo.append((key, leaf))
            others = (("model", alias) for alias, of in self.named.aliases.items() if of == leaf.name)
            self.twins += [(key, other, leaf) for other in others if other != key and other in source.pieces]

    def name_of(self, source: Contents, name: str) -> str:
        """The name under which the checkpoint has a tensor that may be tied there, or here."""
        if ("model", name) in source.pieces:
            return name
        others = (alias for alias, of in self.named.aliases.items() if of == name)
        return next((other for other in others if ("model", other) in source.pieces), source.aliases.get(name, name))

    def note_unexpected(self, keys: Iterable[Key]) -> None:
        """What is in the files and on no rank is wrong."""
        self.wrong += [f"{name}: in the checkpoint, and not in the {kind}" for kind, name in keys]

    def missed(self, source: Contents) -> list[Key]:
        """What is in the files and has no place on this rank."""
        taken = {key for key, _ in self.todo} | {key for _, key, _ in self.twins}
        taken |= {("model", leaf.name) for leaf in self.named.leaves}
        return [key for key in source.pieces if self.model is not None and key[0] == "model" and key not in taken]

    def require(self, path: Path) -> None:
        """Raises:
        CheckpointError: Something does not fit; lists all of it.
        """
        if self.wrong:
            shown = [
                *self.wrong[:_SHOWN],
                *([f"and {len(self.wrong) - _SHOWN} more"] if len(self.wrong) > _SHOWN else []),
            ]
            raise CheckpointError(
                "The checkpoint does not fit: nothing was loaded.",
                checkpoint=path,
                **{f"{number}": line for number, line in enumerate(shown, 1)},
                fix="build the model with the sizes and dtypes of the checkpoint; rename= for other names; strict=False to "
                "leave what is in one of them only; "
                + (
                    "from_pretrained inside zero_fn.integrations.transformers.placed, where transformers converts names"
                    if self.rounds
                    else "only= for a part"
                ),
            )

    def require_wanted(self, source: Contents, together: Together, *, is_strict: bool) -> None:
        """For ranks with parameters of different names: what no rank has a place for. One message of a bit for each tensor.

        Raises:
            CheckpointError: There is some; on every rank.
        """
        source.read_all()
        keys = sorted(key for key in source.pieces if key[0] in KINDS[:2])
        missed = set(self.missed(source))
        wanted = together.union([key not in missed for key in keys])
        if is_strict:
            self.note_unexpected(key for key, is_wanted in zip(keys, wanted, strict=True) if not is_wanted)
            self.require(source.path)

    # -- elements ------------------------------------------------------------------------------------------------------

    def wanted(self) -> list[tuple[Key, Leaf]]:
        """All that this rank will read, and what for."""
        return self.todo

    def verify(self, source: Contents, *, everything: bool) -> None:
        """Compares what the files have several times, and reads all that this rank will read.

        Raises:
            CheckpointError: A block is not what was written; or one tensor has two values.
            StorageError: The disk refused.
        """
        for key, other, leaf in self.twins:
            self._require_equal(source, key, other, leaf)
        if not everything:
            return
        for key, leaf in self.wanted():
            dtype, box = source.first(key).dtype, leaf.place.box
            for first, last in ranges(box.sizes, BUFFER_NBYTES // dtype.itemsize):
                source.fill(key, box, first, torch.empty(last - first, dtype=dtype, device="meta"), keeps=False)

    def _require_equal(self, source: Contents, key: Key, other: Key, leaf: Leaf) -> None:
        box, one, two = leaf.place.box, source.first(key), source.first(other)
        is_alike = (one.shape, one.dtype) == (two.shape, two.dtype)
        for first, last in ranges(box.sizes, BUFFER_NBYTES // 2 // one.dtype.itemsize) if is_alike else ():
            values = torch.empty(2, last - first, dtype=one.dtype)
            for tied, room in zip((key, other), values, strict=True):
                source.fill(tied, box, first, room)
            is_alike = is_alike and torch.equal(*values.view(torch.uint8))
        if not is_alike:
            raise CheckpointError(
                f"{key[1]} and {other[1]} are one parameter here, and the files have a value for each.",
                files=source.path,
                why="one of them would be lost",
                fix="untie them before the transform, or leave one of them out: rename=",
            )

    def follow(self, named: Named) -> None:
        """The same tensors are elsewhere now: they were given memory."""
        there = dict(zip(map(id, self.named.leaves), named.leaves, strict=True))
        self.todo = [(key, there[id(leaf)]) for key, leaf in self.todo]

    def put_tensors(self, source: Contents) -> None:
        """Reads to where they rest what a model has, and of an optimizer what is in memory.

        Raises:
            CheckpointError: A block is not what was written.
            StorageError: A disk refused.
        """
        with ParcelWindow() as window:
            for key, leaf in self.todo:
                dtype, box = source.first(key).dtype, leaf.place.box
                for first, last in ranges(box.sizes, BUFFER_NBYTES // dtype.itemsize):
                    room = leaf.room(first, last, dtype)
                    values = torch.empty(last - first, dtype=dtype) if room is None else room
                    source.fill(key, box, first, values)
                    if room is None:
                        leaf.write(first, values, window)
                    else:
                        torch.autograd.graph.increment_version(room)  # it was written behind the back of torch
        if self.model is not None:
            _tell(self.model)


def _is_near(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether values of one dtype become values of the other but for rounding. Numbers of a byte have scales elsewhere."""
    if source.is_floating_point and target.is_floating_point:
        return source == target or min(source.itemsize, target.itemsize) > 1
    return keeps_every_bit(source, target)


def _tell(model: nn.Module) -> None:
    """Resting parameters were written: what was gathered before is stale, and ranks compare what several of them hold."""
    units = units_of(model)
    if not units:
        return
    refresh(model)
    for unit in units:
        run_of(unit).forwards.note_loaded()
        for slot in unit.slots:
            slot.initial = None
