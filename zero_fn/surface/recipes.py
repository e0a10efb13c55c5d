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


def zero1(module: M, mesh: DeviceMesh, **options: Any) -> M:
    """ZeRO stage 1: `shard_optimizer`. Options, errors and result are those of that transform."""
    return shard_optimizer(module, mesh, **options)


def zero2(module: M, mesh: DeviceMesh, **options: Any) -> M:
    """ZeRO stage 2: `shard_grads` of `shard_optimizer`. Options, errors and result are those of `shard_grads`."""
    return shard_grads(module, mesh, **options)


def zero3(module: M, mesh: DeviceMesh, **options: Any) -> M:
    """ZeRO stage 3: `shard_params` of `shard_grads` of `shard_optimizer`. Options, errors and result are those of
    `shard_params`."""
    return shard_params(module, mesh, **options)


def hybrid(
    module: M, mesh: DeviceMesh, *, shard: str = "inner", replicate: str = "outer", donate: bool = False, **options: Any
) -> M:
    """Shards a module over one axis of a mesh and trains replicas of that over another (HSDP, MiCS).

    `replicate(shard_params(module, mesh[shard]), mesh[replicate])`: parameters are gathered along `shard` only, which may be
    the ranks of one node, and along `replicate` travel 1/n of the gradients, n ranks on `shard`.

    Communicates, in bytes sent per rank and step, for Ψ parameters of b bytes over n ranks on `shard` and m on `replicate`:
        along `shard`        what `shard_params` does: at most 3 (n - 1)/n Ψ b
        along `replicate`    2 (m - 1)/m Ψ/n b

    Args:
        module: Any module.
        mesh: A mesh with both axes.
        shard: Name of the axis to shard over.
        replicate: Name of the axis to replicate over.
        donate: Free each whole parameter as soon as its shard is cut; `module` can no longer run.
        **options: Of `shard_params`.

    Returns:
        A new module, as `shard_params` does.

    Raises:
        MeshError: `mesh` has no axis of that name; or what the two transforms raise.
    """
    for name in (shard, replicate):
        if not isinstance(mesh, DeviceMesh) or name not in (mesh.mesh_dim_names or ()):
            raise MeshError(
                f"hybrid found no axis {name!r}.",
                mesh=axes_text(mesh) if isinstance(mesh, DeviceMesh) else repr(mesh)[:80],
                fix='mesh = init_device_mesh("cpu", (m, n), mesh_dim_names=("outer", "inner")), or name the axes: '
                "shard=..., replicate=...",
            )
    sharded = shard_params(module, mesh[shard], donate=donate, **options)
    return replicate_over(sharded, mesh[replicate], donate=True)
