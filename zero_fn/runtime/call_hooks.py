"""The two hooks of ours at a module, at which units are entered and left.

[Note: our hook comes first] The hook before a call stands before those of the user: the old
`spectral_norm`, `weight_norm` and pruning compute a weight there, from parameters that must be
whole. The hook after it stands behind those that were there when the module was transformed, and is
called after an exception too.

[Note: nothing inside a unit] While a unit runs, our hooks at modules below its anchor would do
nothing but cost 4 us a call, and the compiler would make a graph of each module of torch that has
hooks. So they are taken out until the unit is left.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from zero_fn.runtime.uncompiled import uncompiled

__all__ = [
    "ENTRY_POINTS",
    "cast",
    "drop_hooks",
    "put_hooks",
    "put_hooks_inside",
    "take_hooks_inside",
]

# In the `__dict__` of a module: where units are entered, in this order.
ENTRY_POINTS = "_zero_fn_entry_points"

_KEY = "zero_fn"  # of our hooks, in the dicts where torch keeps the hooks of a module


def put_hooks(module: nn.Module) -> None:
    """What `register_forward_pre_hook(_before, prepend=True, with_kwargs=True)` does, and
    `register_forward_hook(_after, always_call=True)`, with a key that is known.
    [Note: our hook comes first]"""
    torchs: Any = module
    torchs._forward_pre_hooks[_KEY] = _before
    torchs._forward_pre_hooks.move_to_end(_KEY, last=False)
    torchs._forward_pre_hooks_with_kwargs[_KEY] = True
    torchs._forward_hooks[_KEY] = _after
    torchs._forward_hooks_always_called[_KEY] = True


def drop_hooks(module: nn.Module) -> None:
    """Takes our hooks away for good."""
    hooks: Any
    for hooks in (
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks,
        module._forward_hooks_always_called,
    ):
        hooks.pop(_KEY, None)


def take_hooks_inside(inner: Iterable[weakref.ref[nn.Module]], called: nn.Module | None) -> None:
    """Takes our hooks out of the modules below an anchor, except for the one that is called."""
    for reference in inner:
        module: Any = reference()
        if module is not None and module is not called:
            # The second of them, too: the compiler looks there.
            for hooks in (
                module._forward_pre_hooks,
                module._forward_pre_hooks_with_kwargs,
                module._forward_hooks,
            ):
                if _KEY in hooks:
                    del hooks[_KEY]


def put_hooks_inside(inner: Iterable[weakref.ref[nn.Module]]) -> None:
    """Undoes `take_hooks_inside`, and does nothing where that was not done."""
    for reference in inner:
        module: Any = reference()
        if module is not None and ENTRY_POINTS in module.__dict__:
            hooks = module._forward_pre_hooks
            module._forward_pre_hooks_with_kwargs[_KEY] = True
            hooks[_KEY], module._forward_hooks[_KEY] = _before, _after
            if len(hooks) > 1:
                hooks.move_to_end(_KEY, last=False)


@uncompiled
def _before(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Before a call of a module at which units are entered. [Note: our hook comes first]"""
    given = None
    for entry in module.__dict__[ENTRY_POINTS]:
        if entry.begin() and entry.input_dtype is not None:
            given = args, kwargs = cast((args, kwargs), entry.input_dtype)
    return given


@uncompiled
def _after(module: nn.Module, _args: object, output: Any) -> Any:
    """After a call of a module at which a unit may have been entered."""
    error = sys.exception()
    chain = module.__dict__[ENTRY_POINTS][::-1]
    try:
        for entry in chain:
            output = entry.end(output, error)
    except BaseException as raised:
        for entry in chain:
            entry.end(None, raised)
        raise
    return output


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """The tree with floating point tensors in a dtype; also those in dataclasses and attrs,
    which torch's pytree skips."""

    def cast_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(dtype) if leaf.is_floating_point() else leaf
        if isinstance(leaf, type | nn.Module):
            return leaf
        declared = fields(leaf) if is_dataclass(leaf) else getattr(leaf, "__attrs_attrs__", None)
        if declared is None:
            return leaf
        before = {
            field.name: getattr(leaf, field.name) for field in declared if hasattr(leaf, field.name)
        }
        after = {name: cast(value, dtype) for name, value in before.items()}
        leaves = zip(tree_leaves(before), tree_leaves(after), strict=True)
        if all(one is other for one, other in leaves):
            return leaf  # a configuration
        twin = copy.copy(leaf)
        for name, value in after.items():
            object.__setattr__(twin, name, value)  # frozen ones, too
        return twin

    return tree_map(cast_leaf, tree)
