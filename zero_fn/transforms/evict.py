"""A model and its optimizer leave memory for a while, and come back to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zero_fn.errors import PlacementError, StateError
from zero_fn.resting import at_same_address, is_dense, local_of, on_spec, set_local
from zero_fn.runtime.entry import require_idle, units_of
from zero_fn.runtime.everywhere import everywhere
from zero_fn.runtime.tier_tensor import TierTensor
from zero_fn.storage import Store
from zero_fn.streamed.pipeline import Pass
from zero_fn.transforms.parked import bytes_of
from zero_fn.values.chunks import Piece, chunks_of
from zero_fn.values.tiers import Cpu, Tier, bytes_text

__all__ = ["Evicted", "evict"]

_BUFFER_NBYTES = 32 << 20

_absent: WeakSet[nn.Module] = WeakSet()  # modules that are evicted now


def evict(module: nn.Module, optimizer: Optimizer | None = None, *, to: Tier) -> Evicted:
    """Moves parameters, gradients and optimizer states to host memory or a disk, and frees theirs until they are restored.

        evicted = zf.evict(model, optimizer, to=zf.nvme("/local_nvme"))
        rollouts = generate()                   # another model has the memory
        evicted.restore()

    Everything comes back to the bit, to the same parameters and the same optimizer. Until then forwards, steps and state
    dicts raise, plain parameters show NaN, and gradients are None. Buffers of modules stay. A streamed optimizer keeps its
    states where they are. To `zf.cpu()` of a model on the CPU nothing is moved, because that is the memory it is in.

    Communicates a byte per rank, by which all ranks learn that one has failed. All ranks call it together.

    Args:
        module: Any module, transformed or not.
        optimizer: The optimizer over its parameters, if there is one.
        to: `zf.nvme(path)` or `zf.cpu()`.

    Returns:
        An `Evicted`, whose `restore()` brings everything back.

    Raises:
        StateError: The module is running, accumulating, inside `unsharded`, or evicted already.
        PlacementError: Two parameters, or states, share memory. Nothing was moved.
        TierError: The tier is too small. Nothing was moved.
        StorageError: The path takes no files, or the disk failed. Nothing was moved.
    """
    _require_idle(module)
    return Evicted(module, optimizer, to)


@dataclass(slots=True)
class _EvictedParcel:
    """Some of the bytes of all tensors, that rest as one. See `Stored`."""

    pieces: tuple[Piece, ...]
    nbytes: int
    place: int = 0
    is_stored: bool = False


class Evicted:
    """A model and its optimizer that `evict` moved out of memory, until `restore()`. Printed, it says where they are."""

    def __init__(self, module: nn.Module, optimizer: Optimizer | None, tier: Tier) -> None:
        self._module, self._optimizer, self._tier = module, optimizer, tier
        self._parameters = [p for p in module.parameters() if p.device.type != "meta" and not _is_away(p)]
        self._units = units_of(module)
        for unit in self._units:
            unit.follow_moved()
        self._grads = [(p, p.grad) for p in module.parameters() if p.grad is not None and not _is_away(p.grad)]
        self._states = list(_states_of(optimizer))
        self._hooks: list[Any] = []
        self._stays = isinstance(tier, Cpu) and all(p.device.type == "cpu" for p in self._parameters)
        self._store: Store | None = None
        self._parcels: list[_EvictedParcel] = []
        self._forms: list[tuple[Tensor, torch.device]] = []  # each tensor on `meta`, and its device
        if not self._stays:
            everywhere(module.parameters(), self._put, "Evicting a model")
            self._release()
        self._guard()

    def __str__(self) -> str:
        if self._store is None:
            return "in memory of the host, the device's own: nothing was moved" if self._stays else "restored"
        return f"{bytes_text(sum(parcel.nbytes for parcel in self._parcels))} evicted, {self._store}"

    @torch.no_grad()
    def restore(self) -> None:
        """Moves everything back into memory, and frees the room in the tier. Call it once, on all ranks together.

        Communicates a byte per rank, by which all ranks learn that one has failed.

        Raises:
            StateError: It was restored already.
            StorageError: The disk failed, or does not hold what was written to it. Raised on every rank; the model stays
                evicted.
        """
        if not self._hooks:
            raise StateError(
                "The model was restored already.",
                fix="evicted = zf.evict(model, optimizer, to=...) again, and restore that",
            )
        if not self._stays:
            self._return(everywhere(self._module.parameters(), self._fetched, "Restoring a model"))
        for hook in self._hooks:
            hook.remove()
        for module in self._module.modules():
            _absent.discard(module)
        self._hooks, self._store, self._grads, self._states = [], None, [], []

    # -- to the tier ----------------------------------------------------------------------------------------------

    def _sources(self) -> list[Tensor]:
        return [
            *(local_of(parameter) for parameter in self._parameters),
            *(local_of(grad) for _, grad in self._grads),
            *(local_of(states[name]) for states, name in self._states),
        ]

    def _require_own_memory(self) -> None:
        """Refuses tensors that begin at one address: they would come back at two."""
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        held = [(names[id(parameter)], local_of(parameter)) for parameter in self._parameters]
        held += [(f"a state {name!r}", local_of(states[name])) for states, name in self._states]
        for earlier, later in at_same_address(local for _, local in held):
            raise PlacementError(
                f"{held[earlier][0]} and {held[later][0]} share memory.",
                why="they would come back apart, and an edit of one would no longer be an edit of the other",
                fix="clone one of them; or tie parameters as one: decoder.weight = encoder.weight",
            )

    def _put(self) -> None:
        self._require_own_memory()
        flats = []
        for source in self._sources():
            dense = source if is_dense(source) else source.contiguous()
            self._forms.append((torch.empty_like(dense, device="meta"), dense.device))
            flats.append(bytes_of(dense))
        store = Store(self._tier, "evicted tensors")
        packed = chunks_of(
            [flat.numel() for flat in flats], [None] * len(flats), lambda _, nbytes: nbytes, _BUFFER_NBYTES
        )
        self._parcels = [_EvictedParcel(pieces, sum(piece.numel for piece in pieces)) for pieces in packed]
        store.reserve(self._parcels, torch.device("cpu"))
        self._move(store, flats, is_back=False)
        store.forget()  # what comes back is what was written: a disk that lost it is found
        self._store = store

    def _release(self) -> None:
        for parameter, grad in self._grads:
            parameter.grad = None
            del grad
        self._grads = [(parameter, _form_only(grad)) for parameter, grad in self._grads]
        for states, name in self._states:
            states[name] = _form_only(states[name])
        for parameter in self._parameters:
            local = local_of(parameter)
            if isinstance(parameter, DTensor):
                set_local(parameter, torch.empty_like(local, device="meta"))
            else:
                set_local(parameter, _no_values(local))
        for unit in self._units:
            unit.reshard()
            unit.at_rest.vacate()
            unit.note_moved()

    # -- and back -------------------------------------------------------------------------------------------------

    def _fetched(self) -> list[Tensor]:
        assert self._store is not None
        tensors = [torch.empty_like(form, device=device) for form, device in self._forms]
        self._move(self._store, list(map(bytes_of, tensors)), is_back=True)
        return tensors

    def _return(self, tensors: list[Tensor]) -> None:
        found = iter(tensors)
        for parameter in self._parameters:
            set_local(parameter, next(found))
        for unit in self._units:
            unit.at_rest.is_evicted = False
            unit.follow_moved()
        for parameter, grad in self._grads:
            parameter.grad = _filled(grad, next(found))
        for states, name in self._states:
            states[name] = _filled(states[name], next(found))

    def _move(self, store: Store, flats: Sequence[Tensor], *, is_back: bool) -> None:
        """Moves the bytes of all tensors through buffers of the store: to the tier, or back."""

        def visit(parcel: _EvictedParcel, buffer: Tensor) -> None:
            rooms = torch.split(buffer[: parcel.nbytes], [piece.numel for piece in parcel.pieces])
            for room, piece in zip(rooms, parcel.pieces, strict=True):
                own = flats[piece.parameter][piece.start : piece.stop]
                if is_back:
                    own.copy_(room)
                else:
                    room.copy_(own)

        Pass([store], self._parcels, visit, writes=not is_back).run()

    def _guard(self) -> None:
        def refuse(*_: object) -> None:
            raise StateError(
                "The model is evicted: its parameters are not in memory.",
                where=str(self),
                fix="evicted.restore(), where evicted = zf.evict(model, optimizer, to=...)",
            )

        hooked: list[Any] = [*self._module.modules(), *([self._optimizer] if self._optimizer is not None else [])]
        for each in hooked:
            if isinstance(each, nn.Module):
                _absent.add(each)
                self._hooks.append(each.register_forward_pre_hook(refuse, prepend=True))
            else:
                self._hooks.append(each.register_step_pre_hook(refuse))
            self._hooks.append(each.register_state_dict_pre_hook(refuse))
            self._hooks.append(each.register_load_state_dict_pre_hook(refuse))


def _require_idle(module: nn.Module) -> None:
    if any(part in _absent for part in module.modules()):
        raise StateError(
            "The model is evicted already.",
            module=type(module).__name__,
            fix="evict it once, and bring it back with restore() of what evict() returned",
        )
    require_idle(units_of(module), "evict")


def _states_of(optimizer: Optimizer | None) -> Iterator[tuple[dict[str, Any], str]]:
    """The dict and the name of each state of an optimizer that has more than one element, and so is worth moving."""
    if optimizer is not None:
        for states in optimizer.state.values():
            for name in states:
                value = states.get(name)  # None if a streamed optimizer has it in a tier
                if isinstance(value, Tensor) and value.numel() > 1:
                    yield states, name


def _is_away(tensor: Tensor) -> bool:
    """Whether it rests in another tier already."""
    return isinstance(local_of(tensor), TierTensor)


def _no_values(local: Tensor) -> Tensor:
    """One NaN in place of all elements: to read them gives nothing that looks right, to write them raises."""
    return local.new_full((), nan if local.is_floating_point() or local.is_complex() else 0).expand(local.shape)


def _form_only(tensor: Tensor) -> Tensor:
    """A tensor without memory in place of another."""
    if isinstance(tensor, DTensor):
        return on_spec(torch.empty_like(tensor._local_tensor, device="meta"), tensor._spec)
    return torch.empty_like(tensor, device="meta")


def _filled(form: Tensor, values: Tensor) -> Tensor:
    return on_spec(values, form._spec) if isinstance(form, DTensor) else values
