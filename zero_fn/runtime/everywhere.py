"""What all ranks that hold a parameter do together: a disk may fail on one of them alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zero_fn.runtime.slot import slot_of, spec_of
from zero_fn.transport.agree import axes_of, done_over

R = TypeVar("R")

__all__ = ["everywhere", "is_cut", "is_shared", "mesh_of"]


def everywhere(parameters: Iterable[Tensor], act: Callable[[], R], what: str) -> R:
    """`done_over` the ranks of the meshes on which resting parameters lie, for any error of `act`."""
    axes = [axis for mesh in _meshes(parameters) for axis in axes_of(mesh, range(mesh.ndim), what)]
    return done_over(axes, act, what, Exception)


def is_shared(parameters: Iterable[Tensor]) -> bool:
    """Whether other ranks hold these parameters, or other shards of them."""
    return bool(_meshes(parameters))


def is_cut(parameter: Tensor) -> bool:
    """Whether this rank holds a part of a parameter, and other ranks the rest."""
    slot = slot_of(parameter)
    return slot is not None and slot.path.layout is not None


def mesh_of(parameter: Tensor) -> DeviceMesh | None:
    """The mesh on which a parameter rests; None of a plain tensor."""
    spec = spec_of(parameter)
    return None if spec is None else spec.mesh


def _meshes(parameters: Iterable[Tensor]) -> list[DeviceMesh]:
    """The meshes on which resting parameters lie, those of one rank left out."""
    specs = (slot.spec for slot in map(slot_of, parameters) if slot is not None)
    return list(dict.fromkeys(spec.mesh for spec in specs if spec is not None and spec.mesh.size() > 1))
