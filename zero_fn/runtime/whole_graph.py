"""Units inside one graph of the compiler: `torch.compile(model, fullgraph=True)`.

Elsewhere entering a unit breaks the graph (uncompiled.py). A graph that must not break holds the collectives too: gathers and
reductions are functional (collectives/functional.py), autograd connects them, and the compiler orders them and decides what
lives how long. Nothing of `Step` runs then, neither its schedule nor its bookkeeping of graphs:

    resting  --all-gather-->  whole  --the module's own forward-->  ...      in the forward graph
    .grad    <--mean of pieces--  gradients of wholes  <-- ...               in the backward graph

Parameters that are freed after forward are gathered in a region that the compiler recomputes: its partitioner then saves the
shards, and gathers again in backward.

[Note: run while tracing] A function marked `_dynamo_marked_constant` is not traced: the compiler calls it once, while it
traces, and takes what it returns for a constant. What it looked at is no guard, so the traced code reads itself whatever may
change later.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from zero_fn.errors import PlacementError, StateError, ZeroError
from zero_fn.home import ReshardAfter
from zero_fn.runtime.graph_operations import allow_operations, at_rest, gathered, hosted, on_model_axes, unit_of
from zero_fn.runtime.kind import Lifetime

if TYPE_CHECKING:
    from zero_fn.runtime.unit import Unit

__all__ = [
    "Plan",
    "Shown",
    "begin_region",
    "end_region",
    "is_in_whole_graph",
    "is_wanted_whole",
    "show_resting",
    "show_whole",
    "with_own_code",
]

F = TypeVar("F", bound=Callable[..., Any])


def _while_tracing(function: F) -> F:
    """[Note: run while tracing]"""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_while_tracing
def is_in_whole_graph() -> bool:
    """Whether the compiler, which traces now, traces a graph that must not break."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return bool(InstructionTranslator.current_tx().one_graph)


def is_wanted_whole() -> bool:
    """Whether the compiler waits for the next frame to make one graph of it."""
    return bool(getattr(get_eval_frame_callback(), "_one_graph", False))


def with_own_code(function: F) -> F:
    """A copy of a function whose compiled forms are its own: they are kept by code object, a limited number for each."""
    twin = FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return cast(F, twin)


# -- what the compiler traces -------------------------------------------------------------------------------------------

Shown = list[tuple[dict[str, Any], str, Any]]
"""Where whole parameters stand in place of registered ones: parameters of a module, name, the registered one."""


def show_whole(unit: Unit) -> Shown:
    """Registers whole parameters for the forward of a unit, connected to the resting ones.

    Raises:
        StateError: The unit cannot be a part of a graph, or not now.
    """
    key = str(unit.key)  # to the compiler an attribute that it has not looked at is no constant
    _begin_graph(key)
    plan, step, leaves = unit.in_graph, unit.step, unit.leaves
    assert plan is not None, "a unit is traced without a plan"
    _require_traceable(
        key,
        is_accumulating=step.accumulating > 0 and leaves is None,
        is_unsharded=unit.pinned is not None and torch.is_grad_enabled(),
        is_evicted=unit.is_evicted,
        has_agreed=step.has_agreed,
    )
    places = [(module()._parameters, attribute, i) for module, attribute, i in plan.places]  # type: ignore[union-attr]
    registered: list[Any] = [None] * len(plan.dtypes)
    for names, attribute, i in places:
        registered[i] = names[attribute]
    are_whole = leaves is not None or unit.pinned is not None
    resting = [isinstance(value, DTensor) and not are_whole for value in registered]
    wholes: list[Any] = [
        None if rests else value.to(dtype) for value, rests, dtype in zip(registered, resting, plan.dtypes, strict=True)
    ]
    for indices, is_freed in ((plan.kept, False), (plan.freed, True)):
        chosen = tuple(i for i in indices if resting[i])
        if not chosen:
            continue
        inputs = [at_rest(registered[i]) for i in chosen]
        for i, local in zip(chosen, inputs, strict=True):
            if tuple(local.shape) != plan.shapes[i]:
                _refuse(key, i)
        stay = tuple(i for i in chosen if i in plan.hosted)
        if stay:
            inputs += hosted(key, stay, *(at_rest(registered[i]).detach() for i in stay))
        if is_freed and torch.is_grad_enabled():
            found = checkpoint(gathered, key, chosen, *inputs, use_reentrant=False)
        else:
            found = gathered(key, chosen, *inputs)
        if plan.has_model_axes:
            found = on_model_axes(key, chosen, *found)
        for i, whole in zip(chosen, found, strict=True):
            wholes[i] = whole
    shown: Shown = []
    for names, attribute, i in places:
        shown.append((names, attribute, names[attribute]))
        names[attribute] = wholes[i]
    return shown


def show_resting(shown: Shown) -> None:
    """Undoes `show_whole`."""
    for names, attribute, parameter in shown:
        names[attribute] = parameter


# -- while it traces ----------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """What the traced code reads of a unit.

    Attributes:
        places: Module (weakly), name, and number of the slot.
        dtypes: Of each slot in the forward.
        shapes: Of each slot, what this rank holds at rest.
        kept, freed: Slots whose whole parameters stay from forward to backward, and those that are gathered again.
        hosted: Of these, those whose part on the first axis stays.
        has_model_axes: Whether any slot lies on model axes.
    """

    places: tuple[tuple[weakref.ref[torch.nn.Module], str, int], ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    kept: tuple[int, ...]
    freed: tuple[int, ...]
    hosted: tuple[int, ...]
    has_model_axes: bool


@_while_tracing
def _begin_graph(key: str) -> None:
    """Before a unit is traced: ranks agree, what moved is followed, the plan is made.

    Communicates: as the first forward does, if there was none yet.
    """
    unit = unit_of(key)
    with _handed_through():
        unit.step.prepare_graph()
        unit.in_graph = _plan(unit)
    allow_operations()


def _plan(unit: Unit) -> Plan:
    freed: list[int] = []
    kept: list[int] = []
    for i, slot in enumerate(unit.slots):
        if slot.path.layout is not None:
            (kept if slot.kind.is_kept or slot.home.reshard_after is ReshardAfter.BACKWARD else freed).append(i)
    (freed or kept).extend(
        i for i, slot in enumerate(unit.slots) if slot.path.layout is None
    )  # reduced with the others
    places = [(place, i) for i, slot in enumerate(unit.slots) for place in slot.places]
    for place, _ in places:
        if place.aliases:
            raise StateError(
                "A unit whose parameters stand in plain lists or dicts cannot be a part of one graph.",
                unit=unit.name or "root",
                attribute=place.aliases[0][0],
                fix="torch.compile(model) without fullgraph=True",
            )
    if any(group.records() for group in unit.groups):
        raise StateError(
            "Parameters and gradients in another tier cannot be a part of one graph.",
            unit=unit.name or "root",
            fix="torch.compile(model) without fullgraph=True; optimizer states may be in a tier",
        )
    if unit.step.buffers.will_change:
        raise StateError(
            "Statistics of rank 0 are sent to the others before a forward, which one graph does not do.",
            unit=unit.name or "root",
            fix='buffers="local" in the transform, or torch.compile(model) without fullgraph=True',
        )
    return Plan(
        tuple((weakref.ref(place.module), place.attribute, i) for place, i in places),
        tuple(slot.kind.compute_dtype for slot in unit.slots),
        tuple(slot.path.local_shape for slot in unit.slots),
        tuple(kept),
        tuple(freed),
        tuple(i for i, slot in enumerate(unit.slots) if slot.kind.inner is Lifetime.ALWAYS),
        unit.has_model_axes,
    )


@_while_tracing
def _require_traceable(
    key: str, *, is_accumulating: bool, is_unsharded: bool, is_evicted: bool, has_agreed: bool
) -> None:
    """Raises where the state of the unit has no graph; the arguments were read by traced code, which guards on them."""
    unit = unit_of(key)
    assert has_agreed, "a unit is traced before ranks agreed on its layout"
    with _handed_through():
        if is_accumulating:
            raise StateError(
                "In one graph every backward reduces: accumulate() cannot hold its gradients back.",
                unit=unit.name or "root",
                fix="with zf.accumulate(model, unshard=True):, or torch.compile(model) without fullgraph=True",
            )
        if is_unsharded:
            raise StateError(
                "Inside unsharded() a graph would lose the gradients of the parameters.",
                unit=unit.name or "root",
                fix="train outside unsharded(), or call the compiled module under torch.no_grad()",
            )
        if is_evicted:
            unit.readopt()


@_while_tracing
def _refuse(key: str, i: int) -> None:
    unit = unit_of(key)
    with _handed_through():
        raise PlacementError(
            f"{unit.slots[i].fqn!r} was replaced in one graph by a DTensor that does not rest as it does.",
            parameter=unit.slots[i],
            fix="functional_call(model, values, args) with whole plain tensors, or with DTensors placed as the parameter",
        )


_side_effects: list[bool] = []


@_while_tracing
def begin_region(name: str, *, is_moved: bool) -> None:
    """Before a checkpoint is traced: units inside register parameters and undo it, which the compiler need not repeat.

    Raises:
        StateError: The inputs of the checkpoint are to be moved.
    """
    with _handed_through():
        if is_moved:
            raise StateError(
                "In one graph the compiler keeps what backward needs, and neither cuts nor moves the inputs of a checkpoint.",
                module=name,
                fix="leave out partition= and offload=, or torch.compile(model) without fullgraph=True",
            )
    from torch._dynamo import config

    _side_effects.append(config.skip_fwd_side_effects_in_bwd_under_checkpoint)
    config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


@_while_tracing
def end_region() -> None:
    """Undoes `begin_region`."""
    from torch._dynamo import config

    config.skip_fwd_side_effects_in_bwd_under_checkpoint = _side_effects.pop()


@contextmanager
def _handed_through() -> Iterator[None]:
    """The compiler wraps errors that it does not know. It lets AssertionErrors through, so ours become those too."""
    try:
        yield
    except ZeroError as error:
        if not isinstance(error, AssertionError):
            error.__class__ = _assertion_of(type(error))
        raise


def _assertion_of(kind: type[ZeroError]) -> type[ZeroError]:
    def reduced(error: ZeroError) -> tuple[object, ...]:
        rebuild, arguments = kind.__reduce__(error)
        return rebuild, (kind, *arguments[1:])  # type: ignore[index]

    return type(kind.__name__, (kind, AssertionError), {"__reduce__": reduced, "__module__": kind.__module__})
