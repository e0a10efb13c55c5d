"""Activation checkpoints: a module whose forward runs again in backward, from inputs that may be cut over a mesh axis.

torch's own non-reentrant checkpoint does the work; what is ours is how its inputs wait for the backward. The first forward
reads whole inputs. Then each rank of the axis keeps its part, 1/n of the elements; the recomputation gathers the parts. A
part, or a whole input, may wait in another tier. (offloaded_activations.py)

Source: ZeRO, Rajbhandari et al. 2020, section 6.1 (P_a, partitioned activation checkpointing).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from zero_fn.errors import StorageError, TierError
from zero_fn.runtime.registry import units_of
from zero_fn.runtime.uncompiled import left_alone
from zero_fn.transforms.offloaded_activations import Parked, Parking
from zero_fn.transport.agree import agree
from zero_fn.transport.line import Line
from zero_fn.transport.segment import Segment
from zero_fn.values.digests import content_digest
from zero_fn.values.tiers import is_away

__all__ = ["Recomputed"]


class Recomputed:
    """Stands in place of `module.forward`, and keeps only the inputs for the backward."""

    def __init__(
        self, module: nn.Module, name: str, own: Callable[..., Any] | None, transport: Line | None, parking: Parking
    ) -> None:
        self._module = weakref.ref(module)
        self.name = name
        self.own = own  # the forward that the module had in its `__dict__` before; None if there was none
        self._transport = transport
        self._parking = parking
        self._has_agreed = transport is None

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The module's own forward, bound."""
        if self.own is not None:
            return self.own
        module = self._module()
        assert module is not None, "a forward outlived its module"
        method: Callable[..., Any] = type(module).forward.__get__(module)
        return method

    @left_alone
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.__wrapped__
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        if not self._has_agreed:
            self._require_equal(leaves)
        whole = {at: leaf for at, leaf in enumerate(leaves) if self._lets_go(leaf)}
        kept: list[_Kept] = []

        def run(_: Tensor, *others: Any) -> Any:
            found = [whole.get(at, leaf) for at, leaf in enumerate(others)]
            self._bring_back(kept, found)
            given, named = tree_unflatten(found, spec)
            return forward(*given, **named)

        # The empty tensor tells the checkpoint the device, whose random state it restores.
        first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), torch.empty(0))
        # Inputs that stay are kept by torch, which refuses those that were changed in place meanwhile.
        others = [None if at in whole else leaf for at, leaf in enumerate(leaves)]
        outputs = checkpoint(run, torch.empty(0, device=first.device), *others, use_reentrant=False)
        try:
            for at in list(whole):
                kept.append(self._let_go(at, whole.pop(at)))
        except (StorageError, TierError):
            self._tell_others()
            raise
        return outputs

    def _lets_go(self, leaf: object) -> bool:
        """Whether an input does not stay as it is until the backward."""
        return _may_be_cut(leaf) and (self._transport is not None or is_away(self._parking.tier, leaf.device.type))

    def _let_go(self, at: int, leaf: Tensor) -> _Kept:
        """Drops the parts of an input that other ranks keep, and parks the part of this one."""
        own = leaf.detach()
        if self._transport is not None:
            piece = -(-leaf.numel() // self._transport.size)
            own = own.reshape(-1)[self._transport.rank * piece :][:piece].clone()
        return _Kept(at, leaf.shape, leaf.requires_grad, self._parking.park(own))

    def _bring_back(self, kept: Sequence[_Kept], leaves: list[Any]) -> None:
        """Puts inputs that were let go among the others, as leaves: the graph of a recomputation is read, never run."""
        segments = []
        for at, shape, requires_grad, parked in reversed(kept):  # what was parked last comes back first
            value, numel = parked.take(), shape.numel()
            if self._transport is not None:
                piece = -(-numel // self._transport.size)
                flat = value.new_empty(piece * self._transport.size)
                flat[self._transport.rank * piece :][: value.numel()] = value
                segments.append(Segment(flat, numel, piece))
                value = flat[:numel]
            leaves[at] = value.view(shape).requires_grad_(requires_grad)
        if self._transport is not None:
            self._transport.all_gather(segments, f"inputs of {self.name!r}").wait()

    def _tell_others(self) -> None:
        """Ends the collectives of other ranks, which would wait for this one: its disk or memory failed."""
        module = self._module()
        units = units_of(module) if module is not None else []
        for run in {unit.run for unit in units}:
            run.transport.give_up()

    def _require_equal(self, leaves: list[Any]) -> None:
        """Refuses inputs that differ between ranks: they would be gathered from parts of different tensors."""
        assert self._transport is not None
        cut = [leaf for leaf in leaves if _may_be_cut(leaf)]
        agree(
            self._transport,
            "activations",
            [
                f"input {i} of {self.name!r}, {tuple(x.shape)}, sum of bits {content_digest(x)}"
                for i, x in enumerate(cut)
            ],
            why="each rank would keep a part of another tensor",
            fix='partition= takes an axis along which activations are equal: mesh["tp"], not the data axis',
        )
        self._has_agreed = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Recomputed:
        module = copy.deepcopy(self._module(), memo)
        assert module is not None
        parking = copy.deepcopy(self._parking, memo)
        twin = Recomputed(module, self.name, copy.deepcopy(self.own, memo), self._transport, parking)
        memo[id(self)] = twin
        return twin


class _Kept(NamedTuple):
    """What this rank keeps of one input of a forward."""

    at: int  # its number among all inputs
    shape: torch.Size
    requires_grad: bool
    parked: Parked


def _may_be_cut(leaf: object) -> TypeGuard[Tensor]:
    """Whether an input is cut and parked. Parameters are not, as they are no activations; nor DTensors, which are placed."""
    return isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter | DTensor) and leaf.is_floating_point()
