"""The tensors that are saved and loaded: their names, what this rank holds of each,
and how it is read and written.

HeldTensor      one tensor: in memory, in another tier, or in the chunks of a streamed
                optimizer (`streamed_states.py`)
ModelTensors    those of a module, by name
ParcelWindow    reads and writes tensors that rest in another tier, a parcel at a time

[Note: names of tiles] A tensor that `zf.tile` has cut is saved under its own name:
a tile is a box of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import prod

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_fn.average import Average
from zero_fn.checkpoint.format.files import BUFFER_NBYTES, require_dtype
from zero_fn.errors import CheckpointError
from zero_fn.owners import ByOwner
from zero_fn.runtime.holding import holding_of, holding_of_state
from zero_fn.runtime.registry import units_of
from zero_fn.runtime.run import run_of
from zero_fn.storage import StagingBuffers, wait_all
from zero_fn.tiers.parcels import Parcel
from zero_fn.tiers.record import Record
from zero_fn.tiers.tier_tensor import TierTensor
from zero_fn.transforms.selection import Where
from zero_fn.values.box import Box, Holding, ranges, spans, whole_box
from zero_fn.values.dtensors import local_of
from zero_fn.values.tiled import Tiled

__all__ = [
    "HeldTensor",
    "ModelTensors",
    "ParcelWindow",
    "held_averages",
    "held_state",
    "tensors_of_groups",
]


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """One tensor of a model or an optimizer."""

    name: str
    dtype: torch.dtype
    place: Holding
    local: Tensor | None  # None: it rests in chunks of a streamed optimizer
    is_buffer: bool = False  # one that is not sharded is saved by rank 0
    # The identity of the parameter, and the name of the state.
    in_chunks: tuple[int, str] | None = None

    @property
    def is_away(self) -> bool:
        """Whether its elements rest in parcels of another tier, in their order."""
        local = self.local
        return isinstance(local, TierTensor) and local.moved is None and local.is_contiguous()

    @property
    def is_in_memory(self) -> bool:
        return self.local is not None and not self.is_away

    def own(self, ordinal: int, replica: int, replicas: int) -> tuple[Box, int] | None:
        """What this rank writes of it, and the first of these elements in what the rank holds; None
        if another writes it.

        `ordinal` is its number among the tensors; of the ranks that have all of them this is the
        one of number `replica`.
        """
        place = self.place
        box: Box | None = place.box
        if not self.is_buffer or place.replica is not None:
            box = place.own(ordinal, self.dtype.itemsize, (replica, replicas))
        elif replica:  # buffers of ranks may differ: rank 0 decides, as in training
            return None
        if box is None:
            return None
        rows = box.starts[0] - place.box.starts[0] if box.starts else 0
        return box, rows * prod(box.sizes[1:])

    def read(self, first: int, last: int, window: ParcelWindow) -> Tensor:
        """Elements that this rank holds, in order, in memory of the host."""
        local = self.local
        assert local is not None, "a pass of the streamed optimizer reads its states"
        if isinstance(local, TierTensor) and self.is_away:
            return window.read(local, first, last)
        if local.is_contiguous() and not isinstance(local, TierTensor):
            return local.view(-1)[first:last].cpu()
        parts = [box.of(local).reshape(-1) for box in spans(self.place.box.sizes, first, last)]
        return torch.cat(parts).cpu()

    def fill(
        self, dtype: torch.dtype, read: Callable[[int, Tensor], None], window: ParcelWindow
    ) -> None:
        """Fills what this rank holds, a buffer at a time; `read(first, values)`
        fills flat memory of the host."""
        local = self.local
        assert local is not None, "a pass of the streamed optimizer fills its states"
        is_direct = (
            not isinstance(local, TierTensor)
            and local.is_contiguous()
            and local.device.type == "cpu"
        )
        for first, last in ranges(self.place.box.sizes, BUFFER_NBYTES // dtype.itemsize):
            if is_direct:
                read(first, local.view(-1)[first:last])
                # It was written behind the back of torch.
                torch.autograd.graph.increment_version(local)
                continue
            values = torch.empty(last - first, dtype=dtype)
            read(first, values)
            if isinstance(local, TierTensor) and self.is_away:
                window.write(local, first, values)
                continue
            window.close()  # it may hold what the next lines write
            at = 0
            for box in spans(self.place.box.sizes, first, last):
                box.of(local).copy_(values[at : at + box.numel].view(box.sizes))
                at += box.numel


class ParcelWindow:
    """Holds one parcel of another tier in memory.

    A context manager: at its end all that was written is in the tier.
    """

    def __init__(self) -> None:
        self._record: Record | None = None
        self._parcel: Parcel | None = None
        self._buffers = StagingBuffers()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._is_changed = False

    def __enter__(self) -> ParcelWindow:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()

    def read(self, tensor: TierTensor, first: int, last: int) -> Tensor:
        """Elements of a tensor, in order."""
        out = torch.empty(last - first, dtype=tensor.dtype)
        for at, count, room in self._rooms(tensor, first, last):
            out[at : at + count] = room
        return out

    def write(self, tensor: TierTensor, first: int, values: Tensor) -> None:
        """Writes elements of a tensor, from the number `first` on."""
        for at, count, room in self._rooms(tensor, first, first + values.numel()):
            room.copy_(values[at : at + count])
            self._is_changed = True

    def _rooms(
        self, tensor: TierTensor, first: int, last: int
    ) -> Iterator[tuple[int, int, Tensor]]:
        """The parts of these elements that each parcel has: the first,
        how many, and their memory."""
        record = tensor.record
        first, last = first + tensor.first, last + tensor.first
        for parcel in record.parcels:
            for piece, offset in zip(parcel.pieces, parcel.offsets, strict=True):
                low, high = max(first, piece.start), min(last, piece.stop)
                if piece.parameter == tensor.number and low < high:
                    self._open(record, parcel)
                    begin = offset + (low - piece.start) * tensor.dtype.itemsize
                    room = self._memory[begin : begin + (high - low) * tensor.dtype.itemsize]
                    yield low - first, high - low, room.view(tensor.dtype)

    def _open(self, record: Record, parcel: Parcel) -> None:
        if self._record is record and self._parcel is parcel:
            return
        self.close()
        record.settle()
        if record.shelf.is_addressable:
            self._memory = record.memory_of(parcel)
        else:
            if self._buffers.size < parcel.nbytes:
                self._buffers = StagingBuffers(
                    1, max(each.nbytes for each in record.parcels), "a window of a checkpoint"
                )
            self._memory = self._buffers.views[0][: parcel.nbytes]
        wait_all([record.read_parcel(parcel, self._memory)])
        self._record = record
        self._parcel = parcel

    def close(self) -> None:
        """Writes what has changed of the parcel, and lets go of it."""
        record, parcel = self._record, self._parcel
        self._record = self._parcel = None
        if self._is_changed and record is not None and parcel is not None:
            self._is_changed = False
            wait_all([record.write_parcel(parcel, self._memory)])


# -- a model ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelTensors:
    """The tensors of a module."""

    # Tiles of one tensor have one name.
    held_tensors: list[HeldTensor] = field(default_factory=list)
    parameters: dict[int, HeldTensor] = field(default_factory=dict)  # by the identity of the tensor
    # Further names of tied parameters, and those in files.
    aliases: dict[str, str] = field(default_factory=dict)

    def add(self, module: nn.Module, where: Where, *, on_meta: bool = False) -> None:
        """Adds the parameters and persistent buffers that `where` selects.

        Communicates nothing, copies nothing.
        """
        tiles: dict[str, tuple[str, int, Tiled]] = {}
        known: dict[int, str] = {}
        seen: set[int] = set()
        for unit in units_of(module):
            run_of(unit).recover()
            if unit.memory.moving is not None:
                unit.follow_moved()
        keys = set(module.state_dict(keep_vars=True))
        for prefix, child in module.named_modules(remove_duplicate=False):
            if isinstance(child, Tiled):  # [Note: names of tiles]
                for number, (_, start, _) in enumerate(child.rows()):
                    tiles[f"{prefix}.tiles.{number}".lstrip(".")] = (prefix, start, child)
            for attribute, tensor in (*child._parameters.items(), *child._buffers.items()):
                if attribute in child._non_persistent_buffers_set:
                    continue
                key = f"{prefix}.{attribute}".lstrip(".")
                keys.discard(key)
                if tensor is None or not _is_selected(where, key, tensor):
                    continue
                tile = tiles.get(prefix)
                name = key if tile is None else f"{tile[0]}.{attribute}".lstrip(".")
                name = name.replace("_orig_mod.", "")  # what `torch.compile` puts before it
                if known.setdefault(id(tensor), name) != name:
                    self.aliases[name] = known[id(tensor)]
                if id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                held = _held(name, tensor, is_buffer=attribute in child._buffers, on_meta=on_meta)
                if held is not None:
                    if tile is not None:
                        held = _in_whole(held, tile[1], tile[2].whole_shapes()[attribute])
                    self.held_tensors.append(held)
                    self.parameters[id(tensor)] = held
        for key in sorted(keys):
            owner = module.get_submodule(key.rpartition(".")[0])
            raise CheckpointError(
                f"{type(owner).__name__} writes {key!r} into its state_dict in its own way.",
                why="a checkpoint has parameters and buffers under their names, and would lose it",
                fix="register a buffer for what it adds, or save its state_dict as extra=",
            )


def _held(name: str, tensor: Tensor, *, is_buffer: bool, on_meta: bool) -> HeldTensor | None:
    require_dtype(name, tensor.dtype)
    if local_of(tensor).is_meta and not on_meta:
        raise CheckpointError(
            f"{name} is on meta: it has no values.",
            fix="zf.materialize(model, device) first; it may be saved and loaded then",
        )
    place = holding_of(tensor)
    if place is None:
        return None
    return HeldTensor(name, tensor.dtype, place, local_of(tensor), is_buffer)


def _in_whole(held: HeldTensor, start: int, shape: tuple[int, ...]) -> HeldTensor:
    """A tile, as a box of the tensor that it was cut from. [Note: names of tiles]"""
    outer = Box((start, *(0,) * (len(shape) - 1)), held.place.shape)
    return replace(held, place=replace(held.place, shape=shape, box=outer.around(held.place.box)))


def _is_selected(where: Where, name: str, tensor: Tensor) -> bool:
    if where is None:
        return True
    if callable(where):
        return where(name, tensor)  # type: ignore[arg-type]
    return any(
        fnmatchcase(name, pattern) for pattern in ((where,) if isinstance(where, str) else where)
    )


# -- an optimizer ----------------------------------------------------------------------------------


def held_state(name: str, state: Tensor, parameter: Tensor, own: HeldTensor) -> HeldTensor | None:
    """A state that is a tensor in memory; `own` is its parameter.

    None if this rank holds nothing of it.
    """
    require_dtype(f"{own.name}/{name}", state.dtype)
    place = holding_of_state(name, state, parameter, own.place)
    if place is None:
        return None
    return HeldTensor(f"{own.name}/{name}", state.dtype, place, local_of(state))


def tensors_of_groups(optimizer: Optimizer, named: ModelTensors) -> list[list[HeldTensor]]:
    """The parameters of each group, as their states are held: as they are, or whole by one rank."""
    groups: list[list[HeldTensor]] = []
    for number, group in enumerate(optimizer.param_groups):
        groups.append([])
        for at, parameter in enumerate(group["params"]):
            held = named.parameters.get(id(parameter))
            if held is None:
                raise CheckpointError(
                    "The optimizer steps a parameter that the model does not have.",
                    parameter=f"number {at} of group {number}, {list(parameter.shape)}",
                    why="states are saved by the names of their parameters",
                    fix="give the model whose parameters it steps, "
                    "as it is after the last transform, and all of them",
                )
            if isinstance(optimizer, ByOwner) and optimizer.owner_of(parameter) is not None:
                held = replace(
                    held, place=Holding(held.place.shape, whole_box(held.place.shape), (0, 1))
                )
            groups[-1].append(held)
    return groups


def held_averages(
    name: str, average: Average, named: ModelTensors, where: Where
) -> list[HeldTensor]:
    """The averages of the parameters of a model that is saved, or loaded, with them."""
    average.require_hidden("save or load of the average")
    found: list[HeldTensor] = []
    for parameter, shard in average.shards():
        held = named.parameters.get(id(parameter))
        if held is not None:
            found.append(replace(held, name=f"{held.name}/{name}", dtype=shard.dtype, local=shard))
        elif where is None:
            raise CheckpointError(
                f"extra[{name!r}] is an average of a parameter that the model does not have.",
                parameter=list(parameter.shape),
                why="averages are saved by the names of their parameters",
                fix="give the model that is averaged, too: zf.save(folder, model, "
                "extra={'average': average})",
            )
    return found
