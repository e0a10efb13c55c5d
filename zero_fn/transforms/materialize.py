"""From `meta` to memory, one unit at a time.

[Note: who writes what] A module is initialised by its own `reset_parameters()`; or, below a model
of transformers, by that model's `_init_weights`, which knows how the whole is drawn and recomputes
buffers that no checkpoint holds (the frequencies of rotary embeddings). `_init_weights` is called
for every module, the innermost first, as the model itself does: for an attention module it draws
the weights of a projection inside anew. Memory is filled with a pattern before, so values that
nobody wrote are found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from zero_fn.errors import MeshError, StateError
from zero_fn.runtime.registry import runs_of, units_of
from zero_fn.runtime.replaced_parameters import Replacement, note_replacement
from zero_fn.runtime.slot import Slot
from zero_fn.runtime.unit import Unit
from zero_fn.runtime.unwritten_memory import SHOWN, filled, is_filled
from zero_fn.runtime.whole_leaves import register_resting
from zero_fn.transforms.substitute import reserve
from zero_fn.values.digests import content_digests
from zero_fn.values.grid import local_part

__all__ = ["allocate", "device_for", "materialize", "require_ways"]

M = TypeVar("M", bound=nn.Module)


def materialize(module: M, device: torch.device | str | None = None) -> M:
    """Gives a transformed module on `meta` memory and initial values,
    never holding more than one whole unit (wrap group).

        with torch.device("meta"):
            model = GPT(config)
        model = zf.materialize(zf.shard_params(model, mesh["dp"]))

    Each unit in turn is allocated whole, its modules initialise whole plain tensors, and this
    rank's shards are kept. A module is initialised by its `reset_parameters()`, or in a model of
    transformers by the model's `_init_weights`. These must set buffers, too. With the same seed on
    every rank the values are those of one process that calls the same functions in the same order,
    whatever the stage, the axes and the number of ranks. Load a checkpoint afterwards: buffers that
    it does not hold then have their values.

    Communicates nothing. The next forward compares over ranks what was drawn, and raises
    `DisagreementError` if it differs.

    Args:
        module: A transformed module with parameters on `meta`. It is changed in place.
            Units in memory stay as they are. Parameters stay the same objects: an optimizer
            may be built before.
        device: Where to allocate, `"cpu"` or `"cuda"`. None: on the device of its mesh,
            or without a mesh on the CPU.

    Returns:
        `module`.

    Raises:
        MeshError: `device` is not the type of device of the mesh.
        StateError: `module` was not transformed. Or parameters or buffers on `meta` would have no
            values: nothing initialises their module (then nothing was changed), or what does so
            leaves them out.
    """
    for run in runs_of(module, verb="materialize"):
        run.note_loaded()
    _fill(module, device, lambda _: False)
    return module


def allocate(
    module: nn.Module, device: torch.device | str | None, is_read: Callable[[Tensor], bool]
) -> None:
    """`materialize` for a module whose values are read from files next:
    only what is not (`is_read`) is drawn.

    A unit whose parameters all are is never whole.

    Raises:
        StateError: Nothing gives values to a parameter or buffer that is not read.
    """
    _fill(module, device, is_read)


def _fill(
    module: nn.Module, device: torch.device | str | None, is_read: Callable[[Tensor], bool]
) -> None:
    target = device_for(module, device)
    late, ways = require_ways(module, is_read)
    units = [
        unit for unit in units_of(module) if any(slot.parameter.is_meta for slot in unit.slots)
    ]
    drawn = {
        id(unit): {slot.fqn for slot in unit.slots if not is_read(slot.parameter)} for unit in units
    }
    buffers: list[tuple[str, nn.Module, str, Tensor]] = []
    for name, child in module.named_modules():
        for attribute, buffer in child._buffers.items():
            if buffer is not None and buffer.is_meta:
                child._buffers[attribute] = unwritten = filled(
                    torch.empty_like(buffer, device=target)
                )
                if not is_read(buffer):
                    buffers.append((f"{name}.{attribute}".lstrip("."), child, attribute, unwritten))
    for unit in units:
        unit.reshard()
        unit.gather.forget()
        unit.memory.form([slot.dtype for slot in unit.slots], [target] * len(unit.slots))
    for run in runs_of(module, verb="materialize"):
        reserve(run, "materialize", [unit for unit in units if unit.run is run])
    for unit in units:
        before = [slot.parameter for slot in unit.slots]
        unit.memory.allocate([parameter.requires_grad for parameter in before])
        for slot, parameter in zip(unit.slots, before, strict=True):
            _keep(slot, parameter)
        unit.gradients.forget_layout()
    missed: list[str] = []
    regions = _regions(module, units)
    with torch.no_grad():
        for unit in units:
            inside = regions[id(unit)] | {id(child) for child in unit.modules()}
            # Where all parameters are read from files, only buffers have to be written.
            keys, device = (
                (inside, target) if drawn[id(unit)] else (inside & late, torch.device("meta"))
            )
            left_out = _initialise(unit, [way for key, way in ways.items() if key in keys], device)
            missed += [name for name in left_out if name in drawn[id(unit)]]
            late -= inside
        for key, way in ways.items():
            if key in late:
                way()
    missed += [
        name
        for name, child, attribute, empty in buffers
        if child._buffers[attribute] is empty and is_filled(empty)
    ]
    if missed:
        raise StateError(
            f"{len(missed)} parameters and buffers on meta were given memory, "
            "and nobody gave them values.",
            first=", ".join(missed[:SHOWN]),
            why="reset_parameters() or _init_weights() of their modules leaves them out",
            fix="set them there; or, as they have memory now, write them, "
            "and load the rest with load_state_dict()",
        )


def _keep(slot: Slot, parameter: nn.Parameter) -> None:
    """Gives a parameter that was on `meta` the memory of the one that was to take its place:
    an optimizer may hold it."""
    try:
        torch.utils.swap_tensors(parameter, slot.parameter)  # type: ignore[no-untyped-call]
    except RuntimeError:  # somebody has a weak reference to it: a step of that optimizer is refused
        note_replacement(
            parameter, Replacement(slot.fqn, slot.parameter, "memory for what was on meta")
        )
        return
    slot.adopt(parameter, slot.flat)
    slot.register(parameter)


def device_for(module: nn.Module, device: torch.device | str | None) -> torch.device:
    """Where a module gets memory: on the device of its mesh.

    Raises:
        MeshError: It was to be on another one.
    """
    types = {slot.kind.device_type for unit in units_of(module) for slot in unit.slots} - {"meta"}
    target = torch.device(device or next(iter(types), "cpu"))
    if types and target.type not in types:
        raise MeshError(
            "A module was to get memory on another device than that of its mesh.",
            device=target,
            mesh=", ".join(sorted(types)),
            fix="leave out device=, or build the mesh for that device",
        )
    return torch.empty(0, device=target).device  # with its index


def _initialise(unit: Unit, ways: list[Callable[[], None]], device: torch.device) -> list[str]:
    """Calls what initialises modules while they have whole parameters of a unit,
    and keeps this rank's part of these.

    On `meta`, what is drawn for parameters is dropped, and costs nothing.

    Returns:
        The names of the parameters that were not written.
    """
    wholes = [
        nn.Parameter(filled(_empty(slot, device)), slot.parameter.requires_grad)
        for slot in unit.slots
    ]
    for slot, whole in zip(unit.slots, wholes, strict=True):
        slot.register(whole)
    try:
        for way in ways:
            way()
            for slot, whole in zip(unit.slots, wholes, strict=True):
                if len(slot.places) > 1 and device.type != "meta" and not is_filled(whole):
                    # A tied parameter is drawn by its first name.
                    whole._is_hf_initialized = True  # type: ignore[attr-defined]
    finally:
        register_resting(unit)
    if device.type == "meta":
        return []
    parts = [
        local_part(whole.detach(), slot.model)
        for slot, whole in zip(unit.slots, wholes, strict=True)
    ]
    unit.memory.scatter(dict(zip(unit.slots, parts, strict=True)))
    for slot, digest in zip(unit.slots, content_digests(wholes), strict=True):
        slot.initial = digest
    return [slot.fqn for slot, whole in zip(unit.slots, wholes, strict=True) if is_filled(whole)]


def _owners(
    module: nn.Module, is_read: Callable[[Tensor], bool]
) -> Iterator[tuple[str, nn.Module]]:
    """The modules that have parameters or buffers of their own on `meta`
    that nobody reads from files."""
    for name, child in module.named_modules():
        own = (*child._parameters.values(), *child._buffers.values())
        if any(tensor is not None and tensor.is_meta and not is_read(tensor) for tensor in own):
            yield name, child


def _ways(module: nn.Module, owners: set[int]) -> dict[int, Callable[[], None]]:
    """The function that initialises each module, by `id`,
    the innermost first. [Note: who writes what]"""
    ways: dict[int, Callable[[], None]] = {}

    def visit(child: nn.Module, model: Any) -> None:
        if id(child) in ways or hasattr(child, "reset_lora_parameters"):
            # An adapter of peft begins at 0, of which neither its linears nor the model know.
            return
        if hasattr(child, "_init_weights") and hasattr(child, "initialize_weights"):
            model = child
        for grandchild in child.children():
            visit(grandchild, model)
        reset = getattr(child, "reset_parameters", None)
        if model is not None:
            ways[id(child)] = partial(model._init_weights, child)
        elif id(child) in owners and callable(reset):
            ways[id(child)] = reset

    visit(module, None)
    return ways


def require_ways(
    module: nn.Module, is_read: Callable[[Tensor], bool]
) -> tuple[set[int], dict[int, Callable[[], None]]]:
    """The modules that have to be initialised, by `id`, and the functions that initialise modules.
    [Note: who writes what]

    Raises:
        StateError: Nothing initialises a module that has something on `meta`
            that is not read from files.
    """
    owners = list(_owners(module, is_read))
    late = {id(child) for _, child in owners}
    ways = _ways(module, late)
    without = [(name, child) for name, child in owners if id(child) not in ways]
    if not without:
        return late, ways
    kinds = dict.fromkeys(
        f"{type(child).__name__} ({name or 'root'})" for name, child in reversed(without)
    )
    lost = [
        f"{name}.{attribute}".lstrip(".")
        for name, child in module.named_modules()
        for attribute in child._non_persistent_buffers_set
        if child._buffers[attribute] is not None
    ]
    own = (
        "; then `with torch.no_grad(): model.init_weights()`"
        if hasattr(module, "init_weights")
        else ""
    )
    raise StateError(
        "A module on meta has no reset_parameters(): its values would be garbage.",
        module=", ".join(list(kinds)[:SHOWN]),
        **({"not_in_files": ", ".join(lost[:SHOWN])} if lost else {}),
        fix="give it a reset_parameters() that sets its parameters and buffers; "
        "or model.to_empty(device=...)"
        + (own or " and load values")
        + (f", and set the buffers that no state_dict holds: {lost[0]}, ..." if lost else ""),
    )


def _regions(module: nn.Module, units: list[Unit]) -> dict[int, set[int]]:
    """The modules of each unit: at its anchor and below, outside the anchors of others."""
    anchors = {id(unit.anchor()): unit for unit in units}
    regions: dict[int, set[int]] = {id(unit): set() for unit in units}

    def visit(child: nn.Module, unit: Unit | None) -> None:
        unit = anchors.get(id(child), unit)
        if unit is not None:
            regions[id(unit)].add(id(child))
        for grandchild in child.children():
            visit(grandchild, unit)

    visit(module, None)
    return regions


def _empty(slot: Slot, device: torch.device) -> Tensor:
    """Memory for a parameter that is whole on all axes, model axes too:
    so its values do not depend on the axes."""
    if slot.model is not None:
        return torch.empty(slot.full_shape, dtype=slot.dtype, device=device)
    return torch.empty_strided(slot.path.shape, slot.path.stride, dtype=slot.dtype, device=device)
