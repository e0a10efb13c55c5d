"""Parameters whose class says how they are gathered: `fsdp_pre_all_gather` and
`fsdp_post_all_gather`, FSDP2's extensions.

        rest                     sent                        what the module sees
    plain shard  -> pre(shard) -> plain tensors -> post(whole tensors)

Such a parameter rests, is reduced, stepped and saved as the plain tensor that its class is made of
(flatten_subclasses.py). Only its gather differs: float8 weights are cast on each rank, and travel
in a quarter of their bytes. All ranks call these hooks in the order of the gathers, so the hooks
may communicate over the mesh that they are given.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

from zero_fn.errors import PlacementError
from zero_fn.runtime.slot import Slot
from zero_fn.transport.segment import Segment
from zero_fn.values.home import Stage

__all__ = ["ExtensionGather", "gathers_by_extension", "is_product"]

_PRODUCT = "_zero_fn_product"  # an attribute of a tensor


def gathers_by_extension(slot: Slot) -> bool:
    """Whether a parameter is gathered as its class says: if one axis cuts it into equal rows, it
    rests in memory of the device, and it is whole during uses only.

    Any other parameter is gathered as the plain tensor in it.
    """
    extension, path = slot.extension, slot.path
    if extension is None or not hasattr(extension.kind, "fsdp_pre_all_gather"):
        return False
    if (
        slot.model is not None
        or slot.home.tiers.params is not None
        or path.stages != (Stage.PARAMS,)
    ):
        return False
    return path.is_in_order and path.numel == path.piece_numel * path.size


class ExtensionGather:
    """A gather of one parameter as its class says."""

    def __init__(self, slot: Slot) -> None:
        """Lets the class make what this rank sends, and allocates what comes back."""
        assert slot.extension is not None
        self._slot = slot
        self._extension = slot.extension
        self._shard = slot.extension.rebuilt(slot.local)
        size = slot.path.size
        with torch.no_grad():
            inputs, self._metadata = self._shard.fsdp_pre_all_gather(*self._told())
        shapes = [(each.shape[0] * size, *each.shape[1:]) for each in inputs]
        self.outputs = [each.new_empty(shape) for each, shape in zip(inputs, shapes, strict=True)]
        self.segments = [self._segment(*pair) for pair in zip(inputs, self.outputs, strict=True)]
        self._extension.sent_nbytes = sum(output.nbytes for output in self.outputs)

    def _told(self) -> list[object]:
        """The arguments of `fsdp_pre_all_gather`: the mesh; in its newer signature also shape,
        strides, module and precision."""
        slot, axis = self._slot, self._slot.path.axes[0]
        if _asks_for_mesh_only(self._extension.kind):
            return [axis.mesh]
        from torch.distributed.fsdp import MixedPrecisionPolicy  # few programs need it

        policy = MixedPrecisionPolicy(param_dtype=slot.home.compute, reduce_dtype=slot.home.reduce)
        return [
            axis.mesh,
            torch.Size(slot.path.shape),
            slot.path.stride,
            self._extension.module(),
            policy,
        ]

    def _segment(self, sent: Tensor, received: Tensor) -> Segment:
        source = sent.contiguous().view(-1).view(torch.uint8)
        memory = received.view(-1).view(torch.uint8)
        return Segment(memory, memory.numel(), source.numel(), *self._slot.path.way, source=source)

    def arrived(self) -> tuple[Tensor, list[Tensor]]:
        """What the module sees, and the memory that the class has made for it.

        Raises:
            PlacementError: The class has made a tensor of another shape than the parameter.
        """
        with torch.no_grad():
            whole, made = self._shard.fsdp_post_all_gather(
                tuple(self.outputs), self._metadata, self._slot.kind.compute_dtype
            )
        if tuple(whole.shape) != self._slot.path.shape:
            raise PlacementError(
                f"{self._extension.kind.__name__}.fsdp_post_all_gather has made "
                f"{self._slot.fqn!r} of another shape.",
                parameter=self._slot,
                got=list(whole.shape),
                fix="fsdp_pre_all_gather has to keep the first dim of the shard, "
                "or a multiple of it",
            )
        return whole, [*made, *([whole] if type(whole) is Tensor else [])]

    @staticmethod
    def marked(whole: Tensor) -> Tensor:
        """A new tensor on the same memory, marked as what the class has made."""
        found = whole.data
        setattr(found, _PRODUCT, True)
        return found


@cache  # each gather asks
def _asks_for_mesh_only(kind: Any) -> bool:
    """Whether the hook of a class has the older signature, of the shard and the mesh."""
    return len(inspect.signature(kind.fsdp_pre_all_gather).parameters) == 2


def is_product(tensor: Tensor) -> bool:
    """Whether the class of a parameter has made this tensor of what was gathered."""
    return hasattr(tensor, _PRODUCT)
