"""The door of a transformed module: two hooks, before and after each call, at which units are entered and left.

The anchor of a unit has them, and so does every other module that holds a parameter of the unit: called alone it enters the
unit itself, called while the unit runs it steps aside. So any module of a transformed model may be called directly, and
whoever replaces `module.forward` replaces what runs inside. A method that was declared (`gather_in`) is a callable under its
name, with the same door.

[Note: our hook comes first] The hook before a call stands before those of the user: the old `spectral_norm`, `weight_norm`
and pruning compute a weight there, from parameters that must be whole. The hook after it stands behind those that were there
when the module was transformed, and is called after an exception too.

[Note: nothing inside a unit] While a unit runs, our hooks at modules below its anchor would do nothing but cost 4 us a call,
and the compiler would make a graph of each module of torch that has hooks. So they are taken out until the unit is left.

[Note: interrupted forwards] torch calls no hook after a KeyboardInterrupt. So whatever comes next (a call of the module, a
verb, a backward, an optimizer) looks whether a call that has begun still stands on the stack, and leaves its unit if not.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from threading import get_ident
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from zero_fn.errors import StateError
from zero_fn.runtime.ending import current_graph_task
from zero_fn.runtime.gather import gather
from zero_fn.runtime.run import Run, run_of
from zero_fn.runtime.saved import begin_packing, drop_packing, end_packing
from zero_fn.runtime.selective import outside_selection
from zero_fn.runtime.swapped import called_outside, is_transforming
from zero_fn.runtime.uncompiled import left_alone, uncompiled
from zero_fn.runtime.unit import Unit
from zero_fn.runtime.use import UnitUse
from zero_fn.runtime.whole_step import see_leaves, show_in_backward

__all__ = [
    "Attached",
    "Method",
    "attach",
    "attached_below",
    "detach",
    "methods_of",
    "require_idle",
    "runs_of",
    "units_of",
    "with_parameters",
]


_ATTACHED = "_zero_fn_attached"  # in the `__dict__` of a module: the units that are entered at it, in this order

_EXPORT = (
    "export the plain module with the whole values: whole = get_model_state_dict(model, options=StateDictOptions("
    "full_state_dict=True, cpu_offload=True)), of torch.distributed.checkpoint.state_dict, on every rank; "
    "plain.load_state_dict(whole) on rank 0, which has them; or torch.compile the model"
)


class _Begun:
    """A call that entered its unit.

    Attributes:
        use: The use of the unit; None in a block in which whole parameters are registered.
        tensors: The whole parameters, as modules see them.
        error_before: The exception that was being handled when the call began.
        has_backward: Whether a backward may come: the output is watched, and gathered memory that autograd saves is packed.
        is_packing: Whether the packing was begun here.
        is_transforming: Whether the call runs inside a transform of torch.func.
    """

    __slots__ = ("error_before", "has_backward", "is_packing", "is_transforming", "tensors", "use")

    def __init__(self, use: UnitUse | None) -> None:
        self.use = use
        self.tensors: list[Tensor] = []
        self.error_before = sys.exception()
        self.has_backward = self.is_packing = False
        self.is_transforming = is_transforming()


class Attached:
    """A unit and one of the modules at which it is entered.

    Attributes:
        unit: The unit.
        run: The running state of the transformed module.
        attribute: The name of the method: "forward" stands for calls of the module.
        is_anchor: Whether the module is the anchor of the unit.
        input_dtype, output_dtype: Floating point tensors are cast to these on the way in and out; None leaves them.
    """

    __slots__ = (
        "__weakref__",
        "_begun",
        "_depth",
        "_module",
        "attribute",
        "input_dtype",
        "is_anchor",
        "output_dtype",
        "run",
        "unit",
    )

    def __init__(
        self,
        module: nn.Module,
        unit: Unit,
        *,
        attribute: str = "forward",
        is_anchor: bool = False,
        input_dtype: torch.dtype | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        self._module = weakref.ref(module)
        self.unit, self.run = unit, run_of(unit)
        self.attribute, self.is_anchor = attribute, is_anchor
        self.input_dtype, self.output_dtype = input_dtype, output_dtype
        self._begun: _Begun | None = None
        self._depth = 0  # calls of the module inside the one that has begun
        if is_anchor:
            unit.anchor = self._module

    @property
    def module(self) -> nn.Module:
        """The module."""
        module = self._module()
        assert module is not None, "a module is called that is gone"
        return module

    @uncompiled
    def begin(self) -> bool:
        """Enters the unit: until `end`, modules see its whole parameters. Returns False if the unit is running already."""
        unit = self.unit
        if self._begun is not None:
            if self.is_on_stack(get_ident(), times=2):
                self._depth += 1
                return False
            self._forget()
        if unit.running:
            return False
        if unit.shown.leaves is not None and not self._recomputes_before_block():
            self._begin_with_leaves()
            return True
        if self.run.backwards.is_recomputing(unit, self):
            return False
        self._require_run()
        begun = outside_selection(self._entered)
        begun.has_backward = (
            torch.is_grad_enabled()
            and not (unit.shown.swapped and unit.shown.is_replaced)
            and not begun.is_transforming
        )
        # What is kept between uses may be kept by autograd as well.
        begun.is_packing = begun.has_backward and unit.groups.is_transient and begin_packing()
        return True

    def _entered(self) -> _Begun:
        """Gathers the parameters and shows them."""
        unit = self.unit
        use = called_outside(self.run.enter, unit, self)
        begun = self._begun = _Begun(use)
        _take_hooks_inside(unit, self._module())
        begun.tensors = gather(use)
        unit.shown.show(begun.tensors)
        return begun

    @uncompiled
    def end(self, output: Any, error: BaseException | None) -> Any:
        """Leaves the unit, if `begin` entered it. Returns the output as the caller gets it.

        Args:
            output: What the call returned; None if it raised.
            error: The exception that is being handled. If it is not the one from before the call, the call has failed.
        """
        begun = self._begun
        if begun is None:
            return output
        if self._depth:
            self._depth -= 1
            return output
        self._begun = None
        _put_hooks_inside(self.unit)
        if begun.is_packing:
            end_packing()
        failed = error is not begun.error_before
        if failed:
            _explain(error, self.unit, self.run)
        is_done = False
        try:
            if not failed:
                output = self._finished(begun, output)
            is_done = not failed
        finally:
            self.unit.shown.hide()
            if begun.use is None:
                self.unit.running -= 1
                self.unit.shown.swapped = {}
            else:
                begun.tensors.clear()  # memory that somebody holds a part of is not used again
                outside_selection(called_outside, self.run.forwards.leave, begun.use, failed=not is_done)
        return output

    def _finished(self, begun: _Begun, output: Any) -> Any:
        """Casts and watches the output of a call that did not fail, and refuses changed parameters. Returns the output."""
        unit, use = self.unit, begun.use
        if self.output_dtype is not None:
            output = _cast(output, self.output_dtype)
        if use is None:
            show_in_backward(unit, begun.tensors, _tensors_in(output))
        elif begun.has_backward:
            _watch(output, use)
        elif use.node is not None:
            use.has_graph = True
        if not begun.is_transforming:
            unit.shown.require_unchanged(unit.name, begun.tensors)
        return output

    def _recomputes_before_block(self) -> bool:
        """Whether a checkpoint recomputes a forward from before the block that registered whole parameters."""
        return current_graph_task() != -1 and bool(self.run.module.graphs.uses_of(self.unit.index))

    def _begin_with_leaves(self) -> None:
        """Begins a forward in a block that has registered whole parameters: of a plain module. (whole_step.py)"""
        called_outside(self.run.forwards.agree)
        begun = _Begun(None)
        begun.tensors = see_leaves(self.unit)
        self._begun = begun
        self.unit.running += 1
        _take_hooks_inside(self.unit, self._module())
        self.unit.shown.show(begun.tensors)

    def _require_run(self) -> None:
        """Raises inside torch.jit.trace and torch.export, which record a call rather than run it."""
        if torch._C._is_tracing() or torch.compiler.is_exporting():
            raise StateError(
                "A transformed module cannot be traced by torch.jit, or exported.",
                module=type(self.module).__name__,
                why="its forward gathers parameters from other ranks, which no file can hold",
                fix=_EXPORT,
            )

    def is_on_stack(self, thread: int, *, times: int = 1) -> bool:
        """Whether at least `times` calls of the module are running in a thread. [Note: interrupted forwards]"""
        module, found = self._module(), 0
        frame = sys._current_frames().get(thread)
        while frame is not None and found < times:
            if frame.f_code is _CALL and frame.f_locals["self"] is module:
                found += 1
            frame = frame.f_back
        return found >= times

    def _forget(self) -> None:
        """Leaves the unit that an interrupted call has entered. [Note: interrupted forwards]"""
        is_with_leaves = self._begun is not None and self._begun.use is None
        self._begun, self._depth = None, 0
        drop_packing()
        _put_hooks_inside(self.unit)
        if is_with_leaves:
            self.unit.running = 0
            self.unit.shown.hide()
        self.run.forwards.abandon()

    def __deepcopy__(self, memo: dict[int, Any]) -> Attached:
        module = copy.deepcopy(self.module, memo)
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin._module = weakref.ref(module)
        twin.attribute, twin.is_anchor = self.attribute, self.is_anchor
        twin.input_dtype, twin.output_dtype = self.input_dtype, self.output_dtype
        twin._begun, twin._depth = None, 0
        twin.unit = copy.deepcopy(self.unit, memo)
        if twin.is_anchor:
            twin.unit.anchor = twin._module
        elif any(reference is self._module for reference in self.unit.inner):
            twin.unit.inner.append(twin._module)
        twin.run = run_of(twin.unit)
        twin.run.forwards.statistics.watch(module)
        return twin

    def __reduce__(self) -> Any:
        raise StateError(
            "A transformed module cannot be pickled: it belongs to the ranks of a process group.",
            fix="save its state_dict() (torch.distributed.checkpoint), and transform a fresh module after loading",
        )


class Method(Attached):
    """Callable in place of a method of a module, which enters a unit."""

    __slots__ = ()

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The module's own method, bound: what `inspect.signature` reads."""
        method: Callable[..., Any] = getattr(type(self.module), self.attribute).__get__(self.module)
        return method

    @property
    def __name__(self) -> str:
        return self.attribute

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self.__wrapped__.__doc__

    @left_alone
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self.begin()
            output = self.__wrapped__(*args, **kwargs)
        except BaseException as error:
            self.end(None, error)
            raise
        return self.end(output, sys.exception())

    def is_on_stack(self, thread: int, *, times: int = 1) -> bool:
        """False would say that a call was interrupted. That cannot be: `__call__` leaves the unit after any exception."""
        return True


# -- hooks ----------------------------------------------------------------------------------------------------------

_KEY = "zero_fn"  # of our hooks, in the dicts where torch keeps the hooks of a module
_CALL = nn.Module._call_impl.__code__


def attach(attached: Attached) -> None:
    """Lets calls of a module enter a unit, before the units that were attached to it earlier."""
    module = attached.module
    earlier = module.__dict__.get(_ATTACHED, ())
    module.__dict__[_ATTACHED] = (attached, *earlier)
    if not earlier:
        _put_hooks(module)
    for other in earlier:  # at this module two units are entered: its hooks stay
        other.unit.inner = [reference for reference in other.unit.inner if reference is not other._module]
    if not attached.is_anchor and not earlier:
        attached.unit.inner.append(attached._module)


def detach(module: nn.Module) -> None:
    """Lets calls of a module enter no unit any more."""
    if module.__dict__.pop(_ATTACHED, None) is not None:
        hooks: Any
        for hooks in (
            module._forward_pre_hooks,
            module._forward_pre_hooks_with_kwargs,
            module._forward_hooks,
            module._forward_hooks_always_called,
        ):
            hooks.pop(_KEY, None)


def _put_hooks(module: nn.Module) -> None:
    """What `register_forward_pre_hook(_before, prepend=True, with_kwargs=True)` does, and `register_forward_hook(_after,
    always_call=True)`, with a key that is known. [Note: our hook comes first]"""
    torchs: Any = module
    torchs._forward_pre_hooks[_KEY] = _before
    torchs._forward_pre_hooks.move_to_end(_KEY, last=False)
    torchs._forward_pre_hooks_with_kwargs[_KEY] = True
    torchs._forward_hooks[_KEY] = _after
    torchs._forward_hooks_always_called[_KEY] = True


def _take_hooks_inside(unit: Unit, called: nn.Module | None) -> None:
    """Takes our hooks out of the modules below the anchor, except for the one that is called."""
    for reference in unit.inner:
        module: Any = reference()
        if module is not None and module is not called:
            module._forward_pre_hooks.pop(_KEY, None)
            module._forward_pre_hooks_with_kwargs.pop(_KEY, None)  # where the compiler looks, too
            module._forward_hooks.pop(_KEY, None)


def _put_hooks_inside(unit: Unit) -> None:
    for reference in unit.inner:
        module: Any = reference()
        if module is not None and _ATTACHED in module.__dict__:
            hooks = module._forward_pre_hooks
            hooks[_KEY], module._forward_hooks[_KEY] = _before, _after
            module._forward_pre_hooks_with_kwargs[_KEY] = True
            if len(hooks) > 1:
                hooks.move_to_end(_KEY, last=False)


@uncompiled
def _before(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Before a call of a module at which units are entered. [Note: our hook comes first]"""
    given = None
    for attached in module.__dict__[_ATTACHED]:
        if attached.begin() and attached.input_dtype is not None:
            given = args, kwargs = _cast((args, kwargs), attached.input_dtype)
    return given


@uncompiled
def _after(module: nn.Module, _args: object, output: Any) -> Any:
    """After a call of a module at which a unit may have been entered."""
    error = sys.exception()
    chain = module.__dict__[_ATTACHED][::-1]
    try:
        for attached in chain:
            output = attached.end(output, error)
    except BaseException as raised:
        for attached in chain:
            attached.end(None, raised)
        raise
    return output


# -- what a model has ----------------------------------------------------------------------------------------------


def attached_below(module: nn.Module) -> list[tuple[str, Attached]]:
    """What is attached at a module and below it, with module names: two at an anchor with a parameter of another unit."""
    return [
        (name, attached) for name, child in module.named_modules() for attached in child.__dict__.get(_ATTACHED, ())
    ]


def methods_of(module: nn.Module) -> list[Method]:
    """All methods below a module that enter a unit."""
    return [value for child in module.modules() for value in child.__dict__.values() if isinstance(value, Method)]


def units_of(module: nn.Module) -> list[Unit]:
    """The units of a module and of everything below it, each once."""
    return list({id(attached.unit): attached.unit for _, attached in attached_below(module)}.values())


def with_parameters(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules that have parameters: other parts of a model belong to no unit."""
    return [module for module in modules if next(module.parameters(), None) is not None]


def runs_of(*modules: nn.Module, verb: str) -> list[Run]:
    """The running states of transformed modules, each once.

    Raises:
        StateError: A module has none: it was not transformed.
    """
    runs: dict[int, Run] = {}
    for module in modules:
        units = units_of(module)
        if not units:
            raise StateError(
                f"{verb} was given a module that no transform returned.",
                module=type(module).__name__,
                fix=f"transform it before you call {verb}: model = zf.shard_params(model, mesh['dp'])",
            )
        runs.update((id(unit.run), run_of(unit)) for unit in units)
    return list(runs.values())


def require_idle(units: Iterable[Unit], verb: str) -> None:
    """Puts units at rest whose last pass raised, and refuses units in use.

    Raises:
        StateError: A forward runs, gradients wait to be reduced, or an `accumulate` or `unsharded` block is open.
    """
    for unit in units:
        run_of(unit).recover()
        if unit.is_in_use or run_of(unit).module.accumulating:
            raise StateError(
                f"{verb} was called while the module is in use.",
                unit=unit.name or "root",
                fix=f"call {verb} outside forward, accumulate() and unsharded()",
            )


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    """The tree with floating point tensors in a dtype; also those in dataclasses and attrs, which torch's pytree skips."""

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(dtype) if leaf.is_floating_point() else leaf
        if isinstance(leaf, type | nn.Module):
            return leaf
        declared = fields(leaf) if is_dataclass(leaf) else getattr(leaf, "__attrs_attrs__", None)
        if declared is None:
            return leaf
        before = {field.name: getattr(leaf, field.name) for field in declared if hasattr(leaf, field.name)}
        after = {name: _cast(value, dtype) for name, value in before.items()}
        if all(one is other for one, other in zip(tree_leaves(before), tree_leaves(after), strict=True)):
            return leaf  # a configuration
        twin = copy.copy(leaf)
        for name, value in after.items():
            object.__setattr__(twin, name, value)  # frozen ones, too
        return twin

    return tree_map(cast, tree)


def _explain(error: BaseException | None, unit: Unit, run: Run) -> None:
    """Adds a note with the fix to torch's error about an operation that mixes a resting parameter with a plain tensor: torch
    raises it in C++, and knows nothing of units."""
    if not isinstance(error, RuntimeError) or "mixed torch.Tensor and DTensor" not in str(error):
        return
    if hasattr(error, "__notes__") or any(other.has_model_axes for other in run.module.live_units()):
        return  # under tensor parallelism torch's own words fit: activations are DTensors too
    error.add_note(
        "A resting parameter was used outside the forward of its unit, where this rank holds only its shard.\n"
        f"  inside : the forward of {unit}\n"
        "  fix    : call the module that owns the weight, put both modules in one unit (units=), or read it inside "
        "`with zf.unsharded(module):`"
    )


def _watch(output: Any, use: UnitUse) -> None:
    """Hooks the outputs, to learn when backward reaches the unit, before any gradient of it is computed."""
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
    use.unit.run.need_in_backward(use.unit, use)
