"""What a rank has to save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zero_fn.advice import say_if_left_out
from zero_fn.average import Average
from zero_fn.checkpoint.format.files import require_dtype
from zero_fn.checkpoint.format.folders import AVERAGES, CUT, KINDS
from zero_fn.checkpoint.format.values import encoded
from zero_fn.checkpoint.live.streamed_states import (
    cuts_of,
    held_codes,
    held_in_chunks,
    states_in_chunks,
)
from zero_fn.checkpoint.live.tensors import (
    HeldTensor,
    ModelTensors,
    held_averages,
    held_state,
    tensors_of_groups,
)
from zero_fn.owners import ByOwner
from zero_fn.runtime.registry import units_of
from zero_fn.runtime.run import run_of
from zero_fn.runtime.slot import slot_of
from zero_fn.runtime.unit import Unit
from zero_fn.streamed import Streamed
from zero_fn.streamed.state_codes import CODES
from zero_fn.transforms.selection import Where
from zero_fn.values.box import Holding, whole_box
from zero_fn.values.chained_optimizer import Optimizers, members_of

__all__ = ["Inventory"]


@dataclass
class Inventory:
    """What this rank has to save."""

    held_tensors: dict[str, list[HeldTensor]] = field(
        default_factory=lambda: {kind: [] for kind in KINDS}
    )
    # This rank's part of the manifest, but for the tensors.
    says: dict[str, Any] = field(default_factory=dict)
    streamed: list[Streamed] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)
    owned: list[HeldTensor] = field(
        default_factory=list
    )  # states that this rank alone has: the last of its "optimizer"
    has_owners: bool = False  # whether any rank has such

    def add(
        self,
        model: nn.Module | None,
        optimizer: Optimizers | None,
        extra: Mapping[str, Any],
        where: Where,
    ) -> None:
        """Adds everything that was given to `save`."""
        named, tensors = ModelTensors(), dict[str, Tensor]()
        if model is not None:
            named.add(model, where)
            self.held_tensors["model"] = named.held_tensors
            self.says["aliases"] = named.aliases
            self.says["homes"] = _homes(model, named)
            self.units = units_of(model)
            if any(run_of(unit).assignment.buffers == "local" for unit in self.units):
                own = {
                    held.name: held.local
                    for held in named.held_tensors
                    if held.is_buffer and held.place.replica is None
                }
                self.says["buffers"] = encoded(own, "buffers", tensors)
        optimizers = members_of(optimizer)
        if optimizers:
            self.says["groups"], self.says["values"] = [], {}
            say_if_left_out(
                [*optimizers, *extra.values()],
                {key: own.name for key, own in named.parameters.items()},
            )
        for each in optimizers:
            self._add_optimizer(each, named, tensors)
        self.held_tensors["optimizer"] += self.owned  # last: ranks number what they share alike
        states = {
            name: v.state_dict() if hasattr(v, "state_dict") else v for name, v in extra.items()
        }
        for name, value in extra.items():
            if isinstance(value, Average):
                self.held_tensors.setdefault(AVERAGES, []).extend(
                    held_averages(name, value, named, where)
                )
                states[name] = {"updates": value.updates}
        self.says["extra"] = encoded(states, "extra", tensors)
        for path, tensor in tensors.items():
            require_dtype(path, tensor.dtype)
            place = Holding(tuple(tensor.shape), whole_box(tensor.shape))
            self.held_tensors["extra"].append(HeldTensor(path, tensor.dtype, place, tensor))

    def cut_names(self) -> list[object]:
        """What is equal on ranks that are replicas: the tensors of which each writes a part."""
        owned = set(map(id, self.owned))
        cut = [
            (kind, held)
            for kind in CUT
            for held in self.held_tensors.get(kind, ())
            if id(held) not in owned
        ]
        return [(kind, held.name, held.dtype, held.place.shape) for kind, held in cut]

    def end_differences(self) -> None:
        """Who loads this gets parameters in full, and goes on as
        this run does: so does this run."""
        for unit in self.units:
            unit.gather.reference_is_shared = False

    def _add_optimizer(
        self, optimizer: Optimizer, named: ModelTensors, tensors: dict[str, Tensor]
    ) -> None:
        streamed = optimizer if isinstance(optimizer, Streamed) else None
        self.streamed += [] if streamed is None else [streamed]
        if isinstance(optimizer, ByOwner):
            optimizer.require_whole("zf.save")
        in_chunks = {} if streamed is None else states_in_chunks(streamed)
        cuts = {} if streamed is None else cuts_of(streamed)
        says, values = self.says, self.says["values"]
        groups = zip(optimizer.param_groups, tensors_of_groups(optimizer, named), strict=True)
        for number, (group, held_tensors) in enumerate(groups, len(says["groups"])):
            options = {
                name: value
                for name, value in group.items()
                if name not in ("params", "param_names")
            }
            options = encoded(options, f"optimizer.param_groups[{number}]", tensors)
            says["groups"].append(
                {"params": [held.name for held in held_tensors], "options": options}
            )
            for parameter, own in zip(group["params"], held_tensors, strict=True):
                is_owned = (
                    isinstance(optimizer, ByOwner) and optimizer.owner_of(parameter) is not None
                )
                self.has_owners |= is_owned
                found = self.owned if is_owned else self.held_tensors["optimizer"]
                states = {} if streamed is not None else optimizer.state.get(parameter, {})
                dtypes, states = in_chunks.get(id(parameter), ({}, states))
                codes = held_codes(own, cuts.get(id(parameter), ()))
                as_codes = {
                    held.in_chunks[1].removesuffix(CODES)
                    for held in codes
                    if held.in_chunks is not None
                }
                in_floats = (each for each in dtypes.items() if each[0] not in as_codes)
                found += [*codes, *(held_in_chunks(own, parameter, *e) for e in in_floats)]
                for name, value in states.items():
                    if isinstance(value, Tensor):
                        held = held_state(name, value, parameter, own)
                        found += [] if held is None else [held]
                    else:
                        path = f"optimizer.state[{own.name!r}][{name!r}]"
                        values.setdefault(own.name, {})[name] = encoded(value, path, tensors)


def _homes(model: nn.Module, named: ModelTensors) -> dict[str, str]:
    """How each parameter rests, in words: for people who read the manifest."""
    found = {}
    for parameter in model.parameters():
        slot, held = slot_of(parameter), named.parameters.get(id(parameter))
        if slot is not None and held is not None:
            found[held.name] = (
                f"{slot.stages_text} over {', '.join(map(str, slot.path.axes)) or 'no axis'}"
            )
    return found
