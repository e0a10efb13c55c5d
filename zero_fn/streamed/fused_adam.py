"""Steps of Adam and AdamW by the kernel of `zero_fn.kernels.adam`,
for the user's own stock optimizer.

The kernel has the bits of torch's fused step, so it takes the place of that step only. The default
step of torch, over each tensor or `foreach`, rounds in another way (its square roots are those of
MKL's vector library, which rounds a few in a million differently), and is done by torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from zero_fn.errors import warn_once
from zero_fn.kernels import library
from zero_fn.kernels.adam import AdamPiece, AdamRates, by_torch, in_c, rounding
from zero_fn.kernels.threads import share
from zero_fn.streamed.pieces import ParameterPiece
from zero_fn.values.strides import is_dense

__all__ = ["CodesInPlace", "arithmetic_of", "say_if_one_thread", "steps_in_one_pass", "takes_codes"]

_LARGE_NBYTES = 64 << 20


def arithmetic_of(optimizer: Optimizer) -> str:
    """The name of the code that steps the optimizer, for `print(optimizer)`."""
    if type(optimizer) not in (Adam, AdamW):
        return "torch"
    if not all(map(_is_fused, optimizer.param_groups)):
        return "torch; with fused=True by a kernel in one pass"
    hows = [rounding(_rates(optimizer, group)) for group in optimizer.param_groups]
    if library().functions is None:
        return f"torch ({library()})"
    if all(hows):
        return f"{library()} in one pass"
    return "torch (the kernel does not have the bits of this step)"


def say_if_one_thread(optimizer: Optimizer, nbytes: int) -> None:
    """Warns, once a host, of so many bytes of states that torch steps there by the one thread
    that a launcher has left it."""
    threads = share() if nbytes >= _LARGE_NBYTES and torch.get_num_threads() == 1 else 1
    if (
        threads > 1
        and os.environ.get("LOCAL_RANK", "0") == "0"
        and arithmetic_of(optimizer).startswith("torch")
    ):
        warn_once(
            f"{type(optimizer).__name__} is stepped on the host by one thread, "
            f"and a rank could have {threads}.",
            why="torchrun sets OMP_NUM_THREADS=1; the kernel of Adam and AdamW with fused=True "
            "takes its share by itself, other steps of torch do not",
            fix=f"OMP_NUM_THREADS={threads} torchrun ...; if it is meant: "
            "OMP_NUM_THREADS=1 torchrun ...",
        )


def takes_codes(optimizer: Optimizer) -> bool:
    """Whether the kernel takes states of this optimizer that rest in 8 bits as they are."""
    if type(optimizer) not in (Adam, AdamW) or _is_scaled(optimizer):
        return False
    groups = optimizer.param_groups
    return all(
        _is_fused(group) and rounding(_rates(optimizer, group)) is not None for group in groups
    )


class CodesInPlace:
    """The states of pieces, of which those in 8 bits are given as they rest."""

    def __init__(self) -> None:
        self.scales: dict[Tensor, Tensor] = {}  # of the blocks of codes

    def of(self, cut: ParameterPiece, buffer: Tensor) -> dict[str, Any]:
        """The states of a piece by name."""
        coded = cut.coded
        if coded is None or coded.divided is not None:
            return cut.states(buffer)
        found = {"step": torch.zeros((), dtype=torch.float32), **cut.resident}
        found |= {name: cut.value(buffer, name) for name in cut.present - coded.names}
        for name in coded.names:
            codes = cut.laid(cut.codes(buffer, name))
            if name not in cut.present:
                codes.zero_()
                coded.scales[name].zero_()
            self.scales[codes] = coded.scales[name]
            found[name] = codes
        return found


def steps_in_one_pass(
    optimizer: Optimizer,
    sends: Mapping[Tensor, Tensor],
    scales: Mapping[Tensor, Tensor] = MappingProxyType({}),
) -> bool:
    """Steps the groups and states that the optimizer has now by the kernel, if it can do this step.

    Else does nothing. `scales`: those of states that are codes.
    """
    if type(optimizer) not in (Adam, AdamW) or _is_scaled(optimizer):
        return False
    groups = optimizer.param_groups
    stepped = [[p for p in group["params"] if p.grad is not None] for group in groups]
    if not all(map(_is_fused, groups)):
        return False
    if not all(_is_taken(optimizer, p, scales) for ps in stepped for p in ps):
        return False
    rates = [_rates(optimizer, group) for group in groups]
    hows = [rounding(each) for each in rates]
    is_mixed = any(p.grad.dtype != p.dtype for ps in stepped for p in ps)
    if not all(hows) and (scales or not is_mixed):
        return False  # torch's own step does it, without cutting it up
    for group, each, how in zip(groups, rates, hows, strict=True):
        pieces = _pieces(optimizer, group, sends, scales)
        if how is not None:
            in_c(pieces, each, how)
        else:
            by_torch(pieces, each)
    return True


def _is_fused(group: Mapping[str, Any]) -> bool:
    return bool(group["fused"]) and not group["capturable"] and not group["differentiable"]


def _is_scaled(optimizer: Optimizer) -> bool:
    """Whether a GradScaler has left the scale, and the decision to skip, to the optimizer."""
    return any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf"))


def _is_taken(optimizer: Optimizer, parameter: Tensor, scales: Mapping[Tensor, Tensor]) -> bool:
    """Whether the kernel takes a parameter with its gradient and states: dense, alike in memory, on
    the CPU, float32, or codes of it."""
    grad = parameter.grad
    assert grad is not None
    states = [value for name, value in optimizer.state.get(parameter, {}).items() if name != "step"]
    return (
        is_dense(parameter)
        and grad.layout is torch.strided
        and grad.dtype in (torch.float32, torch.bfloat16)
        and all(t.dtype == torch.float32 or t in scales for t in (parameter, *states))
        and all(
            t.device.type == "cpu" and _lies_as(t, parameter) for t in (parameter, grad, *states)
        )
    )


def _lies_as(tensor: Tensor, parameter: Tensor) -> bool:
    return tensor.shape == parameter.shape and tensor.stride() == parameter.stride()


def _rates(optimizer: Optimizer, group: Mapping[str, Any]) -> AdamRates:
    beta1, beta2 = map(float, group["betas"])
    return AdamRates(
        lr=float(group["lr"]),
        beta1=beta1,
        beta2=beta2,
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        is_decoupled=bool(group.get("decoupled_weight_decay", isinstance(optimizer, AdamW))),
        amsgrad=bool(group["amsgrad"]),
        maximize=bool(group["maximize"]),
    )


def _pieces(
    optimizer: Any,
    group: dict[str, Any],
    sends: Mapping[Tensor, Tensor],
    scales: Mapping[Tensor, Tensor],
) -> list[AdamPiece]:
    """The parameters of a group that have gradients, their states made where they have none,
    their steps counted."""
    parameters: list[Tensor] = []
    grads: list[Tensor] = []
    averages: list[Tensor] = []
    squares: list[Tensor] = []
    largest: list[Tensor] = []
    counts: list[Tensor] = []
    optimizer._init_group(group, parameters, grads, averages, squares, largest, counts)
    if counts:
        torch._foreach_add_(counts, 1)
    maxima: Sequence[Tensor | None] = largest or [None] * len(counts)
    sent = map(sends.get, parameters)
    of_codes = (map(scales.get, states) for states in (averages, squares))
    rows = zip(
        parameters,
        grads,
        averages,
        squares,
        maxima,
        map(float, counts),
        sent,
        *of_codes,
        strict=True,
    )
    return [AdamPiece(*row) for row in rows]
