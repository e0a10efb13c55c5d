"""One parameter of a unit: its places in modules, its home, its memory."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from zero_fn.collectives import Rows, Segment
from zero_fn.home import Home, Sharded
from zero_fn.layout import ShardLayout, is_shardable, shard_layout
from zero_fn.mesh import Axis
from zero_fn.resting import local_of, resting_spec
from zero_fn.runtime.registry import note_slot, slot_of

if TYPE_CHECKING:
    from zero_fn.runtime.unit import Unit

__all__ = ["Place", "Slot"]


_NO_PARAMETER = nn.Parameter(torch.empty(0), requires_grad=False)  # stands for one that was not adopted yet


class Place:
    """A module attribute that holds a parameter, and lists or dicts of that module that hold it too.

    The module is held weakly: the module owns the unit, not the reverse, so that `del model` frees its memory at once.
    """

    __slots__ = ("_module", "aliases", "attribute")

    def __init__(self, module: nn.Module, attribute: str) -> None:
        self._module, self.attribute = weakref.ref(module), attribute
        self.aliases: list[tuple[str, int | str]] = list(_aliases(module, module._parameters[attribute]))

    def twin(self, memo: dict[int, Any]) -> Place:
        """The same place in a deep-copied module."""
        twin = object.__new__(Place)
        twin._module = weakref.ref(copy.deepcopy(self.module, memo))
        twin.attribute, twin.aliases = self.attribute, self.aliases
        return twin

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None, f"the module that holds {self.attribute!r} is gone"
        return module

    @property
    def registered(self) -> nn.Parameter | None:
        """The parameter that the module has now under this name."""
        return self.module._parameters.get(self.attribute)

    def register(self, parameter: nn.Parameter) -> None:
        """Makes `parameter` the registered one."""
        module = self.module
        module._parameters[self.attribute] = parameter
        self._set_aliases(module, parameter)

    def shadow(self, tensor: Tensor) -> None:
        """Lets the module see `tensor` under the name of the parameter; the registered parameter stays."""
        module = self._module()
        if module is None:  # a graph outlived its model
            return
        module.__dict__[self.attribute] = tensor
        if self.aliases:
            self._set_aliases(module, tensor)

    def unshadow(self) -> None:
        """Undoes `shadow`."""
        module = self._module()
        if module is None:
            return
        module.__dict__.pop(self.attribute, None)
        parameter = module._parameters.get(self.attribute)
        if self.aliases and parameter is not None:
            self._set_aliases(module, parameter)

    def _set_aliases(self, module: nn.Module, tensor: Tensor) -> None:
        for attribute, key in self.aliases:
            module.__dict__[attribute][key] = tensor


def _aliases(module: nn.Module, parameter: nn.Parameter | None) -> Iterator[tuple[str, int | str]]:
    """Where plain lists and dicts of a module hold its own parameter (`nn.LSTM._flat_weights` does)."""
    for attribute, value in module.__dict__.items():
        if attribute.startswith(("_parameters", "_buffers", "_modules", "_non_persistent")):
            continue
        if isinstance(value, list):
            yield from ((attribute, i) for i, item in enumerate(value) if item is parameter)
        elif isinstance(value, dict):
            yield from ((attribute, key) for key, item in value.items() if item is parameter)


class Slot:
    """One distinct parameter of a unit.

    Attributes:
        fqn: Its first name, relative to the module that was transformed.
        places: Every module attribute that holds it.
        home: Where its state rests.
        parameter: The registered resting parameter.
        shape, stride, numel: Of the whole parameter.
        local_shape, local_stride, local_numel: Of what this rank holds at rest.
        piece_numel: Elements of the largest piece when its gradient is reduced: a shard, or an even part if replicated.
        is_kept: Whether the gathered parameter stays in memory between uses (its home shards less than PARAMS).
        keeps_whole_gradient: Whether the gradient lives in a whole buffer, of which `.grad` is a view or all.
        layout: How it is cut, None where it rests replicated (by its home, or because it has no rows).
        flat: This rank's elements of the resting parameter, flat, in storage order.
        is_recast: Whether its dtype at rest has changed since the transform.
        initial: A digest of the whole values it was cut from, until they are replaced; equal on all ranks.
        unit: Its unit, weakly.
        group, offset: Its gather group in the unit (None: not gathered) and its first element there.
    """

    def __init__(self, fqn: str, places: list[Place], home: Home, source: Tensor, axis: Axis | None) -> None:
        self.fqn, self.places, self.home = fqn, places, home
        self.shape = tuple(source.shape)
        self.rank, self.size = (axis.rank, axis.size) if axis is not None else (0, 1)
        # torch's optimizers update a complex parameter through view_as_real, which loses the writes to a sharded DTensor
        # (Adam, 2.13), so complex parameters rest replicated.
        sharded = (
            axis is not None
            and home.sharded > Sharded.NOTHING
            and is_shardable(self.shape)
            and not source.dtype.is_complex
        )
        known = slot_of(source)
        cut = known.layout if known is not None else None  # a parameter that is cut already stays as it is cut
        self.layout: ShardLayout | None = (
            (cut or shard_layout(self.shape, source.stride(), self.size)) if sharded else None
        )
        self.stride = self.layout.stride if self.layout is not None else tuple(_dense(source).stride())
        rank = self.rank
        self.numel = prod(self.shape)
        self.local_shape = self.layout.local_shape(rank) if self.layout is not None else self.shape
        self.local_stride = self.layout.local_stride(rank) if self.layout is not None else self.stride
        self.local_numel = prod(self.local_shape)
        self.piece_numel = self.layout.shard_numel if self.layout is not None else -(-self.numel // self.size)
        self.is_kept = home.sharded < Sharded.PARAMS
        self.keeps_whole_gradient = self.layout is None or home.sharded == Sharded.OPTIMIZER
        self._in_order = self.layout is not None and self.layout.order == tuple(range(len(self.shape)))
        self._axis = axis
        self.initial: int | None = None
        self.is_recast = False
        self.unit: Callable[[], Unit | None] | None = None
        self.group: int | None = None
        self.offset = 0
        self.parameter: nn.Parameter
        self.local: Tensor
        self.flat: Tensor
        self.set_dtype(source.dtype)

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Fixes the dtype at rest and everything that follows from it."""
        self.is_recast |= dtype != getattr(self, "dtype", dtype)
        self.dtype = dtype
        self.compute_dtype = self.home.compute_dtype(dtype)
        self.sum_dtype = self.home.sum_dtype(dtype)
        dim = self.layout.dim if self.layout is not None else None
        self.spec: DTensorSpec | None = (
            resting_spec(self._axis, dim, self.shape, self.stride, dtype) if self._axis is not None else None
        )

    @property
    def resting_nbytes(self) -> int:
        """Bytes of the elements held between uses: at rest, and whole where the gathered parameter is kept."""
        own = self.local_numel * self.dtype.itemsize
        whole = self.numel * self.compute_dtype.itemsize
        if self.compute_dtype != self.dtype:
            return own + (whole if self.is_kept else 0)
        return whole if self.is_kept else own

    @property
    def gradient_numel(self) -> int:
        """Elements of gradient memory, without padding."""
        return self.numel if self.keeps_whole_gradient else self.local_numel

    def adopt(self, parameter: nn.Parameter, flat: Tensor) -> None:
        """Makes `parameter`, whose local memory is `flat`, the resting parameter."""
        self.parameter, self.flat = parameter, flat
        self.local = local_of(parameter)
        note_slot(parameter, self)

    def is_current(self) -> bool:
        """Whether the module still holds the parameter, on the memory, that this slot knows."""
        registered = self.places[0].registered
        if registered is not self.parameter:
            return False
        if len(self.places) > 1 and any(place.registered is not registered for place in self.places):
            return False
        if isinstance(registered, DTensor):
            return registered._local_tensor is self.local
        return registered.data_ptr() == self.flat.data_ptr() and registered.dtype == self.dtype

    def owned(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor, as a view."""
        if self.layout is None:
            return whole
        start, rows = self.layout.owned_rows(self.rank)
        return whole.narrow(self.layout.dim, start, rows)

    def addend(self, grad: Tensor) -> Segment:
        """A whole gradient, as collectives take it; its elements are not copied if they can be cut where they are."""
        if self.layout is not None:
            rows = grad if self._in_order else grad.permute(self.layout.order)
            return Rows(rows, self.layout.shard_rows)
        return self.segment(
            grad.as_strided((self.numel,), (1,)) if grad.stride() == self.stride else self._packed(grad)
        )

    def whole_view(self, flat: Tensor) -> Tensor:
        """The whole parameter on a flat range in storage order."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset())

    def local_view(self, flat: Tensor) -> Tensor:
        """What this rank holds at rest, on a flat range in storage order."""
        return flat.as_strided(self.local_shape, self.local_stride, flat.storage_offset())

    def segment(self, whole: Tensor) -> Segment:
        """A flat range that holds the whole tensor, as collectives take it."""
        return Segment(whole, self.numel, self.piece_numel)

    def _packed(self, whole: Tensor) -> Tensor:
        packed = torch.empty_strided(self.shape, self.stride, dtype=whole.dtype, device=whole.device)
        return packed.copy_(whole).as_strided((self.numel,), (1,))

    def twin(self, memo: dict[int, Any]) -> Slot:
        """The same slot in deep-copied modules; it adopts its parameter later."""
        twin = copy.copy(self)
        twin.places = [place.twin(memo) for place in self.places]
        twin.parameter = _NO_PARAMETER
        return twin

    def __repr__(self) -> str:
        return f"{self.fqn}  {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def _dense(source: Tensor) -> Tensor:
    """A meta tensor with the strides of `source` if it is dense, contiguous ones otherwise."""
    return torch.empty_like(source, device="meta", memory_format=torch.preserve_format)
