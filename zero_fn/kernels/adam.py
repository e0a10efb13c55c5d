"""A step of AdamW, or of Adam without weight decay, in one pass.

Gradients are float32 or bfloat16, parameters and moments float32;
the new parameters can also be written in bfloat16.

    read     grad 4 or 2, param 4, exp_avg 4, exp_avg_sq 4          bytes of an element
    written  param 4, exp_avg 4, exp_avg_sq 4, send 0 or 2

Moments may be codes of one byte (codes.py). 256 elements at a time are decoded into the cache,
stepped and encoded, so each moment is read and written in one byte and a scale for each block.

The arithmetic is that of torch's fused optimizers, to the bit (as if gradients were cast before,
and `send` after). Without a compiler, and with amsgrad, maximize or the weight decay of Adam,
torch's own kernel makes the step.

[Note: which roundings] In `v * b + (c * g) * g` a compiler may round one product together with the
sum. Builds of torch differ in which product that is, and torch's kernel may do it differently in
whole vectors and in the elements after the last whole vector. So all ways are enumerated
(`Rounding`). Once per process they are tried on some 5,000 elements, and the first whose bits are
those of torch's kernel is used; if none is, torch makes the steps.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cache

import numpy as np
import torch
from torch import Tensor

from zero_fn.kernels.codes import MapInC, decode, encode, map_in_c
from zero_fn.kernels.compiler import call_kernel, has_kernels
from zero_fn.kernels.threads import threads_for
from zero_fn.values.strides import as_flat

__all__ = ["AdamPiece", "AdamRates", "Rounding", "by_torch", "in_c", "rounding"]


@dataclass(frozen=True, slots=True)
class AdamRates:
    """The numbers of a step that are the same for all elements, by torch's names."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    # Whether weight decay shrinks the parameter (AdamW) or is added to the gradient (Adam).
    is_decoupled: bool
    amsgrad: bool
    maximize: bool


@dataclass(frozen=True, slots=True)
class AdamPiece:
    """One tensor to step, with its states.

    All are dense tensors on the CPU with the same strides, and float32. With scales both
    moments are codes in uint8, whose blocks follow each other in memory from the first element
    of the piece on.
    """

    param: Tensor
    grad: Tensor  # or bfloat16
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None  # with amsgrad
    step: float  # the number of this step, from 1
    send: Tensor | None = None  # receives the new parameter in bfloat16, if that is wanted
    # Scales of signed codes: one for each codes.BLOCK_NUMEL elements, contiguous.
    exp_avg_scale: Tensor | None = None
    exp_avg_sq_scale: Tensor | None = None  # of unsigned codes


@dataclass(frozen=True, slots=True)
class Rounding:
    """Which products are rounded together with the sum they are in. [Note: which roundings]"""

    fuses_lerp: bool  # `exp_avg + weight * (grad - exp_avg)`
    # Of `exp_avg_sq * beta2 + (weight * grad) * grad`: 0 neither,
    # 1 the first product, 2 the second.
    body: int  # in whole vectors
    tail: int  # after them
    vector_numel: int


_WRITTEN = ("param", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale", "send")
"""The tensors of a piece that a step writes."""


class _PieceInC(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*_WRITTEN, "grad")),
        *((name, ctypes.c_int64) for name in ("numel", "first_block", "grad_is_bfloat16")),
        *((name, ctypes.c_float) for name in ("negated_step_size", "bias_correction2_sqrt")),
    )


class _RatesInC(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_float)
            for name in ("exp_avg_weight", "exp_avg_sq_weight", "beta2", "eps", "param_factor")
        ),
        *((name, ctypes.c_int32) for name in ("fuses_lerp", "body", "tail", "vector_numel")),
        *((name, MapInC) for name in ("exp_avg_map", "exp_avg_sq_map")),
    )


def in_c(
    pieces: Sequence[AdamPiece], rates: AdamRates, how: Rounding, threads: int | None = None
) -> None:
    """Steps pieces, which share no memory, by the compiled kernel,
    which must exist (`rounding()` was not None).

    The bits do not depend on `threads`; None: `threads_for` so many elements.
    """
    block_numel = call_kernel("zero_fn_adam_block_numel")
    blocks = numel = 0
    written = list[Tensor | None]()
    packed = (_PieceInC * len(pieces))()
    for room, piece in zip(packed, pieces, strict=True):
        for name in _WRITTEN:
            tensor: Tensor | None = getattr(piece, name)
            setattr(room, name, None if tensor is None else tensor.data_ptr())
            written.append(tensor)
        room.grad = piece.grad.data_ptr()
        room.numel = piece.param.numel()
        room.first_block = blocks
        room.grad_is_bfloat16 = piece.grad.dtype == torch.bfloat16
        room.negated_step_size = -(rates.lr / (1 - rates.beta1**piece.step))
        room.bias_correction2_sqrt = math.sqrt(1 - rates.beta2**piece.step)
        blocks += -(-room.numel // block_numel)
        numel += room.numel
    factor = 1 - rates.lr * rates.weight_decay if rates.weight_decay else 1.0
    constants = _RatesInC(1 - rates.beta1, 1 - rates.beta2, rates.beta2, rates.eps, factor)
    constants.fuses_lerp, constants.body, constants.tail = how.fuses_lerp, how.body, how.tail
    constants.vector_numel = how.vector_numel
    constants.exp_avg_map = map_in_c(is_signed=True)
    constants.exp_avg_sq_map = map_in_c(is_signed=False)
    call_kernel(
        "zero_fn_adam",
        packed,
        len(pieces),
        blocks,
        ctypes.byref(constants),
        threads_for(numel) if threads is None else threads,
        written=written,
    )


def by_torch(pieces: Sequence[AdamPiece], rates: AdamRates) -> None:
    """Steps pieces by torch's fused kernel, which takes gradients in float32."""
    for piece in pieces:
        with _decoded(piece) as floats:
            _fused(replace(floats, grad=piece.grad.float()), rates)
        if piece.send is not None:
            piece.send.copy_(piece.param)


@contextmanager
def _decoded(piece: AdamPiece) -> Iterator[AdamPiece]:
    """The piece with moments in float32, which are encoded at the end if its own are codes."""
    first, second = piece.exp_avg_scale, piece.exp_avg_sq_scale
    if first is None or second is None:
        yield piece
        return
    floats = replace(
        piece, exp_avg=torch.empty_like(piece.param), exp_avg_sq=torch.empty_like(piece.param)
    )
    decode(as_flat(piece.exp_avg), first, as_flat(floats.exp_avg), is_signed=True)
    decode(as_flat(piece.exp_avg_sq), second, as_flat(floats.exp_avg_sq), is_signed=False)
    yield floats
    encode(as_flat(floats.exp_avg), as_flat(piece.exp_avg), first, is_signed=True)
    encode(as_flat(floats.exp_avg_sq), as_flat(piece.exp_avg_sq), second, is_signed=False)


def _fused(piece: AdamPiece, rates: AdamRates) -> None:
    options = asdict(rates)
    kernel = torch._fused_adamw_ if options.pop("is_decoupled") else torch._fused_adam_
    largest = [piece.max_exp_avg_sq] if piece.max_exp_avg_sq is not None else []
    step = [torch.tensor(float(piece.step), device="cpu")]
    kernel(
        [piece.param], [piece.grad], [piece.exp_avg], [piece.exp_avg_sq], largest, step, **options
    )


def rounding(rates: AdamRates) -> Rounding | None:
    """The roundings with which the kernel gives the bits of torch for these rates;
    None if there is no kernel for them."""
    has_coupled_decay = rates.weight_decay != 0 and not rates.is_decoupled
    if not has_kernels() or rates.amsgrad or rates.maximize or has_coupled_decay:
        return None
    # torch computes this factor in double precision, perhaps in one rounding. If that shows in
    # float32, torch makes the step.
    exact = (
        1 - Fraction(rates.lr) * Fraction(rates.weight_decay)
        if math.isfinite(rates.lr * rates.weight_decay)
        else 1
    )
    if np.float32(float(exact)) != np.float32(1 - rates.lr * rates.weight_decay):
        return None
    return _found_rounding()


@cache
def _found_rounding() -> Rounding | None:
    """The roundings whose bits are those of torch's fused kernel,
    for weights of a lerp below and above one half."""
    forms = [
        AdamRates(1e-2, beta1, 0.999, 1e-8, 0.1, is_decoupled=True, amsgrad=False, maximize=False)
        for beta1 in (0.9, 0.3)
    ]
    expected = [_tried(rates, None) for rates in forms]
    ways = itertools.product((True, False), (2, 1, 0), (2, 1, 0), (8, 16, 4, 2))
    for how in itertools.starmap(Rounding, ways):
        if all(_same(_tried(rates, how), e) for rates, e in zip(forms, expected, strict=True)):
            return how
    return None


# Small tensors try the elements after the last whole vector.
_TRIED_NUMELS = [4096, *range(1, 18), *[15] * 20]


def _tried(rates: AdamRates, how: Rounding | None) -> list[Tensor]:
    """Three steps of the same tensors, by the kernel or, with None, by torch."""
    generator = torch.Generator().manual_seed(0)

    def drawn(spread: float) -> Sequence[Tensor]:
        signs, sizes = torch.randn(2, sum(_TRIED_NUMELS), generator=generator, device="cpu")
        return torch.split(signs * sizes.mul(spread).exp(), _TRIED_NUMELS)

    params, averages = drawn(1.0), torch.zeros(2, sum(_TRIED_NUMELS), device="cpu")
    first, second = (torch.split(row, _TRIED_NUMELS) for row in averages)
    for step in range(1, 4):
        rows = zip(params, drawn(2.0), first, second, strict=True)
        pieces = [AdamPiece(*row, None, step) for row in rows]
        if how is None:
            by_torch(pieces, rates)
        else:
            in_c(pieces, rates, how)
    return [*params, averages]


def _same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, one, other))
