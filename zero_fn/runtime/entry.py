"""The forward of a transformed module: enters its unit, runs the module's own forward, leaves.

An `Entry` stands in the instance under the name `forward`. The anchor of a unit has one, and so does every other
module that holds a parameter of it: called inside the unit it steps aside, called alone it enters the unit itself. So
any module of a transformed model may be called directly.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from zero_fn.errors import StateError
from zero_fn.runtime.access import explained
from zero_fn.runtime.gather import UnitUse, gather
from zero_fn.runtime.saved import packing_gathered
from zero_fn.runtime.step import Step
from zero_fn.runtime.swapped import is_transforming, outside_transforms
from zero_fn.runtime.unit import Unit

__all__ = ["Entry", "entries", "entry_of", "steps_of", "units_of"]


class Entry:
    """Callable in place of `module.forward`.

    Attributes:
        unit: The unit to enter.
        own: A forward that the instance had before (set by a library that wraps modules), else None.
        input_dtype, output_dtype: Floating point tensors are cast to these on the way in and out; None leaves them.
    """

    def __init__(
        self,
        module: nn.Module,
        unit: Unit,
        *,
        input_dtype: torch.dtype | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        self._module = weakref.ref(module)
        self.own: Callable[..., Any] | None = module.__dict__.get("forward")
        self.unit = unit
        self.input_dtype, self.output_dtype = input_dtype, output_dtype
        unit.step.buffers.watch(module)
        module.__dict__["forward"] = self

    @property
    def module(self) -> nn.Module:
        """The module whose forward this is."""
        module = self._module()
        assert module is not None, "a forward outlived its module"
        return module

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The module's own forward, bound: what `inspect.signature` reads."""
        return self.own if self.own is not None else type(self.module).forward.__get__(self.module)

    @property
    def __name__(self) -> str:
        return "forward"

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self.__wrapped__.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit = self.unit
        if unit.open or unit.step.is_recomputing(unit, self):
            return self.__wrapped__(*args, **kwargs)
        with outside_transforms():
            use = unit.step.enter(unit, self)
        failed = True
        try:
            unit.shadow(gather(use))
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
                _watch(output, use)
            elif use.node is not None:
                use.has_graph = True
            failed = False
        except RuntimeError as error:
            known = explained(error, unit.name)
            if known is error:
                raise
            raise known from error
        finally:
            unit.unshadow()
            with outside_transforms():
                unit.step.leave(use, failed=failed)
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> Entry:
        module = copy.deepcopy(self.module, memo)
        twin = object.__new__(Entry)
        memo[id(self)] = twin
        twin._module = weakref.ref(module)
        twin.own = copy.deepcopy(self.own, memo)
        twin.input_dtype, twin.output_dtype = self.input_dtype, self.output_dtype
        twin.unit = copy.deepcopy(self.unit, memo)
        copy.deepcopy(self.unit.step, memo).buffers.watch(module)
        return twin

    def __reduce__(self) -> Any:
        raise StateError(
            "A transformed module cannot be pickled: it belongs to the ranks of a process group.",
            fix="save its state_dict() (torch.distributed.checkpoint), and transform a fresh module after loading",
        )


def entry_of(module: nn.Module) -> Entry | None:
    """The entry that stands in this module, if any."""
    forward = module.__dict__.get("forward")
    return forward if isinstance(forward, Entry) else None


def entries(module: nn.Module) -> list[tuple[str, Entry]]:
    """All entries below a module, by module name. The anchor of a unit that holds a parameter of another one has two."""
    found: list[tuple[str, Entry]] = []
    for name, child in module.named_modules():
        entry: object = entry_of(child)
        while isinstance(entry, Entry):
            found.append((name, entry))
            entry = entry.own
    return found


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


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    leaves, spec = tree_flatten(tree)
    return tree_unflatten(
        [leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf for leaf in leaves], spec
    )


def _watch(output: Any, use: UnitUse) -> None:
    """Tells the step when backward reaches the outputs, before any gradient of the unit is computed."""
    leaves = (output,) if isinstance(output, Tensor) else tree_leaves(output)
    hook = partial(_reached, use)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            use.has_graph = True
            leaf.register_hook(hook)  # type: ignore[no-untyped-call]
    if use.node is not None:
        use.has_graph = True


def _reached(use: UnitUse, _grad: Tensor) -> None:
    use.unit.step.demand(use.unit, use)
