"""Bytes of activations and floating-point operations of a forward and backward,
found without running them.

The model runs on fake tensors, which have shapes and no values, so any size runs on any machine.
The most bytes that are alive at one moment beside parameters and their gradients are the
activations: what autograd keeps, and what operations need in between. A few layers run, and with
them all others are known (`repeated_layers`). Attention runs as torch's fused kernel of the CPU,
which keeps what the one of an accelerator does.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from zero_fn.planning.models import copy_with, on_meta
from zero_fn.planning.repeated_layers import Stack, cut_to, of_all_layers
from zero_fn.values.units import repeated_blocks

__all__ = ["Compute", "activations_of", "live_bytes"]

_ATEN = torch.ops.aten
_SDPA = "_scaled_dot_product_flash_attention"
_FORMULAS = dict(flop_registry) | {
    getattr(_ATEN, f"{_SDPA}_for_cpu{way}"): flop_registry[getattr(_ATEN, f"{_SDPA}{way}")]
    for way in ("", "_backward")
}
"""Of operations, also of attention on the CPU those that torch has for accelerators:
what is masked counts, too."""

Inputs = Mapping[str, Any] | tuple[Any, ...]
"""Arguments of a forward, by name or in order."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Of a forward and backward of one microbatch: the most bytes at one moment,
    and floating-point operations."""

    nbytes: int
    flops: float


def activations_of(
    module: nn.Module,
    inputs: Inputs,
    dtype: torch.dtype,
    stacks: Sequence[Stack],
    *,
    recompute: bool,
) -> Compute:
    """What a module on `meta` needs where it computes in a dtype.

    `recompute`: repeated blocks are checkpointed.
    """

    def of_few(depths: Sequence[tuple[Stack, int]]) -> Mapping[str, float]:
        few = on_meta(module)
        cut_to(few, depths)
        with FakeTensorMode():
            few = copy_with(few, partial(_fake, dtype=dtype))
            given = tree_map_only(Tensor, _fake, inputs)
            for name in list(repeated_blocks(few)) if recompute else ():
                block = few.get_submodule(name)
                block.forward = partial(
                    checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
                )
            return live_bytes(few, given)

    found = of_all_layers(of_few, stacks)
    return Compute(round(found["nbytes"]), found["flops"])


def live_bytes(module: nn.Module, inputs: Inputs) -> dict[str, float]:
    """Runs a forward and backward; "nbytes": the most bytes alive
    beside what was before; "flops"."""
    known = [*module.parameters(), *module.buffers(), *tree_leaves(inputs)]
    live = _Live(tensor.untyped_storage() for tensor in known if isinstance(tensor, Tensor))
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_forget)  # type: ignore[no-untyped-call]
    with live, _without_dropout_of_attention():
        loss_of(module(**inputs) if isinstance(inputs, Mapping) else module(*inputs)).backward()  # type: ignore[no-untyped-call]
    return {"nbytes": live.most, "flops": live.flops}


def loss_of(output: object) -> Tensor:
    """The loss of a model of Hugging Face; of another, the sum of the
    first tensor that it returns."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    return next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)).sum()


def _forget(parameter: Tensor) -> None:
    parameter.grad = None


@contextmanager
def _without_dropout_of_attention() -> Iterator[None]:
    """With it torch has no fused kernel on the CPU, while accelerators have one.

    Modes of torch are off in recomputation.
    """
    attention: Any = nn.functional.scaled_dot_product_attention

    def fused(*given: Any, **named: Any) -> Any:
        if len(given) > 4:
            return attention(*given[:4], 0.0, *given[5:], **named)
        return attention(*given, **{**named, "dropout_p": 0.0})

    nn.functional.scaled_dot_product_attention = fused
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = attention


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes of storages that operations make, while these live, and the operations
    that torch has a formula for. (torch's `FlopCounterMode` keeps activations of
    checkpointed layers alive.)"""

    def __init__(self, known: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = self.flops = 0
        self._seen = weakref.WeakSet[torch.UntypedStorage](known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_grouped = func is torch.ops.aten._grouped_mm.default  # products of experts
        if is_grouped and args[0].dtype != torch.bfloat16:  # the only one that torch has shapes for
            halves = [each.to(torch.bfloat16) for each in args[:2]]
            found = func(*halves, *args[2:], **(kwargs or {})).to(args[0].dtype)
        else:
            found = func(*args, **(kwargs or {}))
        if (formula := _FORMULAS.get(func._overloadpacket)) is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=found)
        elif is_grouped:
            # Each row is in one group, and meets one expert: of the two
            # counts the larger has all of them.
            self.flops += 2 * min(
                found.numel() * args[0].shape[-1], args[0].numel() * args[1].shape[-1]
            )
        for tensor in tree_leaves(found):
            if (
                isinstance(tensor, Tensor)
                and (storage := tensor.untyped_storage()) not in self._seen
            ):
                self._seen.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes())
        self.most = max(self.most, self.now)
        return found

    def _freed(self, nbytes: int) -> None:
        self.now -= nbytes


def _fake(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """On the CPU, inside a mode of fake tensors; parameters in a dtype."""
    is_cast = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
    return torch.empty(tensor.shape, dtype=dtype if is_cast else tensor.dtype, device="cpu")
