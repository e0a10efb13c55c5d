"""A view across shards is one of the whole tensor, and what is written into it arrives: `p[3].zero_()`, `p.grad[:n] = 0`.

Where an operation takes a view along a dim that is cut over ranks, DTensor gathers the tensor and views the copy (2.13).
Reading that is right. Writing into it is lost, silently: a row that is set to zero, a gate whose bias is set to one, a
gradient that is masked. Here, on tensors of the meshes that transforms were given, the local tensor of such a view is a
`WholeView`, which knows where its elements came from. What an operation writes into it is put into the shards at once.

[Note: views one by one] Two views of one tensor hold two copies. A view whose elements were changed since, through another
one or through the tensor, is refused: it would read, and write back, what was there before.

[Note: where gradients flow] What a forward computed is left to DTensor: that is read, and seldom written. A view of a
parameter may be taken with autograd and be written without it.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils._pytree import tree_leaves, tree_map

from zero_fn.errors import StateError
from zero_fn.resting import detached, lies_in_blocks, local_of, on_spec, part_of
from zero_fn.runtime.dtensor_operations import Otherwise, around, is_ours
from zero_fn.runtime.everywhere import done_along
from zero_fn.runtime.tier_tensor import TierTensor, written_by

__all__ = ["is_editable", "view_uneven_shards", "write_through_views"]

_aten = torch.ops.aten
_ALONG_ONE = (
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.unbind.int,
)


def write_through_views() -> None:
    """From now on what is written into views of tensors of our meshes arrives. Does nothing the second time."""
    around(_viewed, *_ALONG_ONE, _aten.diagonal.default)
    around(_filled, _aten.fill_.Tensor)


def view_uneven_shards() -> None:
    """From now on `p.view(-1)` of a tensor of our meshes whose rows are cut unevenly is one of the whole tensor.

    DTensor has no way to say what each rank would hold, and raises (2.13). Apart from the others, because models of other
    libraries take many such views of activations, and each would cost a call in Python. Does nothing the second time.
    """
    around(_reshaped, _aten.view.default, _aten._unsafe_view.default)


def is_editable(tensor: object) -> TypeGuard[DTensor]:
    """Whether it is a DTensor on a mesh of ours, with values of its own, and not computed with autograd."""
    if not is_ours(tensor):
        return False
    if torch.is_grad_enabled() and tensor.requires_grad and not tensor.is_leaf:  # [Note: where gradients flow]
        return False
    if any(placement.is_partial() for placement in tensor.placements):
        return False
    local = local_of(tensor)
    return (type(local) is Tensor or isinstance(local, TierTensor | WholeView)) and TracingContext.try_get() is None


def _viewed(view: Otherwise, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if not is_editable(tensor):
        return view(*args, **kwargs)
    dims = _dims_of(view.operation, view.named(args, kwargs), tensor)
    # Strided or not: `is_shard` knows the plain ones only.
    cut = [i for i, placement in enumerate(tensor.placements) if getattr(placement, "dim", None) in dims]
    if not cut:
        return view(*args, **kwargs)
    return _view_of_whole(view, cut, args, kwargs)


def _reshaped(view: Otherwise, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if not is_ours(tensor) or TracingContext.try_get() is not None:
        return view(*args, **kwargs)
    try:
        return view(*args, **kwargs)
    except RuntimeError:  # before anything is communicated, and by what is the same on every rank
        cut = [i for i, placement in enumerate(tensor.placements) if hasattr(placement, "dim")]
        if not cut:
            raise
    if is_editable(tensor) and view.operation is _aten.view.default:
        return _view_of_whole(view, cut, args, kwargs)
    return view(_whole_along(tensor, cut), *args[1:], **kwargs)


def _view_of_whole(view: Otherwise, cut: list[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The view, of the tensor in full along some axes of its mesh."""
    tensor = args[0]
    done_along(tensor.device_mesh, cut, lambda: None, "Taking a view across shards")
    whole = _whole_along(tensor, cut)
    viewed = view(whole, *args[1:], **kwargs)
    origin = _Origin(tensor, local_of(whole), whole.placements)
    return tree_map(lambda found: on_spec(WholeView(local_of(found), origin), found._spec), viewed)


def _whole_along(tensor: DTensor, axes: list[int]) -> DTensor:
    with torch.no_grad():
        return detached(tensor).redistribute(
            placements=[Replicate() if i in axes else placement for i, placement in enumerate(tensor.placements)]
        )


def _dims_of(operation: Any, given: dict[str, Any], tensor: Tensor) -> set[int]:
    """The dims that a view runs across."""
    if operation is _aten.slice.Tensor and not given["start"] and given["step"] == 1:
        end = given["end"]
        if end is None or end >= tensor.shape[given["dim"]]:
            return set()  # all of it: `p[:, 3]` begins with one
    return {given[name] % tensor.ndim for name in ("dim", "dim1", "dim2") if name in given}


def _filled(fill: Otherwise, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`p[2:5] = 0` gives the number as a tensor, which DTensor does not know how to fill with (2.13)."""
    tensor, value = args
    if is_editable(tensor) and not isinstance(value, DTensor):
        return tensor.fill_(value.item())
    return fill(*args, **kwargs)


class _Origin:
    """Where the elements of a whole copy rest.

    Attributes:
        tensor: The tensor in shards.
        whole: The copy, in full along the axes that a view ran across.
        placements: Of the copy.
    """

    def __init__(self, tensor: DTensor, whole: Tensor, placements: tuple[Placement, ...]) -> None:
        self.tensor, self.whole, self.placements = tensor, whole, placements

    def require_current(self, view: Tensor) -> None:
        """[Note: views one by one]"""
        if not lies_in_blocks(self.tensor):
            return  # it is never written
        own, resting, viewed = self._part(self.whole), local_of(self.tensor), self._part(self._marked(view))
        is_same = (own == resting) | ((own != own) & (resting != resting))  # NaN is as it was
        if not bool((is_same | ~viewed).all()):
            raise StateError(
                "A view across shards was used after its elements had changed.",
                view=f"{list(view.shape)} of a tensor {list(self.tensor.shape)}",
                why="it is of a copy that was gathered before",
                fix="take the view again after the change",
            )

    def put(self, view: Tensor) -> None:
        """What was written into a view, into the shard of this rank."""
        resting = local_of(self.tensor)
        resting.copy_(torch.where(self._part(self._marked(view)), self._part(self.whole), resting))
        if not torch.is_inference_mode_enabled():
            torch.autograd.graph.increment_version(self.tensor)

    def _marked(self, view: Tensor) -> Tensor:
        """Which elements of the whole copy are in a view."""
        if view.dtype != self.whole.dtype or view.is_conj() or view.is_neg():
            raise StateError(
                "A view across shards was viewed as another dtype.",
                view=f"{list(view.shape)} of a tensor {list(self.tensor.shape)}",
                fix="edit it inside `with zf.unsharded(model):`",
            )
        numel = self.whole.untyped_storage().nbytes() // self.whole.itemsize
        marks = torch.zeros(numel, dtype=torch.bool, device=self.whole.device)
        marks.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
        return marks.as_strided(self.whole.shape, self.whole.stride(), self.whole.storage_offset())

    def _part(self, whole: Tensor) -> Tensor:
        return part_of(whole, self.tensor, self.placements)


class WholeView(Tensor):
    """A view of a whole copy of a tensor in shards.

    Attributes:
        plain: The same view as a plain tensor.
        origin: Where its elements rest.
    """

    plain: Tensor
    origin: _Origin

    @staticmethod
    def __new__(cls, plain: Tensor, origin: _Origin) -> WholeView:
        view: WholeView = torch.Tensor._make_subclass(cls, plain)
        view.plain, view.origin = plain, origin
        return view

    def __init__(self, *_: object) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        views = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, WholeView)]
        if not func.is_view:
            for view in views:
                view.origin.require_current(view.plain)
        given, named = tree_map(lambda leaf: leaf.plain if isinstance(leaf, WholeView) else leaf, (args, kwargs))
        found = func(*given, **named)
        if func.is_view:
            return tree_map(lambda plain: WholeView(plain, views[0].origin), found)
        written = written_by(func, args, kwargs)
        for view in views:
            if id(view) in written:
                view.origin.put(view.plain)
        back = {id(view.plain): view for view in views}
        return tree_map(lambda value: back.get(id(value), value), found)

    def numpy(self, *, force: bool = False) -> Any:
        """As of a plain tensor."""
        return self.plain.numpy(force=force)

    def tolist(self) -> Any:
        """As of a plain tensor."""
        return self.plain.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copied = self.plain.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
