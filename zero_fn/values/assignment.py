"""What transforms have asked of a module, as one value.

A transform joins its own request to it, and rebuilds the module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from zero_fn.errors import LayoutError, MeshError, UnitError
from zero_fn.values.home import Home, Stage
from zero_fn.values.join_rule import agreed
from zero_fn.values.mesh import Axis, axes_text, dims_in, root_of

__all__ = ["Assignment"]

T = TypeVar("T")
Homes = Mapping[str, Home]
Over = tuple[tuple[Axis, Homes], ...]


@dataclass(frozen=True)
class Assignment:
    """What has been asked of a module and of its parameters."""

    # Requests that name no axis (dtypes, tiers, when gathered parameters are freed),
    # by name of the parameter.
    homes: Homes = field(default_factory=dict)
    # The data-parallel axes, at most two, the innermost of their mesh first; and what is
    # asked over each of them, by name of the parameter. A parameter for which nothing is
    # asked rests replicated.
    over: Over = ()
    # Names of the modules whose parameters form units; None: the repeated blocks.
    anchors: tuple[str, ...] | None = None
    # The dtype to which floating point outputs are cast, by name of the module.
    outputs: Mapping[str, torch.dtype] = field(default_factory=dict)
    methods: tuple[str, ...] = ()  # methods that gather as `forward` does, each as `module.method`
    # "broadcast" (all ranks have rank 0's buffers) or "local";
    # None: not asked, which means "broadcast".
    buffers: str | None = None

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The data-parallel axes, the innermost of their mesh first."""
        return tuple(axis for axis, _ in self.over)

    @property
    def axis(self) -> Axis | None:
        """The innermost data-parallel axis; None until a transform names one."""
        return self.over[0][0] if self.over else None

    def home(self, fqn: str) -> Home:
        """Where the state of one parameter rests: the join of all requests for it."""
        home = self.homes.get(fqn, Home())
        for _, homes in self.over:
            home = home.join(homes.get(fqn, Home()))
        return home

    def stages(self, fqn: str) -> tuple[Stage, ...]:
        """How much of the state of one parameter is sharded over each of `axes`."""
        return tuple(homes.get(fqn, Home()).stage for _, homes in self.over)

    def join(self, other: Assignment) -> Assignment:
        """The least assignment that gives both what they ask for.

        Raises:
            MeshError: Together they have more than two axes, axes of different meshes,
                or axes that share ranks.
            UnitError: Both choose units, and different ones.
            LayoutError: They ask for different dtypes, tiers or treatments of buffers.
        """
        anchors = agreed(
            self.anchors,
            other.anchors,
            "units for the same module",
            fix="pass the same units= to every transform, or to one of them only",
            error=UnitError,
            shown=_names,
        )
        outputs = dict(self.outputs)
        for name, dtype in other.outputs.items():
            agreed(outputs.setdefault(name, dtype), dtype, "output dtypes", fix="pass output= once")
        return Assignment(
            _joined(self.homes, other.homes),
            _joined_axes(self.over, other.over),
            anchors,
            outputs,
            tuple(sorted({*self.methods, *other.methods})),
            agreed(self.buffers, other.buffers, "treatments of buffers", fix="pass buffers= once"),
        )

    def below(self, prefix: str) -> Assignment:
        """The same assignment, seen from a module that holds this one under the name `prefix`."""
        return self._renamed(lambda name: f"{prefix}.{name}".strip("."))

    def of_part(self, path: str, tied: Mapping[str, str]) -> Assignment:
        """The same assignment, seen from the module that this one holds under the name `path`.

        `tied`: of its parameters that are tied to ones outside, the first name,
        which is outside, and the name in the part.
        """

        def in_part(name: str) -> str | None:
            if name == path:
                return ""
            return tied.get(
                name, name.removeprefix(f"{path}.") if name.startswith(f"{path}.") else None
            )

        part = self._renamed(in_part)
        if part.anchors is None:
            return part
        return replace(part, anchors=tuple(dict.fromkeys(("", *part.anchors))))

    def _renamed(self, rename: Callable[[str], str | None]) -> Assignment:
        """The assignment with other names of modules, parameters and methods;
        without those for which `rename` gives None."""

        def renamed(by_name: Mapping[str, T]) -> dict[str, T]:
            return {
                new: value for name, value in by_name.items() if (new := rename(name)) is not None
            }

        return Assignment(
            renamed(self.homes),
            tuple((axis, renamed(homes)) for axis, homes in self.over),
            None if self.anchors is None else tuple(renamed(dict.fromkeys(self.anchors))),
            renamed(self.outputs),
            tuple(renamed(dict.fromkeys(self.methods))),
            self.buffers,
        )


def _joined_axes(one: Over, other: Over) -> Over:
    """The axes of two assignments, the innermost first, with the joined requests over each."""
    joined = dict(one)
    for axis, homes in other:
        joined[axis] = _joined(joined.get(axis, {}), homes)
    if len(joined) < 2:
        return tuple(joined.items())
    _require_apart(list(joined))
    root = root_of(next(iter(joined)).mesh)
    return tuple(
        sorted(joined.items(), key=lambda item: -max(dims_in(root, item[0].mesh), default=0))
    )


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
    """The join of the requests for each parameter. An error names the parameter."""
    joined = dict(homes)
    for fqn, home in more.items():
        try:
            joined[fqn] = joined[fqn].join(home) if fqn in joined else home
        except LayoutError as error:
            raise LayoutError(error.summary, parameter=fqn, **error.facts, fix=error.fix) from None
    return joined


def _names(anchors: tuple[str, ...]) -> str:
    return ", ".join(name or "root" for name in anchors[:6]) + (", ..." if len(anchors) > 6 else "")
