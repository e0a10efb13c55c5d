"""Memory of activations for compute: forwards that run again in backward."""

from __future__ import annotations

from inspect import signature
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_fn.errors import UnitError
from zero_fn.transforms.offloaded_activations import Parking
from zero_fn.transforms.recomputation import Recomputed
from zero_fn.transforms.substitute import substitute
from zero_fn.transport.links import line_over
from zero_fn.values.assignment import Assignment
from zero_fn.values.mesh import mesh_axis
from zero_fn.values.tiers import Tier
from zero_fn.values.units import Units, anchors_of, repeated_blocks

__all__ = ["checkpoint_activations"]

M = TypeVar("M", bound=nn.Module)


def checkpoint_activations(
    module: M,
    *,
    units: Units = None,
    partition: DeviceMesh | None = None,
    offload: Tier | None = None,
) -> M:
    """Keeps only the inputs of some modules for the backward,
    and runs their forward again there (activation checkpoints).

        model = zf.checkpoint_activations(model, units=Block)

    With `partition`, an axis along which activations are equal (tensor parallelism), each rank
    keeps 1/n of each input. With `offload`, kept inputs move to host memory or to a disk until the
    backward needs them. Gradients are the same to the bit: the forward that runs again restores the
    random state.

    Communicates: with `partition`, one all-gather of the inputs of each module in backward. A
    sharded unit (wrap group) that holds the module is gathered once in backward, as without
    checkpoints.

    Args:
        module: Any module, transformed or not, before or after other transforms.
        units: Which modules are recomputed: module classes or patterns of module names;
            None: the repeated blocks.
        partition: One axis of a mesh, `mesh["tp"]`: floating point inputs are cut over it.
            DTensors are left as they are.
        offload: Where kept inputs wait: `zf.cpu()` or `zf.nvme(path)`. To `zf.cpu()` of a module
            that computes on the CPU nothing moves.

    Returns:
        A new module with the type, the parameter names and the outputs of `module`,
        which is unchanged.

    Raises:
        UnitError: `units` matches nothing, or there are no repeated blocks.
        MeshError: `partition` is not one axis.
        DisagreementError: In the first forward: the inputs differ along `partition`.
        TierError: In a forward: the tier has no room. Other ranks of the axes of
            `module` get a `LostRankError`.
        StorageError: In a forward or backward: the disk failed,
            or gave other bytes than were written.
        StateError: `module` is running, or was donated.

    Source:
        ZeRO, Rajbhandari et al. 2020, section 6.1 (P_a and P_a+cpu).
    """
    axis = None if partition is None else mesh_axis(partition, verb="checkpoint_activations")
    names = (
        list(repeated_blocks(module))
        if units is None
        else [name for name in anchors_of(module, units) if name]
    )
    if not names:
        raise UnitError(
            "checkpoint_activations found no module to recompute.",
            module=type(module).__name__,
            fix="name a class or a pattern of module names: units=Block",
        )
    links = None if axis is None else line_over([axis])
    parking = Parking(offload)

    def prepare(twin: nn.Module) -> None:
        modules = dict(twin.named_modules())
        for name in names:
            own = modules[name].__dict__.get("forward")
            if not isinstance(own, Recomputed):
                modules[name].__dict__["forward"] = Recomputed(
                    modules[name], name, own, links, parking
                )
        for each in modules.values():
            takes_cache = (
                hasattr(each, "config") and "use_cache" in signature(type(each).forward).parameters
            )
            # Also where the transform is called again.
            if takes_cache and _keep_no_keys not in each._forward_pre_hooks.values():
                each.register_forward_pre_hook(_keep_no_keys, with_kwargs=True)

    return substitute(module, Assignment(), verb="checkpoint_activations", prepare=prepare)


def _keep_no_keys(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Models of transformers fill a cache of keys unless told not to:
    a forward that runs again would add them twice."""
    is_told = kwargs.get("use_cache") is not None or not torch.is_grad_enabled()
    return args, kwargs if is_told else {**kwargs, "use_cache": False}
