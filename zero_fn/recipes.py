"""Named compositions of transforms, for those who think in stages."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_fn.errors import MeshError
from zero_fn.transforms.shard import replicate as replicate_over
from zero_fn.transforms.shard import shard_grads, shard_optimizer, shard_params
from zero_fn.values.mesh import axes_text

__all__ = ["hybrid", "zero1", "zero2", "zero3"]

M = TypeVar("M", bound=nn.Module)


zero1 = shard_optimizer
"""ZeRO stage 1: shards optimizer states over one mesh axis,
`model = zf.shard_optimizer(model, mesh["dp"])`."""

zero2 = shard_grads
"""ZeRO stage 2: shards optimizer states and gradients over one mesh axis,
`model = zf.shard_grads(model, mesh["dp"])`."""

zero3 = shard_params
"""ZeRO stage 3: shards all training state over one mesh axis,
`model = zf.shard_params(model, mesh["dp"])`."""


def hybrid(
    module: M,
    mesh: DeviceMesh,
    *,
    shard: str = "inner",
    replicate: str = "outer",
    donate: bool = False,
    **options: Any,
) -> M:
    """Shards a module over one axis of a mesh and trains replicas of the
    shards over another (HSDP, MiCS).

        mesh = init_device_mesh("cuda", (nodes, 8), mesh_dim_names=("outer", "inner"))
        model = zf.hybrid(model, mesh)

    The same as `replicate(shard_params(module, mesh[shard]), mesh[replicate])`. Parameters are
    gathered along `shard` only, which may be the ranks of one node. Along `replicate` only
    gradients are sent, of this rank's shards.

    Communicates, in bytes sent per rank and step, for Ψ parameters of b bytes over n ranks on
    `shard` and m on `replicate`:
        along `shard`        what `shard_params` does: at most 3 (n - 1)/n Ψ b
        along `replicate`    2 (m - 1)/m Ψ/n b

    Args:
        module: Any module.
        mesh: A mesh with both axes.
        shard: Name of the axis to shard over.
        replicate: Name of the axis to replicate over.
        donate: Free each whole parameter as soon as its shard is cut; `module` can no longer run.
        **options: Other options of `shard_params`.

    Returns:
        A new module with the type, the parameter names and the outputs of `module`,
        which is unchanged unless donated.

    Raises:
        MeshError: `mesh` has no axis of that name.
        LayoutError, StateError: What `shard_params` raises.

    Source:
        MiCS, Zhang et al. 2022, 3.1 (scale-aware partitioning).
    """
    for name in (shard, replicate):
        if not isinstance(mesh, DeviceMesh) or name not in (mesh.mesh_dim_names or ()):
            raise MeshError(
                f"hybrid found no axis {name!r}.",
                mesh=axes_text(mesh) if isinstance(mesh, DeviceMesh) else repr(mesh)[:80],
                fix='mesh = init_device_mesh("cpu", (m, n), mesh_dim_names=("outer", '
                '"inner")), or name the axes: '
                "shard=..., replicate=...",
            )
    sharded = shard_params(module, mesh[shard], donate=donate, **options)
    return replicate_over(sharded, mesh[replicate], donate=True)
