"""What has been asked of a module: the value that transforms join, and that a rebuild carries out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from zero_fn.errors import LayoutError, MeshError, UnitError
from zero_fn.home import Home, Sharded
from zero_fn.mesh import Axis, axes_text, dims_in, root_of
from zero_fn.tiers import IN_MEMORY

__all__ = ["Assignment"]


@dataclass(frozen=True)
class Assignment:
    """Homes of the parameters of a module.

    Attributes:
        axis: The data-parallel axis; None until a sharding transform names one. Of two, the innermost of their mesh.
        homes: Home of each parameter a transform selected, by name; the others rest replicated on the axis. Dtypes and
            tiers are said here, whichever axis a transform was about.
        anchors: Names of the modules whose parameters form units; None: the repeated blocks.
        output: Dtype of floating point outputs of the module; None leaves them.
        methods: Names of methods beside `forward` that gather, as `module.method`.
        buffers: "broadcast" (rank 0's are those of all ranks) or "local"; None: nobody said, which is "broadcast".
        others: A second data axis and the homes over it; without dtypes and tiers.
    """

    axis: Axis | None = None
    homes: Mapping[str, Home] = field(default_factory=dict)
    anchors: tuple[str, ...] | None = None
    output: torch.dtype | None = None
    methods: tuple[str, ...] = ()
    buffers: str | None = None
    others: tuple[tuple[Axis, Mapping[str, Home]], ...] = ()

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The data-parallel axes, the innermost of their mesh first."""
        return () if self.axis is None else (self.axis, *(axis for axis, _ in self.others))

    def home(self, fqn: str) -> Home:
        """Where the state of one parameter rests: on one axis, or on several the join of its homes."""
        home = self.homes.get(fqn, Home())
        for _, homes in self.others:
            home = home.join(homes.get(fqn, Home()))
        return home

    def levels(self, fqn: str) -> tuple[Sharded, ...]:
        """How much of the state of one parameter is sharded over each of `axes`."""
        every = (self.homes, *(homes for _, homes in self.others))
        return tuple(homes.get(fqn, Home()).sharded for homes in every[: len(self.axes)])

    def join(self, other: Assignment) -> Assignment:
        """The least assignment that satisfies both.

        Raises:
            MeshError: The axes are more than two, of different meshes, or share ranks.
            UnitError: Both choose units, differently.
            LayoutError: Dtypes or tiers differ.
        """
        if self.anchors is not None and other.anchors is not None and self.anchors != other.anchors:
            raise UnitError(
                "Two transforms choose different units for the same module.",
                first=_names(self.anchors),
                second=_names(other.anchors),
                fix="pass the same units= to every transform, or to one of them only",
            )
        if self.output is not None and other.output is not None and self.output != other.output:
            raise LayoutError(
                "Two transforms ask for different output dtypes.",
                first=self.output,
                second=other.output,
                fix="pass output= once",
            )
        if self.buffers is not None and other.buffers is not None and self.buffers != other.buffers:
            raise LayoutError(
                "Two transforms ask for different treatment of buffers.",
                first=self.buffers,
                second=other.buffers,
                fix="pass buffers= once",
            )
        axis, homes, others = _joined_axes(self, other)
        return Assignment(
            axis,
            homes,
            self.anchors if self.anchors is not None else other.anchors,
            self.output or other.output,
            tuple(sorted({*self.methods, *other.methods})),
            self.buffers or other.buffers,
            others,
        )

    def below(self, prefix: str) -> Assignment:
        """The same assignment seen from a module that holds this one under `prefix`."""
        if not prefix:
            return self
        anchors = None if self.anchors is None else tuple(f"{prefix}.{name}".rstrip(".") for name in self.anchors)
        methods = tuple(f"{prefix}.{name}" for name in self.methods)
        others = tuple((axis, _below(prefix, homes)) for axis, homes in self.others)
        return replace(self, homes=_below(prefix, self.homes), anchors=anchors, methods=methods, others=others)


def _below(prefix: str, homes: Mapping[str, Home]) -> Mapping[str, Home]:
    return {f"{prefix}.{fqn}": home for fqn, home in homes.items()}


_Others = tuple[tuple[Axis, Mapping[str, Home]], ...]


def _joined_axes(one: Assignment, other: Assignment) -> tuple[Axis | None, Mapping[str, Home], _Others]:
    """The axes of two assignments, innermost first, and the homes over each."""
    over: dict[Axis, Mapping[str, Home]] = {}
    for assignment in (one, other):
        if assignment.axis is not None:
            for axis, homes in ((assignment.axis, assignment.homes), *assignment.others):
                over[axis] = _joined(over.get(axis, {}), homes)
    if len(over) < 2:
        return one.axis or other.axis, _joined(one.homes, other.homes), ()
    _require_apart(list(over))
    root = root_of(next(iter(over)).mesh)
    inner, *outer = sorted(over, key=lambda axis: -max(dims_in(root, axis.mesh), default=0))
    homes = over[inner]
    for assignment in (one, other):
        for axis in outer:
            homes = _joined(homes, _off_axis(over[axis]))
        if assignment.axis is None:
            homes = _joined(homes, assignment.homes)
    return inner, homes, tuple((axis, _on_axis(over[axis])) for axis in outer)


def _require_apart(axes: list[Axis]) -> None:
    if len(axes) > 2:
        raise MeshError(
            "A module is data-parallel over at most two axes, and these are three.",
            **{f"axis_{number}": axis for number, axis in enumerate(axes)},
            fix='flatten some of them: mesh["dp", "cp"]._flatten("dp_cp")',
        )
    one, other = axes
    root = root_of(one.mesh)
    if root != root_of(other.mesh):
        raise MeshError(
            "A module is data-parallel over axes of one mesh, and these are of two.",
            first=f"{one} of {axes_text(root)}",
            second=f"{other} of {axes_text(root_of(other.mesh))}",
            fix="pass the same axis to every transform, or cut both from one mesh: "
            'mesh = init_device_mesh("cpu", (outer, inner), mesh_dim_names=("outer", "inner"))',
        )
    if dims_in(root, one.mesh) & dims_in(root, other.mesh):
        raise MeshError(
            "Two data axes share ranks.",
            first=one,
            second=other,
            mesh=axes_text(root),
            fix="pass the same axis to every transform, or axes of the mesh that do not overlap",
        )


def _joined(homes: Mapping[str, Home], more: Mapping[str, Home]) -> Mapping[str, Home]:
    joined = dict(homes)
    for fqn, home in more.items():
        try:
            joined[fqn] = joined[fqn].join(home) if fqn in joined else home
        except LayoutError as error:
            raise LayoutError(error.summary, parameter=fqn, **error.facts, fix=error.fix) from None
    return joined


def _off_axis(homes: Mapping[str, Home]) -> Mapping[str, Home]:
    """What homes say that has no axis: dtypes and tiers."""
    said = {fqn: Home(compute=home.compute, reduce=home.reduce, tiers=home.tiers) for fqn, home in homes.items()}
    return {fqn: home for fqn, home in said.items() if home != Home()}


def _on_axis(homes: Mapping[str, Home]) -> Mapping[str, Home]:
    return {
        fqn: replace(home, compute=None, reduce=None, tiers=IN_MEMORY)
        for fqn, home in homes.items()
    }  # fmt: skip


def _names(anchors: tuple[str, ...]) -> str:
    return ", ".join(name or "root" for name in anchors[:6]) + (", ..." if len(anchors) > 6 else "")
