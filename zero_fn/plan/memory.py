"""Bytes at rest per rank, from homes.

With Ψ elements, n ranks, b bytes per element at rest, c in compute, and k of optimizer state, a rank that owns Ψ/n holds:

    home       parameters                     gradients    optimizer
    NOTHING    Ψ b          (+ Ψ c if cast)   Ψ b          Ψ k
    OPTIMIZER  Ψ c          (+ Ψ/n b if cast) Ψ b          Ψ/n k
    GRADS      Ψ c          (+ Ψ/n b if cast) Ψ/n b        Ψ/n k
    PARAMS     Ψ/n b                          Ψ/n b        Ψ/n k

In plain float32 with Adam (b = 4, k = 8) the rows are 16 Ψ, 8 Ψ + 8 Ψ/n, 4 Ψ + 12 Ψ/n and 16 Ψ/n.

What rests in another tier takes no memory of the device. It takes its bytes there, in whole pages for each unit, and for each
kind (parameters, gradients) and disk a staging of host memory, as large as the largest unit; beside an accelerator two.

Source: ZeRO, Rajbhandari et al. 2020, section 5 and figure 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from zero_fn.held import Held
from zero_fn.runtime.away import Shelved
from zero_fn.runtime.record import record_nbytes
from zero_fn.runtime.unit import Unit
from zero_fn.storage import stagings_for
from zero_fn.tiers import Cpu

__all__ = ["at_rest", "device_type_of"]


def device_type_of(units: Sequence[Unit]) -> str:
    """The type of the device that computes; the CPU where that is not known yet."""
    return next(
        (slot.kind.device_type for unit in units for slot in unit.slots if slot.kind.device_type != "meta"), "cpu"
    )


def at_rest(units: Sequence[Unit], *, optimizer_nbytes_per_element: int) -> Held:
    """Bytes of the elements that this rank holds between backward and `zero_grad`, without padding.

    Args:
        units: Those of a module.
        optimizer_nbytes_per_element: Bytes of optimizer state per element of a trained parameter: 8 for Adam in float32,
            4 for SGD with momentum.

    Returns:
        States that `offload(optim=...)` sends to another tier are counted there; the buffers of the streamed optimizer, which
        depend on it, are not counted: `streamed.footprint` does.
    """
    parameters = gradients = optimizer = 0
    tiers, largest = Counter[str](), dict[Shelved, int]()
    for unit in units:
        for (kind, tier), forms in (away for group in unit.groups for away in group.forms_away()):
            nbytes = record_nbytes(forms)
            tiers[str(tier)] += nbytes
            largest[kind, tier] = max(nbytes, largest.get((kind, tier), 0))
        for slot in unit.slots:
            parameters += slot.kind.resting_nbytes(slot.path)
            if slot.parameter.requires_grad:
                gradients += slot.path.gradient_numel * slot.dtype.itemsize if not slot.kind.is_gradient_away else 0
                states = slot.path.local_numel * optimizer_nbytes_per_element
                away = slot.kind.states_away_nbytes(states)
                optimizer += states - away
                if away:
                    tiers[str(slot.home.tiers.optim)] += away
    stagings = stagings_for(device_type_of(units))
    buffers = sum(nbytes * stagings for (_, tier), nbytes in largest.items() if not isinstance(tier, Cpu))
    return Held(parameters, gradients, optimizer, buffers, dict(tiers))
