"""Copies a module with other parameters in place of its own: how every transform makes its result.

The copy is `copy.deepcopy` with a memo in which each parameter stands for itself, so names, ties,
plain Python lists of children, bound hooks and parametrizations survive, and no parameter is
copied. Then the units of the copy are built: each cuts its shards from the old parameters into
memory of its own and registers resting parameters.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _world
from torch.jit import ScriptModule

from zero_fn.advice import advise_at_first_step
from zero_fn.dtensor.refused import note_mesh
from zero_fn.errors import LayoutError, PlacementError, StateError, StorageError, TierError
from zero_fn.runtime.attributes import attributes_of
from zero_fn.runtime.entry_point import EntryPoint, Method, attach, detach
from zero_fn.runtime.gradient_hooks import gradient_hooks, parameter_hooks
from zero_fn.runtime.module_edits import watch_modules
from zero_fn.runtime.module_tree import forget_members
from zero_fn.runtime.optimizers import watch_optimizers
from zero_fn.runtime.registry import entry_points_below, methods_of, require_idle, units_of
from zero_fn.runtime.replaced_parameters import (
    Replacement,
    call_site,
    note_replacement,
    replacement_of,
)
from zero_fn.runtime.run import Run, run_of
from zero_fn.runtime.slot import Place, Slot, model_of, slot_of
from zero_fn.runtime.unit import Unit, unit_of
from zero_fn.runtime.unwritten_memory import note_meta_buffers
from zero_fn.tiers.parcels import Form
from zero_fn.tiers.tier_tensor import TierTensor
from zero_fn.transforms.closures import follow_forwards, rebound, refuse_captured
from zero_fn.transforms.ddp_refusal import refuse_ddp
from zero_fn.transforms.generating import generate_together
from zero_fn.transforms.loading import check_entries
from zero_fn.transport.agree import Outcome
from zero_fn.transport.links import line_over
from zero_fn.values.assignment import Assignment
from zero_fn.values.digests import content_digests
from zero_fn.values.dtensors import at_same_address, local_of, set_local, spanned
from zero_fn.values.grid import Grid, grid_of
from zero_fn.values.tiers import Shelved
from zero_fn.values.tiled import is_tile
from zero_fn.values.units import NamedParameter, anchors_of, distinct_parameters, innermost_common

__all__ = ["Donated", "carry_over", "copied", "move_buffers", "reserve", "substitute"]

M = TypeVar("M", bound=nn.Module)


def _assignment_of(module: nn.Module) -> Assignment:
    """What earlier transforms asked of a module, and of modules inside it.

    Raises:
        MeshError: Parts of the module were transformed over axes that do not belong together.
        StateError: The module was donated.
    """
    if isinstance(module.__dict__.get("forward"), Donated):
        module.forward()
    joined = Assignment()
    runs: dict[int, tuple[str, Run]] = {}
    for name, entry in entry_points_below(module):
        runs.setdefault(id(entry.run), (name, entry.run))
    anchors: list[str] = []
    for name, run in runs.values():
        root = run.root()
        path = (
            next((path for path, child in root.named_modules() if child is module), "")
            if root is not None
            else ""
        )
        if path:  # the module is a part of what was transformed
            joined = joined.join(run.assignment.of_part(path, _named_outside(module, path)))
            continue
        below = run.assignment.below(name)
        if name:
            anchors += [name, *(below.anchors or ()), *_anchor_names(name, run)]
            below = replace(below, anchors=None)
        joined = joined.join(below)
    if anchors and joined.anchors is None:
        outside = [
            name
            for name in anchors_of(module, None)
            if not any(_inside(name, root) for root in anchors)
        ]
        chosen = {*outside, *anchors}
        joined = joined.join(
            Assignment(anchors=tuple(name for name, _ in module.named_modules() if name in chosen))
        )
    return joined


def _named_outside(part: nn.Module, path: str) -> dict[str, str]:
    """Names in a part of tied parameters whose first name is outside the part,
    by that first name."""
    slots = ((name, slot_of(parameter)) for name, parameter in part.named_parameters())
    return {
        slot.fqn: name for name, slot in slots if slot is not None and not _inside(slot.fqn, path)
    }


def _anchor_names(prefix: str, run: Run) -> list[str]:
    return [f"{prefix}.{unit.name}".rstrip(".") for unit in run.live_units()]


def _inside(name: str, root: str) -> bool:
    return name == root or name.startswith(f"{root}.")


def substitute(
    module: M,
    request: Assignment,
    *,
    verb: str,
    donate: bool = False,
    prepare: Callable[[nn.Module], None] = lambda twin: None,
    reserves: bool = True,
) -> M:
    """A copy of `module` whose parameters rest as earlier transforms and `request` say together.

    `module` is unchanged unless donated. `prepare` sees the copy before its units are made: it has
    the forwards that the module's author gave it. Without `reserves` no room is made in other
    tiers: for a module on `meta` that is only planned.

    Raises:
        LayoutError: A part of the module cannot be copied;
            or `CUDA_DEVICE_MAX_CONNECTIONS` is 1, on CUDA.
        LayoutError, UnitError, MeshError: The request contradicts an earlier transform.
        MeshError, PlacementError: A parameter is a DTensor that does not
            fit the axes; see `grid_of`.
        StateError: A forward, backward or `accumulate` of the module is still open;
            or the module was donated.
    """
    assignment = _assignment_of(module).join(request)
    named, grid = _checked(module, assignment, verb)
    anchors = assignment.anchors if assignment.anchors is not None else anchors_of(module, None)
    site = call_site(verb)
    watch_optimizers(advise_at_first_step)
    watch_modules()
    with torch.inference_mode(False):  # memory made in inference mode could never be trained
        twin, memo = copied(module, named)
        prepare(twin)
        run = Run(line_over(assignment.axes), assignment)
        units = _units_made(twin, named, anchors, run, grid)
        if reserves:
            reserve(run, site)
        if assignment.axis is not None:
            move_buffers(twin, assignment.axis.device_type)
        _filled(twin, units, run, memo, site, donate=donate)
    if donate:
        detach(module)
        forget_members(module)
        module.__dict__["forward"] = Donated(site)
    return twin


def _checked(
    module: nn.Module, assignment: Assignment, verb: str
) -> tuple[list[NamedParameter], Grid]:
    """The parameters of a module that can be transformed, at rest, and its axes.

    Raises as `substitute`.
    """
    _require_streams(
        {axis.device_type for axis in assignment.axes}
        | {each.device.type for each in module.parameters()}
    )
    units = units_of(module)
    require_idle(units, verb)
    for unit in units:
        unit.follow_moved()
        unit.reshard()
    named = distinct_parameters(module)
    _require_untouched_ties(named)
    _require_own_memory(named)
    _require_buffers_apart(module, named)
    models = ((parameter.fqn, model_of(parameter.parameter)) for parameter in named)
    grid = grid_of(
        assignment.axes,
        {fqn: model for fqn, model in models if model is not None},
        assignment.stages,
    )
    if grid.mesh is not None:
        note_mesh(grid.mesh)
    return named, grid


def _units_made(
    twin: nn.Module, named: Sequence[NamedParameter], anchors: Sequence[str], run: Run, grid: Grid
) -> list[tuple[Unit, list[NamedParameter]]]:
    """The units of a copy, without memory, each with the old
    parameters that it takes the place of."""
    assignment, modules = run.assignment, dict(twin.named_modules())
    # Tiles are units, whatever `units=` chose.
    tiles = (name for name, child in modules.items() if is_tile(child))
    wanted = {"", *anchors, *tiles, *assignment.outputs}
    members: dict[str, list[NamedParameter]] = {name: [] for name in modules if name in wanted}
    for parameter in named:
        members[innermost_common(members, (name for name, _ in parameter.places))].append(parameter)
    units = [
        (_unit_of(anchor, chosen, modules, run, grid), chosen)
        for anchor, chosen in members.items()
        if chosen or not anchor or anchor in assignment.outputs
    ]
    _note_initial([pair for unit, chosen in units for pair in zip(unit.slots, chosen, strict=True)])
    _note_ties(run, [unit for unit, _ in units], modules)
    return units


def _filled(
    twin: nn.Module,
    units: Sequence[tuple[Unit, list[NamedParameter]]],
    run: Run,
    memo: dict[int, Any],
    site: str,
    *,
    donate: bool,
) -> None:
    """Gives units memory and values, and the modules of the copy what runs them."""
    assignment, modules = run.assignment, dict(twin.named_modules())
    wholes, donors = _Wholes(), _Donors()
    for unit, chosen in units:
        _settle_in(unit, [parameter.parameter for parameter in chosen], wholes)
        _attach(modules[unit.name], unit, assignment.outputs.get(unit.name))
        for parameter, slot in zip(chosen, unit.slots, strict=True):
            carry_over(parameter.parameter, slot.parameter, memo)
            if donate:
                # Released before the note: this changes the tensor by which a replacement is found.
                donors.release(parameter.parameter)
            note_replacement(parameter.parameter, Replacement(parameter.fqn, slot.parameter, site))
    by_name = {unit.name: unit for unit, _ in units}
    for path in assignment.methods:
        name, _, attribute = path.rpartition(".")
        if name in modules:
            method = Method(
                modules[name], by_name[innermost_common(by_name, [name])], attribute=attribute
            )
            modules[name].__dict__[attribute] = method
    for child in twin.modules():
        if not isinstance(child, ScriptModule):  # those have no such hooks, and no parameters
            check_entries(child)
    refuse_ddp(twin)
    generate_together(twin)
    note_meta_buffers(twin)


def _require_streams(device_types: set[str]) -> None:
    """Refuses a CUDA whose streams share one queue.

    It reads the variable when it starts, so it is too late to change it.
    """
    if "cuda" in device_types and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise LayoutError(
            "CUDA_DEVICE_MAX_CONNECTIONS is 1: nothing on the device would "
            "run beside the computation.",
            why="all streams share one queue, so collectives and copies wait for "
            "what was issued before them",
            fix="unset it before the process starts, or set it to 8 (as without it) or more",
        )


def _unit_of(
    anchor: str,
    chosen: list[NamedParameter],
    modules: dict[str, nn.Module],
    run: Run,
    grid: Grid,
) -> Unit:
    """A unit of these parameters, at the module named `anchor`. It has no memory yet."""
    slots, assignment = [], run.assignment
    sources = [parameter.parameter for parameter in chosen]
    for parameter, source in zip(chosen, sources, strict=True):
        places = [Place(modules[name], attribute) for name, attribute in parameter.places]
        home, stages = assignment.home(parameter.fqn), assignment.stages(parameter.fqn)
        slot = Slot(parameter.fqn, places, home, source, grid, stages)
        # A parameter in a list of parametrizations, which a module holds.
        if slot.extension is not None:
            slot.extension = slot.extension.held_by(
                modules[parameter.places[0][0].rpartition(".parametrizations.")[0]]
            )
        slots.append(slot)
    unit = Unit(anchor, len(run.units), run)
    unit.hold(slots)
    unit.memory.form([source.dtype for source in sources], [source.device for source in sources])
    return unit


def reserve(
    run: Run, site: str, units: Sequence[Unit] | None = None, *, on_meta: bool = False
) -> None:
    """Makes room in other tiers for all units, or some, before anything moves;
    if a rank cannot, every rank raises.

    What is on `meta` gets room when it gets values, which is `on_meta`. On torch's fake process
    group, whose ranks are pretended, no room is made: that is a plan for another machine.
    """
    if any(axis.backend == "fake" for axis in run.transport.axes):
        return
    records: dict[Shelved, list[list[Form]]] = {}
    groups = [
        group
        for unit in (run.live_units() if units is None else units)
        for group in unit.memory.groups
    ]
    if not on_meta:
        groups = [group for group in groups if group.kind.device.type != "meta"]
    for group in groups:
        for what, forms in (*group.forms_away(), *group.codes_away()):
            if run.offloaded.files is None or what[0] != "parameters":
                records.setdefault(what, []).append(forms)
    if not records:
        return
    failure: Exception | None = None
    try:
        device = next(slot.kind.device_type for unit in run.live_units() for slot in unit.slots)
        run.offloaded.reserve(records, torch.device(device))
    except (TierError, StorageError) as error:
        failure = error
    found = Outcome(run.transport, failure, site.partition(" ")[0]).failed_on_any_rank()
    if found is not None:
        raise found


def _settle_in(unit: Unit, sources: list[nn.Parameter], wholes: _Wholes) -> None:
    """Gives a unit memory, and copies this rank's part of the old parameters into it."""
    slots = unit.slots
    owned = [slot.owned_of_source(source) for slot, source in zip(slots, sources, strict=True)]
    unit.memory.allocate([source.requires_grad for source in sources])
    unit.gradients.forget_layout()
    unit.memory.write(
        {
            slot: part if part is not None else slot.path.owned(wholes.of(source))
            for slot, source, part in zip(slots, sources, owned, strict=True)
        }
    )


def move_buffers(root: nn.Module, device_type: str) -> None:
    """Moves buffers to the device of the mesh, where parameters go; those on `meta` stay."""
    moved: dict[int, Tensor] = {}  # a buffer may have several names
    for module in root.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type not in (device_type, "meta"):
                module._buffers[name] = moved.setdefault(id(buffer), buffer.to(device_type))


def _note_ties(run: Run, units: Sequence[Unit], modules: dict[str, nn.Module]) -> None:
    """For each unit, notes the units around it with a parameter that a
    module inside it holds, too: ties."""
    names = {id(module): name for name, module in modules.items()}
    for unit in units:
        inside = f"{unit.name}." if unit.name else ""
        run.tied_around[unit.index] = tuple(
            other.index
            for other in units
            if other is not unit
            and inside.startswith(f"{other.name}." if other.name else "")
            and any(f"{names[id(module)]}.".startswith(inside) for module in other.modules())
        )


class _Wholes:
    """Whole values of parameters that earlier transforms cut in another way than the new one does,
    of one unit at a time."""

    def __init__(self) -> None:
        self._unit: Unit | None = None
        self._wholes: dict[Slot, Tensor] = {}

    def of(self, source: Tensor) -> Tensor:
        """The whole values of a resting parameter.

        Communicates an all-gather of its unit the first time; waits.
        """
        slot = slot_of(source)
        unit = unit_of(slot)
        assert slot is not None and unit is not None, "a resting parameter has no unit"
        if source.is_meta:
            return torch.empty_strided(
                slot.path.shape, slot.path.stride, dtype=source.dtype, device="meta"
            )
        if unit is not self._unit:
            self._unit = unit
            self._wholes = dict(zip(unit.slots, unit.memory.wholes(), strict=True))
        return self._wholes[slot]


def _attach(anchor: nn.Module, unit: Unit, output: torch.dtype | None) -> None:
    """Attaches the hooks that gather a unit to its anchor,
    and to every module that holds one of its parameters."""
    computes = {
        slot.kind.compute_dtype
        for slot in unit.slots
        if slot.home.compute is not None and slot.dtype.is_floating_point
    }
    compute = computes.pop() if len(computes) == 1 else None
    attach(EntryPoint(anchor, unit, is_anchor=True, input_dtype=compute, output_dtype=output))
    run_of(unit).buffers.watch(anchor)
    for module in unit.modules():
        if module is not anchor:
            attach(EntryPoint(module, unit))


def _require_untouched_ties(named: list[NamedParameter]) -> None:
    """Refuses a module of which another model took a part in an earlier transform:
    a copy would untie the two.

    If all parameters were taken, the caller wants another model like that one.
    """
    trained = [
        (parameter.fqn, parameter.parameter)
        for parameter in named
        if parameter.parameter.requires_grad
    ]
    earlier = [(fqn, replacement_of(parameter)) for fqn, parameter in trained]
    replaced = [
        (fqn, found)
        for fqn, found in earlier
        if found is not None and found.parameter() is not None
    ]
    if replaced and len(replaced) < len(trained):
        fqn, found = replaced[0]
        raise PlacementError(
            f"{fqn!r} belongs to a model that was transformed already, "
            "and other parameters do not.",
            parameter=fqn,
            replaced=f"{found.site}, as {found.fqn!r}",
            why="a transform copies the module: what both models share would become two copies, "
            "trained apart",
            fix="to share it, transform one module that holds both: "
            "zf.shard_params(nn.ModuleDict({'actor': actor, 'critic': critic}), axis); to have "
            "two, copy first: copy.deepcopy(module); or del the transformed model",
        )


def _require_own_memory(named: list[NamedParameter]) -> None:
    """Refuses parameters that begin at the same address without being one parameter:
    their shards would not share memory."""
    held = [(parameter, local_of(parameter.parameter)) for parameter in named]
    held = [
        (parameter, local)
        for parameter, local in held
        if not isinstance(local, TierTensor) and not local.is_meta
    ]
    for earlier, later in at_same_address(local for _, local in held):
        other, parameter = held[earlier][0], held[later][0]
        if other.parameter.requires_grad or parameter.parameter.requires_grad:
            raise PlacementError(
                f"{other.fqn!r} and {parameter.fqn!r} share memory without being one parameter.",
                parameter=parameter.fqn,
                why="an edit of one is an edit of the other, "
                "and their shards would not share memory",
                fix="tie them as one parameter: decoder.weight = encoder.weight; "
                "or clone the values of one",
            )


def _require_buffers_apart(module: nn.Module, named: list[NamedParameter]) -> None:
    """Refuses buffers in the memory of a trained parameter,
    which moves to other memory: they would not follow."""
    trained: dict[int, list[tuple[NamedParameter, range]]] = {}
    for parameter in named:
        local = local_of(parameter.parameter)
        if (
            parameter.parameter.requires_grad
            and type(local) is Tensor
            and not local.is_meta
            and local.numel()
        ):
            address = local.untyped_storage().data_ptr()
            trained.setdefault(address, []).append((parameter, _addresses(local)))
    for name, buffer in module.named_buffers():
        if type(buffer) is not Tensor or buffer.is_meta or not buffer.numel():
            continue
        own = _addresses(buffer)
        for parameter, taken in trained.get(buffer.untyped_storage().data_ptr(), ()):
            if own.start < taken.stop and taken.start < own.stop:
                raise PlacementError(
                    f"The buffer {name!r} lies in the memory of {parameter.fqn!r}.",
                    parameter=parameter.fqn,
                    why="the buffer would keep its present values, "
                    "while the parameter is trained in memory of its own",
                    fix="register a clone, if that is meant; "
                    f"or read {parameter.fqn} in place of the buffer",
                )


def _addresses(tensor: Tensor) -> range:
    return range(tensor.data_ptr(), tensor.data_ptr() + spanned(tensor) * tensor.itemsize)


def copied(module: M, parameters: list[NamedParameter]) -> tuple[M, dict[int, Any]]:
    """A deep copy that shares the parameters and enters no units; and the copies,
    by the `id` of what was copied."""
    memo: dict[int, Any] = {id(named.parameter): named.parameter for named in parameters}
    memo.update((id(entry), entry) for _, entry in entry_points_below(module))
    memo.update((id(method), method) for method in methods_of(module))
    # Handles: `self.group = mesh.get_group("sp")`.
    memo.update((id(group), group) for group in _world.pg_map)
    for child in module.modules():
        for value in vars(child).values():
            # A derived tensor, which is derived again before the next forward.
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach()
    # The children are kept, so that `_uncopyable` looks at one attribute.
    kept = {**memo, **{id(child): child for child in module.modules()}}
    try:
        twin = copy.deepcopy(module, memo)
    except Exception as error:
        path = _uncopyable(module, kept)
        raise LayoutError(
            "A transform returns a copy of the module, and this one cannot be copied.",
            attribute=path,
            error=f"{type(error).__name__}: {error}",
            fix=f"remove or replace {path}, or give its class a __deepcopy__ that "
            "returns self to share it",
        ) from error
    for child in twin.modules():
        detach(child)
        forget_members(child)
        for attribute, value in list(child.__dict__.items()):
            if isinstance(value, Method):
                del child.__dict__[attribute]
    follow_forwards(twin, memo)
    refuse_captured(
        twin,
        {id(child): name for name, child in module.named_modules() if id(child) in memo},
        parameters,
    )
    return twin, memo


def _uncopyable(module: nn.Module, memo: dict[int, Any]) -> str:
    """The innermost attribute that `deepcopy` fails on, as `layer.attribute`."""
    for name, child in reversed(list(module.named_modules())):
        for attribute, value in child.__dict__.items():
            if attribute == "_modules":
                continue
            items = (
                value.items() if attribute in ("_parameters", "_buffers") else [(attribute, value)]
            )
            for key, item in items:
                try:
                    copy.deepcopy(item, dict(memo))
                except Exception:
                    return f"{name}.{key}".lstrip(".")
    return type(module).__name__


def carry_over(old: nn.Parameter, new: nn.Parameter, memo: dict[int, Any]) -> None:
    """Puts the hooks and attributes that users gave a parameter on the one that takes its place."""
    for attribute, value in attributes_of(old).items():
        setattr(new, attribute, value)
    for hook in gradient_hooks(old):
        new.register_hook(rebound(hook, memo))  # type: ignore[no-untyped-call]
    for post_hook in parameter_hooks(old):
        new.register_post_accumulate_grad_hook(rebound(post_hook, memo))  # type: ignore[no-untyped-call]


def _note_initial(pairs: Sequence[tuple[Slot, NamedParameter]]) -> None:
    """Notes the digests by which ranks compare initial values.

    After an earlier transform they are those of before: shards differ by design.
    """
    fresh = []
    for slot, named in pairs:
        known = slot_of(named.parameter)
        if known is None:
            fresh.append((slot, local_of(named.parameter)))
        else:
            slot.initial = known.initial
    for (slot, _), digest in zip(fresh, content_digests(local for _, local in fresh), strict=True):
        slot.initial = digest


class _Donors:
    """Frees the memory of donated parameters: that of each, or,
    after an earlier transform, that of its whole unit."""

    def __init__(self) -> None:
        self._released: set[Slot] = set()

    def release(self, parameter: nn.Parameter) -> None:
        """Frees the memory of a parameter, or that of its unit with the last of them."""
        slot, local = slot_of(parameter), local_of(parameter)
        unit = unit_of(slot)
        if not isinstance(local, TierTensor):  # which has no memory
            set_local(parameter, local.new_empty(0))
        if slot is not None and unit is not None:
            self._released.add(slot)
            if self._released.issuperset(unit.slots):
                unit.vacate()


class Donated:
    """The forward of a module that was donated: it raises."""

    def __init__(self, site: str) -> None:
        self._site = site

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise StateError(
            "This module was donated: its parameters live on in the module "
            "that the transform returned.",
            donated=self._site,
            fix="use the returned module, or leave out donate=True",
        )
