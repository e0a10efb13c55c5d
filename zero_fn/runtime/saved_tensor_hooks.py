"""Saved-tensor hooks: for backward, autograd remembers where a gathered tensor lies,
and does not hold the tensor.

[Note: freeing is dropping the reference] A gathered parameter that autograd saves is packed as
(unit, group, size, stride, offset). So only the unit holds a gathered buffer, and may free it;
unpacking in backward finds the buffer gathered again, or gathers it. A unit whose gathered
parameters are kept between uses needs no packing.

[Note: only the innermost hooks apply] Hooks that are pushed inside a unit hide those around it,
such as the ones of `torch.utils.checkpoint` or `save_on_cpu`. So tensors that are not ours are
handed to the hooks that were on top when the unit was entered.

[Note: a checkpoint by hooks] torch's composable `checkpoint(module)` is two hooks at the module,
and ours stand around them. In the forward its saved-tensor hooks are the innermost, and it counts
gathered parameters. So it must when it runs the module again, where ours would be pushed inside. It
holds them then until their nodes have run, which is before they are freed.

[Note: changed after it was saved] Without hooks, autograd raises in backward if a saved tensor was
changed in place since. With hooks it does not look (torch 2.13), so it is done here: the version is
packed with the tensor. Tensors that are handed to hooks around the unit are theirs to check, as
without a unit; a change of a gathered parameter is refused in any case.
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

from zero_fn.runtime.uncompiled import uncompiled
from zero_fn.values.dtensors import on_spec

__all__ = [
    "begin_packing",
    "drop_packing",
    "end_packing",
    "is_run_again_by_hooks",
    "remember_buffer",
]

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_push = torch._C._autograd._push_saved_tensors_default_hooks
_pop = torch._C._autograd._pop_saved_tensors_default_hooks


class _GatheredBuffer:
    """A gathered buffer: its unit, weakly, and the places of the tensors
    on it that were packed before."""

    __slots__ = ("dtype", "group", "places", "unit")

    def __init__(self, unit: Any, group: int, dtype: torch.dtype) -> None:
        self.unit = weakref.ref(unit)
        self.group = group
        self.dtype = dtype
        self.places: dict[tuple[int, Sequence[int], Sequence[int]], _PackedPlace] = {}


_live: dict[int, _GatheredBuffer] = {}  # by storage, also of a buffer that has lost its memory
_REMEMBERED_PLACES = 256  # whoever cuts parameters anew in each step finds the places of none


def remember_buffer(buffer: Tensor, owner: object, unit: object, group: int) -> None:
    """Packs tensors on this buffer as views of group `group` of `unit`, as long as `owner` lives.

    Once it is gone, whoever still holds the buffer keeps it as an ordinary tensor.
    """
    key = buffer.untyped_storage()._cdata
    _live[key] = _GatheredBuffer(unit, group, buffer.dtype)
    weakref.finalize(owner, _live.pop, key, None).atexit = False


class _PackedPlace:
    """Where a tensor lies in a gathered buffer; of a DTensor, its local tensor."""

    __slots__ = ("group", "offset", "size", "spec", "stride")

    def __init__(self, group: int, offset: int, size: Sequence[int], stride: Sequence[int]) -> None:
        self.group = group
        self.offset = offset
        self.size = size
        self.stride = stride
        self.spec: DTensorSpec | None = None


class _PackedParts:
    """A tensor of a subclass whose parts are views of gathered buffers:
    quantized weights. (flatten_subclasses.py)"""

    __slots__ = ("context", "form", "kind", "parts")

    def __init__(self, whole: Any, parts: dict[str, _Packed | _PackedParts], context: Any) -> None:
        self.kind = type(whole)
        self.context = context
        self.form = (whole.size(), whole.stride())
        self.parts = parts

    def unpacked(self) -> Tensor:
        """The same tensor, made of the parts gathered again."""
        parts = {name: _unpack(part) for name, part in self.parts.items()}
        whole: Tensor = self.kind.__tensor_unflatten__(parts, self.context, *self.form)
        return whole


_PLAIN = frozenset((Tensor, nn.Parameter))
_Packed = tuple[Any, Any]
"""A unit and a `_PackedPlace` in a gathered buffer of it; or a tensor that is not ours,
and its version when it was saved."""


@uncompiled
def _pack(tensor: Tensor) -> _Packed | _PackedParts:
    local = tensor._local_tensor if type(tensor) is DTensor else tensor
    if type(local) not in _PLAIN and local is tensor and is_traceable_wrapper_subclass(local):
        return _packed_parts(local)
    try:
        key = local.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        # A tensor without storage, such as a wrapper subclass.
        return _kept(tensor)
    if key not in _live:
        # What `_kept` does, which would cost a call.
        return tensor if tensor.grad_fn is None else tensor.detach(), tensor._version
    buffer = _live[key]
    unit, dtype = buffer.unit(), buffer.dtype
    if (
        unit is None
        or local.dtype != dtype
        or local.is_neg()
        or (dtype.is_complex and local.is_conj())
    ):
        return _kept(tensor)
    where: Any = (local.storage_offset(), local.size(), local.stride())
    if where in buffer.places and local is tensor:
        return unit, buffer.places[where]
    place = _PackedPlace(buffer.group, *where)
    if local is not tensor:
        place.spec = tensor._spec  # type: ignore[attr-defined]
    elif len(buffer.places) < _REMEMBERED_PLACES:
        buffer.places[where] = place
    return unit, place


def _kept(tensor: Tensor) -> _Packed:
    # The tensor may be an output of the node that saves it. With its history it would keep that
    # node alive for ever if backward never ran. Autograd remembers the history itself.
    return tensor if tensor.grad_fn is None else tensor.detach(), tensor._version


def _packed_parts(tensor: Tensor) -> _Packed | _PackedParts:
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: _pack(getattr(tensor, name)) for name in names}
    if any(map(_is_of_unit, parts.values())):
        return _PackedParts(tensor, parts, context)
    return _kept(tensor)


def _is_of_unit(packed: _Packed | _PackedParts) -> bool:
    return type(packed) is _PackedParts or type(packed[1]) is _PackedPlace  # type: ignore[index]


@uncompiled
def _unpack(packed: _Packed | _PackedParts) -> Tensor:
    if type(packed) is _PackedParts:
        return packed.unpacked()
    unit, place = packed  # type: ignore[misc]
    if type(place) is int:
        tensor: Tensor = unit
        if tensor._version != place:
            raise _changed(tensor, place, tensor._version)
        return tensor
    view: Tensor = unit.buffer_for_backward(place.group).as_strided(
        place.size, place.stride, place.offset
    )
    return view if place.spec is None else on_spec(view, place.spec)


def _changed(tensor: Tensor, expected: int, version: int) -> RuntimeError:
    """The error that autograd raises without hooks. [Note: changed after it was saved]"""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{tensor.type()} {list(tensor.shape)}] is at version {version}; expected "
        f"version {expected} instead."
    )


@uncompiled
def begin_packing() -> bool:
    """Packs what autograd saves from now on, until `end_packing`.
    [Note: only the innermost hooks apply]

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
    """Ends so many `begin_packing` whose end never came.

    Hooks of others that were pushed inside have been popped since: each by its owner, who took ours
    for its own if that was on top.
    """
    while (top := _top_hooks(False)) is not None and (count > 0 or _is_ours(top)):
        _pop()
        count -= 1


def is_run_again_by_hooks(module: nn.Module) -> bool:
    """Whether the composable checkpoint of a module runs it, in backward.
    [Note: a checkpoint by hooks]"""
    # Nobody uses the module before it is imported.
    composable = sys.modules.get("torch.distributed._composable.checkpoint_activation")
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
    packed = _pack(tensor)
    return packed if _is_of_unit(packed) else _Delegated(outer(tensor))


@uncompiled
def _unpack_or(
    outer: Callable[[Any], Tensor], packed: _Packed | _PackedParts | _Delegated
) -> Tensor:
    return outer(packed.packed) if isinstance(packed, _Delegated) else _unpack(packed)
