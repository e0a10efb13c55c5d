"""Which part of the tensors a rank writes, and its files."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from zero_fn.checkpoint.agreement import Agreement
from zero_fn.checkpoint.format.files import BUFFER_NBYTES, StoredBox
from zero_fn.checkpoint.format.folders import tensors_name
from zero_fn.checkpoint.format.writer import Writer
from zero_fn.checkpoint.live.inventory import Inventory
from zero_fn.checkpoint.live.streamed_states import each_state
from zero_fn.checkpoint.live.tensors import HeldTensor, ParcelWindow
from zero_fn.storage import Slab
from zero_fn.streamed import Streamed
from zero_fn.values.box import ranges
from zero_fn.values.tiers import Cpu

__all__ = ["RankFiles", "Share", "shared_out"]

_SMALL_NBYTES = 4096


@dataclass
class Share:
    """What this rank writes of a tensor."""

    piece: StoredBox
    held: HeldTensor
    first: int  # of its elements, in what the rank holds

    def write(self, writer: Writer, window: ParcelWindow) -> None:
        """Writes all elements, a buffer at a time."""
        for first, last in ranges(self.piece.box.sizes, BUFFER_NBYTES // self.piece.dtype.itemsize):
            writer.append(self.piece, self.held.read(self.first + first, self.first + last, window))


def shared_out(
    plan: Inventory, agreed: Agreement, *, small_apart: bool = False
) -> dict[str, list[list[Share]]]:
    """What this rank writes, by kind and file.

    A file has one box of each name: tiles go to several files. With `small_apart` small tensors,
    which many ranks read, have files of their own.
    """
    found: dict[str, list[list[Share]]] = {}
    for kind, held_tensors in plan.held_tensors.items():
        files: dict[tuple[int, bool], list[Share]] = {}
        taken: Counter[str] = Counter()
        for ordinal, held in enumerate(held_tensors):
            whole = held.place.box, 0
            is_own = kind == "extra"
            own = whole if is_own else held.own(ordinal, agreed.replica, agreed.replicas)
            if own is None:
                continue
            box, first = own
            piece = StoredBox(held.name, held.dtype, held.place.shape, box)
            file = taken[held.name], small_apart and piece.nbytes <= _SMALL_NBYTES
            taken[held.name] += 1
            files.setdefault(file, []).append(Share(piece, held, first))
        found[kind] = list(files.values())
    return found


@dataclass
class RankFiles:
    """The files of one rank, in a folder that is there."""

    writer: Writer
    rank: int
    plan: Inventory
    files: dict[str, list[list[Share]]]  # what this rank writes, by kind and file
    room: list[Slab] = field(default_factory=list)  # memory for copies, for the next save, too

    def begin(self, *, copies: bool) -> None:
        """Makes the files, and writes what rests in tiers; with `copies`,
        what is in memory is copied to the host."""
        for kind, files in self.files.items():
            for number, shares in enumerate(files):
                pieces = [share.piece for share in shares]
                self.writer.make(kind, tensors_name(kind, self.rank, number), pieces)
        if copies:
            _copy([share for share in self.each() if share.held.is_in_memory], self.room)
        with ParcelWindow() as window:
            for share in self.each():
                if share.held.is_away:
                    share.write(self.writer, window)
        for optimizer in self.plan.streamed:
            self._write_chunks(optimizer)

    def _write_chunks(self, optimizer: Streamed) -> None:
        in_chunks = {
            share.held.in_chunks: share for share in self.each() if share.held.in_chunks is not None
        }

        def take(parameter: Tensor, name: str, first: int, values: Tensor) -> None:
            share = in_chunks.get((id(parameter), name))
            if share is None:  # another rank writes this state
                return
            low = max(first, share.first)
            high = min(first + values.numel(), share.first + share.piece.box.numel)
            if low < high:
                self.writer.append(share.piece, values[low - first : high - first])

        each_state(optimizer, take, in_chunks)

    def write_rest(self) -> None:
        """Writes what is in memory, and then this rank's part of the manifest."""
        with ParcelWindow() as window:
            for share in self.each():
                if share.held.is_in_memory:
                    share.write(self.writer, window)
        self.writer.finish_part(self.rank, self.plan.says)

    def each(self) -> list[Share]:
        """All that this rank writes, in the order of files."""
        return [share for files in self.files.values() for shares in files for share in shares]

    def names(self) -> list[str]:
        """The names of the files of tensors."""
        return [
            tensors_name(kind, self.rank, number)
            for kind, files in self.files.items()
            for number in range(len(files))
        ]


def _copy(shares: list[Share], room: list[Slab]) -> None:
    """Copies what is to be written into memory of the host; it is written from there."""
    sizes = [-(-share.piece.nbytes // 64) * 64 for share in shares]
    if not sum(sizes):
        return
    if not room or room[0].nbytes < sum(sizes):
        room[:] = [
            Slab(sum(sizes), Cpu(True, None), "copies of what is saved", forked=False, huge=False)
        ]
    memory = room[0].memory
    is_on_device = False
    for share, part in zip(shares, torch.split(memory[: sum(sizes)], sizes), strict=True):
        copy = part[: share.piece.nbytes].view(share.piece.dtype)
        local, first, last = share.held.local, share.first, share.first + share.piece.box.numel
        if local is not None and local.is_contiguous() and local.device.type != "cpu":
            copy.copy_(local.view(-1)[first:last], non_blocking=True)
            is_on_device = True
        else:
            copy.copy_(share.held.read(first, last, ParcelWindow()))
        share.held, share.first = replace(share.held, local=copy), 0
    if is_on_device:
        torch.accelerator.synchronize()
