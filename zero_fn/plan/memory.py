"""Bytes at rest per rank, from homes.

With Ψ elements, n ranks, b bytes per element at rest, c in compute, and k of optimizer state, a rank that owns Ψ/n holds:

    home       parameters                     gradients    optimizer
    NOTHING    Ψ b          (+ Ψ c if cast)   Ψ b          Ψ k
    OPTIMIZER  Ψ c          (+ Ψ/n b if cast) Ψ b          Ψ/n k
    GRADS      Ψ c          (+ Ψ/n b if cast) Ψ/n b        Ψ/n k
    PARAMS     Ψ/n b                          Ψ/n b        Ψ/n k

In plain float32 with Adam (b = 4, k = 8) the rows are 16 Ψ, 8 Ψ + 8 Ψ/n, 4 Ψ + 12 Ψ/n and 16 Ψ/n.

Source: ZeRO, Rajbhandari et al. 2020, section 5 and figure 1.
"""

from __future__ import annotations

from collections.abc import Iterable

from zero_fn.held import Held
from zero_fn.runtime.slot import Slot

__all__ = ["at_rest"]


def at_rest(slots: Iterable[Slot], *, optimizer_nbytes_per_element: int) -> Held:
    """Bytes of the elements that this rank holds between backward and `zero_grad`, without padding.

    Args:
        slots: The parameters.
        optimizer_nbytes_per_element: Bytes of optimizer state per element of a trained parameter: 8 for Adam in float32,
            4 for SGD with momentum.
    """
    parameters = gradients = optimizer = 0
    for slot in slots:
        parameters += slot.resting_nbytes
        if slot.parameter.requires_grad:
            gradients += slot.gradient_numel * slot.dtype.itemsize
            optimizer += slot.local_numel * optimizer_nbytes_per_element
    return Held(parameters, gradients, optimizer)
