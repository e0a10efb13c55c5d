"""`weights`: hands the values of a model over to another engine, while training goes on;
`apply_weights` takes them there.

lockstep  all ranks gather bucket after bucket; each first says whether its loop still wants one, so
          a bucket that nobody wants is not gathered, and a rank whose loop has ended takes part in
          the gathers of the others
changes   a pass is over values of one moment. What was written since the call is refused before it
          is read, on all ranks: each also says whether it has met such a tensor
version   a copy, on the host, of what was yielded; what differs from it in a bit has changed. Each
          element is compared by the rank that would write it into a checkpoint (`Holding.own`), so
          all copies together are one model
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zero_fn.checkpoint.agreement import RankMeeting, failure_of
from zero_fn.checkpoint.huggingface.own_names import require_own_names
from zero_fn.checkpoint.live.tensors import HeldTensor, ModelTensors, ParcelWindow
from zero_fn.checkpoint.loading import Rename, renamed_by
from zero_fn.checkpoint.saving import wait_for_saving
from zero_fn.errors import LayoutError, StateError
from zero_fn.runtime.registry import entry_points_below, require_idle, units_of
from zero_fn.runtime.resting_edits import watch_edits
from zero_fn.runtime.run import run_of
from zero_fn.runtime.slot import Slot, meshes_of, slot_of
from zero_fn.runtime.uncompiled import uncompiled
from zero_fn.runtime.unit import unit_of
from zero_fn.tiers.tier_tensor import TierTensor, in_memory
from zero_fn.transport.agree import Bits, on_all_ranks
from zero_fn.transport.line import Line
from zero_fn.values.box import Box
from zero_fn.values.dtensors import local_of, on_spec, spec_on
from zero_fn.values.dtypes import INTEGERS
from zero_fn.values.tiers import nbytes_of_text

__all__ = ["Weights", "WeightsVersion", "apply_weights", "weights"]

_COMPARED = 64  # bytes for each element that is compared, if all have changed
_Key = tuple[str, int]  # the name of a tensor, and the number of the tile


@uncompiled
def weights(
    model: nn.Module,
    *,
    names: str | Rename = "hf",
    dtype: torch.dtype | None = None,
    bucket: int | str = "64MiB",
    whole: bool = True,
    keep: bool = False,
    since: WeightsVersion | None = None,
) -> Weights:
    """The weights of a model, one tensor after another, for an engine that generates.

    All ranks call it, and loop.

        for name, tensor in zf.weights(model, dtype=torch.bfloat16): ...  # whole, on every rank

    Parameters, frozen ones too, and persistent buffers, which are this rank's (of a pipeline, its
    stage's); tied ones once, under their first name. They are copies, cast before they travel, in
    the memory of one bucket, or of the largest tensor if that is larger, beside what the loop
    holds. A loop may end early, on some ranks or on all: where `break` or an exception leaves it,
    this rank takes part in what others still gather; `with zf.weights(model) as items:` ends one
    that has a name. Until then forwards are refused.

    With `keep=True` a pass that has come to its end leaves a `version`,
    and `since=version` yields what has changed since:

        items = zf.weights(model, dtype=torch.bfloat16, keep=True)
        zf.apply_weights(engine, items)
        version = items.version  # holds a copy: version.nbytes
        for name, indices, values in zf.weights(model, since=version): ...  # of this rank's shards

    All values are those of the call. If one is written before the loop has come to it
    (`optimizer.step()`, `zf.load`, an average that is shown, adapters that are merged), the next
    item raises.

    Indices count the elements of the whole tensor, row by row, in int32 (int64 from 2^31 elements
    on). A change of any bit counts. The version then stands for what was yielded last: after a pass
    that breaks off the next one has the rest.

    Communicates 640 bytes from each rank to rank 0, and back; of whole tensors, an all-gather of
    each bucket and two messages of a byte per rank. Changes and parts are read from the shards.

    Args:
        model: Any module, transformed or not, in memory or in tiers.
        names: "hf": those of `zf.save_pretrained`; or names for the model's,
            as regular expressions or a function.
        dtype: The dtype of floating-point tensors; None: that in which they rest.
        bucket: The most bytes that are gathered, or compared, together, as a number or as text.
        whole: Whole tensors. Without, `(name, part, starts)`: what this rank holds,
            and its first index in each dim.
        keep: Whether to keep a copy of what was yielded, for `since`:
            over all ranks one model in `dtype`.
        since: The `version` of an earlier pass over the same model.
            It goes without dtype, whole and keep.

    Raises:
        StateError: The model is in use, or its weights are being handed over already; `since` is of
            another model. In the loop: values were written since the call.
        LayoutError: `names` is another text, or gives a name twice; options exclude each other.
        CheckpointError, StorageError: Something has no values,
            or no names of its own; a tier could not be read.
        DisagreementError, LostRankError: Ranks were given different arguments;
            a rank does not take part.
    """
    if since is not None and (dtype is not None or keep or not whole):
        raise LayoutError(
            "since= goes without dtype=, keep= and whole=.", fix="zf.weights(model, since=version)"
        )
    wait_for_saving()
    plan = _HandOver(since or WeightsVersion(dtype), keeps=keep)
    failure = failure_of(lambda: plan.add(model, names, nbytes_of_text(bucket, "bucket")))
    same = (dtype, bucket, whole, keep, since and since.name)
    agreed = RankMeeting().agree(
        "Handing weights over",
        failure,
        lambda: str(time.time_ns()),
        same=same,
        same_names=[*plan.entries],
    )
    plan.deal(agreed.replica, agreed.replicas)
    plan.name = agreed.text
    return Weights(
        plan, _changes(plan) if since is not None else _wholes(plan) if whole else _shards(plan)
    )


class WeightsVersion:
    """What a pass of `zf.weights(keep=True)` has yielded, as far as this rank compares it:
    a copy in memory of the host."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self.name = ""  # the same on all ranks, once the pass has come to its end
        self.values: dict[_Key, Tensor] = {}  # flat

    @property
    def nbytes(self) -> int:
        """Bytes of the copy on this rank."""
        return sum(each.nbytes for each in self.values.values())


class Weights:
    """An iterator over weights, from `zf.weights`; a context manager that ends it."""

    def __init__(self, plan: _HandOver, items: Generator[Any, None, None]) -> None:
        self._plan = plan
        self._items = _refusing(plan, items)
        next(self._items)  # begun: from here on its end is that of a pass

    def __iter__(self) -> Weights:
        return self

    def __next__(self) -> Any:
        return next(self._items)

    def close(self) -> None:
        """Ends it: takes part in what other ranks still gather."""
        self._items.close()

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def version(self) -> WeightsVersion:
        """What was yielded, for `since=`: of a pass with `keep=True` that has come to its end;
        else raises StateError."""
        if not self._plan.keeps or not self._plan.version.name:
            raise StateError(
                "There is no version of these weights.",
                why="the loop has not come to its end"
                if self._plan.keeps
                else "keep=True was not given",
                fix="items = zf.weights(model, keep=True); "
                "loop over all of them; then items.version",
            )
        return self._plan.version


@dataclass
class _Handed:
    """A tensor of the model, or a tile of one."""

    held: HeldTensor
    tensor: Tensor
    dtype: torch.dtype
    slot: Slot | None
    line: Line | None  # the ranks that gather it together
    # What this rank compares of what it holds: the first, and how many.
    own: tuple[int, int] | None = None
    sealed: object = None  # `seal` at the call

    def seal(self) -> object:
        """What is another after the tensor was written, but by some operations
        on a DTensor (`watch_edits`)."""
        local, unit = local_of(self.tensor), unit_of(self.slot)
        found = [0 if each.is_inference() else each._version for each in (self.tensor, local)]
        found.append(0 if unit is None else unit.generation)
        if isinstance(local, TierTensor):
            return found + [parcel.version for parcel in local.record.parcels]
        return [*found, local.data_ptr()]

    def read(self) -> Tensor:
        """What this rank holds, cast, in memory: of a parameter in its
        place in room for the whole."""
        if self.slot is None:
            return in_memory(self.tensor.detach()).to(self.dtype, copy=True)
        flat = self.slot.flat
        return self.slot.path.around(in_memory(flat), self.dtype, flat.device).memory

    def local(self, read: Tensor) -> Tensor:
        """This rank's part of what `read` has returned, as a view."""
        if self.slot is None:
            return local_of(read)
        return self.slot.path.local_view(
            read.narrow(0, self.slot.path.start, self.slot.path.local_numel)
        )

    def whole(self, gathered: Tensor) -> Tensor:
        """The whole tensor. Of one on model axes a collective of torch over these."""
        if (slot := self.slot) is not None:
            gathered = slot.path.whole_view(gathered)
            if slot.model is not None:
                gathered = on_spec(
                    gathered, spec_on(slot.model, slot.full_shape, slot.full_stride, self.dtype)
                )
        return gathered.full_tensor() if isinstance(gathered, DTensor) else gathered

    def in_whole(self, numbers: Tensor) -> Tensor:
        """The numbers in the whole tensor of elements that this rank holds,
        by their numbers here."""
        box, shape, step = self.held.place.box, self.held.place.shape, 1
        if box.sizes[1:] == shape[1:]:  # rows: no division
            found = numbers + sum(box.starts[:1]) * prod(shape[1:])
        else:
            found = torch.zeros_like(numbers)
            dims = zip(box.starts[::-1], box.sizes[::-1], shape[::-1], strict=True)
            for start, size, count in dims:
                found += (numbers % size + start) * step
                numbers, step = numbers // size, step * count
        return found if prod(shape) >= 2**31 else found.int()


class _HandOver:
    """The tensors of a model, by the names that are yielded."""

    def __init__(self, version: WeightsVersion, *, keeps: bool) -> None:
        self.version = version
        self.keeps = keeps
        self.most = 0
        self.name = ""
        self.is_changed = False  # here, or on a rank that gathers with this one
        self.edited: set[Slot] = set()
        self.entries: dict[str, list[_Handed]] = {}
        self.modules: list[nn.Module] = []  # at which units are entered

    def add(self, model: nn.Module, names: str | Rename, most: int) -> None:
        """Names all tensors. Communicates nothing."""
        self.most = most
        self.modules = list({entry.module: None for _, entry in entry_points_below(model)})
        if any(_refuse in each._forward_pre_hooks.values() for each in self.modules):
            _refuse()
        require_idle(units_of(model), "weights")
        for unit in units_of(model):
            unit.follow_moved()
        if isinstance(names, str):
            require_own_names(model)
        renamed, named = renamed_by(None if isinstance(names, str) else names), ModelTensors()
        tiles: dict[str, list[_Handed]] = {}
        named.add(model, None)
        by_id = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        for key, held in named.parameters.items():
            slot = slot_of(by_id[key])
            dtype = self.version.dtype if held.dtype.is_floating_point else None
            if isinstance(local := local_of(by_id[key]), TierTensor):
                local.record.settle()  # a step that waits is no change
            owner = unit_of(slot)
            line = run_of(owner).transport if owner is not None else None
            tiles.setdefault(held.name, []).append(
                _Handed(held, by_id[key], dtype or held.dtype, slot, line)
            )
        self.entries = {renamed(name): parts for name, parts in tiles.items()}
        if isinstance(names, str) and names != "hf":
            raise LayoutError(
                "names= is a word that is not known.", got=repr(names), fix='names="hf"'
            )
        if len(self.entries) < len(tiles):
            raise LayoutError(
                "names= does not give each tensor a name of its own.",
                fix='names="hf", or regular expressions and their replacements, '
                "or a function of the name",
            )

    def deal(self, replica: int, replicas: int) -> None:
        """Decides what this rank compares, and looks whether that is what the version has."""
        now = {}
        for ordinal, (key, part) in enumerate(self.each()):
            own = part.held.own(ordinal, replica, replicas)
            part.sealed = part.seal()
            if own is not None:
                box, first = own
                part.own = first, box.numel
                now[key] = (box.numel, part.dtype)
        if self.version.name and now != {
            key: (v.numel(), v.dtype) for key, v in self.version.values.items()
        }:
            raise StateError(
                "since= is a version of other weights.",
                why="tensors, names, dtypes or shards differ",
                fix="items = zf.weights(model, keep=True)",
            )

    def each(self) -> Iterator[tuple[_Key, _Handed]]:
        """All tensors and tiles."""
        return (
            ((name, at), part)
            for name, parts in self.entries.items()
            for at, part in enumerate(parts)
        )

    def look_at(self, parts: Iterable[_Handed]) -> bool:
        """Whether any of these tensors, or one before, was written since the call."""
        self.is_changed = self.is_changed or any(
            p.slot in self.edited or p.seal() != p.sealed for p in parts
        )
        return self.is_changed

    def require_unchanged(self, parts: Iterable[_Handed]) -> None:
        """Refuses tensors that were written since the call."""
        if self.look_at(parts):
            raise StateError(
                "Weights were changed in a loop that hands them over.",
                why="what the loop has had is of before, and the next would be of after",
                fix="step, load, merge adapters and show averages before zf.weights(model), "
                "or after the loop; here, or on another rank that did so, begin another pass",
            )

    def note(self, key: _Key, part: _Handed, local: Tensor) -> None:
        """Keeps a copy of what this rank compares, if it is to."""
        if self.keeps and part.own is not None:
            self.version.values[key] = local.reshape(-1).narrow(0, *part.own).to("cpu", copy=True)

    def buckets(self) -> Iterator[list[str]]:
        """Names in order, as many together as one line gathers in so many bytes."""
        found: list[list[str]] = []
        total, among = 0, None
        for name, parts in self.entries.items():
            nbytes = sum(part.tensor.numel() * part.dtype.itemsize for part in parts)
            line = parts[0].line
            total += nbytes
            if not found or total > self.most or (line is not among and None not in (line, among)):
                found.append([])
                total, among = nbytes, None
            found[-1].append(name)
            among = among or line
        return iter(found)

    def gather(self, names: list[str], *, wants: bool) -> list[tuple[str, Tensor]]:
        """The whole tensors of these names, the last one first; none if no rank wants them.

        A collective.

        Raises:
            StateError: This rank wants them, and one was written since the call,
                on this rank or on another.
        """
        parts = [((name, at), part) for name in names for at, part in enumerate(self.entries[name])]
        line = next((part.line for _, part in parts if part.line is not None), None)
        # Of ranks on model axes only those of one line hear of one another.
        is_due = any(
            isinstance(p.tensor, DTensor) if p.slot is None else p.slot.model for _, p in parts
        )
        self.look_at(part for _, part in parts)
        if line is not None and line.size > 1:
            bits = Bits(line, [wants, self.is_changed], "who wants the next weights")
            wanted, self.is_changed = bits.read()
        else:
            wanted = wants
        if not is_due and (not wanted or self.is_changed):
            if wants:
                self.require_unchanged([])
            return []
        meshes = meshes_of(part.tensor for _, part in parts)
        rooms = on_all_ranks(meshes, lambda: [part.read() for _, part in parts], "Reading weights")
        for (key, part), room in zip(parts, rooms, strict=True) if wants else ():
            self.note(key, part, part.local(room))
        cut = [
            (p.slot.path, room)
            for (_, p), room in zip(parts, rooms, strict=True)
            if p.slot and p.slot.path.layout
        ]
        if line is not None:
            line.all_gather([path.segment(room) for path, room in cut], "weights").wait()
        rooms.reverse()
        found = []
        for name in names:
            wholes = [part.whole(rooms.pop()) for part in self.entries[name]]
            found.append((name, wholes[0] if len(wholes) == 1 else torch.cat(wholes)))
        if wants:
            self.require_unchanged([])  # now: ranks on model axes have gathered with this one
        return found[::-1]


def _refusing(plan: _HandOver, items: Generator[Any, None, None]) -> Generator[Any, None, None]:
    """The items, None first; until their end, calls of the modules are refused,
    and changes of parameters watched."""
    hooks = [each.register_forward_pre_hook(_refuse, prepend=True) for each in plan.modules]
    watch_edits(plan, is_open=True, tell=plan.edited.update)
    try:
        yield from items
    finally:
        watch_edits(plan, is_open=False)
        for hook in hooks:
            hook.remove()


def _refuse(*_: object) -> None:
    raise StateError(
        "The weights of this model are being handed over.",
        why="ranks gather them in turn, and one that does something else in "
        "between would be waited for",
        fix="end the loop over zf.weights(model) first: close() it, "
        "or `with zf.weights(model) as items:`",
    )


def _wholes(plan: _HandOver) -> Generator[Any, None, None]:
    """All tensors whole.

    Where it is left, the rest of the buckets is gathered for other ranks, as far as they want it.
    """
    buckets = plan.buckets()
    found: list[tuple[str, Tensor]] = []
    try:
        yield None
        for names in buckets:
            found = plan.gather(names, wants=True)
            while found:
                plan.require_unchanged(plan.entries[found[-1][0]])
                yield found.pop()
        plan.version.name = plan.name
    finally:
        found.clear()
        for names in () if sys.is_finalizing() else buckets:
            plan.gather(names, wants=False)


def _shards(plan: _HandOver) -> Generator[Any, None, None]:
    """What this rank holds of each tensor."""
    yield None
    for key, part in plan.each():
        plan.require_unchanged([part])
        local = in_memory(local_of(part.tensor)).to(part.dtype, copy=True)
        plan.note(key, part, local)
        yield key[0], local, part.held.place.box.starts
    plan.version.name = plan.name


def _changes(plan: _HandOver) -> Generator[Any, None, None]:
    """What differs from the version, which follows once the loop asks for more."""
    step = max(plan.most // _COMPARED // 8, 1) * 8
    yield None
    with ParcelWindow() as window:
        for (name, at), known in plan.version.values.items():
            part = plan.entries[name][at]
            for begin in range(0, known.numel(), step):
                plan.require_unchanged([part])
                first, before = (part.own or (0, 0))[0] + begin, known[begin : begin + step]
                now = part.held.read(first, first + before.numel(), window).to(part.dtype)
                numbers = _differing(now, before)
                values = now[numbers]
                if numbers.numel():
                    yield name, part.in_whole(numbers + first), values
                    before[numbers] = values


def _differing(now: Tensor, before: Tensor) -> Tensor:
    """The numbers of the elements that differ in any bit.

    Words of 8 bytes are compared first, then elements in those.
    """
    size = now.element_size()
    if size > 8:  # complex128
        return (
            (now.view(torch.int64) != before.view(torch.int64))
            .view(-1, 2)
            .any(1)
            .nonzero()
            .view(-1)
        )
    if now.storage_offset() * size % 8:
        now = now.clone()
    per, (a, b) = 8 // size, (each.view(INTEGERS[size]).numpy() for each in (now, before))
    end = len(a) // per * per
    # NumPy, because torch takes ten times as long.
    words = np.flatnonzero(a[:end].view(np.int64) != b[:end].view(np.int64))
    found = np.flatnonzero(a[:end].reshape(-1, per)[words] != b[:end].reshape(-1, per)[words])
    found = words[found // per] * per + found % per
    return torch.from_numpy(np.concatenate([found, end + np.flatnonzero(a[end:] != b[end:])]))


@torch.no_grad()
def apply_weights(target: nn.Module | Mapping[str, Tensor], items: Iterable[Any]) -> set[str]:
    """Writes what `zf.weights` yields into plain tensors, in place: those of an engine in this
    process, or in shared memory.

    Takes whole tensors, parts and changes, casts them, and goes through all of them.
    Communicates nothing of its own.

    Args:
        target: A module that no transform returned, or its `state_dict()`.
        items: What `zf.weights` returns, or the same tuples that came another way.

    Returns the names that were written, and raises StateError if the target has no
    plain tensor of a name and shape.
    """
    own = target.state_dict() if isinstance(target, nn.Module) else target
    written: set[str] = set()
    for name, *rest in items:
        found, is_change = own.get(name), len(rest) == 2 and isinstance(rest[1], Tensor)
        if len(rest) == 2 and type(found) is Tensor and not is_change:
            found = Box(tuple(rest[1]), tuple(rest[0].shape)).of(found)
        if (
            found is None
            or isinstance(found, DTensor)
            or not (is_change or found.shape == rest[0].shape)
        ):
            raise StateError(
                f"There is no place for {name!r}.",
                target="nothing of this name"
                if found is None
                else f"{type(found).__name__} of {list(found.shape)}",
                fix="zf.weights(names=...) gives the names of the receiver, "
                "which must be a plain model of the same sizes",
            )
        if is_change:
            found.put_(rest[0].to(found.device, torch.int64), rest[1].to(found.device, found.dtype))
        else:
            found.copy_(rest[0])
        written.add(name)
    return written
