"""Entry points of a transformed module: two hooks, before and after a call,
at which a unit is entered and left.

The anchor of a unit has them, and so does every other module that holds a parameter of the unit:
called alone it enters the unit itself, called while the unit runs it steps aside. So any module of
a transformed model may be called directly, and whoever replaces `module.forward` replaces what runs
inside. A method that was declared (`register_forward_method`) is a callable under its name, with
the same entry point.

A call that an interrupt has ended is never left here. [Note: interrupted passes] (call.py)
"""

from __future__ import annotations

import copy
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zero_fn.errors import StateError
from zero_fn.runtime.autograd_node import gather
from zero_fn.runtime.call import Call, still_runs
from zero_fn.runtime.call_context import (
    called_outside,
    has_context,
    is_swapped,
    is_transforming,
    require_run,
)
from zero_fn.runtime.call_hooks import (
    ENTRY_POINTS,
    cast,
    drop_hooks,
    put_hooks,
    put_hooks_inside,
    take_hooks_inside,
)
from zero_fn.runtime.ending import current_graph_task
from zero_fn.runtime.run import Run, run_of
from zero_fn.runtime.saved_tensor_hooks import begin_packing, end_packing, is_run_again_by_hooks
from zero_fn.runtime.uncompiled import left_alone, uncompiled
from zero_fn.runtime.unit import Unit, UnitUse
from zero_fn.runtime.weight_reads import Parameters, end_reads, finish_reads, leave_read
from zero_fn.runtime.whole_leaves import see_leaves, show_in_backward
from zero_fn.values import watching
from zero_fn.values.watching import Moment

__all__ = ["EntryPoint", "Method", "attach", "detach"]


class EntryPoint:
    """A unit and one of the modules at which it is entered."""

    _frames: ClassVar[int] = 2  # from `begin` to the frame that stays until the call has ended

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
        self.unit = unit
        self.run = run_of(unit)
        self.attribute = attribute  # the method: "forward" stands for calls of the module
        self.is_anchor = is_anchor
        # Floating point tensors are cast to these on the way in and out; None leaves them.
        self.input_dtype = input_dtype
        self.output_dtype = output_dtype
        self._call: Call | None = None  # the one that entered the unit here, if it has not ended
        if is_anchor:
            unit.anchor = self._module

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None, "a module is called that is gone"
        return module

    @uncompiled
    def begin(self) -> bool:
        """Enters the unit: until `end`, modules see its whole parameters.

        Returns False if the unit is running already.
        """
        unit, run, in_context = self.unit, self.run, has_context()
        in_backward = in_context and current_graph_task() != -1
        if run.calls.forward and not in_backward:
            run.abandon()
        call = self._call
        if call is not None and not call.is_left:
            if not still_runs(call.frame):
                raise _went_on(unit)
            call.depth += 1
            return False
        if unit.read is not None and not in_backward:
            unit.visible.require_unchanged(unit.name, unit.read.tensors)
            leave_read(unit.read, failed=False)
        if unit.running or (unit.visible.leaves is None and is_swapped(unit.visible, unit.name)):
            return False
        # A checkpoint may recompute a forward from before the block that
        # registered whole parameters.
        recomputes = in_backward and (
            unit.visible.leaves is None or bool(run.graphs.uses_of(unit.index))
        )
        if recomputes and run.is_recomputing(unit, self):
            return False
        calls = run.calls.backward if in_backward else run.calls.forward
        call = Call(
            sys._getframe(self._frames),
            in_backward=in_backward,
            is_transforming=in_context and is_transforming(),
        )
        call.is_outermost = not (in_backward or calls)
        calls.append(call)
        if call.is_outermost:
            run.begin_outermost()
        for watch in watching.watchers:
            watch.note(Moment.ENTER, unit.name)
        if unit.visible.leaves is not None and not recomputes:
            self._begin_with_leaves(call)
            return True
        try:
            if not in_context:
                use = run.enter(unit, self, self.attribute)
            else:
                require_run(unit.name, self.module)
                use = called_outside(
                    run.enter_recomputation if recomputes else run.enter, unit, self, self.attribute
                )
        except Exception:
            if run.forward is None or not call.is_outermost:
                calls.remove(call)
            raise
        call.use, self._call = use, call
        take_hooks_inside(unit.inner, self._module())
        call.tensors = called_outside(gather, use) if call.is_transforming else gather(use)
        unit.visible.show(call.tensors)
        call.has_backward = torch.is_grad_enabled() and not call.is_transforming
        # What is kept between uses may be kept by autograd as well.
        packs = call.has_backward and unit.memory.is_transient
        call.is_packing = (
            packs and not (in_backward and is_run_again_by_hooks(self.module)) and begin_packing()
        )
        return True

    @uncompiled
    def end(self, output: Any, error: BaseException | None) -> Any:
        """Leaves the unit, if `begin` entered it.

        Returns the output as the caller gets it. `error` is the exception that is being handled: if
        it is not the one from before the call, the call has failed.
        """
        call, run = self._call, self.run
        if call is None or call.is_left:
            return output
        failed = error is not call.error_before
        if failed and run.calls.are_elsewhere:
            return output  # the call of another thread, which was refused
        if call.depth:
            call.depth -= 1
            return output
        self._call = None
        put_hooks_inside(self.unit.inner)
        if call.is_packing:
            call.is_packing = False
            end_packing()
        calls = run.calls.backward if call.in_backward else run.calls.forward
        if not call.is_outermost:
            calls.remove(call)
        if failed:
            _explain(error, self.unit, self.run)
        is_done = False
        try:
            if not failed:
                output = self._finished(call, output)
            is_done = not failed
        finally:
            if run.calls.reads:
                end_reads(run, self, failed=not is_done)
            self.unit.visible.hide()
            if call.use is None:
                self.unit.running -= 1
            else:
                call.tensors.clear()  # memory that somebody holds a part of is not used again
                if call.is_transforming:
                    called_outside(run.leave, call.use, failed=not is_done)
                else:
                    run.leave(call.use, failed=not is_done)
            for watch in watching.watchers:
                watch.note(Moment.LEAVE, self.unit.name)
            if call.is_outermost and run.forward is None:
                calls.remove(call)
        return output

    def _finished(self, call: Call, output: Any) -> Any:
        """Casts and watches the output of a call that did not fail, and refuses changed parameters.

        Returns the output.
        """
        unit, use = self.unit, call.use
        if self.output_dtype is not None:
            output = cast(output, self.output_dtype)
        if use is None:
            if not call.is_transforming:
                show_in_backward(unit, call.tensors, _tensors_in(output))
        elif call.has_backward:
            _watch(output, use)
        elif use.node is not None:
            use.has_graph = True
        if not call.is_transforming:
            unit.visible.require_unchanged(unit.name, call.tensors)
        if self.run.calls.reads:
            finish_reads(self.run, self)
        return output

    def _begin_with_leaves(self, call: Call) -> None:
        """Begins a forward in a block that has registered whole parameters:
        of a plain module. (whole_leaves.py)"""
        called_outside(self.run.agree)
        call.tensors = see_leaves(self.unit)
        self._call = call
        self.unit.running += 1
        take_hooks_inside(self.unit.inner, self._module())
        self.unit.visible.show(call.tensors)

    def __deepcopy__(self, memo: dict[int, Any]) -> EntryPoint:
        module = copy.deepcopy(self.module, memo)
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin._module = weakref.ref(module)
        twin.attribute, twin.is_anchor = self.attribute, self.is_anchor
        twin.input_dtype, twin.output_dtype = self.input_dtype, self.output_dtype
        twin._call = None
        twin.unit = copy.deepcopy(self.unit, memo)
        if twin.is_anchor:
            twin.unit.anchor = twin._module
        elif any(reference is self._module for reference in self.unit.inner):
            twin.unit.inner.append(twin._module)
        twin.run = run_of(twin.unit)
        twin.run.buffers.watch(module)
        return twin

    def __reduce__(self) -> Any:
        raise StateError(
            "A transformed module cannot be pickled: it belongs to the ranks of a process group.",
            fix="save its state_dict() (torch.distributed.checkpoint), "
            "and transform a fresh module after loading",
        )


class Method(EntryPoint):
    """Callable in place of a method of a module, which enters a unit."""

    _frames = 1

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


# -- hooks -----------------------------------------------------------------------------------------


def attach(entry: EntryPoint) -> None:
    """Lets calls of a module enter a unit, before the units that were attached to it earlier."""
    module = entry.module
    earlier = module.__dict__.get(ENTRY_POINTS, ())
    module.__dict__[ENTRY_POINTS] = (entry, *earlier)
    if not earlier:
        put_hooks(module)
        if module._parameters:
            module.__dict__["_parameters"] = Parameters(module._parameters, module)
    for other in earlier:  # at this module two units are entered: its hooks stay
        other.unit.inner = [
            reference for reference in other.unit.inner if reference is not other._module
        ]
    if not entry.is_anchor and not earlier:
        entry.unit.inner.append(entry._module)


def detach(module: nn.Module) -> None:
    """Lets calls of a module enter no unit any more."""
    if module.__dict__.pop(ENTRY_POINTS, None) is not None:
        drop_hooks(module)
        module.__dict__["_parameters"] = dict(module._parameters)


def _went_on(unit: Unit) -> StateError:
    return StateError(
        "A forward went on after an interrupt in it.",
        unit=unit.name or "root",
        why="the unit that was interrupted has not been left",
        fix="let KeyboardInterrupt leave the outermost forward: "
        "catch it around model(x), not inside",
    )


def _explain(error: BaseException | None, unit: Unit, run: Run) -> None:
    """Adds a note with the fix to torch's errors about operations that mix a resting parameter with
    a plain tensor, or two dtypes: torch raises them in C++, and knows nothing of units."""
    if not isinstance(error, RuntimeError) or hasattr(error, "__notes__"):
        return
    rounded = next((s for s in unit.slots if s.kind.compute_dtype != s.dtype), None)
    if rounded is not None and _TWO_DTYPES.search(str(error)):
        compute = str(rounded.kind.compute_dtype).removeprefix("torch.")
        rest = str(rounded.dtype).removeprefix("torch.")
        error.add_note(
            f"The forward computes in {compute} (zf.precision); "
            f"parameters() gives what rests, in {rest}, here, too.\n"
            f"  inside : the forward of {unit}\n"
            "  fix    : cast to the dtype of a weight that is read under its name "
            f"({rounded.fqn!r}), as in x.to(self.linear.weight.dtype), and not to that of "
            "next(self.parameters())"
        )
    if "mixed torch.Tensor and DTensor" not in str(error):
        return
    if any(other.has_model_axes for other in run.live_units()):
        return  # under tensor parallelism torch's own words fit: activations are DTensors too
    error.add_note(
        "A resting parameter was used outside the forward of its unit, "
        "where this rank holds only its shard.\n"
        f"  inside : the forward of {unit}\n"
        "  fix    : call the module that owns the weight, put both modules in one unit (units=), "
        "or read it inside `with zf.unsharded(module):`"
    )


# What torch's errors about two dtypes say.
_TWO_DTYPES = re.compile(r"same dtype|expected scalar type|type .* should be the same")


def _watch(output: Any, use: UnitUse) -> None:
    """Hooks the outputs, to learn when backward reaches the unit,
    before any gradient of it is computed."""
    tensors = (output,) if isinstance(output, Tensor) else _tensors_in(output)
    hook = partial(_reached, use)
    for tensor in tensors:
        if tensor.requires_grad:
            use.has_graph = True
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    if use.node is not None:
        use.has_graph = True


def _tensors_in(output: object, depth: int = 3) -> Iterator[Tensor]:
    """The tensors of a pytree, and of the attributes of objects in it
    that torch knows no pytree for."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif (
            depth
            and hasattr(leaf, "__dict__")
            and not isinstance(leaf, type | nn.Module | ModuleType)
        ):
            for value in list(vars(leaf).values()):
                yield from _tensors_in(value, depth - 1)


@uncompiled
def _reached(use: UnitUse, _grad: Tensor) -> None:
    use.unit.run.need_in_backward(use.unit, use)
