"""One parameter of a unit: its places in modules, its home, its memory."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from zero_fn.errors import PlacementError
from zero_fn.runtime.extension import EXTENSION, Extension
from zero_fn.runtime.parameter_kind import ParameterKind
from zero_fn.runtime.path import Path, path_of
from zero_fn.tiers.tier_tensor import TierTensor, in_memory, same_place
from zero_fn.values.dtensors import alone, as_plain, local_of, spec_on
from zero_fn.values.grid import Grid, local_part
from zero_fn.values.home import Home, Stage
from zero_fn.values.layout import ShardLayout

__all__ = [
    "Place",
    "Slot",
    "is_cut",
    "mesh_of",
    "meshes_of",
    "model_of",
    "slot_of",
    "slot_on",
    "spec_of",
    "trained",
]

# Slots by the id of the resting parameter. [Note: no weak references to DTensors]
# (replaced_parameters.py)
_slots: dict[int, weakref.ref[Slot]] = {}

# By the storage of the local tensor, which views and `.data` of the parameter share.
_on_storage: weakref.WeakValueDictionary[int, Slot] = weakref.WeakValueDictionary()

# The parameter of a copied slot, until it adopts its own.
_NO_PARAMETER = nn.Parameter(torch.empty(0), requires_grad=False)


class Place:
    """A module attribute that holds a parameter, and lists or dicts of
    that module that hold it too.

    The module is held weakly: the module owns the unit, not the reverse,
    so that `del model` frees its memory at once.
    """

    __slots__ = ("_module", "aliases", "attribute")

    def __init__(self, module: nn.Module, attribute: str) -> None:
        self._module = weakref.ref(module)
        self.attribute = attribute
        self.aliases: list[tuple[str, int | str]] = list(
            _aliases(module, module._parameters[attribute])
        )

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
            PlacementError: The module was taken out of the model,
                and others that share its unit, or the parameter, were not.
        """
        module = self._module()
        if module is None:
            raise PlacementError(
                f"The module that held {self.attribute!r} was taken out of its unit, "
                "or others of it were copied without it.",
                why="the rest of the unit is gathered, and its gradients are reduced, "
                "together with it",
                fix="take out, or copy, whole units, or parts before the transform: units= "
                "chooses what a unit is; adapters with modules_to_save, which PEFT copies, "
                "before the transform; in place of merge_and_unload(): with zf.unsharded(model, "
                "writeback=True): model.merge_adapter()",
            )
        return module._parameters.get(self.attribute)

    def register(self, parameter: nn.Parameter) -> None:
        self.module._parameters[self.attribute] = parameter
        self.set_aliases(parameter)

    @property
    def seen(self) -> Tensor | None:
        """What the module sees in place of the registered parameter, if anything."""
        module = self._module()
        return None if module is None else module.__dict__.get(self.attribute)

    def set_aliases(self, tensor: Tensor) -> None:
        """Puts `tensor` into the lists and dicts of the module that hold the parameter."""
        module = self._module()
        if module is not None:
            for attribute, key in self.aliases:
                module.__dict__[attribute][key] = tensor


def _aliases(module: nn.Module, parameter: nn.Parameter | None) -> Iterator[tuple[str, int | str]]:
    """Where plain lists and dicts of a module hold its own parameter
    (`nn.LSTM._flat_weights` does)."""
    for attribute, value in module.__dict__.items():
        if attribute.startswith(("_parameters", "_buffers", "_modules", "_non_persistent")):
            continue
        if isinstance(value, list):
            yield from ((attribute, i) for i, item in enumerate(value) if item is parameter)
        elif isinstance(value, dict):
            yield from ((attribute, key) for key, item in value.items() if item is parameter)


class Slot:
    """One distinct parameter of a unit."""

    def __init__(
        self,
        fqn: str,
        places: list[Place],
        home: Home,
        source: Tensor,
        grid: Grid,
        stages: tuple[Stage, ...],
    ) -> None:
        self.fqn = fqn  # its first name
        self.places = places  # all modules that hold it, and under which names
        self.home = home
        self._grid = grid
        self.full_shape = tuple(source.shape)  # on all ranks of all axes
        # Placements of the parameter on model axes; None if it has none.
        self.model: DTensorSpec | None = model_of(source)
        known = slot_of(source)
        self.path: Path = path_of(
            grid,
            known.path.shape if known is not None else tuple(local_of(source).shape),
            known.path.stride if known is not None else tuple(local_of(source).stride()),
            self.model,
            stages,
            # torch's optimizers update a complex parameter through view_as_real, which loses the
            # writes to a sharded DTensor (Adam, 2.13), so complex parameters rest replicated.
            is_cuttable=not source.dtype.is_complex,
            before=known.path if known is not None else None,
        )
        self.is_frozen = not source.requires_grad  # when it was transformed
        self.kind: ParameterKind  # what it has in common with the others of its group
        # Placements of parameter and gradient at rest; None on no axis.
        self.spec: DTensorSpec | None = None
        self.gradient_spec: DTensorSpec | None = None
        self.is_recast = False  # its dtype at rest has changed since the transform
        # A digest of the whole values, equal on all ranks; None once they were replaced.
        self.initial: int | None = None
        # How its tensor subclass makes what the module sees; None of plain tensors.
        self.extension: Extension | None = getattr(source, EXTENSION, None)
        if known is not None:
            self.extension = known.extension
        self.owner: Callable[[], object] = _no_owner  # its unit, weakly (unit.py)
        # The last backward (graph task) that is to ignore the user's hooks. (gradient_hooks.py)
        self.deferred_in: int | None = None
        self.parameter: nn.Parameter  # the registered resting one
        self.local: Tensor  # of this rank in that
        self.flat: Tensor  # the same elements, flat, in storage order
        # Where its gradient rests, if that is in another tier.
        self.gradient_place: TierTensor | None = None

    def join(self, kind: ParameterKind) -> None:
        """Makes it a parameter of this kind: sets its placements."""
        self.is_recast |= hasattr(self, "kind") and kind.dtype != self.kind.dtype
        self.kind = kind
        shape, stride = self.path.shape, self.path.stride
        if self.model is not None:
            shape, stride = self.full_shape, self.full_stride
            self.model_spec = spec_on(self.model, shape, stride, kind.compute_dtype)
        self.spec = self.gradient_spec = self._grid.spec(
            self.model, self.path.cut, shape, stride, kind.dtype
        )
        if self.spec is not None and kind.gradient_dtype != kind.dtype:
            self.gradient_spec = spec_on(self.spec, shape, stride, kind.gradient_dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype at rest."""
        return self.kind.dtype

    @property
    def full_stride(self) -> tuple[int, ...]:
        """Strides of the parameter on all ranks of its model axes."""
        meta = self.model.tensor_meta if self.model is not None else None
        assert meta is not None, f"{self.fqn} was placed without a shape"
        if self.path.cut is None:
            return tuple(meta.stride)
        return ShardLayout(self.full_shape, self.path.cut.order, 1).stride

    @property
    def stages_text(self) -> str:
        """How much of its state is sharded, as text; with the axes, if there are several."""
        hops = self.path.hops
        if len(hops) < 2:
            return self.home.stage.name
        return ", ".join(f"{hop.stage.name} over {hop.axis}" for hop in hops)

    def adopt(self, parameter: nn.Parameter, flat: Tensor) -> None:
        """Makes `parameter` the resting parameter. `flat` is its memory on this rank."""
        self.parameter = parameter
        self.flat = flat
        self.local = local_of(parameter)
        if self.kind.gradient_dtype != self.dtype:
            # Gradients of any dtype: torch.distributed.checkpoint assigns
            # zeros of that of the parameter.
            parameter.grad_dtype = None
        key = id(parameter)
        _slots[key] = weakref.ref(self, lambda _: _slots.pop(key, None))
        if type(self.local) is Tensor:
            _on_storage[self.local.untyped_storage()._cdata] = self

    def register(self, parameter: nn.Parameter) -> None:
        """Registers `parameter` in all modules, under all its names."""
        for place in self.places:
            place.register(parameter)

    def is_current(self) -> bool:
        """Whether the modules still hold the parameter, on the memory, that this slot knows."""
        registered = self.parameter
        for place in self.places:
            module = place._module()
            if module is None or module._parameters.get(place.attribute) is not registered:
                return False
        if isinstance(registered, DTensor):
            return registered._local_tensor is self.local
        if isinstance(registered, TierTensor):
            return same_place(registered, self.flat)
        return registered.data_ptr() == self.flat.data_ptr() and registered.dtype == self.dtype

    def owned_of_source(self, source: Tensor) -> Tensor | None:
        """This rank's part of `source`, which this slot replaces;
        None if that is in the hands of other ranks."""
        known, local = slot_of(source), in_memory(local_of(source))
        if known is None or known.path.cut is None:
            return self.path.owned(local)
        if self.path.cut is None or known.path.cut.order != self.path.cut.order:
            return None
        if known.path.axes == self.path.axes:
            return local
        return self.path.owned_of_inner(local) if known.path.axes == self.path.axes[:1] else None

    def owned_of_full(self, full: Tensor) -> Tensor:
        """This rank's part of the parameter on all axes, as a view."""
        return self.path.owned(local_part(full, self.model))

    def resting_local(self) -> Tensor:
        """The local tensor for the parameter to register, on the memory `flat`."""
        with torch.inference_mode(False), torch.no_grad():
            return alone(self.path.local_view(self.flat))

    def twin(self, memo: dict[int, Any]) -> Slot:
        """The same slot in deep-copied modules; it adopts its parameter later."""
        twin = copy.copy(self)
        twin.places = [place.twin(memo) for place in self.places]
        twin.parameter, twin.deferred_in = _NO_PARAMETER, None
        if self.extension is not None:
            holder = copy.deepcopy(self.extension.module(), memo)
            assert holder is not None, f"the module of {self.fqn} is gone"
            twin.extension = self.extension.held_by(holder)
        return twin

    def __repr__(self) -> str:
        return f"{self.fqn}  {str(self.dtype).removeprefix('torch.')}{list(self.full_shape)}"


def _no_owner() -> None:
    """The owner of a slot that belongs to no unit yet."""


def slot_of(parameter: object) -> Slot | None:
    """The slot of a resting parameter; None for any other tensor."""
    reference = _slots.get(id(parameter))
    slot = reference() if reference is not None else None
    return slot if slot is not None and slot.parameter is parameter else None


def spec_of(tensor: Tensor) -> DTensorSpec | None:
    """How a parameter or any other tensor rests on a mesh; None of a plain one."""
    slot = slot_of(tensor)
    return slot.spec if slot is not None else tensor._spec if isinstance(tensor, DTensor) else None


def mesh_of(parameter: Tensor) -> DeviceMesh | None:
    """The mesh on which a parameter rests; None of a plain tensor."""
    spec = spec_of(parameter)
    return None if spec is None else spec.mesh


def meshes_of(parameters: Iterable[Tensor]) -> list[DeviceMesh]:
    """The meshes on which resting parameters lie, those of one rank left out:
    whose ranks hold them, or other shards."""
    meshes = (mesh_of(each) for each in parameters if slot_of(each) is not None)
    return list(dict.fromkeys(mesh for mesh in meshes if mesh is not None and mesh.size() > 1))


def is_cut(parameter: Tensor) -> bool:
    """Whether this rank holds a part of a parameter, and other ranks the rest."""
    slot = slot_of(parameter)
    return slot is not None and slot.path.layout is not None


def slot_on(tensor: Tensor) -> Slot | None:
    """The slot of a resting parameter, or of one that a DTensor is a view of, as `.data` is."""
    slot, local = slot_of(tensor), local_of(tensor)
    if slot is not None or type(local) is not Tensor:
        return slot
    slot = _on_storage.get(storage := local.untyped_storage()._cdata)
    return slot if slot is not None and slot.local.untyped_storage()._cdata == storage else None


def trained(slots: Sequence[Slot]) -> list[bool]:
    """For each slot, whether its parameter requires gradients now."""
    with as_plain():
        return [slot.parameter.requires_grad for slot in slots]


def model_of(source: Tensor) -> DTensorSpec | None:
    """The placements of a parameter on model axes: those of a DTensor that no transform made,
    or those its slot remembers."""
    known = slot_of(source)
    if known is not None:
        return known.model
    return source._spec if isinstance(source, DTensor) else None
