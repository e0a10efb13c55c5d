"""What has been asked of a module: the value that transforms join, and that a rebuild carries out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from zero_fn.errors import LayoutError, MeshError, UnitError
from zero_fn.values.home import Home, Sharded
from zero_fn.values.mesh import Axis, axes_text, dims_in, root_of

__all__ = ["Assignment"]

T = TypeVar("T")
Homes = Mapping[str, Home]
Over = tuple[tuple[Axis, Homes], ...]


@dataclass(frozen=True)
class Assignment:
    """Homes of the parameters of a module.

    Attributes:
        homes: What was asked for on no axis, by name of the parameter: dtypes, tiers, and when gathered ones are freed.
        over: At most two data-parallel axes, the innermost of their mesh first, and the homes over each; parameters that no
            transform selected rest replicated.
        anchors: Names of the modules whose parameters form units; None: the repeated blocks.
        outputs: Dtype of floating point outputs, by name of a module; those of other modules are left.
        methods: Names of methods beside `forward` that gather, as `module.method`.
        buffers: "broadcast" (rank 0's are those of all ranks) or "local"; None: nobody said, which is "broadcast".
    """

    homes: Homes = field(default_factory=dict)
    over: tuple[tuple[Axis, Homes], ...] = ()
    anchors: tuple[str, ...] | None = None
    outputs: Mapping[str, torch.dtype] = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    buffers: str | None = None

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The data-parallel axes, the innermost of their mesh first."""
        return tuple(axis for axis, _ in self.over)

    @property
    def axis(self) -> Axis | None:
        """The innermost of them; None until a sharding transform names one."""
        return self.over[0][0] if self.over else None

    def home(self, fqn: str) -> Home:
        """Where the state of one parameter rests: the join of its homes."""
        home = self.homes.get(fqn, Home())
        for _, homes in self.over:
            home = home.join(homes.get(fqn, Home()))
        return home

    def levels(self, fqn: str) -> tuple[Sharded, ...]:
        """How much of the state of one parameter is sharded over each of `axes`."""
        return tuple(homes.get(fqn, Home()).sharded for _, homes in self.over)

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
        for name in self.outputs.keys() & other.outputs.keys():
            if self.outputs[name] != other.outputs[name]:
                raise LayoutError(
                    "Two transforms ask for different output dtypes.",
                    first=self.outputs[name],
                    second=other.outputs[name],
                    fix="pass output= once",
                )
        if self.buffers is not None and other.buffers is not None and self.buffers != other.buffers:
            raise LayoutError(
                "Two transforms ask for different treatment of buffers.",
                first=self.buffers,
                second=other.buffers,
                fix="pass buffers= once",
            )
        return Assignment(
            _joined(self.homes, other.homes),
            _joined_axes(self.over, other.over),
            self.anchors if self.anchors is not None else other.anchors,
            {**self.outputs, **other.outputs},
            tuple(sorted({*self.methods, *other.methods})),
            self.buffers or other.buffers,
        )

    def below(self, prefix: str) -> Assignment:
        """The same assignment seen from a module that holds this one under `prefix`."""
        if not prefix:
            return self
        anchors = None if self.anchors is None else tuple(f"{prefix}.{name}".rstrip(".") for name in self.anchors)
        methods = tuple(f"{prefix}.{name}" for name in self.methods)
        over = tuple((axis, _below(prefix, homes)) for axis, homes in self.over)
        outputs = _below(prefix, self.outputs)
        return Assignment(_below(prefix, self.homes), over, anchors, outputs, methods, self.buffers)

    def of_part(self, path: str, tied: Mapping[str, str]) -> Assignment:
        """The same assignment seen from the module that this one holds under `path`.

        Args:
            path: Of the part.
            tied: Names in the part of parameters that have their first name outside it, by that.
        """

        def homes_of(homes: Homes) -> dict[str, Home]:
            return {**_inside(path, homes), **{name: homes[first] for first, name in tied.items() if first in homes}}

        anchors = None if self.anchors is None else ("", *_inside(path, dict.fromkeys(self.anchors)))
        over = tuple((axis, homes_of(homes)) for axis, homes in self.over)
        methods = tuple(_inside(path, dict.fromkeys(self.methods)))
        return Assignment(homes_of(self.homes), over, anchors, _inside(path, self.outputs), methods, self.buffers)


def _inside(path: str, by_name: Mapping[str, T]) -> dict[str, T]:
    return {name.removeprefix(f"{path}."): value for name, value in by_name.items() if name.startswith(f"{path}.")}


def _below(prefix: str, by_name: Mapping[str, T]) -> dict[str, T]:
    return {f"{prefix}.{name}".rstrip("."): value for name, value in by_name.items()}


def _joined_axes(one: Over, other: Over) -> Over:
    """The axes of two assignments, innermost first, and the homes over each."""
    joined = dict(one)
    for axis, homes in other:
        joined[axis] = _joined(joined.get(axis, {}), homes)
    if len(joined) < 2:
        return tuple(joined.items())
    _require_apart(list(joined))
    root = root_of(next(iter(joined)).mesh)
    return tuple(sorted(joined.items(), key=lambda item: -max(dims_in(root, item[0].mesh), default=0)))


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


def _joined(homes: Homes, more: Homes) -> Homes:
    joined = dict(homes)
    for fqn, home in more.items():
        try:
            joined[fqn] = joined[fqn].join(home) if fqn in joined else home
        except LayoutError as error:
            raise LayoutError(error.summary, parameter=fqn, **error.facts, fix=error.fix) from None
    return joined


def _names(anchors: tuple[str, ...]) -> str:
    return ", ".join(name or "root" for name in anchors[:6]) + (", ..." if len(anchors) > 6 else "")
