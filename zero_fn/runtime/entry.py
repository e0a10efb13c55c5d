"""The forward of a transformed module: enters its unit, runs the module's own forward, leaves.

An `Entry` stands in the instance under the name `forward`, or under that of another method (`gather_in`). The anchor of a
unit has one, and so does every other module that holds a parameter of it: called alone it enters the unit itself, called
inside the unit it steps aside. So any module of a transformed model may be called directly.

[Note: hooks before a forward] torch calls them before `forward`, and the old `spectral_norm`, `weight_norm` and pruning
compute a weight there. So where a module has such hooks when it is transformed, one more stands before them: it enters the
unit, and the entry goes on from there. One that is called even if another hook raises leaves the unit then.

[Note: hidden entries] While a unit runs, entries below its anchor are taken out of their modules: they would do nothing,
and `torch.compile` would see another one in every block and compile each block anew.

[Note: replaced forwards] Users and profilers put a forward of their own in the place of an entry, around it or not. A module
remembers its entry under another name, too; before a forward of the whole, and in every verb, an entry is put around what
was found in its place. One that is called below it steps aside.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from zero_fn.errors import StateError
from zero_fn.runtime.access import explained, is_about_shards
from zero_fn.runtime.changes import Probe, require_untouched_casts
from zero_fn.runtime.gather import UnitUse, gather
from zero_fn.runtime.saved import packing_gathered
from zero_fn.runtime.selective import outside_selection
from zero_fn.runtime.step import Step
from zero_fn.runtime.swapped import called_outside, is_transforming
from zero_fn.runtime.uncompiled import left_alone, uncompiled
from zero_fn.runtime.unit import Unit
from zero_fn.runtime.whole_step import cast_leaves, show_in_backward

__all__ = ["Entry", "NoCodeError", "entries", "entry_of", "forget_entries", "methods_of", "steps_of", "units_of"]


_ENTRY = "_zero_fn_entry"  # in the `__dict__` of a module: its entry, whatever stands at `forward`

_EXPORT = (
    "export the plain module with the whole values: plain.load_state_dict(get_model_state_dict(model, options="
    "StateDictOptions(full_state_dict=True))), of torch.distributed.checkpoint.state_dict; or torch.compile the model"
)


class NoCodeError(StateError, AttributeError):
    """So that whoever only asks whether there is code is answered no."""


class _Begun:
    """A forward that entered its unit.

    Attributes:
        use: What the unit was entered for.
        hidden: Entries inside that were taken out. [Note: hidden entries]
        tensors: The whole parameters.
        is_watched: Whether changes of `tensors` are kept.
        probe: What finds such changes.
    """

    __slots__ = ("hidden", "is_watched", "probe", "tensors", "use")

    def __init__(self, use: UnitUse, hidden: list[tuple[dict[str, Any], Entry]]) -> None:
        self.use, self.hidden = use, hidden
        self.tensors: list[Tensor] = []
        self.is_watched = False
        self.probe: Probe | None = None


class Entry:
    """Callable in place of `module.forward`, or of another method.

    Attributes:
        unit: The unit to enter.
        attribute: The name of the method.
        own: A method that the instance had before (set by a library that wraps modules), else None.
        input_dtype, output_dtype: Floating point tensors are cast to these on the way in and out; None leaves them.
        is_hidden: Whether it is taken out while the unit runs. [Note: hidden entries]
    """

    # No `__dict__`: `functools.wraps` would copy what it holds into functions around the entry, which would keep the unit.
    __slots__ = (
        "__weakref__",
        "_begun",
        "_is_inner",
        "_module",
        "attribute",
        "input_dtype",
        "is_hidden",
        "output_dtype",
        "own",
        "unit",
    )

    def __init__(
        self,
        module: nn.Module,
        unit: Unit,
        *,
        attribute: str = "forward",
        is_inner: bool = False,
        input_dtype: torch.dtype | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        self._module = weakref.ref(module)
        self.attribute = attribute
        self.own: Callable[..., Any] | None = module.__dict__.get(attribute)
        self.unit = unit
        self.input_dtype, self.output_dtype = input_dtype, output_dtype
        self._begun: _Begun | None = None  # by a hook, and not yet taken over
        module.__dict__[attribute] = self
        if attribute == "forward":
            module.__dict__[_ENTRY] = self
            if module._forward_pre_hooks:
                _enter_before_hooks(module)
            if not is_inner:
                unit.anchor = weakref.ref(module)
        self._is_inner, self.is_hidden = is_inner, is_inner and self.own is None

    @property
    def module(self) -> nn.Module:
        """The module whose forward this is."""
        module = self._module()
        assert module is not None, "a forward outlived its module"
        return module

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The module's own method, bound: what `inspect.signature` reads."""
        if self.own is not None:
            return self.own
        method: Callable[..., Any] = getattr(type(self.module), self.attribute).__get__(self.module)
        return method

    @property
    def innermost(self) -> Callable[..., Any] | None:
        """What the instance had before all entries, else None."""
        own: Callable[..., Any] | None = self
        while isinstance(own, Entry):
            own = own.own
        return own

    @property
    def __name__(self) -> str:
        return self.attribute

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self.__wrapped__.__doc__

    def __getattr__(self, name: str) -> Any:
        """Called for attributes that are not there: torch.export and torch.jit.script look for the code of a forward."""
        if name in ("__code__", "__globals__"):
            raise NoCodeError(
                "A transformed module has no forward that could be exported or scripted.",
                why="its forward gathers parameters from other ranks, which no file can hold",
                fix=_EXPORT,
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @left_alone
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit = self.unit
        if unit.leaves is not None:
            return self._call_with_leaves(*args, **kwargs)
        if torch._C._is_tracing():
            raise StateError(
                "A transformed module cannot be traced by torch.jit.",
                module=type(self.module).__name__,
                why="the trace would hold gathered parameters as constants",
                fix=_EXPORT,
            )
        begun, self._begun = self._begun, None
        if begun is None:
            if unit.open or unit.step.is_recomputing(unit, self):
                return self.__wrapped__(*args, **kwargs)
            begun = self._begin()
        failed = True
        try:
            if self.input_dtype is not None:
                args, kwargs = _cast((args, kwargs), self.input_dtype)
            has_backward = torch.is_grad_enabled() and not unit.is_replaced and not is_transforming()
            if has_backward:
                with packing_gathered():
                    output = self.__wrapped__(*args, **kwargs)
            else:
                output = self.__wrapped__(*args, **kwargs)
            if self.output_dtype is not None:
                output = _cast(output, self.output_dtype)
            if has_backward:
                _watch(output, begun.use)
            elif begun.use.node is not None:
                begun.use.has_graph = True
            if begun.probe is not None:
                with outside_selection():
                    begun.probe.check(begun.tensors)
            failed = False
        except RuntimeError as error:
            if not is_about_shards(error) or any(other.has_model_axes for other in unit.step.live_units()):
                raise  # under tensor parallelism torch's own words fit: activations are DTensors too
            raise explained(error, unit.name) from error  # a variable of this frame would make a cycle
        finally:
            self._end(begun, failed=failed)
        return output

    @left_alone
    def _begin(self) -> _Begun:
        """Enters the unit: its whole parameters stand under their names until `_end`."""
        unit = self.unit
        if unit.step.begins_forward:
            _follow_anchors(unit.step)
        with outside_selection():
            begun = _Begun(called_outside(unit.step.enter, unit, self), _hide(unit))
            try:
                begun.tensors = gather(begun.use)
                unit.shadow(begun.tensors)
                if unit.gathered is not None and not is_transforming():
                    begun.is_watched, begun.probe = True, unit.changes.probe(unit)
            except BaseException:
                self._end(begun, failed=True)
                raise
        return begun

    @left_alone
    def _end(self, begun: _Begun, *, failed: bool) -> None:
        self.unit.unshadow()
        for names, entry in begun.hidden:
            names.setdefault("forward", entry)  # unless the forward put another one there
        with outside_selection():
            _leave(begun.use, begun.tensors if begun.is_watched else None, failed=failed)

    @left_alone
    def begin_before_hooks(self) -> None:
        """Enters the unit where the forward is about to. [Note: hooks before a forward]"""
        unit = self.unit
        if unit.leaves is None and not unit.open and not unit.step.is_recomputing(unit, self):
            self._begun = self._begin()

    @left_alone
    def end_after_hooks(self) -> None:
        """Leaves the unit if a hook raised before the forward."""
        begun, self._begun = self._begun, None
        if begun is not None:
            self._end(begun, failed=True)

    @left_alone
    def _call_with_leaves(self, *args: Any, **kwargs: Any) -> Any:
        """A forward of the plain module that the unit is for a while. (whole_step.py)"""
        unit = self.unit
        if unit.open:
            return self.__wrapped__(*args, **kwargs)
        unit.open += 1
        try:
            tensors = cast_leaves(unit)
            unit.shadow(tensors)
            if self.input_dtype is not None:
                args, kwargs = _cast((args, kwargs), self.input_dtype)
            output = self.__wrapped__(*args, **kwargs)
            require_untouched_casts(unit, tensors)
            if self.output_dtype is not None:
                output = _cast(output, self.output_dtype)
            show_in_backward(unit, tensors, _tensors_in(output))
            return output
        finally:
            unit.open -= 1
            unit.unshadow()

    def __deepcopy__(self, memo: dict[int, Any]) -> Entry:
        module = copy.deepcopy(self.module, memo)
        twin = object.__new__(Entry)
        memo[id(self)] = twin
        twin._module = weakref.ref(module)
        twin.attribute = self.attribute
        twin.own = copy.deepcopy(self.own, memo)
        twin.input_dtype, twin.output_dtype = self.input_dtype, self.output_dtype
        twin._begun = None
        twin.unit = copy.deepcopy(self.unit, memo)
        twin._is_inner, twin.is_hidden = self._is_inner, self.is_hidden
        if self.attribute == "forward" and not self._is_inner:
            twin.unit.anchor = weakref.ref(module)
        if twin.is_hidden:
            twin.unit.inner.append(weakref.ref(module))
        copy.deepcopy(self.unit.step, memo).buffers.watch(module)
        return twin

    def __reduce__(self) -> Any:
        raise StateError(
            "A transformed module cannot be pickled: it belongs to the ranks of a process group.",
            fix="save its state_dict() (torch.distributed.checkpoint), and transform a fresh module after loading",
        )


def _enter_before_hooks(module: nn.Module) -> None:
    """[Note: hooks before a forward]"""
    if _before_hooks not in module._forward_pre_hooks.values():  # an earlier transform put them there
        hooks = module._forward_pre_hooks
        others = list(hooks)
        module.register_forward_pre_hook(_before_hooks)
        # Not `prepend=True`, which leaves the order of the `dict` below as it was: the compiler reads that in 2.11.
        for key in others:
            hooks[key] = hooks.pop(key)
        module.register_forward_hook(_after_hooks, always_call=True)


@left_alone
def _before_hooks(module: nn.Module, _args: object) -> None:
    entry = module.__dict__.get("forward")
    while isinstance(entry, Entry):
        entry.begin_before_hooks()
        entry = entry.own


@left_alone
def _after_hooks(module: nn.Module, _args: object, _output: object) -> None:
    entry = module.__dict__.get("forward")
    while isinstance(entry, Entry):
        entry.end_after_hooks()
        entry = entry.own


@uncompiled
def _leave(use: UnitUse, tensors: list[Tensor] | None, *, failed: bool) -> None:
    """Ends the forward of a unit; what it changed in its `tensors`, if they are gathered ones, is kept."""
    is_kept = False
    try:
        if tensors is not None:
            use.unit.changes.keep(use.unit, tensors)
        is_kept = True
    finally:
        if tensors is not None:
            tensors.clear()  # memory that somebody holds a part of is not used again
        called_outside(use.unit.step.leave, use, failed=failed or not is_kept)


@uncompiled
def _hide(unit: Unit) -> list[tuple[dict[str, Any], Entry]]:
    """Takes out the entries inside a unit that begins. [Note: hidden entries]"""
    hidden = []
    for reference in unit.inner:
        module = reference()
        names = module.__dict__ if module is not None else {}
        if module is not None and _ENTRY in names:
            entry: Entry = names[_ENTRY]
            if names.get("forward") is not entry:
                entry = _follow(module, entry)
            if entry.unit is unit and entry.is_hidden:
                del names["forward"]
                hidden.append((names, entry))
    return hidden


def entry_of(module: nn.Module) -> Entry | None:
    """The entry of this module, if any, where it belongs. [Note: replaced forwards]"""
    names = module.__dict__
    entry: Entry | None = names.get(_ENTRY)
    if entry is None or names.get("forward") is entry or (entry.is_hidden and entry.unit.open):
        return entry
    return _follow(module, entry)


def forget_entries(module: nn.Module) -> None:
    """Lets a module have no entry any more."""
    module.__dict__.pop(_ENTRY, None)


@uncompiled
def _follow_anchors(step: Step) -> None:
    for unit in step.live_units():
        anchor = unit.anchor()
        if anchor is not None:
            entry_of(anchor)


def _follow(module: nn.Module, entry: Entry) -> Entry:
    """Puts entries like those of a module around its new forward. [Note: replaced forwards]"""
    forward = module.__dict__.get("forward")
    if isinstance(forward, Entry) and forward._module() is module:  # one of before was put back
        module.__dict__[_ENTRY] = forward
        return forward
    chain = [entry]
    while isinstance(own := chain[-1].own, Entry):
        chain.append(own)
    for earlier in reversed(chain):
        entry = Entry(
            module,
            earlier.unit,
            is_inner=earlier._is_inner,
            input_dtype=earlier.input_dtype,
            output_dtype=earlier.output_dtype,
        )
    return entry


def entries(module: nn.Module) -> list[tuple[str, Entry]]:
    """All entries below a module, by module name. The anchor of a unit that holds a parameter of another one has two."""
    found: list[tuple[str, Entry]] = []
    for name, child in module.named_modules():
        entry: object = entry_of(child)
        while isinstance(entry, Entry):
            found.append((name, entry))
            entry = entry.own
    return found


def methods_of(module: nn.Module) -> list[Entry]:
    """All entries below a module that stand for other methods than `forward`."""
    return [
        value
        for child in module.modules()
        for value in child.__dict__.values()
        if isinstance(value, Entry) and value.attribute != "forward"
    ]


def units_of(module: nn.Module) -> list[Unit]:
    """The units of a module and of everything below it, each once."""
    return list({id(entry.unit): entry.unit for _, entry in entries(module)}.values())


def steps_of(*modules: nn.Module, verb: str) -> list[Step]:
    """The running states of transformed modules, each once.

    Raises:
        StateError: A module has none: it was not transformed.
    """
    steps: dict[int, Step] = {}
    for module in modules:
        units = units_of(module)
        if not units:
            raise StateError(
                f"{verb} was given a module that no transform returned.",
                module=type(module).__name__,
                fix=f"model = zf.shard_params(model, mesh['dp']), then zf.{verb}(model)",
            )
        steps.update((id(unit.step), unit.step) for unit in units)
    return list(steps.values())


@uncompiled
def _cast(tree: Any, dtype: torch.dtype) -> Any:
    leaves, spec = tree_flatten(tree)
    return tree_unflatten(
        [leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf for leaf in leaves], spec
    )


@uncompiled
def _watch(output: Any, use: UnitUse) -> None:
    """Tells the step when backward reaches the outputs, before any gradient of the unit is computed."""
    tensors = (output,) if isinstance(output, Tensor) else _tensors_in(output)
    hook = partial(_reached, use)
    for tensor in tensors:
        if tensor.requires_grad:
            use.has_graph = True
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    if use.node is not None:
        use.has_graph = True


def _tensors_in(output: object, depth: int = 3) -> Iterator[Tensor]:
    """The tensors of a pytree, and of the attributes of objects in it that torch knows no pytree for."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and hasattr(leaf, "__dict__") and not isinstance(leaf, type | nn.Module | ModuleType):
            for value in list(vars(leaf).values()):
                yield from _tensors_in(value, depth - 1)


@uncompiled
def _reached(use: UnitUse, _grad: Tensor) -> None:
    use.unit.step.demand(use.unit, use)
