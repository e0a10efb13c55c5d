"""Parameters, gradients and optimizer states in other tiers: the third coordinate of a home."""

from __future__ import annotations

from typing import Literal, TypeVar

from torch import nn

from zero_fn.errors import LayoutError
from zero_fn.runtime.refused import agree_in_tiers
from zero_fn.transforms.selection import Where, selected
from zero_fn.transforms.substitute import assignment_of, substitute
from zero_fn.values.assignment import Assignment
from zero_fn.values.home import Home, ReshardAfter
from zero_fn.values.tiers import Cpu, Nvme, Tier, Tiers
from zero_fn.values.units import Units, anchors_of, distinct_parameters

__all__ = ["offload", "offloaded"]

M = TypeVar("M", bound=nn.Module)


def offload(
    module: M,
    *,
    params: Tier | None = None,
    grads: Tier | None = None,
    optim: Tier | None = None,
    fraction: float = 1.0,
    reshard_after: Literal["forward", "backward"] = "forward",
    units: Units = None,
    where: Where = None,
    donate: bool = False,
) -> M:
    """Lets parameters, gradients and optimizer states of a module rest in other tiers: a disk, or the memory of the host.

        disk = zf.nvme("/local_nvme")
        model = zf.offload(zf.shard_params(model, mesh["dp"]), params=disk, grads=disk, optim=disk)
        optimizer = zf.streamed(torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True))

    With `params`, between uses no parameter is in memory, at any stage: each rank reads what it owns of a unit from its
    tier, ahead of the unit's forward and of its backward, gathers it as the stage says, and frees it. What is computed is
    the same to the bit. It composes with the other transforms in any order, and works without a mesh: one process then
    trains or runs a model that its memory does not hold.

    `model.parameters()`, `state_dict()`, `full_tensor()`, edits in place and whatever else reads or writes a resting
    parameter goes to the tier each time. A stock optimizer would fetch them all; `zf.streamed(optimizer, tier)` takes them
    through its buffers together with its states. To `zf.cpu()` of a model that computes on the CPU nothing moves, because
    that is where it is.

    Where they are computed with in a smaller dtype than they rest in (`precision`), copies in that dtype rest beside them,
    and gathers read those. On an accelerator, states, and gradients that are summed or measured, are computed on the host.

    With `grads`, the gradients of a unit are written to the tier when they are reduced, while backward goes on, and read by
    the streamed step. `.grad` is a tensor whose values are there: `clip_grad_norm_` and whatever else reads or scales it
    works, one tensor at a time. With `optim`, states rest where it says: `zf.streamed(optimizer)` without a tier puts them
    there, and a stock optimizer is refused.

    Shapes: those that the other transforms give.

    Communicates: as `shard_params` does where parameters are sharded in any way; replicated ones are read whole by every
    rank. Over several ranks, one byte per rank with each gather, and with each norm and scaling of `clip_grad_norm_` and each
    redistribution of tensors in a tier, by which all ranks learn that a disk has failed. From the tier are read, per rank and
    step, the bytes that it owns, in the dtype of the computation, once for the forward and once for the backward of each unit
    (see `reshard_after`).

    Args:
        module: Any module, transformed or not. On `meta`, nothing is moved until `zf.materialize` fills it; over torch's fake
            process group, whose ranks are pretended, no room is made either, and no path looked at: to plan a run elsewhere.
        params: Where parameters rest: `zf.nvme(path)` or `zf.cpu()`. None: as an earlier transform said, or on the device.
        grads: Where gradients rest between backward and step.
        optim: Where `zf.streamed(optimizer)` keeps the states of these parameters.
        fraction: How much of those states, in bytes, is in that tier; the rest stays on the device. See `streamed`.
        reshard_after: When fetched parameters are freed. "backward" is one fetch less, and more memory of the device.
        units: What is fetched together: module classes, patterns of module names, `by_size`; None finds repeated blocks.
        where: Which parameters; the others rest as they do in `module`.
        donate: Free each parameter as soon as it was moved; `module` can no longer run.

    Returns:
        A new module with the type, the parameter names and the outputs of `module`. `module` is unchanged and still runs
        (unless donated).

    Raises:
        LayoutError: No tier is given, `where` selects nothing, `fraction` is none, `reshard_after` names no moment, or an
            earlier transform chose another tier.
        UnitError: `units` matches nothing, or contradicts an earlier transform.
        TierError: The tier, or memory for its buffers, is too small: on every rank, and before anything moved.
        StorageError: The path takes no files: on every rank, and before anything moved.

    Source:
        ZeRO-Offload, Ren et al. 2021, 4.1 (the step on the host); ZeRO-Infinity, Rajbhandari et al. 2021, 5.1.1 (infinity
        offload engine) and 5.2 (bandwidth-centric partitioning).
    """
    given = {"params": params, "grads": grads, "optim": optim}
    wrong = {name: tier for name, tier in given.items() if tier is not None and not isinstance(tier, Cpu | Nvme)}
    if wrong or not any(given.values()):
        raise LayoutError(
            "offload() was given no tier.",
            **{name: repr(tier) for name, tier in (wrong or given).items()},
            fix='zf.offload(model, params=zf.nvme("/local_nvme"))',
        )
    if not 0 < fraction <= 1 or (fraction < 1 and optim is None):
        raise LayoutError(
            "fraction is not a part of the optimizer states.",
            got=fraction,
            optim=optim,
            fix='zf.offload(model, optim=zf.nvme("/local_nvme"), fraction=0.5): half of them, in bytes',
        )
    tiers = Tiers(params, grads, optim, fraction)
    home = Home(tiers=tiers, reshard_after=ReshardAfter.named(reshard_after))
    return offloaded(module, home, units=units, where=where, donate=donate)


def offloaded(
    module: M, home: Home, *, units: Units = None, where: Where = None, donate: bool = False, reserves: bool = True
) -> M:
    """`offload`, by what it asks of a home.

    Args:
        module, units, where, donate: See `offload`.
        home: The tiers, and when parameters are freed.
        reserves: Make room in the tiers. Without, for a module on `meta` that will only be planned, no path is looked at.
    """
    if home.tiers.grads is not None or home.tiers.params is not None:
        agree_in_tiers()
    homes = {parameter.fqn: home for parameter in selected(distinct_parameters(module), where)}
    anchors = None if units is None else tuple(anchors_of(module, units))
    request = Assignment(homes=homes, anchors=anchors)
    joined = assignment_of(module).join(request)
    return substitute(module, joined, verb="offload", donate=donate, reserves=reserves)
