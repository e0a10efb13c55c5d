"""Units: which parameters are gathered, freed and reduced together (FSDP's wrap groups).

A *unit* belongs to a module, its *anchor*, and is gathered when the anchor's forward begins. A
parameter belongs to the innermost anchor around it, or to the root. If several modules share a
parameter, it belongs to the innermost anchor around all of them; so weights may be tied within a
unit and across units.

By default the anchors are the repeated blocks of the model: the members of each `ModuleList`,
`Sequential` or `ModuleDict` that has at least two members with parameters. Containers inside
containers are searched, blocks are not. A large module beside the blocks (`LARGE_NBYTES`: a token
table, an output head) is an anchor too, because the unit of the root stays gathered from the first
forward to the last backward. The parts of a tiled module (`tiled.py`) are always anchors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from inspect import getattr_static

from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parameter import UninitializedParameter

from zero_fn.errors import LayoutError, PlacementError, UnitError
from zero_fn.values.tiled import Tiled, is_tile

__all__ = [
    "LARGE_NBYTES",
    "BySize",
    "NamedParameter",
    "Units",
    "anchors_of",
    "by_size",
    "distinct_parameters",
    "innermost_common",
    "repeated_blocks",
    "subclass_of",
]

LARGE_NBYTES = 64 * 2**20
"""A module beside the repeated blocks is a unit of its own if its whole
parameters take more bytes than this."""


@dataclass(frozen=True, slots=True)
class BySize:
    """Units of at least `nbytes` bytes of parameters; see `by_size`."""

    nbytes: int


Units = type[nn.Module] | str | BySize | Sequence[type[nn.Module] | str] | None
"""How to choose the anchors: module classes, patterns of module names, `by_size`, or None: the
repeated blocks, and large modules beside them."""


def by_size(*, nbytes: int) -> BySize:
    """A rule for `units=`: a module is a unit if its parameters outside smaller units
    take at least `nbytes` bytes."""
    if nbytes <= 0:
        raise UnitError(
            "by_size needs a positive number of bytes.",
            nbytes=nbytes,
            fix="by_size(nbytes=40_000_000)",
        )
    return BySize(nbytes)


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """One parameter, and every place of a model that holds it."""

    parameter: nn.Parameter  # the parameter
    # The name of the module and the attribute, for each place in registration order.
    # A tied weight has several.
    places: tuple[tuple[str, str], ...]

    @property
    def fqn(self) -> str:
        """The name that `named_parameters` gives: that of the first place."""
        module, attribute = self.places[0]
        return f"{module}.{attribute}" if module else attribute


def distinct_parameters(
    module: nn.Module, *, takes_subclasses: bool = False
) -> list[NamedParameter]:
    """The distinct parameters of a module in registration order, each with all its places.

    Tensor subclasses are refused, unless `takes_subclasses`.

    Raises:
        LayoutError: A parameter has no shape yet, or belongs to a scripted module.
        PlacementError: A parameter would get a sparse gradient, or is of a tensor subclass.
    """
    places: dict[int, list[tuple[str, str]]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for module_name, child in module.named_modules():
        _refuse_sparse(module_name, child)
        _refuse_scripted(module_name, child)
        for attribute, parameter in child._parameters.items():
            if parameter is None:
                continue
            if isinstance(parameter, UninitializedParameter):
                raise LayoutError(
                    "A lazy parameter has no shape yet.",
                    parameter=f"{module_name}.{attribute}".lstrip("."),
                    fix="run one forward with a sample batch, then transform",
                )
            if not takes_subclasses:
                _refuse_subclass(f"{module_name}.{attribute}".lstrip("."), parameter)
            parameters[id(parameter)] = parameter
            places.setdefault(id(parameter), []).append((module_name, attribute))
    return [NamedParameter(parameters[key], tuple(found)) for key, found in places.items()]


def _refuse_sparse(name: str, module: nn.Module) -> None:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
        raise PlacementError(
            "Sparse gradients cannot be reduced over an axis.",
            module=f"{name or 'root'}: {module}",
            fix="build the embedding with sparse=False",
        )


# Modules of classes that are not refused: of tensors at rest, on a mesh, simulated or fake.
_KEPT_FROM = ("zero_fn.", "torch.distributed.", "torch._subclasses.")


def subclass_of(tensor: Tensor) -> type | None:
    """The tensor subclass of a tensor, or of the local tensor in it; None for a plain tensor,
    and for DTensors of plain ones.

    A subclass may compute in its own way or keep several tensors (quantized weights), so plain
    shards would not stand for it.
    """
    for each in (tensor, getattr(tensor, "_local_tensor", None)):
        kind = type(each)
        if (
            each is not None
            and kind not in (Tensor, nn.Parameter)
            and not kind.__module__.startswith(_KEPT_FROM)
        ):
            return kind
    return None


def _refuse_subclass(fqn: str, parameter: nn.Parameter) -> None:
    kind = subclass_of(parameter)
    if kind is not None:
        raise PlacementError(
            f"{fqn!r} is a {kind.__name__}, and no shard of it would be.",
            parameter=f"{kind.__module__}.{kind.__qualname__}  {list(parameter.shape)}",
            why="shards are cut from plain memory: what the class computes, "
            "and what it keeps beside, would be lost",
            fix="model = zf.transforms.flatten_subclasses(model) first: it rests as the plain tensors that "
            "it is made of (one, if it is trained), and travels as fsdp_pre_all_gather says; or "
            "transform the modules beside it: model.head = zf.shard_params(model.head, axis); or "
            "train plain values: nn.Parameter(weight.dequantize())",
        )


def _refuse_scripted(name: str, module: nn.Module) -> None:
    if isinstance(module, ScriptModule) and len(module._parameters):
        raise LayoutError(
            "A scripted module keeps its parameters where a transform cannot replace them.",
            module=f"{name}: {module.original_name}",
            fix="transform the module without torch.jit.script or torch.jit.trace; "
            "torch.compile works after a transform",
        )


def anchors_of(module: nn.Module, units: Units) -> list[str]:
    """Names of the anchor modules below `module`, in registration order;
    the root ("") is always the first.

    Raises:
        UnitError: `units` names a class or a pattern that matches no module, or is of another type.
    """
    if units is None:
        blocks = set(repeated_blocks(module))
        chosen = blocks.union(_large_beside(blocks, module))
    elif isinstance(units, BySize):
        chosen = set(_of_size(module, units.nbytes))
    else:
        rules: Sequence[type[nn.Module] | str] = (
            (units,) if isinstance(units, type | str) else tuple(units)
        )
        chosen = set()
        for rule in rules:
            matched = {
                name for name, child in module.named_modules() if _matches(rule, name, child)
            }
            if not matched:
                classes = sorted({type(child).__name__ for child in module.modules()})
                raise UnitError(
                    "units= matches no module.",
                    units=rule.__name__ if isinstance(rule, type) else repr(rule),
                    classes=", ".join(classes[:12]),
                    fix="name a class or a pattern of module names of this model, "
                    "or leave units out",
                )
            chosen |= matched
    return ["", *(name for name, _ in module.named_modules() if name and name in chosen)]


def innermost_common(anchors: Iterable[str], modules: Iterable[str]) -> str:
    """The innermost anchor that contains every one of `modules`, by name."""
    best = ""
    names = list(modules)
    for anchor in anchors:
        if len(anchor) >= len(best) and all(_contains(anchor, name) for name in names):
            best = anchor
    return best


def _contains(anchor: str, name: str) -> bool:
    return not anchor or name == anchor or name.startswith(f"{anchor}.")


def _matches(rule: object, name: str, module: nn.Module) -> bool:
    if isinstance(rule, type) and issubclass(rule, nn.Module):
        return isinstance(module, rule)
    if isinstance(rule, str):
        return fnmatchcase(name, rule)
    raise UnitError(
        "units= takes module classes, patterns of module names, or by_size(nbytes=...).",
        got=repr(rule),
        fix="units=Block, units=(Block, nn.Embedding), units='layers.*'",
    )


_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def repeated_blocks(module: nn.Module, name: str = "") -> Iterator[str]:
    """Names of the repeated blocks of a module, which is called `name` itself."""
    children = [
        (f"{name}.{child_name}" if name else child_name, child)
        for child_name, child in module.named_children()
        if next(child.parameters(), None) is not None
    ]
    repeats = type(module) in _CONTAINERS and len(children) > 1
    for child_name, child in children:
        if repeats and type(child) not in _CONTAINERS:
            yield child_name
        elif not isinstance(child, Tiled):  # its parts are units, but no blocks
            yield from repeated_blocks(child, child_name)


def _large_beside(blocks: Set[str], module: nn.Module) -> Iterator[str]:
    """Names of the modules beside the blocks that hold more than `LARGE_NBYTES`."""
    around = {""}
    for name in blocks:
        while name:
            name = name.rpartition(".")[0]
            around.add(name)
    beside = []
    for name, child in module.named_modules():
        if name in around or name in blocks or name.rpartition(".")[0] not in around:
            continue
        if getattr_static(child, "forward") is nn.Module.forward:
            # A list of other modules: nobody calls it, so nothing could be gathered when it begins.
            around.add(name)
        elif not isinstance(child, Tiled):
            beside.append(name)
    nbytes: Counter[str] = Counter()
    for named in distinct_parameters(module):
        # A table that is tied to a head elsewhere counts for neither:
        # it belongs to the unit around both.
        holder = innermost_common(beside, (place for place, _ in named.places))
        nbytes[holder] += named.parameter.numel() * named.parameter.element_size()
    return (name for name in beside if nbytes[name] > LARGE_NBYTES)


def _of_size(module: nn.Module, nbytes: int) -> list[str]:
    """Names of the units of `by_size`."""
    found: list[str] = []
    seen: set[int] = set()

    def visit(name: str, child: nn.Module) -> int:
        """Finds the units in a module. Returns the bytes of its parameters outside them."""
        left = sum(
            visit(f"{name}.{below}" if name else below, part)
            for below, part in child.named_children()
        )
        for parameter in child._parameters.values():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                left += parameter.numel() * parameter.element_size()
        if not is_tile(child) and (left < nbytes or type(child) in (nn.ModuleList, nn.ModuleDict)):
            return left
        found.append(name)
        return 0

    visit("", module)
    return found
