"""A model and its optimizer leave the memory of the device for a while,
and come back to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import nan
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zero_fn.errors import LayoutError, PlacementError, StateError
from zero_fn.runtime.registry import require_idle, units_of
from zero_fn.runtime.slot import meshes_of
from zero_fn.storage import Slab
from zero_fn.tiers.tier_tensor import TierTensor
from zero_fn.transforms.offloaded_activations import bytes_of
from zero_fn.transport.agree import on_all_ranks
from zero_fn.values.chained_optimizer import Optimizers, members_of
from zero_fn.values.dtensors import at_same_address, local_of, on_spec, set_local
from zero_fn.values.layout import aligned_offsets
from zero_fn.values.strides import is_dense
from zero_fn.values.tiers import Cpu, Tier, bytes_text

__all__ = ["Evicted", "evict"]

_absent: WeakSet[nn.Module] = WeakSet()  # modules that are evicted now


def evict(module: nn.Module, optimizer: Optimizers | None = None, *, to: Tier) -> Evicted:
    """Moves parameters, gradients and optimizer states to host memory,
    and frees theirs until they are restored.

        evicted = zf.offload_states(model, optimizer, to=zf.cpu())
        rollouts = generate()                   # another model has the memory
        evicted.restore()

    Everything comes back to the bit, to the same parameters and the same optimizer. Until then
    forwards, steps and state dicts raise, plain parameters show NaN, and gradients are None.
    Buffers of modules stay. A streamed optimizer keeps its states where they are. Of a model on the
    CPU nothing is moved, because host memory is where it is.

    Communicates a byte per rank, by which all ranks learn that one has failed.
    All ranks call it together.

    Args:
        module: Any module, transformed or not.
        optimizer: The optimizer over its parameters, if there is one, or a sequence of them.
        to: `zf.cpu()`. To a disk a model goes by `zf.save`.

    Returns:
        An `Evicted`, whose `restore()` brings everything back.

    Raises:
        LayoutError: `to` is not host memory.
        StateError: The module is running, accumulating, inside `unsharded`, or evicted already.
        PlacementError: Two parameters, or states, share memory. Nothing was moved.
        TierError: Host memory is too small. Nothing was moved.
    """
    if not isinstance(to, Cpu):
        raise LayoutError(
            "evict moves to host memory only.",
            to=to,
            fix="zf.offload_states(model, optimizer, to=zf.cpu()); for a disk, zf.save(path, model, "
            "optimizer) before the model is deleted, and zf.load(path, model, optimizer) into "
            "a new one",
        )
    if any(part in _absent for part in module.modules()):
        raise StateError(
            "The model is evicted already.",
            module=type(module).__name__,
            fix="evict it once, and bring it back with restore() of what evict() returned",
        )
    require_idle(units_of(module), "evict")
    return Evicted(module, members_of(optimizer), to)


@dataclass(slots=True)
class _Leaving:
    """A parameter, a gradient or a state that leaves."""

    what: str
    local: Tensor  # while it is away a form of it, on `meta`
    absent: Tensor | None  # what stands for it then
    put: Callable[[Any], object]
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        self.local = self.local if is_dense(self.local) else self.local.contiguous()
        self.device = self.local.device


class Evicted:
    """A model and its optimizer that `evict` moved out of memory, until `restore()`.

    Printed, it says where they are.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer], tier: Cpu) -> None:
        self._module = module
        self._optimizers = optimizers
        self._tier = tier
        self._units = units_of(module)
        for unit in self._units:
            unit.follow_moved()
        self._held = list(_held_by(module, optimizers))
        self._hooks: list[Any] = []
        self._copies: list[Tensor] = []  # in host memory, one for each
        if self._held:
            self._copies = on_all_ranks(
                meshes_of(module.parameters()), self._copied, "Evicting a model"
            )
            self._release()
        self._guard()

    def __str__(self) -> str:
        if not self._hooks:
            return "restored"
        if not self._copies:
            return "in memory of the host, the device's own: nothing was moved"
        return f"{bytes_text(sum(copy.numel() for copy in self._copies))} evicted, {self._tier}"

    @torch.no_grad()
    def restore(self) -> None:
        """Moves everything back to its device, and frees the host memory.

        Call it once, on all ranks together.

        Communicates a byte per rank, by which all ranks learn that one has failed.

        Raises:
            StateError: It was restored already.
            StorageError: It failed on another rank. The model stays evicted.
        """
        if not self._hooks:
            raise StateError(
                "The model was restored already.",
                fix="evicted = zf.offload_states(model, optimizer, to=...) again, and restore that",
            )
        if self._held:
            tensors = on_all_ranks(
                meshes_of(self._module.parameters()), self._brought, "Restoring a model"
            )
            for held, tensor in zip(self._held, tensors, strict=True):
                held.put(tensor)
            for unit in self._units:
                unit.memory.is_evicted = False
                unit.follow_moved()
        for hook in self._hooks:
            hook.remove()
        for module in self._module.modules():
            _absent.discard(module)
        self._hooks = []
        self._held = []
        self._copies = []

    @torch.no_grad()
    def _copied(self) -> list[Tensor]:
        named = [(held.what, held.local) for held in self._held if held.what]
        for earlier, later in at_same_address(local for _, local in named):
            raise PlacementError(
                f"{named[earlier][0]} and {named[later][0]} share memory.",
                why="they would come back apart, and an edit of one would no "
                "longer be an edit of the other",
                fix="clone one of them; or tie parameters as one: decoder.weight = encoder.weight",
            )
        flats = [bytes_of(held.local) for held in self._held]
        *begins, total = aligned_offsets([flat.numel() for flat in flats], 1)
        room = Slab(total, self._tier, "evicted tensors").memory
        return [
            room[begin : begin + flat.numel()].copy_(flat)
            for begin, flat in zip(begins, flats, strict=True)
        ]

    def _release(self) -> None:
        for held in reversed(self._held):  # gradients before their parameters
            held.put(held.absent)
            held.local = torch.empty_like(held.local, device="meta")
        for unit in self._units:
            unit.reshard()
            unit.vacate()
            unit.gradients.forget_layout()

    def _brought(self) -> list[Tensor]:
        tensors = [torch.empty_like(held.local, device=held.device) for held in self._held]
        for tensor, copy in zip(tensors, self._copies, strict=True):
            bytes_of(tensor).copy_(copy)
        return tensors

    def _guard(self) -> None:
        def refuse(*_: object) -> None:
            raise StateError(
                "The model is evicted: its parameters are not in memory.",
                where=str(self),
                fix="evicted.restore(), where evicted = zf.offload_states(model, optimizer, to=...)",
            )

        hooked: list[Any] = [*self._module.modules(), *self._optimizers]
        for each in hooked:
            if isinstance(each, nn.Module):
                _absent.add(each)
                self._hooks.append(each.register_forward_pre_hook(refuse, prepend=True))
            else:
                self._hooks.append(each.register_step_pre_hook(refuse))
            self._hooks.append(each.register_state_dict_pre_hook(refuse))
            self._hooks.append(each.register_load_state_dict_pre_hook(refuse))


def _held_by(module: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[_Leaving]:
    """What leaves, parameters first; of the optimizers the states of more than one element,
    which are worth moving."""
    for name, parameter in module.named_parameters():
        if _leaves(parameter):
            local = local_of(parameter)
            absent = _on_meta(local) if isinstance(parameter, DTensor) else _no_values(local)
            yield _Leaving(name, local, absent, partial(set_local, parameter))
    for parameter in module.parameters():
        if parameter.grad is not None and _leaves(parameter.grad):
            yield _Leaving(
                "",
                local_of(parameter.grad),
                None,
                _setter(parameter.__setattr__, "grad", parameter.grad),
            )
    for states in [states for optimizer in optimizers for states in optimizer.state.values()]:
        for name in states:
            value = states.get(name)  # None if a streamed optimizer has it in a tier
            if isinstance(value, Tensor) and value.numel() > 1 and _leaves(value):
                local = local_of(value)
                yield _Leaving(
                    f"a state {name!r}",
                    local,
                    _on_meta(local),
                    _setter(states.__setitem__, name, value),
                )


def _setter(
    set_: Callable[[str, Any], object], name: str, tensor: Tensor
) -> Callable[[Tensor | None], object]:
    """Sets a gradient or a state by its name, on the spec of the tensor that is there."""
    spec = tensor._spec if isinstance(tensor, DTensor) else None
    return lambda local: set_(
        name, local if local is None or spec is None else on_spec(local, spec)
    )


def _leaves(tensor: Tensor) -> bool:
    """Whether a tensor has memory of a device that is not the host's."""
    local = local_of(tensor)
    return local.device.type not in ("cpu", "meta") and not isinstance(local, TierTensor)


def _on_meta(local: Tensor) -> Tensor:
    return torch.empty_like(local, device="meta")


def _no_values(local: Tensor) -> Tensor:
    """One NaN in place of all elements: to read them gives nothing that looks right,
    to write them raises."""
    value = nan if local.is_floating_point() or local.is_complex() else 0
    return local.new_full((), value).expand(local.shape)
