"""Operations on resting tensors for which DTensor silently gives a wrong result:
each is refused or mended.

This is the only file that changes what operations of torch do. `ROWS` says which operations, when,
and why. A row leaves when torch does its operation right; `tests/units/runtime/test_refused.py`
checks that torch alone is still wrong. What torch itself refuses has no row, but for what libraries
write. The rows look at DTensors on a mesh that was given to a transform: parameters, gradients,
optimizer states, and what is computed from them. Other tensors pass through, at 3 us for each
operation in the table.

[Note: copies] A view along a dim that is cut (`weight[0]`) is a view of a copy that DTensor
gathers. Reading the copy is right; what is written into it would be lost. So the local tensor of
such a view refuses to be written.

[Note: parts that are no terms] Along a dim that is cut each rank has a norm, or an `any`, of its
own part. These parts are not terms of a sum, but DTensor treats them so: `p.norm(dim=0).sum()` adds
up norms of shards. So the parts are brought together at once.

[Note: whole tensors in a forward] DTensor takes the gradient of `weight.full_tensor()` to be equal
on every rank. In a forward it is not, as each rank has other inputs. So `full_tensor()` of a
trained parameter is refused while a forward runs; also inside `module.forward(x)` called in place
of `module(x)`, which enters no unit.

[Note: files] safetensors writes a tensor from the address of its storage, and a DTensor has none:
torch would say "invalid python storage". Asked for are `untyped_storage().data_ptr()` and then, as
that raises, `storage()`. The first is torch's own too, and stays; `storage()` of a DTensor is
called by nobody else.

[Note: lists of both kinds] Averages of parameters and buffers (torch's `AveragedModel`, timm's
`ModelEmaV3`) take them in one call of a `_foreach` operation, which torch refuses. So DTensors and
plain tensors get a call each.

[Note: sums that are written] `p.norm().clamp_(min=eps)`: torch refuses, as the value of a sum over
ranks is known once it is brought together. So the tensor is made whole in its place, if no other
tensor has its memory.

[Note: assigned values] torch puts what is assigned to the `.data` of a DTensor beside the local
tensor, which nobody reads then. So the local tensor becomes a copy of the values, in memory of its
own: what was taken from `.data` before keeps the old ones. The next forward takes the memory over,
as it does after `module.to()`.

[Note: tiers] In norms of gradients, in their scaling and in redistributions, ranks wait for one
another. So they tell one another first whether a disk has failed. DTensor has no handlers for
redistributions, so the function that does them is replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import inf, prod
from typing import Any, NamedTuple, NoReturn, TypeGuard

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, _dispatch, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_leaves, tree_map

from zero_fn.errors import PlacementError, ShardedAccessError
from zero_fn.runtime.resting_edits import copy_handlers, note_edited
from zero_fn.runtime.run import Run, run_of
from zero_fn.runtime.slot import slot_of
from zero_fn.runtime.unit import unit_of
from zero_fn.tiers.tier_tensor import TierTensor, in_memory, written_by
from zero_fn.transport.agree import axes_of, done_over
from zero_fn.values.dtensors import cut_alike, detached, local_of, on_spec
from zero_fn.values.mesh import axes_text

__all__ = ["ROWS", "Row", "note_mesh"]

_aten = torch.ops.aten
_MEAN = 1  # the number of reduction="mean" in losses of aten
_ALONE = 2  # references to a storage that one tensor has, while it is asked for
_EDIT_WHOLES = (
    "edit whole parameters: with zf.unsharded(model, writeback=True), torch.no_grad(): ..."
)
_ADAPTERS = (
    "before the transform, or with zf.unsharded(base, writeback=True): "
    "model = get_peft_model(base, config)"
)


class Call(NamedTuple):
    """A call of an operation."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ours: list[DTensor]  # those on a mesh of ours among its arguments, and in lists among them

    def named(self, name: str) -> Any:
        """The argument of this name, or its default; None if the operation has no such argument."""
        at, default = _arguments_of(self.operation).get(name, (len(self.args), None))
        return self.args[at] if at < len(self.args) else self.kwargs.get(name, default)


Mend = Callable[[Call, Callable[..., Any]], object]
"""Takes a call, and a function that does the operation as the rows below this one and torch do it,
with any arguments."""


@dataclass(frozen=True)
class Row:
    """Operations that torch does wrong with resting tensors, when,
    and the refusal or the right result."""

    # Overloads ("sum.dim_IntList"), or names that stand for all their overloads ("bernoulli").
    names: str
    when: Callable[[Call], bool]  # whether the result of a call would be wrong
    why: str  # what torch does wrong
    fix: str = ""  # what to write instead; empty if the row mends the operation
    # Gives the right result; beside a `fix` it refuses in its own way, at once or when written.
    mend: Mend | None = None
    until: str | None = None  # the first version of torch that is right, if there is one


def _cut(tensor: DTensor) -> list[int]:
    """The mesh axes over which a tensor is cut."""
    sizes = tensor.device_mesh.shape
    return [
        axis
        for axis, p in enumerate(tensor.placements)
        if getattr(p, "dim", None) is not None and sizes[axis] > 1
    ]


def _partial(tensor: DTensor) -> list[int]:
    """The mesh axes over which ranks hold terms that are still to be reduced."""
    return [axis for axis, placement in enumerate(tensor.placements) if placement.is_partial()]


def _dims_cut(tensor: DTensor) -> set[int]:
    return {tensor.placements[axis].dim for axis in _cut(tensor)}  # type: ignore[attr-defined]


def _is_any_cut(call: Call) -> bool:
    return any(map(_cut, call.ours))


def _whole(tensor: DTensor, axes: Sequence[int]) -> DTensor:
    """The tensor, whole along some axes, outside autograd."""
    wanted = [
        Replicate() if i in axes else placement for i, placement in enumerate(tensor.placements)
    ]
    with torch.no_grad():
        return detached(tensor).redistribute(placements=wanted)


# -- when torch would be wrong, and the right result -----------------------------------------------


def _draws_alike(call: Call) -> bool:
    knows_offsets = (
        call.ours[0].device_mesh.device_type != "cpu"
        and call.operation in DTensor._op_dispatcher._random_ops
    )
    is_off = call.named("train") is False or call.named("training") is False
    return not (knows_offsets or is_off) and any(
        _cut(t) and not local_of(t).is_meta for t in call.ours
    )


def _is_mean(call: Call) -> bool:
    return call.named("reduction") == _MEAN and _is_any_cut(call)


def _stacks_plain(call: Call) -> bool:
    return not all(isinstance(tensor, DTensor) for tensor in call.args[0])


def _refuse_mixed(call: Call, _: Callable[..., Any]) -> NoReturn:
    """Raises before `clip_grad_norm_` clips anything: it would raise at the first plain gradient,
    after it has clipped others."""
    summary = "Gradients of a transformed model and of a plain one cannot share a norm."
    raise PlacementError(summary, why=_NORMS.why, fix=_NORMS.fix)


def _meets_plain(call: Call) -> bool:
    return any(
        isinstance(arg, Tensor) and not isinstance(arg, DTensor) and arg.requires_grad
        for arg in call.args
    )


def _has_plain_positions(call: Call) -> bool:
    return any(isinstance(at, Tensor) and not isinstance(at, DTensor) for at in call.args[1])


def _refuse_positions(call: Call, go_on: Callable[..., Any]) -> NoReturn:
    tensor = f"{list(call.ours[0].shape)}  {', '.join(map(str, call.ours[0].placements))}"
    raise ShardedAccessError(
        "A resting tensor was read at plain positions.",
        tensor=tensor,
        why=_POSITIONS.why,
        fix=_POSITIONS.fix,
    )


def _is_from_the_end(call: Call) -> bool:
    return bool(call.named("dim") < 0 and call.ours[0].ndim)


def _from_the_front(call: Call, go_on: Callable[..., Any]) -> Any:
    ndim = call.ours[0].ndim + (call.operation is _aten.stack.default)
    return go_on(call.args[0], call.named("dim") % ndim, *call.args[2:], **call.kwargs)


def _has_no_dims(call: Call) -> bool:
    return call.named("dim") == [] and bool(call.ours[0].ndim)


def _with_all_dims(call: Call, go_on: Callable[..., Any]) -> Any:
    return go_on(call.args[0], list(range(call.ours[0].ndim)), *call.args[2:], **call.kwargs)


def _keeps_all_dims(call: Call) -> bool:
    return bool(call.named("dim") is None and call.named("keepdim") and _is_any_cut(call))


def _is_partial(call: Call) -> bool:
    return bool(_partial(call.ours[0]))


def _read_whole(call: Call, go_on: Callable[..., Any]) -> Any:
    (tensor,) = call.ours
    axes = _partial(tensor)
    what = "Reading the value of a sum over shards"
    done_over(axes_of(tensor.device_mesh, axes, what), lambda: None, what)
    return go_on(_whole(tensor, axes))


def _brought_together(call: Call, go_on: Callable[..., Any]) -> Any:
    """The result, reduced at once. [Note: parts that are no terms]"""
    found = go_on(*call.args, **call.kwargs)
    if found.is_floating_point() and not found.ndim:
        # A norm over all dims, whose parts DTensor reduces rightly: `clip_grad_norm_` uses it.
        return found
    return _whole(found, _partial(found))


def _is_written_sum(call: Call) -> bool:
    tensor = call.args[0]
    if not isinstance(tensor, DTensor) or not _partial(tensor):
        return False
    return torch._C._storage_Use_Count(local_of(tensor).untyped_storage()._cdata) <= _ALONE


def _written_whole(call: Call, go_on: Callable[..., Any]) -> Any:
    """The result, of the tensor made whole in its place. [Note: sums that are written]"""
    tensor = call.args[0]
    whole = _whole(tensor, _partial(tensor))
    tensor._local_tensor, tensor._spec = whole._local_tensor, whole._spec
    return go_on(*call.args, **call.kwargs)


def _are_mixed(call: Call) -> bool:
    """Whether some rows of a call over lists are of DTensors, and others of plain tensors."""
    kinds = [
        [isinstance(tensor, DTensor) for tensor in arg] for arg in call.args if _is_tensors(arg)
    ]
    return len(set(kinds[0])) > 1 and all(kind == kinds[0] for kind in kinds)


def _apart(call: Call, _: Callable[..., Any]) -> Any:
    """The results of both kinds of rows, in order. [Note: lists of both kinds]"""
    first = call.args[0]
    found: list[Any] = [None] * len(first)
    for kind in (True, False):
        rows = [row for row, tensor in enumerate(first) if isinstance(tensor, DTensor) is kind]
        given = [[arg[row] for row in rows] if _is_row_of(arg, first) else arg for arg in call.args]
        for row, result in zip(rows, call.operation(*given, **call.kwargs) or (), strict=False):
            found[row] = result
    return None if call.operation._schema.is_mutable else found


def _one_by_one(call: Call, _: Callable[..., Any]) -> None:
    for tensor, source in zip(*call.args[:2], strict=True):
        tensor.copy_(source)


def _is_tensors(arg: object) -> bool:
    return isinstance(arg, list | tuple) and bool(arg) and isinstance(arg[0], Tensor)


def _is_row_of(arg: object, first: Sequence[object]) -> bool:
    return isinstance(arg, list | tuple) and len(arg) == len(first)


def _is_sum_of_norms(call: Call) -> bool:
    return any(type(placement).__name__ == "_NormPartial" for placement in call.ours[0].placements)


def _is_extreme(call: Call) -> bool:
    return any(
        getattr(call.ours[0].placements[axis], "reduce_op", "") in {"max", "min"}
        for axis in _partial(call.ours[0])
    )


def _of_reduced(call: Call, go_on: Callable[..., Any]) -> Any:
    """The result, of the first tensor brought together."""
    tensor = call.args[0]
    return go_on(_whole(tensor, _partial(tensor)), *call.args[1:], **call.kwargs)


def _is_strided(call: Call) -> bool:
    return any(type(placement).__name__ == "_StridedShard" for placement in call.ours[0].placements)


def _divides_by_parts(call: Call) -> bool:
    return isinstance(call.args[1], DTensor) and bool(_partial(call.args[1]))


def _of_wholes(call: Call, go_on: Callable[..., Any]) -> Any:
    def whole(value: Any) -> Any:
        return _whole(value, range(value.device_mesh.ndim)) if isinstance(value, DTensor) else value

    return go_on(*tree_map(whole, call.args), **call.kwargs)


def _may_be_empty(tensor: DTensor) -> bool:
    """Whether some rank may hold nothing of a tensor; the answer is the same on every rank."""
    shards = prod(tensor.device_mesh.size(axis) for axis in _cut(tensor))
    # Only of fewer rows than this does `torch.chunk` make fewer chunks than it was asked for.
    return bool(tensor.numel()) and any(
        tensor.shape[dim] < shards * shards for dim in _dims_cut(tensor)
    )


def _has_no_least(call: Call) -> bool:
    order = call.args[1] if len(call.args) > 1 and "norm" in call.operation._schema.name else inf
    return (order < 0 or order == inf) and any(map(_may_be_empty, call.ours))


def _is_cut_view(call: Call) -> bool:
    """Whether a tensor that is cut is viewed.

    What a forward computes is left out, as it is read and seldom written;
    so are views that a compiler traces.
    """
    (tensor,) = call.ours
    is_computed = torch.is_grad_enabled() and tensor.requires_grad and not tensor.is_leaf
    return bool(_cut(tensor)) and not is_computed and TracingContext.try_get() is None


def _read_only(call: Call, go_on: Callable[..., Any]) -> Any:
    """The view, on a local tensor that refuses to be written. [Note: copies]"""
    given = _cut(call.ours[0])

    def marked(view: DTensor) -> DTensor:
        local = local_of(view)
        if isinstance(local, AsyncCollectiveTensor):
            local = local.wait()
        is_copy = type(local) is Tensor and not set(given) <= set(_cut(view))
        return on_spec(Copied(local), view._spec) if is_copy else view

    return tree_map(marked, go_on(*call.args, **call.kwargs))


def _may_not_flatten(call: Call) -> bool:
    return bool(_cut(call.ours[0])) and TracingContext.try_get() is None


def _viewed_whole(call: Call, go_on: Callable[..., Any]) -> Any:
    """The view, of the tensor made whole where torch has no view of the shards."""
    try:
        return go_on(*call.args, **call.kwargs)
    except RuntimeError:
        # It comes on every rank, before anything is sent, unless a plain
        # tensor has no such view either.
        tensor, size = call.args
        torch.empty_strided(tensor.shape, tensor.stride(), device="meta").view(size)
        return go_on(_whole(tensor, _cut(tensor)), size)


def _is_thin_beside_other(call: Call) -> bool:
    """Whether a tensor that is cut along a dim of one element is written with one of
    its shape that lies elsewhere."""
    tensor, other = call.args[:2]
    if (
        not isinstance(tensor, DTensor)
        or not isinstance(other, DTensor)
        or other.placements == tensor.placements
    ):
        return False
    return other.shape == tensor.shape and any(tensor.shape[dim] == 1 for dim in _dims_cut(tensor))


def _with_other_alike(call: Call, go_on: Callable[..., Any]) -> Any:
    tensor, other = call.args[:2]
    return go_on(
        tensor,
        detached(other).redistribute(placements=tensor.placements),
        *call.args[2:],
        **call.kwargs,
    )


def _is_in_tiers(call: Call) -> bool:
    return any(isinstance(local_of(tensor), TierTensor) for tensor in call.ours)


def _agreed(call: Call, go_on: Callable[..., Any]) -> Any:
    """The result, once all ranks have told one another that their disks are well. [Note: tiers]"""
    mesh = call.ours[0].device_mesh
    act = "The norm of" if "norm" in _name(call.operation) else "Scaling"
    what = f"{act} {'a gradient' if isinstance(call.args[0], Tensor) else 'gradients'}"
    return done_over(
        axes_of(mesh, range(mesh.ndim), what), partial(go_on, *call.args, **call.kwargs), what
    )


class Copied(Tensor):
    """The local tensor of a view of a gathered copy: read as a plain tensor,
    it refuses to be written. [Note: copies]"""

    plain: Tensor

    @staticmethod
    def __new__(cls, plain: Tensor) -> Copied:
        copied: Copied = torch.Tensor._make_subclass(cls, plain)
        copied.plain = plain
        return copied

    def __init__(self, *_: object) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        written = written_by(func, args, kwargs)
        if any(
            isinstance(leaf, Copied) and id(leaf) in written for leaf in tree_leaves((args, kwargs))
        ):
            raise ShardedAccessError(
                f"{_name(func)} of a view of a resting tensor, along a dim that is cut.",
                why=_VIEWS.why,
                fix=_VIEWS.fix,
            )
        given, named = tree_map(
            lambda leaf: leaf.plain if isinstance(leaf, Copied) else leaf, (args, kwargs)
        )
        found = func(*given, **named)
        return tree_map(Copied, found) if func.is_view else found

    def numpy(self, *, force: bool = False) -> Any:
        """The array of the plain tensor."""
        return self.plain.numpy(force=force)

    def tolist(self) -> Any:
        """The list of the plain tensor."""
        return self.plain.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copied = self.plain.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


# -- the table -------------------------------------------------------------------------------------


def _operations(names: str) -> tuple[Any, ...]:
    """The operations of a row: of "sum.dim_IntList amax",
    one overload of `sum` and all of `amax`."""
    found: list[Any] = []
    for name in names.split():
        packet, _, overload = name.partition(".")
        overloads = [overload] if overload else getattr(_aten, packet).overloads()
        found += (getattr(getattr(_aten, packet), one) for one in overloads)
    return tuple(found)


_VIEWS = Row(
    "select.int slice.Tensor split.Tensor split_with_sizes.default diagonal.default view.default",
    when=_is_cut_view,
    why="it is a view of a copy that was gathered: "
    "what is written into it does not reach the shards",
    fix=f"{_EDIT_WHOLES}; gradients and states: t.mul_(distribute_tensor(mask, "
    "t.device_mesh, t.placements))",
    mend=_read_only,
)

_POSITIONS = Row(
    "index.Tensor",
    when=_has_plain_positions,
    why="torch takes positions that are placed as it is, and plain ones are not",
    fix="p.full_tensor()[positions]; adapters that copy rows of their base "
    f"(trainable_token_indices): {_ADAPTERS}",
    mend=_refuse_positions,
)

_NORMS = Row(
    "stack.default _foreach_norm.Scalar",
    when=_stacks_plain,
    why="a plain gradient may differ between ranks, and nothing tells whether it does",
    fix="transform the other model too: zf.replicate(model, mesh['dp']); or combine the norms of "
    "both yourself and call clip_grads_with_norm_(parameters, max_norm, total) for each",
    mend=_refuse_mixed,
)

ROWS = (
    Row(
        "normal_ uniform_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_ bernoulli "
        "multinomial rand_like randn_like randint_like native_dropout rrelu_with_noise",
        when=_draws_alike,
        why="each rank would draw the same numbers for its own part",
        fix=f"zf.materialize(model, device) from meta; {_EDIT_WHOLES}; noise of a whole tensor, "
        "with one seed everywhere: distribute_tensor(torch.randn(t.shape), t.device_mesh, "
        "t.placements)",
    ),
    Row(
        "eye.m_out",
        when=_is_any_cut,
        why="ranks with fewer rows would get another diagonal",
        fix=_EDIT_WHOLES,
    ),
    Row(
        "mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy "
        "binary_cross_entropy_with_logits",
        when=_is_mean,
        why="its gradient would be divided by the elements of a part, not of the whole",
        fix="divide the sum: F.mse_loss(p, anchor, reduction='sum') / p.numel()",
    ),
    Row(
        "aminmax.default",
        when=_keeps_all_dims,
        why="torch would look for the least and the greatest element in "
        "the part of this rank alone",
        fix="p.amin(dims, keepdim=True), p.amax(dims, keepdim=True) with all dims",
    ),
    Row(
        "fill_.Scalar",
        when=_is_partial,
        why="it is a sum over ranks, and each would fill its own term",
        fix="bring it together before: t = t.full_tensor()",
    ),
    Row(
        "add.Tensor sub.Tensor mul.Tensor div.Tensor",
        when=_meets_plain,
        why="in backward the plain tensor beside it would be given a gradient in shards",
        fix="loss + penalty.full_tensor(), or two backwards: loss.backward(); penalty.backward(); "
        f"adapters that read their base (DoRA): {_ADAPTERS}",
    ),
    _POSITIONS,
    _NORMS,
    Row(
        "cumsum.default cumprod.default logcumsumexp.default stack.default",
        when=_is_from_the_end,
        why="a dim counted from the end is not taken for the one that is cut",
        mend=_from_the_front,
    ),
    Row(
        "sum.dim_IntList mean.dim amax.default amin.default",
        when=_has_no_dims,
        why="an empty list of dims means all dims, "
        "also in the backward of p.amax() and p.norm(inf); torch takes it for none",
        mend=_with_all_dims,
    ),
    Row(
        "_local_scalar_dense.default",
        when=_is_partial,
        why="item(), float() and `if` read the part of this rank, so ranks take other branches",
        mend=_read_whole,
    ),
    Row(
        "linalg_vector_norm.default any.default any.dim any.dims",
        when=_is_any_cut,
        why="parts of a norm along a dim that is cut, and of `any`, are added up",
        mend=_brought_together,
    ),
    Row(
        "sum.default sum.dim_IntList nansum.default",
        when=_is_sum_of_norms,
        why="norms of shards that were stacked or joined are added up before their root is taken",
        mend=_of_reduced,
        until="2.14.1",
    ),
    Row(
        "linalg_vector_norm.default",
        when=_is_extreme,
        why="the greatest of p.max() and the like is looked for among magnitudes, "
        "so a negative one loses its sign first",
        mend=_of_reduced,
    ),
    Row(
        "_foreach_add _foreach_add_ _foreach_sub _foreach_sub_ _foreach_mul _foreach_mul_ "
        "_foreach_div _foreach_div_ _foreach_lerp _foreach_lerp_ _foreach_copy_.default "
        "_foreach_addcmul_ _foreach_addcdiv_",
        when=_are_mixed,
        why="torch refuses lists of plain tensors and DTensors, "
        "such as buffers and parameters that are averaged",
        mend=_apart,
    ),
    Row("_foreach_copy_.default", when=bool, why="torch has it not", mend=_one_by_one),
    Row(
        "clamp_.default clamp_min_.default clamp_max_.default add_.Tensor sub_.Tensor mul_.Tensor "
        "div_.Tensor sqrt_.default pow_.Scalar reciprocal_.default",
        when=_is_written_sum,
        why="torch refuses to write into a norm or a sum over shards, as adaptive clipping does",
        mend=_written_whole,
    ),
    Row(
        "div.Tensor",
        when=_divides_by_parts,
        why="a quotient by a sum is taken for the sum of quotients",
        mend=_of_wholes,
        until="2.12",
    ),
    Row(
        "mean.default mean.dim",
        when=_is_strided,
        why="shards beside tensor parallelism are taken to be equally large",
        mend=_of_wholes,
        until="2.12",
    ),
    Row(
        "_foreach_norm.Scalar linalg_vector_norm.default amax.default amin.default max.default "
        "min.default argmax.default argmin.default",
        when=_has_no_least,
        why="ranks that hold nothing of a tensor raise that it has no greatest element, "
        "and the others wait for them",
        mend=_of_wholes,
    ),
    _VIEWS,
    Row(
        "view.default _unsafe_view.default",
        when=_may_not_flatten,
        why="torch refuses p.view(-1) of rows that the ranks do not divide, "
        "as L-BFGS and parameters_to_vector write",
        mend=_viewed_whole,
    ),
    Row(
        "add_.Tensor sub_.Tensor mul_.Tensor div_.Tensor copy_.default",
        when=_is_thin_beside_other,
        why="torch takes a dim of one element for one that is broadcast, and refuses: "
        "L-BFGS adds parts of a flat tensor",
        mend=_with_other_alike,
    ),
    Row(
        "_foreach_norm.Scalar linalg_vector_norm.default _foreach_mul_.Tensor "
        "_foreach_mul_.Scalar mul_.Tensor",
        when=_is_in_tiers,
        why="ranks whose disk is well would wait for one that has raised, "
        "up to the deadline of their group",
        mend=_agreed,
    ),
)
"""The rows, in order: a row gets the calls that the rows above it let through."""

# -- how they are put in place ---------------------------------------------------------------------

_meshes: set[DeviceMesh] = set()
_rows: dict[Any, list[Row]] = {}
_before: dict[Any, Callable[..., object]] = {}  # handlers that DTensor had of its own


def note_mesh(mesh: DeviceMesh) -> None:
    """Applies the rows to tensors on this mesh from now on. The first call installs them."""
    if not _meshes:
        _install()
        copy_handlers()
        DTensor.redistribute = _redistribute_outside_forwards  # type: ignore[method-assign]
        DTensor.storage = _no_storage  # type: ignore[method-assign, assignment]
        DTensor.share_memory_ = _share_nothing  # type: ignore[method-assign, assignment]
        DTensor.data = property(_data.__get__, _assign_data)  # type: ignore[assignment]
        nn.Parameter.data = property(_data.__get__, _assign_plain_data)  # type: ignore[assignment]
        DTensor.__format__ = _format  # type: ignore[method-assign, assignment]
        _redistribute.redistribute_local_tensor = _redistributed
        _dispatch.redistribute_local_tensor = _redistributed  # type: ignore[attr-defined]
    _meshes.add(mesh)


def _install() -> None:
    for row in ROWS:
        if row.until is not None and TorchVersion(torch.__version__) >= row.until:
            continue
        for operation in _operations(row.names):
            if operation not in _rows and operation in _table():
                _before[operation] = _table()[operation]
            _rows.setdefault(operation, []).append(row)
            _table()[operation] = _run


def _run(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    return _from_row(0, operation, *args, **kwargs)


def _from_row(first: int, operation: Any, /, *args: Any, **kwargs: Any) -> object:
    """Does an operation as the rows from this number on say, and otherwise as torch does."""
    given = (*args, *kwargs.values()) if kwargs else args
    call = Call(
        operation,
        args,
        kwargs,
        [tensor for arg in given for tensor in _listed(arg) if _is_ours(tensor)],
    )
    if call.ours:
        for number, row in enumerate(_rows[operation][first:], first):
            if row.when(call):
                if row.mend is None:
                    raise _refusal(row, call)
                return row.mend(call, partial(_from_row, number + 1, operation))
    if operation in _before:
        return _before[operation](operation, args, kwargs)
    # What follows is DTensor's own way. The table is asked for once: a forward that another thread
    # opens or closes meanwhile puts another one there.
    table = _table()
    table.pop(operation, None)
    try:
        return operation(*args, **kwargs)
    finally:
        table[operation] = _run


def _refusal(row: Row, call: Call) -> ShardedAccessError:
    tensor = call.ours[0]
    placements = ", ".join(map(str, tensor.placements))
    return ShardedAccessError(
        f"{_name(call.operation)} of a resting tensor: "
        "torch would give a wrong result without an error.",
        tensor=f"{list(tensor.shape)}, {placements} over {axes_text(tensor.device_mesh)}",
        why=row.why,
        fix=row.fix,
    )


def _name(operation: Any) -> str:
    return str(operation._schema.name.removeprefix("aten::"))


def _listed(arg: object) -> Sequence[object]:
    return arg if isinstance(arg, list | tuple) else (arg,)


def _is_ours(tensor: object) -> TypeGuard[DTensor]:
    return isinstance(tensor, DTensor) and tensor.device_mesh in _meshes


def _table() -> dict[Any, Callable[..., Any]]:
    return DTensor._op_dispatcher._custom_op_handlers


@cache  # reading a schema takes longer than the rest
def _arguments_of(operation: Any) -> dict[str, tuple[int, object]]:
    """The position and the default of each argument."""
    return {
        argument.name: (at, argument.default_value)
        for at, argument in enumerate(operation._schema.arguments)
    }


# -- whole tensors in a forward --------------------------------------------------------------------

_stock_method = DTensor.redistribute


def _redistribute_outside_forwards(self: DTensor, *args: Any, **kwargs: Any) -> DTensor:
    """Stands in for `DTensor.redistribute`, and refuses some calls in a forward.
    [Note: whole tensors in a forward]"""
    slot = slot_of(self) if torch.is_grad_enabled() and self.requires_grad else None
    unit = unit_of(slot)
    if (
        slot is not None
        and unit is not None
        and (run_of(unit).is_forward_open or _is_past_call(run_of(unit)))
    ):
        raise ShardedAccessError(
            f"{slot.fqn!r} was made whole by hand in a forward, "
            "where its gradient would be that of one rank.",
            parameter=slot,
            unit=unit.name or "root",
            fix="read it under its name, where it is whole while its unit runs: call the module "
            "that owns it, as module(x) and not as module.forward(x), or put both modules in one "
            "unit (units=); or with torch.no_grad() if no gradient is wanted",
        )
    return _stock_method(self, *args, **kwargs)


def _is_past_call(run: Run) -> bool:
    """Whether the `forward` of a module of the transformed model is on the stack,
    called past its `__call__`."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        module = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(module, nn.Module):
            forward: object = module.forward
            is_forward = getattr(getattr(forward, "__func__", forward), "__code__", None) is code
            if is_forward and any(module is member for member in _members(run)):
                return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _members(run: Run) -> Iterator[nn.Module]:
    for unit in run.live_units():
        anchor = unit.anchor()
        if anchor is not None:
            yield from anchor.modules()


# -- files -----------------------------------------------------------------------------------------

_stock_storage: Callable[[DTensor], object] = DTensor.storage


def _no_storage(self: DTensor) -> object:
    """[Note: files]"""
    if not _is_ours(self):
        return _stock_storage(self)
    slot = slot_of(self)
    raise ShardedAccessError(
        "A resting tensor has no memory that a file could be written from: "
        "this rank holds a part of it.",
        tensor=slot
        if slot is not None
        else f"{list(self.shape)}  {', '.join(map(str, self.placements))}",
        fix="on all ranks: zf.save_pretrained(model, folder), zf.save(folder, model), or a "
        "ZeroTrainer's save_model(); or whole = get_model_state_dict(model, "
        "options=StateDictOptions(full_state_dict=True, cpu_offload=True)), which rank 0 saves",
    )


_stock_share: Callable[[DTensor], DTensor] = DTensor.share_memory_


def _share_nothing(self: DTensor) -> DTensor:
    """`model.share_memory()`: torch would read the storage that a DTensor has not,
    and die of SIGSEGV."""
    if not _is_ours(self):
        return _stock_share(self)
    raise ShardedAccessError(
        "A resting tensor was to be moved into memory that processes share.",
        tensor=f"{list(self.shape)}  {', '.join(map(str, self.placements))}",
        why="each rank is a process of its own and holds a part",
        fix="share the plain model, before the transform or beside it",
    )


# -- `.data` ---------------------------------------------------------------------------------------

_data: Any = DTensor.data


def _assign_data(self: DTensor, value: Tensor) -> None:
    """`p.data = value` and `p.grad.data = value`, which torch drops. [Note: assigned values]"""
    if not _is_ours(self):
        _data.__set__(self, value)
        return
    mesh = self.device_mesh
    local = local_of(self)
    alike = (value.shape, value.dtype, value.device) == (self.shape, self.dtype, self.device)
    is_away = isinstance(local, TierTensor)
    if is_away or not alike or (isinstance(value, DTensor) and value.device_mesh != mesh):
        slot = slot_of(self)
        raise PlacementError(
            "The `.data` of a tensor that rests in a tier cannot be assigned."
            if is_away
            else (
                "`.data` of a resting tensor was assigned a tensor of another shape, dtype, "
                "device or mesh."
            ),
            tensor=slot
            if slot is not None
            else f"{_short(self.dtype)}{list(self.shape)} on {self.device}",
            value=f"{_short(value.dtype)}{list(value.shape)} on {value.device}",
            why="what was taken from `.data` before has its place there; nothing was changed"
            if is_away
            else "its unit is cut, gathered and reduced as it is; nothing was changed",
            fix="with torch.no_grad(): p.copy_(values)"
            if is_away
            else (
                "a whole tensor of its shape, dtype and device, or a DTensor on its mesh; "
                "to cast or to move: module.to(...); other shapes before the transform"
            ),
        )
    with torch.inference_mode(False), torch.no_grad():
        if not isinstance(value, DTensor):
            value = cut_alike(value, self)
        values = local_of(detached(value).redistribute(placements=self.placements))
        room = torch.empty_strided(
            local.shape, local.stride(), dtype=local.dtype, device=values.device
        )
        self._local_tensor = room.copy_(in_memory(values))
    slot = slot_of(self)
    unit = unit_of(slot)
    if slot is not None and unit is not None and run_of(unit).forward is not None:
        unit.memory.is_moved = True
        note_edited([slot])


def _assign_plain_data(self: nn.Parameter, value: Tensor) -> None:
    """`plain.data = resting`: the parameter would be a tensor without memory,
    and whoever reads it die of SIGSEGV."""
    if _is_ours(value):
        raise PlacementError(
            "`.data` of a plain parameter was assigned a resting tensor.",
            parameter=f"{_short(self.dtype)}{list(self.shape)}",
            value=f"{list(value.shape)}  {', '.join(map(str, value.placements))}",
            why="it would have no memory; nothing was changed",
            fix="p.data = value.full_tensor(); adapters that begin as parts of their base (OLoRA, "
            f"PiSSA): {_ADAPTERS}",
        )
    _data.__set__(self, value)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- text ------------------------------------------------------------------------------------------


def _format(self: DTensor, spec: str) -> str:
    """`f"{norm:.3f}"`, which torch knows for plain tensors only.

    Reads the value, as `item()` does.
    """
    return format(self.item(), spec) if spec and not self.ndim else object.__format__(self, spec)


# -- tiers -----------------------------------------------------------------------------------------

_stock = _redistribute.redistribute_local_tensor


def _redistributed(
    local_tensor: Tensor, current_spec: DTensorSpec, target_spec: DTensorSpec, **options: Any
) -> Tensor:
    """Reads a tensor that is in a tier, and redistributes it.

    Ranks along the axes that cut it read together; along other axes each rank has what it needs,
    and one may be alone in asking.
    """
    if isinstance(local_tensor, TierTensor) and current_spec.placements != target_spec.placements:
        cut = [
            axis
            for axis, placement in enumerate(current_spec.placements)
            if not placement.is_replicate()
        ]
        what = "Reading a tensor to redistribute it"
        local_tensor = done_over(
            axes_of(current_spec.mesh, cut, what), partial(in_memory, local_tensor), what
        )
    return _stock(local_tensor, current_spec, target_spec, **options)
