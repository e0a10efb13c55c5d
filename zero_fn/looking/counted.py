"""Bytes of groups of parameters: held at rest, sent, and moved from and to other tiers.

With Ψ elements, n ranks, and per element b bytes at rest, c bytes in compute and k bytes of optimizer states, a rank holds:

    home       parameters                     gradients    optimizer
    NOTHING    Ψ b          (+ Ψ c if cast)   Ψ b          Ψ k
    OPTIMIZER  Ψ c          (+ Ψ/n b if cast) Ψ b          Ψ/n k
    GRADS      Ψ c          (+ Ψ/n b if cast) Ψ/n b        Ψ/n k
    PARAMS     Ψ/n b                          Ψ/n b        Ψ/n k

In plain float32 with Adam (b = 4, k = 8) the rows are 16 Ψ, 8 Ψ + 8 Ψ/n, 4 Ψ + 12 Ψ/n and 16 Ψ/n. An all-gather sends this
rank's shard to n - 1 peers, a reduce-scatter sends each peer its piece: each sends (n - 1)/n Ψ b bytes.

State that rests in another tier takes no memory of the device, and whole pages of the tier for each unit. For each disk there
is a staging buffer of host memory for parameters and one for gradients, as large as the largest unit; beside an accelerator
there are two of each.

Source: ZeRO, Rajbhandari et al. 2020, section 5 and figure 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from zero_fn.looking.held import Held
from zero_fn.runtime.group import Group
from zero_fn.runtime.kind import Lifetime, Shelved
from zero_fn.runtime.parcels import planned_parcels, record_nbytes
from zero_fn.storage import stagings_for
from zero_fn.streamed import Footprint, Link
from zero_fn.values.tiers import Cpu, is_accelerator

__all__ = ["add_moved", "at_rest", "device_type_of", "sent_nbytes"]


def device_type_of(groups: Sequence[Group]) -> str:
    """The type of the device that computes; "cpu" as long as that is not known."""
    return next((group.kind.device_type for group in groups if group.kind.device_type != "meta"), "cpu")


def at_rest(groups: Sequence[Group], *, optimizer_nbytes_per_element: int) -> Held:
    """Bytes that this rank holds between backward and `zero_grad`, without padding.

    Args:
        groups: The groups of all units of a module.
        optimizer_nbytes_per_element: Bytes of optimizer state per element of a trained parameter: 8 for Adam in float32,
            4 for SGD with momentum.

    Returns:
        The bytes. States that `offload(optim=...)` puts into another tier are counted there. The buffers of a streamed
        optimizer are not counted: `streamed.footprint` counts them.
    """
    parameters = gradients = optimizer = 0
    tiers, largest = Counter[str](), dict[Shelved, int]()
    for group in groups:
        kind = group.kind
        for (what, tier), forms in group.forms_away():
            nbytes = record_nbytes(forms)
            tiers[str(tier)] += nbytes
            if not isinstance(tier, Cpu):
                largest[what, tier] = max(nbytes, largest.get((what, tier), 0))
        for slot in group.slots:
            parameters += kind.resting_nbytes(slot.path)
            if not slot.parameter.requires_grad:
                continue
            gradients += 0 if kind.is_gradient_away else slot.path.gradient_numel * kind.gradient_dtype.itemsize
            states = slot.path.local_numel * optimizer_nbytes_per_element
            away = kind.states_away_nbytes(states)
            optimizer += states - away
            if away:
                tiers[str(kind.home.tiers.optim)] += away
    buffers = sum(largest.values()) * stagings_for(device_type_of(groups))
    return Held(parameters, gradients, optimizer, buffers, dict(tiers))


def sent_nbytes(group: Group, *, times_gathered: int, is_exact: bool, pads: bool) -> Counter[str]:
    """Bytes that this rank sends in a step for the parameters of a group, by the name of the axis.

    Of two axes the first carries as many bytes as one axis alone would; the second carries this rank's piece on the first.

    Args:
        group: The parameters.
        times_gathered: How often their unit is gathered in the step.
        is_exact: Whether gradients travel in the dtype of their sum. Along the second axis they always do.
        pads: Whether the transport sends padding.
    """
    total, kind = Counter[str](), group.kind
    for slot in group.slots:
        numel = slot.path.numel
        for number, hop in enumerate(slot.path.hops if numel else ()):
            size = hop.axis.size
            piece = hop.layout.shard_numel if hop.layout is not None else -(-numel // size)
            own = min(piece, numel - min(hop.axis.rank * piece, numel))
            gathered = (piece if pads else own) * (size - 1)
            scattered = piece * (size - 1) if pads else numel - own
            if hop.layout is not None:
                times = 1 if number and kind.inner is Lifetime.ALWAYS else times_gathered
                own_nbytes = gathered * kind.compute_dtype.itemsize
                if kind.travels and slot.extension.sent_nbytes is not None:
                    own_nbytes = slot.extension.sent_nbytes // size * (size - 1)
                total[hop.axis.name] += times * own_nbytes
            if slot.parameter.requires_grad:
                summed = kind.sum_dtype if is_exact or number else kind.compute_dtype
                total[hop.axis.name] += scattered * summed.itemsize
                total[hop.axis.name] += gathered * kind.gradient_dtype.itemsize if hop.layout is None else 0
            numel = own
    return +total


def add_moved(group: Group, times_gathered: int, found: Footprint) -> None:
    """Adds the bytes that forward and backward move from and to tiers.

    Parameters, or their compute copies, are read from their tier for each gather; gradients are written to their tier once.
    Beside an accelerator both cross the link to the host.
    """
    kind, away = group.kind, dict(group.forms_away())
    trained = [slot.parameter.requires_grad for slot in group.slots]
    has_copies = any(what == "compute copies" for what, _ in away)
    for (what, tier), forms in away.items():
        if what == "gradients" and all(trained):
            found.written[tier] += record_nbytes(forms)
        elif what == "gradients":
            for parcel in planned_parcels(tuple(forms)):
                some = [trained[piece.parameter] for piece in parcel.pieces]
                found.written[tier] += parcel.nbytes if any(some) else 0
                found.read[tier] += parcel.nbytes if any(some) and not all(some) else 0  # frozen ones in the same pages
        elif what == "compute copies" or not has_copies:
            found.read[tier] += times_gathered * record_nbytes(forms)
    if is_accelerator(kind.device_type):
        numels = [slot.path.local_numel for slot in group.slots]
        dtype = kind.compute_dtype if has_copies else kind.dtype
        there = times_gathered * sum(numels) * dtype.itemsize if kind.is_away else 0
        back = sum(n for n, flag in zip(numels, trained, strict=True) if flag) * kind.gradient_dtype.itemsize
        found.link = Link(found.link[0] + there, found.link[1] + (back if kind.is_gradient_away else 0))
