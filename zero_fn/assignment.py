"""What has been asked of a module: the value that transforms join, and that a rebuild carries out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from zero_fn.errors import LayoutError, MeshError, UnitError
from zero_fn.home import Home
from zero_fn.mesh import Axis, axes_text

__all__ = ["Assignment"]


@dataclass(frozen=True)
class Assignment:
    """Homes of the parameters of a module.

    Attributes:
        axis: The data-parallel axis; None until a sharding transform names one.
        homes: Home of each parameter a transform selected, by name; the others rest replicated on the axis.
        anchors: Names of the modules whose parameters form units; None: the repeated blocks.
        output: Dtype of floating point outputs of the module; None leaves them.
        methods: Names of methods beside `forward` that gather, as `module.method`.
        buffers: "broadcast" (rank 0's are those of all ranks) or "local"; None: nobody said, which is "broadcast".
    """

    axis: Axis | None = None
    homes: Mapping[str, Home] = field(default_factory=dict)
    anchors: tuple[str, ...] | None = None
    output: torch.dtype | None = None
    methods: tuple[str, ...] = ()
    buffers: str | None = None

    def home(self, fqn: str) -> Home:
        """Where the state of one parameter rests."""
        return self.homes.get(fqn, Home())

    def join(self, other: Assignment) -> Assignment:
        """The least assignment that satisfies both.

        Raises:
            MeshError: The axes differ.
            UnitError: Both choose units, differently.
            LayoutError: Dtypes differ.
        """
        if self.axis is not None and other.axis is not None and self.axis != other.axis:
            raise MeshError(
                "A module is data-parallel over one axis, and these are two.",
                first=axes_text(self.axis.mesh),
                second=axes_text(other.axis.mesh),
                fix="pass the same axis to every transform; for a product of axes, flatten them: "
                'mesh["dp", "cp"]._flatten("dp_cp")',
            )
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
        homes = dict(self.homes)
        for fqn, home in other.homes.items():
            try:
                homes[fqn] = homes[fqn].join(home) if fqn in homes else home
            except LayoutError as error:
                raise LayoutError(error.summary, parameter=fqn, **error.facts, fix=error.fix) from None
        return Assignment(
            self.axis or other.axis,
            homes,
            self.anchors if self.anchors is not None else other.anchors,
            self.output or other.output,
            tuple(sorted({*self.methods, *other.methods})),
            self.buffers or other.buffers,
        )

    def below(self, prefix: str) -> Assignment:
        """The same assignment seen from a module that holds this one under `prefix`."""
        if not prefix:
            return self
        anchors = None if self.anchors is None else tuple(f"{prefix}.{name}".rstrip(".") for name in self.anchors)
        homes = {f"{prefix}.{fqn}": home for fqn, home in self.homes.items()}
        methods = tuple(f"{prefix}.{name}" for name in self.methods)
        return replace(self, homes=homes, anchors=anchors, methods=methods)


def _names(anchors: tuple[str, ...]) -> str:
    return ", ".join(name or "root" for name in anchors[:6]) + (", ..." if len(anchors) > 6 else "")
