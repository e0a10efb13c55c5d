"""One parameter of a unit: its places in modules, its home, its memory."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from zero_fn.collectives import Route, Rows, Segment
from zero_fn.errors import PlacementError
from zero_fn.grid import Cut, Grid, local_part
from zero_fn.home import Home, Sharded
from zero_fn.layout import ShardLayout
from zero_fn.mesh import Axis
from zero_fn.resting import alone, local_of, on_spec, spec_on
from zero_fn.runtime.registry import note_slot, slot_of
from zero_fn.runtime.tier_tensor import TierTensor, in_memory, same_place
from zero_fn.tiers import Tier, is_away

if TYPE_CHECKING:
    from zero_fn.runtime.unit import Unit

__all__ = ["Place", "Slot", "model_of"]


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
    def is_gone(self) -> bool:
        """Whether nobody holds the module any more."""
        return self._module() is None

    @property
    def registered(self) -> nn.Parameter | None:
        """The parameter that the module has now under this name.

        Raises:
            PlacementError: The module was taken out of the model, and others that share its unit, or the parameter, were not.
        """
        module = self._module()
        if module is None:
            raise PlacementError(
                f"The module that held {self.attribute!r} was taken out of its unit.",
                why="the rest of the unit is gathered, and its gradients are reduced, together with it",
                fix="take out whole units, or parts before the transform: units= chooses what a unit is",
            )
        return module._parameters.get(self.attribute)

    def register(self, parameter: nn.Parameter) -> None:
        """Makes `parameter` the registered one."""
        module = self.module
        module._parameters[self.attribute] = parameter
        self._set_aliases(module, parameter)

    @property
    def shown(self) -> Tensor | None:
        """What the module sees in place of the registered parameter, if anything."""
        module = self._module()
        return None if module is None else module.__dict__.get(self.attribute)

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
        if self.aliases:
            parameter = module._parameters.get(self.attribute)
            if parameter is not None:
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
        model: Where it lies on the model axes of the module, None if it was never placed there.
        full_shape: Of the parameter on all ranks of all axes.
        shape, stride, numel: Of the whole parameter, as this rank's part of the model axes is cut over the data axes.
        local_shape, local_stride, local_numel: Of what this rank holds at rest.
        start: First element of that in the whole parameter, flat and padded.
        device_type: Of the device that computes with it.
        along: The data axes in the order in which it is cut and its gradients are summed.
        sharded: How much of its state the axes that cut it shard, by their names.
        rank, size: On the first of them, and how many ranks that axis has.
        piece_numel: Elements of the largest piece when its gradient is reduced: a shard, or an even part if replicated.
        is_away: Whether the resting parameter is in another tier than the memory of the device: then the gathered one is
            freed between uses, whatever its home shards.
        gradient_away: Where its gradient rests, if that is in another tier than the memory of the device; flat.
        is_kept: Whether the gathered parameter stays in memory between uses (its home shards less than PARAMS).
        is_hosted: Whether the part of this rank on the first axis stays in memory, of which it owns a part on the second.
        keeps_whole_gradient: Whether the gradient lives in a whole buffer, of which `.grad` is a view or all.
        is_reduced_at_once: Whether its gradient is at rest after the reduce-scatter: it is cut, or no other rank has it.
        is_in_order: Whether it is cut along its first dim, and its dims lie in order.
        layout: How it is cut over the first axis, None where it rests replicated (by its home, or because it has no rows).
        sublayout: How the part of this rank is cut over the second axis, None if it is not.
        flat: This rank's elements of the resting parameter, flat, in storage order.
        hosted: If `is_hosted`, the part of this rank on the first axis in the compute dtype, flat.
        is_recast: Whether its dtype at rest has changed since the transform.
        initial: A digest of the whole values it was cut from, until they are replaced; equal on all ranks.
        unit: Its unit, weakly.
        node, node_hooks: What accumulates gradients of the resting parameter, and hooks on it. [Note: hooks on the node]
        group, offset: Its gather group in the unit (None: not gathered) and its first element there.
    """

    def __init__(
        self, fqn: str, places: list[Place], home: Home, source: Tensor, grid: Grid, levels: tuple[Sharded, ...]
    ) -> None:
        self.fqn, self.places, self.home = fqn, places, home
        self.full_shape = tuple(source.shape)
        known = slot_of(source)
        self.model: DTensorSpec | None = model_of(source)
        self.shape: tuple[int, ...] = known.shape if known is not None else tuple(local_of(source).shape)
        stride = known.stride if known is not None else tuple(local_of(source).stride())
        self._grid = grid
        # torch's optimizers update a complex parameter through view_as_real, which loses the writes to a sharded DTensor
        # (Adam, 2.13), so complex parameters rest replicated.
        self.cut: Cut | None = None
        if not source.dtype.is_complex:
            largest = self.shape if self.model is None else _largest(self.model)
            self.cut = grid.cut(largest, stride, self.model, levels)
            if known is not None and self.cut is not None and known.cut_axes == [grid.axes[n] for n in self.cut.axes]:
                assert known.cut is not None
                self.cut = Cut(known.cut.order, self.cut.axes)  # a parameter that is cut already stays as it is cut
        numbers = grid.order(levels, self.model)
        self.along = tuple(grid.axes[number] for number in numbers)
        self.rank, self.size = (self.along[0].rank, self.along[0].size) if self.along else (0, 1)
        self.layout: ShardLayout | None = None
        self.sublayout: ShardLayout | None = None
        if self.cut is not None:
            self.layout = ShardLayout(self.shape, self.cut.order, self.size)
        self.stride: tuple[int, ...] = (
            self.layout.stride if self.layout is not None else _dense_stride(self.shape, stride)
        )
        self.numel = prod(self.shape)
        self.local_shape = self.layout.local_shape(self.rank) if self.layout is not None else self.shape
        self.start = self.rank * self.layout.shard_numel if self.layout is not None else 0
        self.host_numel = prod(self.local_shape)
        self._sub_rank = 0
        if self.cut is not None and len(self.cut.axes) > 1:
            second = self.along[1]
            self.sublayout = ShardLayout(self.local_shape, self.cut.order, second.size)
            self._sub_rank = second.rank
            self.local_shape = self.sublayout.local_shape(second.rank)
            self.start += self.sublayout.owned_rows(second.rank)[0] * self.sublayout.row_numel
        cut = self.sublayout or self.layout
        self.local_stride = cut.strides_of(self.local_shape) if cut is not None else self.stride
        self.local_numel = prod(self.local_shape)
        self.piece_numel = self.layout.shard_numel if self.layout is not None else -(-self.numel // self.size)
        sharded = tuple(levels[number] for number in self.cut.axes) if self.cut is not None else ()
        self.sharded = dict(zip((axis.name for axis in self.along), sharded, strict=False))
        self.gradient_away: TierTensor | None = None
        self.set_device_type(self.along[0].device_type if self.along else source.device.type)
        self.keeps_whole_gradient = self.layout is None or max(sharded) == Sharded.OPTIMIZER
        self.is_reduced_at_once = self.layout is not None or self.size == 1
        self.is_in_order = self.layout is not None and self.layout.order == tuple(range(len(self.shape)))
        # What collectives must know where there are two axes.
        self.route: Route | None = None
        if len(grid.axes) > 1:
            is_alone = len(numbers) == 1
            self.route = Route(numbers[0], self.sublayout.shard_numel if self.sublayout is not None else None, is_alone)
        self.host_route = Route(numbers[0], None) if len(numbers) > 1 else None
        self.initial: int | None = None
        self.is_recast = False
        self.unit: Callable[[], Unit | None] | None = None
        self.node: Node | None = None
        self.node_hooks: dict[int, Any] | None = None
        self.group: int | None = None
        self.offset = 0
        self.parameter: nn.Parameter
        self.local: Tensor
        self._outside: torch.UntypedStorage | None = None
        self.flat: Tensor
        self.hosted: Tensor | None = None
        self.set_dtype(source.dtype)

    def set_device_type(self, device_type: str) -> None:
        """Fixes what computes with it, and everything that follows from it. Without an axis that may change: a model that was
        made on `meta`, or is moved."""
        levels = tuple(self.sharded.values())
        self.device_type = device_type
        self.is_away = is_away(self.home.tiers.params, device_type)
        self.is_kept = not self.is_away and (not levels or max(levels) < Sharded.PARAMS)
        self.is_hosted = (
            self.sublayout is not None
            and not self.is_away
            and levels[0] == Sharded.PARAMS
            and levels[1] < Sharded.PARAMS
        )

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Fixes the dtype at rest and everything that follows from it."""
        self.is_recast |= dtype != getattr(self, "dtype", dtype)
        self.dtype = dtype
        self.compute_dtype = self.home.compute_dtype(dtype)
        self.sum_dtype = self.home.sum_dtype(dtype)
        shape, stride = self.shape, self.stride
        if self.model is not None:
            shape = self.full_shape
            meta = self.model.tensor_meta
            assert meta is not None, f"{self.fqn} was placed without a shape"
            stride = meta.stride if self.cut is None else ShardLayout(shape, self.cut.order, 1).stride
            self.model_spec = spec_on(self.model, shape, stride, self.compute_dtype)
        self.spec: DTensorSpec | None = self._grid.spec(self.model, self.cut, shape, stride, dtype)

    def shelved(self) -> Iterator[tuple[str, Tier]]:
        """Which of its states rest in another tier than the memory of the device."""
        for kind, tier in (("parameters", self.home.tiers.params), ("gradients", self.home.tiers.grads)):
            if tier is not None and is_away(tier, self.device_type):
                yield kind, tier

    @property
    def is_gradient_away(self) -> bool:
        """Whether its gradient rests in another tier than the memory of the device."""
        return is_away(self.home.tiers.grads, self.device_type)

    def states_away_nbytes(self, nbytes: int) -> int:
        """How many of so many bytes of optimizer states are to rest in another tier than the memory of the device."""
        tiers = self.home.tiers
        return round(nbytes * tiers.fraction) if is_away(tiers.optim, self.device_type) else 0

    @property
    def must_be_streamed(self) -> bool:
        """Whether an optimizer must go to another tier to step it."""
        return any(True for _ in self.shelved()) or is_away(self.home.tiers.optim, self.device_type)

    @property
    def cut_axes(self) -> list[Axis]:
        """The data axes that cut it, first to last."""
        return list(self.along[: len(self.cut.axes)]) if self.cut is not None else []

    @property
    def levels_text(self) -> str:
        """How much of its state is sharded, and over several axes by which."""
        if len(self.along) < 2:
            return self.home.sharded.name
        levels = (self.sharded.get(axis.name, Sharded.NOTHING) for axis in self.along)
        return ", ".join(f"{level.name} over {axis}" for axis, level in zip(self.along, levels, strict=True))

    @property
    def is_spread(self) -> bool:
        """Whether any other rank of the data axes holds a part of it."""
        return any(cut is not None and cut.shards > 1 for cut in (self.layout, self.sublayout))

    @property
    def resting_nbytes(self) -> int:
        """Bytes of the elements held in memory of the device between uses: at rest, and whole where the gathered parameter
        is kept."""
        if self.is_away:
            return 0
        own = self.local_numel * self.dtype.itemsize
        kept = self.numel if self.is_kept else self.host_numel if self.is_hosted else 0
        if self.compute_dtype != self.dtype:
            return own + kept * self.compute_dtype.itemsize
        return kept * self.dtype.itemsize or own

    @property
    def gradient_numel(self) -> int:
        """Elements of gradient memory of the device between backward and step, without padding."""
        return self.numel if self.keeps_whole_gradient else self.local_numel

    @property
    def gradient_room(self) -> int:
        """Elements of gradient memory: the largest that any rank needs."""
        if self.keeps_whole_gradient:
            return self.piece_numel * self.size
        return self.sublayout.shard_numel if self.sublayout is not None else self.piece_numel

    def adopt(self, parameter: nn.Parameter, flat: Tensor) -> None:
        """Makes `parameter`, whose local memory is `flat`, the resting parameter."""
        self.parameter, self.flat = parameter, flat
        self.local = local_of(parameter)
        self.node, self.node_hooks = None, None
        # Held, so that no other storage comes to have its address.
        self._outside = parameter.untyped_storage() if isinstance(parameter, DTensor) else None
        note_slot(parameter, self)

    def is_current(self) -> bool:
        """Whether the module still holds the parameter, on the memory, that this slot knows."""
        registered = self.parameter
        for place in self.places:
            module = place._module()
            if module is None or module._parameters.get(place.attribute) is not registered:
                return False
        if isinstance(registered, DTensor):
            return registered._local_tensor is self.local and not self._is_assigned(registered)
        if isinstance(registered, TierTensor):
            return same_place(registered, self.flat)
        return registered.data_ptr() == self.flat.data_ptr() and registered.dtype == self.dtype

    def _is_assigned(self, registered: DTensor) -> bool:
        """Whether somebody has assigned to its `.data`: torch then replaces all of a DTensor but the shard in it."""
        return self._outside is not None and registered.untyped_storage()._cdata != self._outside._cdata

    def refuse_assignment(self) -> None:
        """Undoes what assigning to `.data` did to the resting parameter, so that it is whole again, and raises.

        Raises:
            PlacementError: Somebody has assigned to it.
        """
        registered = self.parameter
        if not isinstance(registered, DTensor) or registered._local_tensor is not self.local:
            return  # no DTensor, or moved as a whole
        if not self._is_assigned(registered):
            return
        registered.data = on_spec(self.local, registered._spec)
        self._outside = registered.untyped_storage()
        raise PlacementError(
            f"The values assigned to `.data` of {self.fqn!r} are lost.",
            parameter=self,
            why="torch keeps the old shard in a DTensor whose `.data` is assigned; its values are those of before",
            fix="with torch.no_grad(): parameter.copy_(values), or, with whole tensors, "
            "`with zf.unsharded(model, writeback=True):`",
        )

    def owned(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor, as a view."""
        if self.layout is None:
            return whole
        own = whole.narrow(self.layout.dim, *self.layout.owned_rows(self.rank))
        return own if self.sublayout is None else self.owned_of_host(own)

    def owned_of_host(self, part: Tensor) -> Tensor:
        """This rank's part of its part on the first axis, as a view."""
        if self.sublayout is None:
            return part
        return part.narrow(self.sublayout.dim, *self.sublayout.owned_rows(self._sub_rank))

    def owned_of_source(self, source: Tensor) -> Tensor | None:
        """This rank's part of the parameter that this slot takes the place of; None if other ranks hold it."""
        known, local = slot_of(source), in_memory(local_of(source))
        if known is None or known.cut is None:
            return self.owned(local)
        if self.cut is None or known.cut.order != self.cut.order:
            return None
        if known.cut_axes == self.cut_axes:
            return local
        return self.owned_of_host(local) if known.cut_axes == self.cut_axes[:1] else None

    def owned_of_full(self, full: Tensor) -> Tensor:
        """This rank's part of the parameter on all axes, as a view."""
        return self.owned(local_part(full, self.model))

    def rows_of(self, grad: Tensor) -> Tensor:
        """A whole gradient in such a shape that pieces are cut along the first dim; copied only where it must be."""
        if self.layout is not None:
            return grad if self.is_in_order else grad.permute(self.layout.order)
        return grad.as_strided((self.numel,), (1,)) if grad.stride() == self.stride else self._packed(grad)

    def addend(self, rows: Tensor) -> Segment:
        """What `rows_of` gave, as collectives take it."""
        return Rows(rows, self.layout.shard_rows, self.route) if self.layout is not None else self.segment(rows)

    def whole_view(self, flat: Tensor) -> Tensor:
        """The whole parameter on a flat range in storage order."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset())

    def local_view(self, flat: Tensor) -> Tensor:
        """What this rank holds at rest, on a flat range in storage order."""
        return flat.as_strided(self.local_shape, self.local_stride, flat.storage_offset())

    def resting_local(self) -> Tensor:
        """What this rank holds at rest, on its memory: the local tensor of the parameter to register."""
        with torch.inference_mode(False), torch.no_grad():
            return alone(self.local_view(self.flat))

    def owned_of_hosted(self, hosted: Tensor) -> Tensor:
        """This rank's elements of its hosted part, flat."""
        assert self.sublayout is not None
        start = self.sublayout.owned_rows(self._sub_rank)[0] * self.sublayout.row_numel
        return hosted.narrow(0, start, self.local_numel)

    def hosted_segment(self) -> Segment:
        """The hosted part, as collectives over the second axis take it."""
        assert self.hosted is not None and self.sublayout is not None and self.cut is not None
        return Segment(self.hosted, self.host_numel, self.sublayout.shard_numel, Route(self.cut.axes[1], None))

    def segment(self, whole: Tensor) -> Segment:
        """A flat range that holds the whole tensor, as collectives take it."""
        return Segment(whole, self.numel, self.piece_numel, self.route)

    def segment_in(self, buffer: Tensor) -> Segment:
        """The place of the whole tensor in the buffer of its gather group."""
        if self.hosted is not None:
            return Segment(buffer, self.numel, self.piece_numel, self.host_route, start=self.offset)
        source = self.flat if self.is_source else None
        return Segment(buffer, self.numel, self.piece_numel, self.route, start=self.offset, source=source)

    @property
    def is_source(self) -> bool:
        """Whether an all-gather reads the resting parameter where it lies: it is freed between uses and needs no cast."""
        rests_apart = not self.is_kept and not self.is_away and self.layout is not None
        return rests_apart and self.compute_dtype == self.dtype and self.route is None

    def _packed(self, whole: Tensor) -> Tensor:
        packed = torch.empty_strided(self.shape, self.stride, dtype=whole.dtype, device=whole.device)
        return packed.copy_(whole).as_strided((self.numel,), (1,))

    def twin(self, memo: dict[int, Any]) -> Slot:
        """The same slot in deep-copied modules; it adopts its parameter later."""
        twin = copy.copy(self)
        twin.places = [place.twin(memo) for place in self.places]
        twin.parameter, twin.node, twin.node_hooks = _NO_PARAMETER, None, None
        return twin

    def __repr__(self) -> str:
        return f"{self.fqn}  {str(self.dtype).removeprefix('torch.')}{list(self.full_shape)}"


def model_of(source: Tensor) -> DTensorSpec | None:
    """Where a parameter lies on model axes: a DTensor that no transform made lies there, and a resting one remembers."""
    known = slot_of(source)
    if known is not None:
        return known.model
    return source._spec if isinstance(source, DTensor) else None


def _largest(model: DTensorSpec) -> tuple[int, ...]:
    """The shape of the largest part of a parameter on its model axes."""
    shape = list(model.shape)
    for size, placement in zip(model.mesh.shape, model.placements, strict=True):
        if isinstance(placement, Shard):
            shape[placement.dim] = -(-shape[placement.dim] // size)
    return tuple(shape)


def _dense_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """The strides if they are dense, contiguous ones otherwise."""
    meta = torch.empty_strided(shape, stride, device="meta")
    return tuple(torch.empty_like(meta, memory_format=torch.preserve_format).stride())
