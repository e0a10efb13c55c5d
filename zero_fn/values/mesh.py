"""One axis of a `DeviceMesh`, which is all that a transform needs of it;
and where the axes of one mesh lie in that mesh.

Only this file asks torch which mesh a submesh was cut from, and joins submeshes:
torch's functions for both are private.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zero_fn.errors import MeshError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "Axis",
    "axes_text",
    "cut_from",
    "dims_in",
    "joined_mesh",
    "mesh_axis",
    "root_of",
    "unflattened",
]


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a device mesh, over which state is replicated or sharded."""

    mesh: DeviceMesh  # the 1-D mesh; two axes are equal when their meshes are
    size: int = field(compare=False)  # number of ranks along the axis, `n` in the formulas
    rank: int = field(compare=False)  # position of this process, `0 <= rank < size`
    name: str = field(compare=False)  # the name of the axis, `"axis"` when the mesh gave none
    # `"cpu"`, `"cuda"`, ...: where the bytes of this axis move.
    device_type: str = field(compare=False)

    @property
    def group(self) -> ProcessGroup:
        """The process group of the ranks along this axis."""
        return self.mesh.get_group()

    @property
    def backend(self) -> str:
        """The backend that moves the bytes: "gloo", "nccl", ...
        A process group may have one for each type of device."""
        named = str(dist.get_backend(self.group))
        # The group was started without a name, as init_device_mesh does.
        if named == "undefined":
            return str(self.group._get_backend(torch.device(self.device_type)).name())
        by_device = dict(pair.split(":", 1) for pair in named.split(",") if ":" in pair)
        return by_device.get(self.device_type, named)

    def __str__(self) -> str:
        return f"{self.name!r} ({self.size})"


def mesh_axis(mesh: object, *, verb: str) -> Axis:
    """A mesh of one axis, as an `Axis`.

    Raises:
        MeshError: `mesh` is not a mesh, has several axes, is on `meta`,
            or does not contain this rank.
    """
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(
            f"{verb} takes one axis of a DeviceMesh, got {type(mesh).__name__}.",
            got=repr(mesh)[:80],
            fix='mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("dp",)); '
            f'zf.{verb}(model, mesh["dp"])',
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        first = names[0] if names else None
        raise MeshError(
            f"{verb} takes one mesh axis, got {mesh.ndim}.",
            mesh=axes_text(mesh),
            fix=f'zf.{verb}(model, mesh["{first}"])'
            if first
            else 'name the axes, mesh_dim_names=("dp", ...), and pass mesh["dp"]',
        )
    if mesh.get_coordinate() is None:
        raise MeshError(
            f"This rank is not on the axis given to {verb}.",
            mesh=axes_text(mesh),
            fix=f"call {verb} only on the ranks of the mesh, or build the mesh over all ranks",
        )
    if mesh.device_type == "meta":
        raise MeshError(
            f"{verb} was given a mesh on 'meta'.",
            mesh=axes_text(mesh),
            why="parameters rest on the device of their mesh, and meta has no memory",
            fix='init_device_mesh("cpu", ...) or "cuda"; '
            "a model on meta stays there until zf.materialize",
        )
    name = mesh.mesh_dim_names[0] if mesh.mesh_dim_names else "axis"
    return Axis(mesh, mesh.size(), mesh.get_local_rank(), name, mesh.device_type)


def root_of(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that `mesh` was cut from; `mesh` itself if it was not cut."""
    return mesh._get_root_mesh()


def cut_from(root: DeviceMesh, mesh: DeviceMesh) -> DeviceMesh | None:
    """The submesh of `root` that is `mesh` or equal to it; None if there is none.

    A DTensor holds the first of all equal meshes that DTensor met in the process.
    That one may be cut from another root.
    """
    names = mesh.mesh_dim_names
    if names is None or root_of(mesh) == root:
        return mesh if names is not None else None
    try:
        own = root[names if len(names) > 1 else names[0]]
    except (KeyError, RuntimeError, ValueError):
        return None
    return own if own == mesh else None


def dims_in(root: DeviceMesh, mesh: DeviceMesh) -> frozenset[int]:
    """The dims of `root` over which the ranks of a submesh spread; for a flattened axis,
    all dims that it was made of."""
    names, known = mesh.mesh_dim_names or (), root.mesh_dim_names or ()
    if mesh is root or (names and all(name in known for name in names)):
        if mesh is root:
            return frozenset(range(root.ndim))
        return frozenset(known.index(name) for name in names)
    places = (root.mesh.unsqueeze(-1) == mesh.mesh.flatten()).nonzero()[:, : root.ndim]
    return frozenset(
        dim for dim in range(root.ndim) if int(places[:, dim].min()) != int(places[:, dim].max())
    )


def joined_mesh(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """The mesh whose axes are those of several submeshes of one mesh, in this order."""
    if len(meshes) == 1:
        return meshes[0]
    root = root_of(meshes[0])
    names = tuple(name for mesh in meshes for name in mesh.mesh_dim_names or ())
    if names == root.mesh_dim_names:
        return root
    return DeviceMesh._concatenate(list(meshes))


def unflattened(mesh: DeviceMesh, sizes: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """The ranks of one axis as several axes, neighbours along the last,
    of a new mesh in which the other axes stay.

    All ranks of the mesh call it, as it makes process groups. (torch's own keeps the mesh of
    before, in which these axes share a dim.)
    """
    root, own = root_of(mesh), (mesh.mesh_dim_names or ("",))[0]
    known = root.mesh_dim_names or ("",)
    if own not in known and mesh.size() == root.size():  # flattened, of all ranks
        root, known = mesh, (own,)
    dim = known.index(own)
    shape = (*root.shape[:dim], *sizes, *root.shape[dim + 1 :])
    named = (*known[:dim], *names, *known[dim + 1 :])
    made = DeviceMesh(mesh.device_type, root.mesh.reshape(shape), mesh_dim_names=named)
    return made if made.ndim == len(names) else made[tuple(names)]


def axes_text(mesh: DeviceMesh) -> str:
    """The axes of a mesh by name and size, as errors show them: `(dp=8, tp=4) on 'cuda'`."""
    names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
    sizes = ", ".join(f"{name}={mesh.size(i)}" for i, name in enumerate(names))
    return f"({sizes}) on {mesh.device_type!r}"
