"""A tensor whose values are in another tier: it has shape, strides,
dtype and device, and no memory.

Each read of it reads the tier, and each write writes the tier. So an offloaded parameter is right
wherever it is met: in `clip_grad_norm_`, `full_tensor()`, `state_dict()`, a penalty in the loss, an
edit in place. Each of these waits for the tier; the runtime and streamed optimizers, which know
what comes next, read ahead instead.

[Note: one tensor at a time] `_foreach_` and `_fused_` operations take all tensors of a model at
once. They are run for one tensor after another, so that no more than one is in memory.

[Note: .data] `Module.to` writes `parameter.data = values`. From then on the tensor has these
values, in memory, until its unit gives it a place in the tier again (`moved.follow`).

[Note: where it is computed] Values that are fetched are on the host, also if the model is on an
accelerator. Operations that read and write nothing else that is large (norms, scaling, zeroing,
sums of gradients) run there, and only results and small arguments cross to or from the device. All
other operations run on the device.

[Note: norms by rows] torch takes the norm of one tensor on the host by one thread, in one float32:
of the gradients of 1.2 billion parameters in 0.6 s, which is longer than their step. All threads
take norms of rows, which are nearer to the truth; of bfloat16, too: rounded norms of 1024 rows add
up to more digits than any of them has, and a cast takes 20 times as long.

[Note: factors of one] `clip_grad_norm_` multiplies gradients that are small enough by 1.
That changes nothing.

[Note: views] A view of such a tensor is another one, on other elements of the same range:
writes through it reach the tier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from zero_fn.errors import StateError
from zero_fn.kernels.threads import more_threads
from zero_fn.tiers.record import Record

__all__ = ["PLACE", "TierTensor", "in_memory", "same_place", "written_by"]

_aten = torch.ops.aten
_data: Any = torch.Tensor.data
_set_data: Callable[[Tensor, Tensor], None] = _data.__set__
_LIKE = frozenset((
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
    "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided",
))  # fmt: skip
_NORMS = (_aten._foreach_norm.Scalar, _aten.linalg_vector_norm.default)
# Operations of clip_grad_norm_, which give the same bits by any number of threads.
_MORE_THREADS = (*_NORMS, _aten.mul_.Tensor)
_ROWS = 1024
_BY_LIST = ("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")


PLACE = ("record", "number", "first", "moved")
"""The attributes of a `TierTensor` that say where its values are."""


class TierTensor(Tensor):
    """A tensor, or a view of a tensor, of a record."""

    record: Record
    number: int  # the number of the tensor in the record
    first: int  # the storage offset of the view in that tensor
    # Values in memory that have replaced those in the tier. [Note: .data]
    moved: Tensor | None = None

    @staticmethod
    def __new__(
        cls, record: Record, number: int, size: Sequence[int], stride: Sequence[int], first: int = 0
    ) -> TierTensor:
        tensor: TierTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            tuple(size),
            strides=tuple(stride),
            dtype=record.forms[number].dtype,
            device=record.device,
        )
        tensor.record, tensor.number, tensor.first = record, number, first
        return tensor

    def __init__(self, *_: object) -> None:
        pass

    @classmethod
    def of(cls, record: Record, number: int) -> TierTensor:
        """One of the tensors of a record, flat."""
        return cls(record, number, (record.forms[number].numel,), (1,))

    @property
    def data(self) -> Tensor:
        """The tensor outside autograd."""
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        if values is self:  # a tied parameter that has been moved by another name
            return
        _set_data(self, values)
        if isinstance(values, TierTensor):
            self.record = values.record
            self.number = values.number
            self.first = values.first
            self.moved = values.moved
        else:
            self.moved = values.detach()

    def __repr__(self) -> str:  # type: ignore[override]
        dtype = str(self.dtype).removeprefix("torch.")
        return f"TierTensor({dtype}{list(self.shape)} in {self.record.shelf.tier})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name: str = func._schema.name
        if name.startswith(_BY_LIST):
            return _one_at_a_time(func, args, kwargs)
        if name.removeprefix("aten::") in _LIKE:
            return func(*tree_map(_blank, args), **tree_map(_blank, kwargs))
        if func is _aten.detach.default and args[0].moved is None:
            own = args[0]
            return TierTensor(own.record, own.number, own.size(), own.stride(), own.first)
        if func.is_view or func is _aten.detach.default:
            return _viewed(func, args, kwargs)
        return _computed(func, args, kwargs)

    def __dlpack__(self, *_: object, **__: object) -> Any:
        """Refuses: other libraries are given memory, and there is none."""
        raise StateError(
            "A tensor that rests in another tier has no memory to share.",
            tensor=self,
            fix="copy it into memory first: p.detach().clone(), of a DTensor p.to_local().clone()",
        )

    def set_(self, *_: object, **__: object) -> Tensor:
        """Refuses: torch would keep the values in the tier, and drop the new ones."""
        raise StateError(
            "The memory of a tensor that rests in another tier was to be replaced by `set_`.",
            tensor=self,
            fix="p.copy_(values) writes them to the tier",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copies into memory.

        Whoever copies a module gives its parameters new places in the tier.
        """
        values: Tensor = self.detach().clone()
        copied = (
            nn.Parameter(values, requires_grad=self.requires_grad)
            if isinstance(self, nn.Parameter)
            else values
        )
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        values: Tensor = self.detach().clone()
        if isinstance(self, nn.Parameter):
            values = nn.Parameter(values, requires_grad=self.requires_grad)
        return values.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def in_memory(tensor: Tensor) -> Tensor:
    """The tensor itself; of one in another tier, a copy in memory."""
    return tensor.detach().clone() if isinstance(tensor, TierTensor) else tensor


def same_place(one: Tensor, other: Tensor) -> bool:
    """Whether both are the same tensor of the same record."""
    if not isinstance(one, TierTensor) or not isinstance(other, TierTensor):
        return False
    if one.moved is not None or other.moved is not None:
        return False
    return one.record is other.record and one.number == other.number


def _one_at_a_time(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operation on lists for one element of each list after another.
    [Note: one tensor at a time]"""
    count = next(len(arg) for arg in (*args, *kwargs.values()) if isinstance(arg, list | tuple))

    def nth(arg: Any, i: int) -> Any:
        return [arg[i]] if isinstance(arg, list | tuple) and len(arg) == count else arg

    found: list[Any] = []
    for i in range(count):
        out = _computed(
            func,
            tuple(nth(arg, i) for arg in args),
            {key: nth(arg, i) for key, arg in kwargs.items()},
        )
        if out is not None:
            found += out
    return found or None


def _blank(arg: Any) -> Any:
    """In place of a tensor in a tier, memory of the same form with any content;
    for operations that read only the form."""
    if not isinstance(arg, TierTensor):
        return arg
    return torch.empty_strided(arg.size(), arg.stride(), dtype=arg.dtype, device=arg.device)


def _viewed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view of a tensor in a tier; torch computes its form on `meta`. [Note: views]"""
    base: TierTensor = args[0]
    if base.moved is not None:
        return func(base.moved, *args[1:], **kwargs)
    flat = torch.empty(base.record.forms[base.number].numel, dtype=base.dtype, device="meta")
    form = flat.as_strided(base.size(), base.stride(), base.first)

    def placed(view: Any) -> Any:
        if not isinstance(view, Tensor):
            return view
        if view.dtype != base.dtype or view.is_conj() or view.is_neg():
            raise StateError(
                "A tensor that rests in another tier was viewed as another dtype.",
                operation=func,
                tensor=base,
                fix="copy it into memory first: p.detach().clone(), "
                "of a DTensor p.to_local().clone()",
            )
        return TierTensor(
            base.record, base.number, view.size(), view.stride(), view.storage_offset()
        )

    return tree_map(placed, func(form, *args[1:], **kwargs))


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fetches values, runs an operation on them, and puts back those that it writes."""
    if func is _aten.mul_.Tensor and _is_one(args[1]):
        return args[0]
    leaves, spec = tree_flatten((args, kwargs))
    written = written_by(func, args, kwargs)
    is_for_host = _is_for_host(func, leaves, written)
    values: dict[int, Tensor] = {}
    with ExitStack() as stack:
        for leaf in leaves:
            if id(leaf) in values:
                continue
            if isinstance(leaf, TierTensor) and leaf.moved is not None:
                values[id(leaf)] = leaf.moved
            elif isinstance(leaf, TierTensor):
                opened = leaf.record.opened(
                    leaf.number, is_written=id(leaf) in written, on_host=is_for_host
                )
                flat = stack.enter_context(opened)
                values[id(leaf)] = flat.as_strided(
                    leaf.size(), leaf.stride(), flat.storage_offset() + leaf.first
                )
            elif is_for_host and isinstance(leaf, Tensor):
                values[id(leaf)] = leaf.cpu()
        given, named = tree_unflatten([values.get(id(leaf), leaf) for leaf in leaves], spec)
        if is_for_host and func in _MORE_THREADS:
            stack.enter_context(more_threads(max(value.numel() for value in values.values())))
        out = (
            _norm(func, *given, **named)
            if is_for_host and func in _NORMS
            else func(*given, **named)
        )
        back = {id(values[id(leaf)]): leaf for leaf in leaves if id(leaf) in values}
        device = (
            next(leaf.device for leaf in leaves if isinstance(leaf, TierTensor))
            if is_for_host
            else None
        )
        if kwargs.get("device") is not None:
            device = None

        def returned(value: Any) -> Any:
            found = back.get(id(value), value)
            if device is not None and found is value and isinstance(value, Tensor):
                return found.to(device)
            return found

        return tree_map(returned, out)


def _is_one(factor: Any) -> bool:
    """Whether a factor changes nothing. [Note: factors of one]"""
    return (
        type(factor) is Tensor
        and factor.is_floating_point()
        and factor.numel() == 1
        and factor.item() == 1
    )


def _norm(func: Any, values: Any, order: Any = 2, *args: Any, **kwargs: Any) -> Any:
    """The norm of a tensor on the host, or of the one in a list. [Note: norms by rows]"""
    (tensor,) = values if isinstance(values, list | tuple) else (values,)
    numel = tensor.numel() // _ROWS * _ROWS
    asked = [each for each in (*args, *kwargs.values()) if each is not None]
    is_known = asked == [torch.float32] or (not asked and tensor.dtype == torch.float32)
    if numel < _ROWS**2 or not is_known or order not in (1, 2) or not tensor.is_contiguous():
        return func(values, order, *args, **kwargs)
    flat = tensor.view(-1)
    parts = torch.linalg.vector_norm(flat[:numel].view(_ROWS, -1), order, dim=1)
    if numel < tensor.numel():
        parts = torch.cat([parts, torch.linalg.vector_norm(flat[numel:], order).view(1)])
    found = torch.linalg.vector_norm(parts.float(), order)
    return found if tensor is values else [found]


def _is_for_host(func: Any, leaves: Sequence[Any], written: set[int]) -> bool:
    """Whether an operation is to run on the host. [Note: where it is computed]"""
    ours = [leaf for leaf in leaves if isinstance(leaf, TierTensor)]
    if any(leaf.moved is not None for leaf in ours):
        return False
    if all(leaf.device.type == "cpu" for leaf in ours):
        return False
    others = [
        leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, TierTensor)
    ]
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if any(id(leaf) in written for leaf in others):
        return False
    return bool(written) or all(leaf.numel() <= 1 for leaf in others)


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """The ids of the arguments that an operation writes into."""
    found: set[int] = set()
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        found.update(map(id, value if isinstance(value, list | tuple) else (value,)))
    return found
