"""Saved-tensor hooks: for backward, autograd remembers where a gathered tensor lies, and does not hold the tensor.

[Note: freeing is dropping the reference] A gathered parameter that autograd saves is packed as (unit, group, size, stride,
offset). So only the unit holds a gathered buffer, and may free it; unpacking in backward finds the buffer gathered again, or
gathers it. A unit whose gathered parameters are kept between uses needs no packing.

[Note: only the innermost hooks apply] Hooks that are pushed inside a unit hide those around it, such as the ones of
`torch.utils.checkpoint` or `save_on_cpu`. So tensors that are not ours are handed to the hooks that were on top when the unit
was entered.

[Note: a checkpoint by hooks] torch's composable `checkpoint(module)` is two hooks at the module, and ours stand around them.
In the forward its saved-tensor hooks are the innermost, and it counts gathered parameters. So it must when it runs the module
again, where ours would be pushed inside. It holds them then until their nodes have run, which is before they are freed.

[Note: changed after it was saved] Without hooks, autograd raises in backward if a saved tensor was changed in place since.
With hooks it does not look (torch 2.13), so it is done here: the version is packed with the tensor. Tensors that are handed
to hooks around the unit are theirs to check, as without a unit; a change of a gathered parameter is refused in any case.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zero_fn.resting import on_spec
from zero_fn.runtime.uncompiled import uncompiled

__all__ = ["begin_packing", "drop_packing", "end_packing", "is_run_again_by_hooks", "remember_buffer"]

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_push = torch._C._autograd._push_saved_tensors_default_hooks
_pop = torch._C._autograd._pop_saved_tensors_default_hooks


# By storage, also of a buffer that has lost its memory: its unit, weakly, its group there, and its dtype.
_live: dict[int, tuple[weakref.ref[Any], int, torch.dtype]] = {}


def remember_buffer(buffer: Tensor, owner: object, unit: object, group: int) -> None:
    """Packs tensors on this buffer as views of group `group` of `unit`, as long as `owner` lives.

    Once it is gone, whoever still holds the buffer keeps it as an ordinary tensor.
    """
    key = buffer.untyped_storage()._cdata
    _live[key] = (weakref.ref(unit), group, buffer.dtype)
    weakref.finalize(owner, _live.pop, key, None).atexit = False


class _Packed:
    """A view of a gathered buffer, as its place in the buffer; for a DTensor, the place of its local tensor."""

    __slots__ = ("group", "place", "spec", "unit")

    def __init__(
        self,
        unit: Any,
        group: int,
        place: tuple[Sequence[int], Sequence[int], Any],
        spec: DTensorSpec | None,
    ) -> None:
        self.unit, self.group, self.place, self.spec = unit, group, place, spec


class _PackedParts:
    """A tensor of a subclass whose parts are views of gathered buffers: quantized weights. (flatten_subclasses.py)"""

    __slots__ = ("context", "form", "kind", "parts")

    def __init__(self, whole: Any, names: Sequence[str], context: Any) -> None:
        self.kind, self.context, self.form = type(whole), context, (whole.size(), whole.stride())
        self.parts = {name: _pack(getattr(whole, name)) for name in names}

    def unpacked(self) -> Tensor:
        """The same tensor, made of the parts gathered again."""
        parts = {name: _unpack(part) for name, part in self.parts.items()}
        whole: Tensor = self.kind.__tensor_unflatten__(parts, self.context, *self.form)
        return whole


def _find(tensor: Tensor) -> _Packed | _PackedParts | None:
    spec: DTensorSpec | None = None
    if type(tensor) is DTensor:
        spec = tensor._spec
        tensor = tensor._local_tensor
    elif type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()
        is_ours = any(_find(getattr(tensor, name)) is not None for name in names)
        return _PackedParts(tensor, names, context) if is_ours else None
    try:
        entry = _live.get(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # a tensor without storage, such as a wrapper subclass
        return None
    if entry is None or tensor.dtype != entry[2] or tensor.is_conj() or tensor.is_neg():
        return None
    unit = entry[0]()
    if unit is None:
        return None
    return _Packed(unit, entry[1], (tensor.size(), tensor.stride(), tensor.storage_offset()), spec)


_PLAIN = frozenset((Tensor, nn.Parameter))
_Kept = tuple[Tensor, int]  # a tensor, with its version when it was saved


@uncompiled
def _pack(tensor: Tensor) -> _Kept | _Packed | _PackedParts:
    packed = _find(tensor)
    if packed is not None:
        return packed
    # The tensor may be an output of the node that saves it. With its history it would keep that node alive for ever if
    # backward never ran. Autograd remembers the history itself.
    return tensor if tensor.grad_fn is None else tensor.detach(), tensor._version


@uncompiled
def _unpack(packed: _Kept | _Packed | _PackedParts) -> Tensor:
    if type(packed) is tuple:
        tensor, version = packed
        if tensor._version != version:
            raise _changed(tensor, version, tensor._version)
        return tensor
    if type(packed) is not _Packed:
        assert isinstance(packed, _PackedParts)
        return packed.unpacked()
    buffer: Tensor = packed.unit.buffer_for_backward(packed.group)
    view = buffer.as_strided(*packed.place)
    return view if packed.spec is None else on_spec(view, packed.spec)


def _changed(tensor: Tensor, expected: int, version: int) -> RuntimeError:
    """The error that autograd raises without hooks. [Note: changed after it was saved]"""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}] is at version {version}; expected version {expected} instead."
    )


@uncompiled
def begin_packing() -> bool:
    """Packs what autograd saves from now on, until `end_packing`. [Note: only the innermost hooks apply]

    Returns:
        False if it was packed already: then there is nothing to end.
    """
    top = _top_hooks(False)
    if top is None:
        _push(_pack, _unpack)
    elif _is_ours(top):
        return False
    else:
        _push(partial(_pack_or, top[0]), partial(_unpack_or, top[1]))
    return True


@uncompiled
def end_packing() -> None:
    """Ends what `begin_packing` began."""
    _pop()


@uncompiled
def drop_packing(count: int) -> None:
    """Ends so many `begin_packing` whose end never came. Hooks of others that were pushed inside have been popped since: each
    by its owner, who took ours for its own if that was on top."""
    while (top := _top_hooks(False)) is not None and (count > 0 or _is_ours(top)):
        _pop()
        count -= 1


def is_run_again_by_hooks(module: nn.Module) -> bool:
    """Whether the composable checkpoint of a module runs it, in backward. [Note: a checkpoint by hooks]"""
    composable = sys.modules.get("torch.distributed._composable.checkpoint_activation")  # nobody uses it before
    state = composable.checkpoint.state(module) if composable is not None else None
    return state is not None and not state.enable_hook


def _is_ours(top: tuple[object, object]) -> bool:
    return top[0] is _pack or getattr(top[0], "func", None) is _pack_or


class _Delegated:
    """What hooks around the unit have packed."""

    __slots__ = ("packed",)

    def __init__(self, packed: Any) -> None:
        self.packed = packed


@uncompiled
def _pack_or(outer: Callable[[Tensor], Any], tensor: Tensor) -> _Packed | _PackedParts | _Delegated:
    """Packs a tensor that is ours, and hands any other to the hooks around the unit."""
    packed = _find(tensor)
    return _Delegated(outer(tensor)) if packed is None else packed


@uncompiled
def _unpack_or(outer: Callable[[Any], Tensor], packed: _Packed | _PackedParts | _Delegated) -> Tensor:
    return outer(packed.packed) if isinstance(packed, _Delegated) else _unpack(packed)
