"""A model that a config cuts over more ranks than those of ZeRO: its own plan of tensor
parallelism, the meshes of it, and which modules are gathered as wholes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, parallel

from zero_fn.deepspeed.settings import Cuts
from zero_fn.errors import ConfigError, MeshError
from zero_fn.transforms.substitute import copied
from zero_fn.values.mesh import axes_text, mesh_axis, root_of, unflattened
from zero_fn.values.units import anchors_of, distinct_parameters

__all__ = ["cut_by_its_plan", "other_axes", "require_experts", "split", "units_around"]

M = TypeVar("M", bound=nn.Module)

# Sizes that plans with "colwise" divide between ranks.
_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
_TENSOR, _SEQUENCE = ("tp", "tensor", "mp", "model"), ("sp", "sequence", "cp", "context")


def _styles() -> dict[str, parallel.ParallelStyle]:
    """The words of plans of dense models of transformers, as styles of torch."""
    return {
        "colwise": parallel.ColwiseParallel(),
        "rowwise": parallel.RowwiseParallel(),
        "colwise_gather_output": parallel.ColwiseParallel(output_layouts=Replicate()),
        "colwise_rep": parallel.ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": parallel.RowwiseParallel(input_layouts=Replicate()),
        "rowwise_split_input": parallel.RowwiseParallel(input_layouts=Replicate()),
        # A norm of each head: its weight is whole, and its gradient the sum
        # of those of each rank's heads.
        "replicated_with_grad_allreduce": parallel.SequenceParallel(
            sequence_dim=1, use_local_output=True
        ),
    }


def other_axes(
    mesh: DeviceMesh, pipeline: DeviceMesh | None, model: nn.Module
) -> dict[str, DeviceMesh]:
    """The axes of tensor and sequence parallelism beside an axis of data,
    by kind; and that of a pipeline.

    They are known by their names, that of tensor parallelism also
    because parameters are cut over it.
    """
    root, own, cut = root_of(mesh), set(mesh.mesh_dim_names or ()), _axes_cut(model)
    found = {} if pipeline is None else {"stages": mesh_axis(pipeline, verb="from_deepspeed").mesh}
    inside = set(mesh.mesh.flatten().tolist())  # also of a flattened axis
    for name in root.mesh_dim_names or ():
        if name not in own and (name in cut or name in _TENSOR):
            found["tensor"] = root[name]
        elif (
            name not in own
            and name in _SEQUENCE
            and not inside.issuperset(root[name].mesh.tolist())
        ):
            found["sequence"] = root[name]
    return found


def _axes_cut(model: nn.Module) -> set[str]:
    """The names of the axes over which parameters are DTensors."""
    meshes = [each.device_mesh for each in model.parameters() if isinstance(each, DTensor)]
    return {name for mesh in meshes for name in mesh.mesh_dim_names or ()}


def split(
    mesh: DeviceMesh, cuts: Cuts, others: Mapping[str, DeviceMesh]
) -> tuple[DeviceMesh, DeviceMesh, DeviceMesh | None]:
    """The ranks over which ZeRO shards, those that have batches of their own,
    and the axis of tensor parallelism.

    Over parts of sequences ZeRO shards, too. What has no axis beside `mesh` is cut out of
    its ranks, neighbours together.
    """
    tensor = others.get("tensor")
    divided = (cuts.tensor if tensor is None else 1) * cuts.sequence
    if mesh.ndim > 1 and divided > 1:
        raise MeshError(
            "A DeepSpeed config divides the ranks of a mesh that has two axes already.",
            mesh=axes_text(mesh),
            fix='a mesh of more axes, ("dp", ..., "tp"), and those of data here: mesh["dp"]',
        )
    if cuts.tensor > 1 and tensor is None:
        grid = unflattened(mesh, (mesh.size() // cuts.tensor, cuts.tensor), ("dp", "tp"))
        mesh, tensor = grid["dp"], grid["tp"]
    own = mesh
    if cuts.sequence > 1:
        own = unflattened(mesh, (mesh.size() // cuts.sequence, cuts.sequence), ("data", "sp"))[
            "data"
        ]
    return mesh, own, tensor if cuts.tensor > 1 else None


def cut_by_its_plan(model: M, axis: DeviceMesh) -> M:
    """The model with its linear layers cut over an axis, as `model.tp_plan` says.

    One that is cut over it already stays.

    Raises:
        ConfigError: It has no plan, or one with other words than these,
            or its heads are not to be divided so.
    """
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return model
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    styles = _styles()
    sizes = {name: getattr(getattr(model, "config", None), name, None) for name in _DIVIDED}
    unknown = sorted(set(plan.values()) - styles.keys()) or [
        f"{name} {size} over {axis.size()} ranks"
        for name, size in sizes.items()
        if "colwise" in plan.values() and isinstance(size, int) and size % axis.size()
    ]
    if not plan or unknown:
        raise ConfigError(
            "A DeepSpeed config cuts a model by its own plan of tensor parallelism, "
            "and there is none that can be followed.",
            entry="tensor_parallel",
            model=type(model).__name__,
            plan=", ".join(unknown) or "no tp_plan",
            fix=f'parallelize_module(model, mesh["{(axis.mesh_dim_names or ("tp",))[0]}"], '
            'plan) before, and mesh["dp"] of '
            "the same mesh here (docs/guides/tensor-parallel.md)",
        )

    named = distinct_parameters(model)
    twin, _ = copied(model, named)
    parallel.parallelize_module(twin, axis, {name: styles[word] for name, word in plan.items()})
    # A plan cuts each place of a tied parameter by itself.
    for first, *others in (each.places for each in named):
        kept = twin.get_submodule(first[0])._parameters[first[1]]
        for module, attribute in others:
            other = twin.get_submodule(module)._parameters[attribute]
            if getattr(other, "placements", None) != getattr(kept, "placements", None):
                raise ConfigError(
                    "A model's own plan of tensor parallelism cuts one parameter in two ways.",
                    parameter=f"{first[0]}.{first[1]}, which is {module}.{attribute}, too",
                    fix="parallelize_module(model, mesh, plan) before, with one style for both",
                )
            twin.get_submodule(module)._parameters[attribute] = kept
    return twin


def units_around(model: nn.Module, wholes: tuple[str, ...]) -> list[str] | None:
    """The repeated blocks of a model, but for those inside modules that are to be
    gathered as wholes, and these.

    Raises:
        ConfigError: No module is one of those.
    """
    if not wholes:
        return None
    modules = [(name, module) for name, module in model.named_modules() if name]
    found = [
        name for name, module in modules if any(_is_named(name, module, word) for word in wholes)
    ]
    if not found:
        raise ConfigError(
            "A DeepSpeed config names modules that the model does not have.",
            entry="zero_optimization.leaf_module",
            got=", ".join(word.removeprefix("class ") for word in wholes),
            fix="names as named_modules() gives them, ends of names, or the names of classes",
        )
    anchors = [name for name in anchors_of(model, None) if name]
    outer = [name for name in anchors if not any(name.startswith(f"{whole}.") for whole in found)]
    return outer + [
        name for name in found if not any(f"{name}.".startswith(f"{anchor}.") for anchor in outer)
    ]


def _is_named(name: str, module: nn.Module, word: str) -> bool:
    if word.startswith("class "):
        return type(module).__name__ == word.removeprefix("class ")
    return name.endswith(word[1:]) if word.startswith("*") else name == word


def require_experts(model: nn.Module, mesh: DeviceMesh, experts: int) -> None:
    """Requires that experts were placed over the second axis of a mesh.

    Raises:
        MeshError: The mesh has no such axis, or no parameter is cut over it.
    """
    names = mesh.mesh_dim_names or ("", "")
    if mesh.ndim != 2 or mesh.size(1) != experts or names[1] not in _axes_cut(model):
        raise MeshError(
            f"{experts} ranks with experts of their own need a mesh of two axes, "
            "and experts placed over the second.",
            mesh=axes_text(mesh),
            fix=f"mesh = init_device_mesh({mesh.device_type!r}, (n, {experts}), "
            'mesh_dim_names=("dp", "ep")); distribute_tensor(..., mesh["ep"], [Shard(0)]) of '
            "experts; zf.from_deepspeed(model, config, mesh)",
        )
