"""How a checkpoint of ours fits a model, an optimizer and anything else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_fn.checkpoint.contents import Contents, Key
from zero_fn.checkpoint.fit import Fit
from zero_fn.checkpoint.leaves import Leaf, leaves_of_groups, state_leaf
from zero_fn.checkpoint.passing import end_step, fill_states, room_of_states
from zero_fn.checkpoint.together import Together
from zero_fn.runtime.entry import units_of
from zero_fn.runtime.run import run_of
from zero_fn.streamed import Streamed
from zero_fn.transforms.loading import keeps_every_bit

__all__ = ["WholeFit"]


@dataclass
class WholeFit(Fit):
    """How a checkpoint fits a model and an optimizer on this rank.

    Attributes:
        optimizer: What is to be loaded beside the model.
        states: Its states in memory, by parameter.
        chunks: Of a streamed one, by the identity of the parameter: its leaf, dtypes of states by name, and others.
        options: Options of groups, in their order.
        buffers: Those that each rank has saved for itself, by name.
        objects: What to load values of `extra` into.
        values: Those values.
    """

    optimizer: Optimizer | None = None
    states: dict[Tensor, dict[str, Any]] = field(default_factory=dict)
    chunks: dict[int, tuple[Leaf, dict[str, torch.dtype], dict[str, Any]]] = field(default_factory=dict)
    options: list[dict[str, Any]] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def match(self, source: Contents, together: Together, extra: dict[str, Any] | None, *, is_strict: bool) -> None:
        """Finds everything in the checkpoint; what cannot be found is noted as wrong.

        Raises:
            CheckpointError: What a rank says is damaged.
            StorageError: The disk refused.
        """
        if self.model is not None:
            self.match_model(source, is_strict=is_strict)
            self._match_local_buffers(source, together, self.model)
        if self.optimizer is not None:
            self._match_optimizer(source, self.optimizer, is_strict=is_strict)
        if extra is not None:
            self._match_extra(source, together, extra, is_strict=is_strict)

    def _match_local_buffers(self, source: Contents, together: Together, model: nn.Module) -> None:
        """The buffers of `buffers="local"`, which each rank has saved for itself."""
        if source.ranks == together.size:
            own = source.said(together.rank, "buffers")
            self.buffers = {name: source.value(together.rank, value) for name, value in own.items()}
            return
        if not any(run_of(unit).module.assignment.buffers == "local" for unit in units_of(model)):
            return  # buffers are those of rank 0 here, and its own are in the files of the model
        names = {leaf.name for leaf in self.named.leaves}
        self.wrong += [
            f"{name}: {source.ranks} ranks have saved different values of a buffer, and {together.size} are to load them; "
            'transform without buffers="local" to take those of rank 0 everywhere'
            for name in source.said(0, "buffers")
            if name in names and source.is_parted("buffers", name)
        ]

    def _match_optimizer(self, source: Contents, optimizer: Optimizer, *, is_strict: bool) -> None:
        groups = leaves_of_groups(optimizer, self.named)
        rooms = room_of_states(optimizer) if isinstance(optimizer, Streamed) else None
        for group, leaves in zip(optimizer.param_groups, groups, strict=True):
            options: dict[str, tuple[int, Any]] = {}
            for parameter, own in zip(group["params"], leaves, strict=True):
                name = self.name_of(source, own.name)
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
        self, source: Contents, optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor, own: Leaf
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
                self.match_leaf(source, key, leaf)

    def _match_chunks(self, source: Contents, parameter: Tensor, own: Leaf, room: Mapping[str, torch.dtype]) -> None:
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

    def _match_extra(self, source: Contents, together: Together, extra: dict[str, Any], *, is_strict: bool) -> None:
        rank = together.rank if source.ranks == together.size else 0
        said = source.said(rank, "extra")
        if source.ranks != together.size:
            self.wrong += [
                f"extra[{name!r}]: {source.ranks} ranks have saved different values, and {together.size} are to load them; "
                'leave it with only=("model", "optimizer")'
                for name in said
                if source.is_parted("extra", name)
            ]
        if is_strict:
            self.wrong += [f"extra[{name!r}]: not in the checkpoint" for name in extra if name not in said]
        self.values = {name: source.value(rank, value) for name, value in said.items()}
        self.objects = {name: extra[name] for name in extra if name in said and hasattr(extra[name], "load_state_dict")}

    def missed(self, source: Contents) -> list[Key]:
        """What is in the checkpoint and has no place on this rank."""
        found = super().missed(source)
        if self.optimizer is None:
            return found
        taken = {key for key, _ in self.todo}
        known = {own.name for own, _, _ in self.chunks.values()} | {
            self.name_of(source, self.named.parameters[id(p)].name) for p in self.states
        }
        return found + [
            key
            for key in source.pieces
            if key[0] == "optimizer" and key not in taken and key[1].rpartition("/")[0] not in known
        ]

    def wanted(self) -> list[tuple[Key, Leaf]]:
        """All that this rank will read, and what for."""
        return self.todo + [
            (("optimizer", f"{own.name}/{name}"), own) for own, dtypes, _ in self.chunks.values() for name in dtypes
        ]

    def put(self, source: Contents) -> None:
        """Reads everything to where it rests.

        Raises:
            CheckpointError: A block is not what was written.
            StorageError: A disk refused.
        """
        if isinstance(self.optimizer, Streamed):
            end_step(self.optimizer)
        self.put_tensors(source)
        for leaf in self.named.leaves:
            if leaf.local is not None and leaf.name in self.buffers:
                leaf.local.copy_(self.buffers[leaf.name])
        if self.optimizer is not None:
            self._put_states(source, self.optimizer)
        for name, taker in self.objects.items():
            taker.load_state_dict(self.values[name])

    def _put_states(self, source: Contents, optimizer: Optimizer) -> None:
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
