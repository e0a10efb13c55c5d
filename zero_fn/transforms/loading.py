"""What `load_state_dict` and `state_dict` of a transformed module check.

`load_state_dict` takes whole tensors, which are sharded, and writes nothing unless everything fits.
A pre-hook of every module checks all entries at and below it. So whichever module `load_state_dict`
is called on, its own hook sees every entry before torch copies the first. The next forward compares
over ranks what whole tensors were loaded. Communicates only for entries that are sharded in another
way than the parameter: an all-gather each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zero_fn.errors import CheckpointError
from zero_fn.runtime.optimizers import require_own_shard, sharded
from zero_fn.runtime.registry import units_of
from zero_fn.runtime.run import run_of
from zero_fn.runtime.slot import slot_of
from zero_fn.runtime.unit import unit_of
from zero_fn.storage.stored_files import StoredFiles
from zero_fn.tiers.tier_tensor import TierTensor, in_memory
from zero_fn.values.digests import content_digest
from zero_fn.values.dtensors import local_of
from zero_fn.values.mesh import axes_text
from zero_fn.values.tiled import Tiled
from zero_fn.values.units import subclass_of

__all__ = ["check_entries"]


def check_entries(module: nn.Module) -> None:
    """Lets `load_state_dict` of this module take whole tensors beside DTensors
    and refuse what does not fit.

    Does nothing the second time.
    """
    hooks = module._load_state_dict_pre_hooks.values()
    if not any(getattr(hook, "hook", hook) is _before_load for hook in hooks):
        module.register_load_state_dict_pre_hook(_before_load)  # type: ignore[no-untyped-call]


def _before_load(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    *_: object,
) -> None:
    for unit in units_of(module):
        run_of(unit).recover()
        unit.follow_moved()  # of a deep copy that did not run yet
    inside = module.named_modules(prefix=prefix.removesuffix("."), remove_duplicate=False)
    for name, child in inside:
        if isinstance(child, Tiled):
            _split(child, state_dict, f"{name}.".lstrip("."))
    for key, own in _tensors(module, prefix):
        entry = state_dict.get(key)
        if isinstance(entry, Tensor):
            _require_fit(key, own, entry)
    if local_metadata.get("assign_to_params_buffers", False):
        _require_assignable(module, state_dict, prefix)
    _shard_whole(module, state_dict, prefix)


def _split(tiled: Tiled, state_dict: dict[str, Any], prefix: str) -> None:
    tiled.split_entries(state_dict, prefix)
    for attribute, shape in tiled.whole_shapes().items():
        entry = state_dict.get(f"{prefix}{attribute}")
        if isinstance(entry, Tensor):
            raise _mismatch(f"{prefix}{attribute}", entry, shape)


def _tensors(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers at and below a module, by key."""
    inside = module.named_modules(prefix=prefix.removesuffix("."), remove_duplicate=False)
    for name, child in inside:
        if child is not module and _rewrites_entries(child):
            continue  # its own hook comes after whatever rewrites its entries
        for attribute, own in (*child._parameters.items(), *child._buffers.items()):
            if own is not None and attribute not in child._non_persistent_buffers_set:
                yield f"{name}.{attribute}".lstrip("."), own


def _rewrites_entries(module: nn.Module) -> bool:
    if not type(module)._load_from_state_dict.__module__.startswith("torch.nn.modules."):
        return True
    hooks = module._load_state_dict_pre_hooks.values()
    return any(getattr(hook, "hook", hook) is not _before_load for hook in hooks)


def _require_fit(key: str, own: Tensor, entry: Tensor) -> None:
    slot = slot_of(own)
    shape = slot.full_shape if slot is not None else tuple(own.shape)
    is_scalar_in_old_form = not shape and tuple(entry.shape) == (1,)  # torch takes its element
    if tuple(entry.shape) != shape and not is_scalar_in_old_form:
        raise _mismatch(key, entry, shape)
    if isinstance(entry, DTensor) and slot is not None and slot.spec is not None:
        if entry.device_mesh != slot.spec.mesh:
            raise CheckpointError(
                f"{key} lies on another mesh: nothing was loaded.",
                state_dict=axes_text(entry.device_mesh),
                model=axes_text(slot.spec.mesh),
                fix="load whole tensors: {k: v.full_tensor() for k, v in state_dict.items()}",
            )
        require_own_shard(key, entry, slot.spec.mesh)
    elif isinstance(entry, DTensor):
        raise CheckpointError(
            f"{key} is sharded in the state_dict and whole in the model: nothing was loaded.",
            state_dict=f"{entry.placements} over {axes_text(entry.device_mesh)}",
            fix="load whole tensors: {k: v.full_tensor() for k, v in state_dict.items()}",
        )


def _require_assignable(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Refuses tensors that cannot take the place of a parameter (`assign=True`): they are cut as
    the parameter is, and a tied parameter takes one."""
    first: dict[int, tuple[str, Tensor]] = {}
    for key, own in _tensors(module, prefix):
        entry = state_dict.get(key)
        if slot_of(own) is None or not isinstance(entry, Tensor):
            continue
        kind = subclass_of(entry)
        if kind is not None:
            raise CheckpointError(
                f"{key} would be assigned a {kind.__name__}, "
                "and no shard of it would be one: nothing was loaded.",
                state_dict=f"{kind.__module__}.{kind.__qualname__}  {list(entry.shape)}",
                fix="load plain values: {k: v.dequantize() for k, v in state_dict.items()}",
            )
        known, other = first.setdefault(id(own), (key, entry))
        if not _holds_the_same(entry, other):
            raise CheckpointError(
                f"{known} and {key} are one parameter, "
                "and the state_dict has a value for each: nothing was loaded.",
                why="a transformed parameter stays tied, so that one of the values would be lost",
                fix="load one of them under both names; or untie before the transform: "
                "decoder.weight = nn.Parameter(decoder.weight.detach().clone())",
            )


def _holds_the_same(one: Tensor, other: Tensor) -> bool:
    """Whether two entries have the same values.

    A collective where they are sharded, and not in the same memory.
    """
    local, other_local = local_of(one), local_of(other)
    is_same_memory = local.untyped_storage()._cdata == other_local.untyped_storage()._cdata
    if (
        one is other
        or (is_same_memory and local.storage_offset() == other_local.storage_offset())
        or one.is_meta
    ):
        return True
    wholes = [
        entry.full_tensor() if isinstance(entry, DTensor) else entry for entry in (one, other)
    ]
    return torch.equal(*wholes)


def _mismatch(key: str, entry: Tensor, shape: tuple[int, ...]) -> CheckpointError:
    return CheckpointError(
        f"size mismatch for {key}: nothing was loaded.",
        state_dict=list(entry.shape),
        model=list(shape),
        fix="build the model with the sizes of the checkpoint, "
        "or drop the entry and load with strict=False",
    )


def _shard_whole(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    for attribute, parameter in module._parameters.items():
        slot = slot_of(parameter)
        entry = state_dict.get(f"{prefix}{attribute}")
        if slot is None or not isinstance(entry, Tensor):
            continue
        is_whole = not isinstance(entry, DTensor)
        slot.initial = content_digest(in_memory(entry)) if is_whole else None
        unit, local = unit_of(slot), local_of(slot.parameter)
        if isinstance(local, TierTensor) and isinstance(files := local.record.shelf, StoredFiles):
            raise files.unchanged(files)
        if unit is not None:
            unit.generation += 1
            run_of(unit).note_loaded()
        # The form of scalars in old checkpoints.
        if not slot.full_shape and tuple(entry.shape) == (1,):
            entry = entry[0]
        if slot.spec is not None and tuple(entry.shape) == slot.full_shape:
            if isinstance(entry, DTensor):
                if entry.placements == slot.spec.placements:
                    continue
                is_local = all(placement.is_replicate() for placement in entry.placements)
                entry = local_of(entry) if is_local else entry.full_tensor()
            # Memory of its own: with `assign=True` it becomes the parameter.
            state_dict[f"{prefix}{attribute}"] = sharded(entry.detach(), slot, slot.spec)
