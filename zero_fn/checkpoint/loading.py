"""`load`: each rank reads the elements that it holds, wherever they were written.

choose   ranks meet: rank 0 says which checkpoint
check    names, shapes, dtypes, options: all that is wrong, in one error; then every block that will be read
meet     everybody well, or nothing has changed anywhere
write    elements go to where they rest, through a buffer
meet     everybody has everything
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_fn.checkpoint.boxes import ranges
from zero_fn.checkpoint.catalog import Catalog, Key
from zero_fn.checkpoint.folders import KINDS, newest
from zero_fn.checkpoint.leaves import Leaf, Named, ParcelWindow, leaves_of_groups, named_tensors, state_leaf
from zero_fn.checkpoint.passing import end_step, fill_states, room_of_states
from zero_fn.checkpoint.saving import BUFFER_NBYTES, wait_for_saving
from zero_fn.checkpoint.together import Together
from zero_fn.errors import CheckpointError, LayoutError
from zero_fn.loading import keeps_every_bit
from zero_fn.runtime.entry import units_of
from zero_fn.runtime.run import run_of
from zero_fn.streamed import Streamed
from zero_fn.transforms.selection import Where
from zero_fn.transforms.unsharded import refresh

__all__ = ["load"]

Rename = Mapping[str, str] | Callable[[str], str] | None

LOADING = "Loading a checkpoint"

_SHOWN = 30
"""Lines of what does not fit that an error shows."""


def load(
    folder: str | os.PathLike[str],
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    only: str | Sequence[str] | None = None,
    where: Where = None,
    strict: bool = True,
    rename: Rename = None,
    verify: Literal["first", "once"] = "first",
) -> dict[str, Any]:
    """Loads what `zf.save` has saved, on any number of ranks, mesh, stage and tier. All ranks call it.

        step = zf.load("runs/a", model, optimizer, extra={"scheduler": scheduler})["step"]

    Values, moments and step counts are those that were saved, to the bit. Each rank reads what it holds, through a buffer of
    64 MiB. Digests are verified as bytes are read: once before anything changes, and once more as they go where they rest.

    Communicates three messages of 640 bytes to each peer; where ranks have parameters of different names, a fourth of a bit
    for each tensor.

    Args:
        folder: A checkpoint, or a folder with checkpoints, of which the one that was committed last is meant.
        model: Where the parameters and buffers go.
        optimizer: Where states and options of groups go; over parameters of `model`.
        extra: Objects with `load_state_dict`, by the names under which they were saved. Others are returned only.
        only: "model", "optimizer" or "extra", or several of these: the rest is left.
        where: Which parameters and buffers are loaded: patterns of names, or a predicate of name and tensor; None: all.
        strict: Whether each tensor must be in both, the checkpoint and the model. Shapes must always agree.
        rename: What names in the checkpoint are in the model: regular expressions with what takes their place, or a function.
        verify: "first": digests of all that will be read are verified before anything changes, which reads it twice. "once":
            it is read once; where a block is damaged, the model is partly loaded when that is found.

    Returns:
        What was saved as `extra`, by name: of this rank, where as many ranks have saved as load.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or it does not fit; lists all that does not. Raised on every
            rank. Nothing has changed, unless the message says so.
        StorageError: The disk refused. Raised on every rank.
        DisagreementError: Ranks were given different arguments.
        LostRankError: A rank has ended, or did not call `load`.
        LayoutError: `verify` or `only` names nothing.
    """
    wait_for_saving()
    kinds = KINDS if only is None else (only,) if isinstance(only, str) else tuple(only)
    if verify not in ("first", "once") or not set(kinds) <= set(KINDS):
        raise LayoutError(
            "verify or only names nothing.", verify=verify, only=only, fix='verify="first", only=("model", "optimizer")'
        )
    together = Together()
    path, named, chosen, failure = Path(os.path.abspath(folder)), Named([], {}, {}), "", None
    try:
        if model is not None:
            named = named_tensors(model, where)
        if together.rank == 0:
            chosen = str(newest(path).relative_to(path))
    except Exception as error:
        failure = error
    names = [(leaf.name, leaf.place.shape) for leaf in named.leaves]
    rows = together.agree(LOADING, failure, same=(str(path), kinds, strict, verify), kind=names, text=chosen)
    is_of_one_kind = all(row.kind == rows[0].kind for row in rows)
    fit = _Fit(named, model if "model" in kinds else None, optimizer if "optimizer" in kinds else None)
    source: Catalog | None = None
    try:
        source = Catalog(path / rows[0].text, _renamed(rename))
        fit.match(source, together, dict(extra or {}) if "extra" in kinds else None, is_strict=strict)
        if strict and where is None and is_of_one_kind:
            fit.wrong += _unexpected(source, fit.missed(source))
        fit.require(source.path)
        if verify == "first" and is_of_one_kind:
            fit.verify(source)
    except Exception as error:
        failure = error
    try:
        together.agree(LOADING, failure)
        assert source is not None, "ranks have agreed that all is well"
        if not is_of_one_kind:
            failure = _attempt(lambda: fit.require_wanted(source, together, is_strict=strict and where is None))
            failure = failure or _attempt(lambda: fit.verify(source) if verify == "first" else None)
            together.agree(LOADING, failure)
        failure = _attempt(lambda: fit.put(source))
        if failure is not None:
            failure.add_note(
                "The model and the optimizer are partly loaded: load a checkpoint before training goes on."
            )
        together.agree(
            LOADING, failure, consequence="the model is partly loaded: load a checkpoint before training goes on"
        )
    finally:
        if source is not None:
            source.close()
    return fit.values


def _attempt(act: Callable[[], None]) -> Exception | None:
    try:
        with torch.no_grad():
            act()
    except Exception as error:
        return error
    return None


def _renamed(rename: Rename) -> Callable[[str], str]:
    if rename is None:
        return lambda name: name
    if callable(rename):
        return rename
    patterns = [(re.compile(pattern), by) for pattern, by in rename.items()]

    def renamed(name: str) -> str:
        for pattern, by in patterns:
            name = pattern.sub(by, name)
        return name

    return renamed


def _unexpected(source: Catalog, keys: Iterable[Key]) -> list[str]:
    return [f"{name}: in the checkpoint, and not in the {kind}" for kind, name in keys]


@dataclass
class _Fit:
    """How a checkpoint fits a model and an optimizer on this rank.

    Attributes:
        named, model, optimizer: What is to be loaded.
        todo: Tensors to be filled, with the key of each in the checkpoint.
        states: States of an optimizer in memory, by parameter.
        chunks: Of a streamed one, by the identity of the parameter: its leaf, dtypes of states by name, and others.
        options: Options of groups, in their order.
        buffers: Those that each rank has saved for itself, by name.
        objects: What to load values of `extra` into.
        values: Those values.
        wrong: What does not fit, in words.
    """

    named: Named
    model: nn.Module | None
    optimizer: Optimizer | None
    todo: list[tuple[Key, Leaf]] = field(default_factory=list)
    states: dict[Tensor, dict[str, Any]] = field(default_factory=dict)
    chunks: dict[int, tuple[Leaf, dict[str, torch.dtype], dict[str, Any]]] = field(default_factory=dict)
    options: list[dict[str, Any]] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    # -- names, shapes, dtypes, options --------------------------------------------------------------------------------

    def match(self, source: Catalog, together: Together, extra: dict[str, Any] | None, *, is_strict: bool) -> None:
        """Finds everything in the checkpoint; what cannot be found is noted as wrong.

        Raises:
            CheckpointError: What a rank says is damaged.
            StorageError: The disk refused.
        """
        if self.model is not None:
            for leaf in self.named.leaves:
                self._match_leaf(source, ("model", self._name_of(source, leaf.name)), leaf, is_strict=is_strict)
            if source.ranks == together.size:  # of buffers="local"
                own = source.parts[together.rank].get("buffers", {})
                self.buffers = {name: source.value(together.rank, value) for name, value in own.items()}
        if self.optimizer is not None:
            self._match_optimizer(source, self.optimizer, is_strict=is_strict)
        if extra is not None:
            self._match_extra(source, together, extra, is_strict=is_strict)

    def _match_leaf(self, source: Catalog, key: Key, leaf: Leaf, *, is_strict: bool = True) -> None:
        if key not in source.pieces:
            if is_strict:
                self.wrong.append(f"{leaf.name}: not in the checkpoint")
            return
        piece = source.first(key)
        if piece.shape != leaf.place.shape:
            self.wrong.append(f"{leaf.name}: {list(piece.shape)} in the checkpoint, {list(leaf.place.shape)} here")
        elif not keeps_every_bit(piece.dtype, leaf.dtype):
            self.wrong.append(f"{leaf.name}: {piece.dtype} in the checkpoint, and bits would be lost in {leaf.dtype}")
        else:
            source.require_all(key, leaf.place.box)
            self.todo.append((key, leaf))

    def _name_of(self, source: Catalog, name: str) -> str:
        """The name under which the checkpoint has a tensor that may be tied there, or here."""
        if ("model", name) in source.pieces:
            return name
        others = (alias for alias, of in self.named.aliases.items() if of == name)
        return next((other for other in others if ("model", other) in source.pieces), source.aliases.get(name, name))

    def _match_optimizer(self, source: Catalog, optimizer: Optimizer, *, is_strict: bool) -> None:
        groups = leaves_of_groups(optimizer, self.named)
        rooms = room_of_states(optimizer) if isinstance(optimizer, Streamed) else None
        for group, leaves in zip(optimizer.param_groups, groups, strict=True):
            options: dict[str, tuple[int, Any]] = {}
            for parameter, own in zip(group["params"], leaves, strict=True):
                name = self._name_of(source, own.name)
                if name not in source.options:
                    if is_strict:
                        self.wrong.append(f"{own.name}: no states of an optimizer in the checkpoint")
                    continue
                rank, said = source.options[name]
                options.setdefault(repr(said), (rank, said))
                if rooms is None:
                    self._match_states(source, optimizer, group, parameter, replace(own, name=name))
                else:
                    self._match_chunks(source, parameter, replace(own, name=name), rooms.get(id(parameter), {}))
            if len(options) > 1:
                self.wrong.append(
                    f"a group of {len(leaves)} parameters: they had different options when they were saved"
                )
            self.options.append(source.value(*next(iter(options.values()))) if len(options) == 1 else {})

    def _match_states(
        self, source: Catalog, optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor, own: Leaf
    ) -> None:
        found = self.states[parameter] = dict(source.values_of(own.name))
        for name, key in source.states_of(own.name):
            piece, old = source.first(key), optimizer.state.get(parameter, {}).get(name)
            follows = piece.shape == own.place.shape and name != "step"
            if follows and isinstance(old, Tensor) and old.dtype == piece.dtype and old.shape == parameter.shape:
                found[name] = old
            elif follows:
                found[name] = torch.empty_like(parameter.detach(), dtype=piece.dtype)
            else:
                is_there = group.get("fused") or group.get("capturable")
                device = parameter.device if is_there or piece.box.numel > 1 else torch.device("cpu")
                found[name] = torch.empty(piece.shape, dtype=piece.dtype, device=device)
            leaf = state_leaf(name, found[name], parameter, own)
            if leaf is not None:
                self._match_leaf(source, key, leaf)

    def _match_chunks(self, source: Catalog, parameter: Tensor, own: Leaf, room: Mapping[str, torch.dtype]) -> None:
        dtypes, others = {}, dict(source.values_of(own.name))
        for name, key in source.states_of(own.name):
            piece = source.first(key)
            if name in room and piece.shape == own.place.shape:
                source.require_all(key, own.place.box)
                dtypes[name] = room[name]
                if not keeps_every_bit(piece.dtype, room[name]):
                    self.wrong.append(
                        f"{key[1]}: {piece.dtype} in the checkpoint, and bits would be lost in {room[name]}"
                    )
            elif prod(piece.shape) <= 1:
                others[name] = source.whole(key)
            else:
                self.wrong.append(f"{key[1]}: the streamed optimizer has no such state")
        if dtypes and dtypes.keys() != room.keys():
            self.wrong.append(f"{own.name}: the checkpoint has no {', '.join(room.keys() - dtypes.keys())} of it")
        self.chunks[id(parameter)] = (own, dtypes, others)

    def _match_extra(self, source: Catalog, together: Together, extra: dict[str, Any], *, is_strict: bool) -> None:
        said = [part.get("extra", {}) for part in source.parts]
        if source.ranks != together.size:
            parted = [
                name
                for name in said[0]
                if any(source.told(r, name) != source.told(0, name) for r in range(source.ranks))
            ]
            self.wrong += [
                f"extra[{name!r}]: {source.ranks} ranks have saved different values, and {together.size} are to load them; "
                'leave it with only=("model", "optimizer")'
                for name in parted
            ]
        rank = together.rank if source.ranks == together.size else 0
        if is_strict:
            self.wrong += [f"extra[{name!r}]: not in the checkpoint" for name in extra if name not in said[rank]]
        self.values = {name: source.value(rank, value) for name, value in said[rank].items()}
        self.objects = {
            name: extra[name] for name in extra if name in said[rank] and hasattr(extra[name], "load_state_dict")
        }

    def missed(self, source: Catalog) -> list[Key]:
        """What is in the checkpoint and has no place on this rank."""
        taken = {key for key, _ in self.todo} | {("model", leaf.name) for leaf in self.named.leaves}
        wanted = [kind for kind, of in (("model", self.model), ("optimizer", self.optimizer)) if of is not None]
        known = {own.name for own, _, _ in self.chunks.values()} | {
            self._name_of(source, self.named.parameters[id(p)].name) for p in self.states
        }
        return [
            key
            for key in source.pieces
            if key[0] in wanted
            and key not in taken
            and not (key[0] == "optimizer" and key[1].rpartition("/")[0] in known)
        ]

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
                "leave what is in one of them only; only= for a part",
            )

    def require_wanted(self, source: Catalog, together: Together, *, is_strict: bool) -> None:
        """For ranks with parameters of different names: what no rank has a place for. One message of a bit for each tensor.

        Raises:
            CheckpointError: There is some; on every rank.
        """
        keys = sorted(key for key in source.pieces if key[0] in KINDS[:2])
        missed = set(self.missed(source))
        wanted = together.union([key not in missed for key in keys])
        if is_strict:
            self.wrong += _unexpected(
                source, (key for key, is_wanted in zip(keys, wanted, strict=True) if not is_wanted)
            )
            self.require(source.path)

    # -- elements ------------------------------------------------------------------------------------------------------

    def verify(self, source: Catalog) -> None:
        """Reads all that this rank will read.

        Raises:
            CheckpointError: A block is not what was written.
            StorageError: The disk refused.
        """
        chunked = [
            (("optimizer", f"{own.name}/{name}"), own) for own, dtypes, _ in self.chunks.values() for name in dtypes
        ]
        for key, leaf in [*self.todo, *chunked]:
            dtype, box = source.first(key).dtype, leaf.place.box
            for first, last in ranges(box.sizes, BUFFER_NBYTES // dtype.itemsize):
                source.fill(key, box, first, torch.empty(last - first, dtype=dtype, device="meta"), keeps=False)

    def put(self, source: Catalog) -> None:
        """Reads everything to where it rests.

        Raises:
            CheckpointError: A block is not what was written.
            StorageError: A disk refused.
        """
        if isinstance(self.optimizer, Streamed):
            end_step(self.optimizer)
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
        for leaf in self.named.leaves:
            if leaf.local is not None and leaf.name in self.buffers:
                leaf.local.copy_(self.buffers[leaf.name])
        if self.optimizer is not None:
            self._put_states(source, self.optimizer)
        if self.model is not None:
            _tell(self.model)
        for name, taker in self.objects.items():
            taker.load_state_dict(self.values[name])

    def _put_states(self, source: Catalog, optimizer: Optimizer) -> None:
        for group, options in zip(optimizer.param_groups, self.options, strict=True):
            group.update(options)
        if not isinstance(optimizer, Streamed):
            for parameter, states in self.states.items():
                optimizer.state[parameter] = states
                if not states:
                    del optimizer.state[parameter]
            return

        def fill(parameter: Tensor, name: str, first: int, values: Tensor) -> None:
            own, key = self.chunks[id(parameter)][0], ("optimizer", f"{self.chunks[id(parameter)][0].name}/{name}")
            dtype = source.first(key).dtype
            read = values if values.dtype == dtype else torch.empty(values.numel(), dtype=dtype)
            source.fill(key, own.place.box, first, read)
            if read is not values:
                values.copy_(read)

        fill_states(optimizer, lambda parameter: self.chunks.get(id(parameter), (None, {}, {}))[1:], fill)


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
