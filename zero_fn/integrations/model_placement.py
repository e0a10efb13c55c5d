"""Transforms a plain model, and gives an optimizer that was built for the
plain model the new parameters.

An optimizer holds parameters, not a model. If it has not stepped yet, its parameters are exchanged,
by name, for those of the transformed model. If it has stepped, its states have the shapes of whole
parameters, and it is refused.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

import zero_fn as zf
from zero_fn.integrations.adapters import let_adapters_be_whole
from zero_fn.runtime.replaced_parameters import replacement_of
from zero_fn.runtime.slot import slot_of
from zero_fn.transforms.generating import is_generative

__all__ = [
    "Place",
    "all_ranks",
    "exchange_parameters",
    "place_module",
    "plain_trained",
    "refuse_stale",
    "replaced_since",
    "run_together",
]

M = TypeVar("M", bound=nn.Module)

Place = Callable[[M], M]
"""Any chain of transforms: `lambda model: zf.shard_params(model, mesh["dp"])`."""


def all_ranks(device_type: str | None = None) -> DeviceMesh:
    """The axis "dp" over all processes, on the accelerator if there is one.

    Starts their process group if nobody has.
    """
    if not dist.is_initialized() and "RANK" not in os.environ:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(store=store, rank=0, world_size=1)  # a process that nobody launched
    elif not dist.is_initialized():
        dist.init_process_group()
    found = torch.accelerator.current_accelerator(check_available=True)
    device_type = device_type or ("cpu" if found is None else found.type)
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("dp",))


def plain_trained(module: nn.Module) -> list[str]:
    """Names of the parameters that are trained and that no transform holds:
    a plain model's, or adapters added since."""
    return [name for name, p in module.named_parameters() if p.requires_grad and slot_of(p) is None]


def place_module(
    place: Place[M], module: M, device: torch.device | None = None
) -> tuple[M, dict[int, nn.Parameter]]:
    """Transforms a module.

    Returns it, and its parameters by the id of the plain parameters that they replace.

    What the transforms left elsewhere goes to `device`; None leaves it where it is.
    """
    old = dict(module.named_parameters())
    transformed = place(module)
    if transformed is None:
        raise zf.errors.StateError(
            "place= returned nothing.",
            why="a transform leaves its argument as it is, and returns another module",
            fix="place=lambda model: zf.shard_params(model, mesh['dp']); in a def: return model",
        )
    if not zf.inspect.is_transformed(transformed):
        raise zf.errors.StateError(
            "place= returned a module that no transform has made.",
            returned=type(transformed).__name__,
            fix="place=lambda model: zf.shard_params(model, mesh['dp'])",
        )
    tensors = (*transformed.parameters(), *transformed.buffers())
    if device is not None and any(
        tensor.device.type not in (device.type, "meta") for tensor in tensors
    ):
        transformed = transformed.to(device)
    run_together(transformed)
    let_adapters_be_whole()
    new = dict(transformed.named_parameters())
    return transformed, {id(parameter): new[name] for name, parameter in old.items() if name in new}


def run_together(module: nn.Module) -> None:
    """Tells modules of transformers that ranks must run the same layers, and skip none at random
    (`layerdrop`); and its Seq2SeqTrainer, which asks the model, that `generate` must go on until
    all ranks are done.

    Only those that ask: the compiler makes other graphs for a module that says so.
    """
    for child in module.modules():
        forward = inspect.unwrap(type(child).forward)
        names = getattr(getattr(forward, "__code__", None), "co_names", ())
        if is_generative(child) or _ASKED in names:
            child.__dict__["_is_fsdp_managed_module"] = True


_ASKED = "is_fsdp_managed_module"  # the function of transformers by which its modules ask


def exchange_parameters(optimizer: Optimizer, new: Mapping[int, nn.Parameter]) -> None:
    """Replaces parameters of an optimizer that has not stepped.

    `new` has the others by the id of those that they replace.
    """
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(id(parameter) in new for parameter in held):
        return
    if optimizer.state:
        raise zf.errors.StateError(
            "An optimizer took steps before its model was transformed.",
            optimizer=type(optimizer).__name__,
            why="its states have the shapes of whole parameters",
            fix="transform the model before the first step, or build a new optimizer: "
            "AdamW(model.parameters())",
        )
    for group in optimizer.param_groups:
        group["params"] = [new.get(id(parameter), parameter) for parameter in group["params"]]


def replaced_since(optimizer: Optimizer, models: Iterable[nn.Module]) -> dict[int, nn.Parameter]:
    """The parameters of models that a transform put in place of those of an optimizer,
    by the id of the replaced ones."""
    own = {id(parameter) for model in models for parameter in model.parameters()}
    replaced = {
        id(p): replacement_of(p) for group in optimizer.param_groups for p in group["params"]
    }
    successors = {
        key: replacement.parameter()
        for key, replacement in replaced.items()
        if replacement is not None
    }
    return {key: new for key, new in successors.items() if new is not None and id(new) in own}


def refuse_stale(optimizers: Iterable[Optimizer]) -> None:
    """Refuses optimizers whose parameters a transform has replaced."""
    for optimizer in optimizers:
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter in own:
            if (replacement := replacement_of(parameter)) is not None:
                raise zf.errors.StaleError(
                    "An optimizer was built before its model was transformed.",
                    first=f"{replacement.fqn}, replaced by {replacement.site}",
                    why="step() would update the old parameters and the loss would not move",
                    fix="build it after the last transform: AdamW(model.parameters()); or leave "
                    "the transform to ZeroAccelerator(place=...), which takes the plain model "
                    "and its optimizer",
                )
