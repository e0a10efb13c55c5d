"""Activation checkpoints: a module whose forward runs again in backward, from inputs that may be cut over a mesh axis.

torch's own non-reentrant checkpoint does the work; what is ours is how its inputs wait for the backward. The first forward
reads whole inputs. Then each rank of the axis keeps its part, 1/n of the elements; the recomputation gathers the parts. A
part, or a whole input, may wait in another tier. (parked.py)

Source: ZeRO, Rajbhandari et al. 2020, section 6.1 (P_a, partitioned activation checkpointing).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from zero_fn.errors import StorageError, TierError
from zero_fn.runtime.entry import units_of
from zero_fn.runtime.uncompiled import left_alone
from zero_fn.transforms.parked import Parked, Parking
from zero_fn.transport.agreement import agree, content_digest
from zero_fn.transport.line import Line
from zero_fn.transport.segment import Segment
from zero_fn.values.tiers import is_away

__all__ = ["Recomputed"]


class Recomputed:
    """Stands in place of `module.forward`, and keeps only the inputs for the backward."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        own: Callable[..., Any] | None,
        transport: Line | None,
        parking: Parking,
    ) -> None:
        self._module = weakref.ref(module)
        # own: the forward in the `__dict__` of the module before; None if there was none.
        self.name, self.own, self._transport, self._parking = name, own, transport, parking
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
        own = {at: leaf for at, leaf in enumerate(leaves) if self._lets_go(leaf)}
        inputs = _Inputs(own, spec, self._transport, self._parking, self.name)

        def run(_: Tensor, *others: Any) -> Any:
            given, named = inputs.take(others)
            return forward(*given, **named)

        # The empty tensor tells the checkpoint the device, whose random state it restores.
        first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), torch.empty(0))
        device = torch.empty(0, device=first.device)
        # Inputs that stay are kept by torch, which refuses those that were changed in place meanwhile.
        others = [None if at in own else leaf for at, leaf in enumerate(leaves)]
        outputs = checkpoint(run, device, *others, use_reentrant=False)
        try:
            inputs.let_go()
        except (StorageError, TierError):
            self._tell_others()
            raise
        return outputs

    def _lets_go(self, leaf: object) -> bool:
        """Whether an input does not stay as it is until the backward."""
        return _may_be_cut(leaf) and (self._transport is not None or is_away(self._parking.tier, leaf.device.type))

    def _tell_others(self) -> None:
        """Ends the collectives of other ranks, which would wait for this one: its disk or memory failed."""
        module = self._module()
        units = units_of(module) if module is not None else []
        for run in {unit.run for unit in units}:
            run.transport.give_up()

    def _require_equal(self, leaves: list[Any]) -> None:
        """Refuses inputs that differ between ranks: they would be gathered from parts of different tensors."""
        assert self._transport is not None
        self._has_agreed = True
        cut = [leaf for leaf in leaves if _may_be_cut(leaf)]
        agree(
            self._transport.exchange,
            "activations",
            [
                f"input {i} of {self.name!r}, {tuple(x.shape)}, sum of bits {content_digest(x)}"
                for i, x in enumerate(cut)
            ],
            why="each rank would keep a part of another tensor",
            fix='partition= takes an axis along which activations are equal: mesh["tp"], not the data axis',
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Recomputed:
        module = copy.deepcopy(self._module(), memo)
        assert module is not None
        parking = copy.deepcopy(self._parking, memo)
        twin = Recomputed(module, self.name, copy.deepcopy(self.own, memo), self._transport, parking)
        memo[id(self)] = twin
        return twin


class _Inputs:
    """The inputs of one forward that do not stay as they are: whole until the forward has run, then what this rank keeps."""

    def __init__(
        self, own: dict[int, Tensor], spec: TreeSpec, transport: Line | None, parking: Parking, name: str
    ) -> None:
        """`own`: these inputs, by their number among all inputs."""
        self._own, self._spec, self._name = own, spec, name
        self._transport, self._parking = transport, parking
        self._kept: list[tuple[int, torch.Size, bool, Parked]] = []  # number, shape and `requires_grad` of each input

    def take(self, others: Sequence[Any]) -> Any:
        """The arguments, among `others`, which stayed. Those that were let go come back as leaves: the graph of a
        recomputation is read, never run."""
        leaves = [self._own.get(at, leaf) for at, leaf in enumerate(others)]
        segments = []
        for at, shape, requires_grad, parked in reversed(self._kept):  # what was parked last comes back first
            value, numel = parked.take(), shape.numel()
            if self._transport is not None:
                start, _, piece = self._part(numel)
                flat = value.new_empty(piece * self._transport.size)
                flat.narrow(0, start, value.numel()).copy_(value)
                segments.append(Segment(flat, numel, piece))
                value = flat[:numel]
            leaves[at] = value.view(shape).requires_grad_(requires_grad)
        if self._transport is not None and segments:
            self._transport.all_gather(segments, f"inputs of {self._name!r}").wait()
        return tree_unflatten(leaves, self._spec)

    def let_go(self) -> None:
        """Drops the parts of inputs that other ranks keep, and parks the parts of this one."""
        for at, leaf in list(self._own.items()):
            own = leaf.detach()
            if self._transport is not None:
                start, numel, _ = self._part(leaf.numel())
                own = own.reshape(-1).narrow(0, start, numel).clone()
            self._kept.append((at, leaf.shape, leaf.requires_grad, self._parking.park(own)))
            del self._own[at]

    def _part(self, numel: int) -> tuple[int, int, int]:
        """The part of an input of so many elements that this rank keeps: its first element, its elements, and those of the
        largest part."""
        assert self._transport is not None
        piece = -(-numel // self._transport.size)
        start = min(self._transport.rank * piece, numel)
        return start, min(piece, numel - start), piece


def _may_be_cut(leaf: object) -> TypeGuard[Tensor]:
    """Whether an input is cut and parked. Parameters are not, as they are no activations; nor DTensors, which are placed."""
    return isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter | DTensor) and leaf.is_floating_point()
