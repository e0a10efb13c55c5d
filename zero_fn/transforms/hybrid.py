"""`hybrid`: shards over one mesh axis, replicates over another (HSDP)."""

from __future__ import annotations

from typing import Literal, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_fn.errors import MeshError
from zero_fn.transforms.selection import Where
from zero_fn.transforms.shard import Buffers, shard_params
from zero_fn.transforms.shard import replicate as replicate_over
from zero_fn.values.mesh import axes_text
from zero_fn.values.units import Units

__all__ = ["hybrid"]

M = TypeVar("M", bound=nn.Module)


def hybrid(
    module: M,
    mesh: DeviceMesh,
    *,
    shard: str = "inner",
    replicate: str = "outer",
    units: Units = None,
    where: Where = None,
    persist_below: int = 0,
    reshard_after: Literal["forward", "backward"] = "forward",
    buffers: Buffers = None,
    donate: bool = False,
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
        units, where, persist_below, reshard_after, buffers, donate: As `shard_params` takes them.

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
    sharded = shard_params(
        module,
        mesh[shard],
        units=units,
        where=where,
        persist_below=persist_below,
        reshard_after=reshard_after,
        buffers=buffers,
        donate=donate,
    )
    return replicate_over(sharded, mesh[replicate], donate=True)
