"""A model placed as the settings of a config say: stage, dtypes, tiers; and ready to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zero_fn.deepspeed.precision import Computing, run_under_autocast
from zero_fn.deepspeed.settings import Settings, Sharding
from zero_fn.deepspeed.tensor_parallel import require_experts, units_around
from zero_fn.errors import ConfigError, MeshError
from zero_fn.inspect.describe import home_of
from zero_fn.runtime.registry import units_of
from zero_fn.runtime.run import run_of
from zero_fn.runtime.slot import slot_of
from zero_fn.transforms.checkpoint_activations import checkpoint_activations
from zero_fn.transforms.flatten_subclasses import is_part
from zero_fn.transforms.offload import offload
from zero_fn.transforms.precision import precision
from zero_fn.transforms.shard import replicate, shard_grads, shard_optimizer, shard_params
from zero_fn.values.mesh import Axis, axes_text, mesh_axis, root_of, unflattened
from zero_fn.values.tiers import IN_MEMORY, cpu
from zero_fn.values.units import Units

__all__ = ["made_by", "mesh_of", "placed_by", "ready_to_run", "require_placed"]

M = TypeVar("M", bound=nn.Module)

_NARROW = (torch.bfloat16, torch.float16)


def made_by(settings: Settings, mesh: DeviceMesh, model: M) -> M:
    """The model placed and ready to run, for a Trainer or an Accelerator,
    whose ranks all have batches of their own."""
    return ready_to_run(settings, placed_by(settings, mesh, model))


def ready_to_run(settings: Settings, placed: M, tensor: DeviceMesh | None = None) -> M:
    """A placed model whose blocks are computed again in backward, whose units are compiled, which
    runs under autocast, as the settings say."""
    if settings.computing.recomputes:
        placed = checkpoint_activations(
            placed, partition=tensor, offload=cpu() if settings.computing.parks else None
        )
    axes = _axes_of(placed)
    if settings.computing.autocast is not None:
        run_under_autocast(
            placed, axes[0].device_type if axes else "cpu", settings.computing.autocast
        )
    if settings.computing.compiles is not None:
        blocks = [
            anchor
            for unit in units_of(placed)
            if (anchor := unit.anchor()) is not None and anchor is not placed
        ]
        for block in blocks or [placed]:
            block.compile(**settings.computing.compiles)
    return placed


def placed_by(
    settings: Settings, mesh: DeviceMesh, model: M, units: Units = None, *, donate: bool = False
) -> M:
    """The model with placements, dtypes and tiers as the settings say.

    One that is placed is checked; adapters get places.

    [Note: masters] As in DeepSpeed, trained parameters rest in float32, whatever dtype they were
    loaded in. Frozen ones keep their dtype if the model computes in 16 bits.
    """

    def is_widened(name: str, parameter: Tensor) -> bool:
        return parameter.dtype in _NARROW and (
            parameter.requires_grad or settings.computing.compute is None
        )

    if mesh_of(model) is not None:
        mesh = require_placed(settings, mesh, model)
        if all(slot_of(parameter) is not None for parameter in model.parameters()):
            return model
    sharding = settings.sharding
    if settings.cuts.experts > 1:
        require_experts(model, mesh, settings.cuts.experts)
    units = units_around(model, sharding.leaves) if units is None else units
    placed, tiers = _sharded(model, settings, mesh, units, donate=donate), sharding.tiers
    computing = settings.computing
    in_flight = partial(
        precision,
        compute=computing.compute or torch.float32,
        reduce=computing.reduce,
        donate=True,
    )
    if (computing.compute, sharding.gather, sharding.scatter) != (None, None, None):
        reduce = sharding.scatter or computing.reduce
        placed = in_flight(placed, reduce=reduce, gather=sharding.gather, grads=computing.grads)
    are_frozen = not all(parameter.requires_grad for parameter in placed.parameters())
    if sharding.gather_frozen is not None and are_frozen:
        placed = in_flight(placed, gather=sharding.gather_frozen, where=_is_frozen)
    if computing.rest is not None:
        placed = in_flight(placed, rest=computing.rest)
    elif any(is_widened(name, parameter) for name, parameter in placed.named_parameters()):
        placed = in_flight(placed, rest=torch.float32, where=is_widened)
    _cast_buffers(placed, computing)
    if tiers == IN_MEMORY:
        return placed
    return offload(
        placed,
        params=tiers.params,
        grads=tiers.grads,
        optim=tiers.optim,
        fraction=tiers.fraction,
        donate=True,
    )


def _cast_buffers(model: nn.Module, computing: Computing) -> None:
    """Casts buffers of a model of our own as the config says;
    to float32 those that it, or the model, keeps so."""
    lists = ("_keep_in_fp32_modules_strict", "_keep_in_fp32_modules")[
        : 1 + (computing.compute is torch.float16)
    ]
    modules = [(f"{name}." if name else "", module) for name, module in model.named_modules()]
    kept = [f"*{word}*" for word in computing.keeps_wide or ()]
    if computing.keeps_wide is None:
        kept = [
            f"{at}*{word}*"
            for at, each in modules
            for own in lists
            for word in getattr(each, own, None) or ()
        ]
    for at, module in modules:
        for own, buffer in module.named_buffers(recurse=False):
            is_kept = computing.compute is not None and any(
                fnmatchcase(at + own, word) for word in kept
            )
            dtype = torch.float32 if is_kept else computing.buffers
            if dtype is not None and buffer.dtype in (torch.float32, *_NARROW):
                setattr(module, own, buffer.to(dtype))


def _is_frozen(_: str, parameter: Tensor) -> bool:
    return not parameter.requires_grad


def _axes_of(model: nn.Module) -> tuple[Axis, ...]:
    return next((axes for unit in units_of(model) if (axes := run_of(unit).transport.axes)), ())


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """The mesh over which a model is placed: its data axis, or two of them, the outer one first.

    None of any other model.
    """
    axes = _axes_of(model)
    if len(axes) < 2:
        return axes[0].mesh if axes else None
    return root_of(axes[0].mesh)[tuple(axis.name for axis in reversed(axes))]


def require_placed(settings: Settings, mesh: DeviceMesh, model: nn.Module) -> DeviceMesh:
    """Requires that a placed model rests as the settings say.

    Returns its own mesh, which may have other names.

    The same transforms place parameters of these shapes on `meta`:
    but for tiers, where they would make room.
    """
    own, twin, sharding = mesh_of(model) or mesh, nn.Module(), settings.sharding
    first, second = ((each.device_type, each.mesh.flatten().tolist()) for each in (own, mesh))
    if first != second:
        raise MeshError(
            "A model was placed over another mesh than the one that is given "
            "with its DeepSpeed config.",
            placed=axes_text(own),
            given=axes_text(mesh),
            fix="the mesh over which the model was placed: placed(config, mesh)",
        )
    slots = [slot for unit in units_of(model) for slot in unit.slots if not is_part(slot.parameter)]
    for number, slot in enumerate(slots):
        shape = torch.empty(slot.path.shape, dtype=slot.dtype, device="meta")
        twin.register_parameter(str(number), nn.Parameter(shape, slot.parameter.requires_grad))
    if settings.cuts.experts > 1:
        return own  # on a twin they would not be placed
    twin = placed_by(
        replace(settings, sharding=replace(sharding, tiers=IN_MEMORY, leaves=())), own, twin
    )
    for parameter, slot in zip(twin.parameters(), slots, strict=True):
        wanted = slot_of(parameter)
        assert wanted is not None, "placed_by has left out a parameter"
        found, said = home_of(slot, slot.home.tiers), home_of(wanted, sharding.tiers)
        if found != said:
            raise ConfigError(
                "A model was placed in another way than its DeepSpeed config says.",
                first=slot.fqn,
                placed=found,
                config=said,
                fix="with placed(config): model = AutoModelForCausalLM.from_pretrained(folder); "
                "or a plain model",
            )
    return own


def _sharded(model: M, settings: Settings, mesh: DeviceMesh, units: Units, *, donate: bool) -> M:
    sharding = settings.sharding
    whole = _persistent(model, sharding)
    names = mesh.mesh_dim_names or ()

    def is_large(name: str, parameter: Tensor) -> bool:
        return name not in whole

    keeps_all = len(whole) == sum(1 for _ in model.parameters())
    # Stage 3 without anything to shard is stage 2.
    stage = 2 if sharding.stage == 3 and keeps_all else sharding.stage
    where = is_large if stage == 3 and whole else None
    transform: Callable[..., M] = (replicate, shard_optimizer, shard_grads, shard_params)[stage]
    cut = partial(transform, units=units, donate=donate, where=where)
    if settings.cuts.experts > 1:
        own = {name for name, each in model.named_parameters() if isinstance(each, DTensor)}
        first = cut(model, mesh[names[0]])
        return transform(
            first, mesh[names[1]], where=lambda name, _: name not in own | whole, donate=True
        )
    if sharding.secondary == 1 or sharding.secondary >= mesh.size():
        return cut(model, mesh_axis(mesh, verb="from_deepspeed").mesh)
    if mesh.ndim == 1 and mesh.size() % sharding.secondary == 0:
        mesh = unflattened(
            mesh, (mesh.size() // sharding.secondary, sharding.secondary), ("outer", "inner")
        )
    names = mesh.mesh_dim_names or ()
    if len(names) != 2 or mesh.size(1) != sharding.secondary:
        raise MeshError(
            "zero_hpz_partition_size needs a number of ranks that it divides, "
            "or a mesh of two axes.",
            mesh=axes_text(mesh),
            zero_hpz_partition_size=sharding.secondary,
            fix=f"a divisor of {mesh.size()}; or init_device_mesh({mesh.device_type!r}, "
            f"(n, {sharding.secondary}), "
            'mesh_dim_names=("outer", "inner")), and both axes: '
            "zf.from_deepspeed(model, config, mesh)",
        )
    return shard_grads(cut(model, mesh[names[1]]), mesh[names[0]], where=where, donate=True)


def _persistent(model: nn.Module, sharding: Sharding) -> set[str]:
    """The names of parameters that stay whole at stage 3: the first that are small, and together
    not too many, as DeepSpeed chooses them."""
    found: set[str] = set()
    numel = 0
    for name, parameter in model.named_parameters():
        if parameter.numel() <= min(sharding.persist_numel, sharding.persist_most - numel):
            found.add(name)
            numel += parameter.numel()
    return found
