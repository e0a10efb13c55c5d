"""One mesh axis: the only thing a transform needs to know about a `DeviceMesh`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch.distributed.device_mesh import DeviceMesh

from zero_fn.errors import MeshError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Axis", "axes_text", "mesh_axis"]


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a device mesh, over which state is replicated or sharded.

    Attributes:
        mesh: The 1-D mesh; two axes are equal when their meshes are.
        size: Number of ranks along the axis, `n` in the formulas.
        rank: Position of this process, `0 <= rank < size`.
        name: The name of the axis, `"axis"` when the mesh gave none.
        device_type: `"cpu"`, `"cuda"`, ...: where the bytes of this axis move.
    """

    mesh: DeviceMesh
    size: int = field(compare=False)
    rank: int = field(compare=False)
    name: str = field(compare=False)
    device_type: str = field(compare=False)

    @property
    def group(self) -> ProcessGroup:
        """The process group of the ranks along this axis."""
        return self.mesh.get_group()

    def __str__(self) -> str:
        return f"{self.name!r} ({self.size})"


def mesh_axis(mesh: object, *, verb: str) -> Axis:
    """The single axis that `mesh` is.

    Args:
        mesh: A 1-D `DeviceMesh`: `mesh["dp"]`, or a mesh that has one axis only.
        verb: Name of the calling transform, for the messages.

    Raises:
        MeshError: `mesh` is not a mesh, has several axes, or does not contain this rank.
    """
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(
            f"{verb} takes one axis of a DeviceMesh, got {type(mesh).__name__}.",
            got=repr(mesh)[:80],
            fix=f'mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("dp",)); {verb}(model, mesh["dp"])',
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        first = names[0] if names else None
        raise MeshError(
            f"{verb} takes one mesh axis, got {mesh.ndim}.",
            mesh=axes_text(mesh),
            fix=f'{verb}(model, mesh["{first}"])' if first else 'name the axes: mesh_dim_names=("dp", ...)',
        )
    if mesh.get_coordinate() is None:
        raise MeshError(
            f"This rank is not on the axis given to {verb}.",
            mesh=axes_text(mesh),
            fix=f"call {verb} only on the ranks of the mesh, or build the mesh over all ranks",
        )
    name = mesh.mesh_dim_names[0] if mesh.mesh_dim_names else "axis"
    return Axis(mesh, mesh.size(), mesh.get_local_rank(), name, mesh.device_type)


def axes_text(mesh: DeviceMesh) -> str:
    """The axes of a mesh by name and size, as errors show them: `(dp=8, tp=4) on 'cuda'`."""
    names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
    sizes = ", ".join(f"{name}={mesh.size(i)}" for i, name in enumerate(names))
    return f"({sizes}) on {mesh.device_type!r}"
