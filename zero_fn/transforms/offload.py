"""Parameters, gradients and optimizer states in other tiers (host memory, disks):
the third coordinate of a home."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypeVar

from torch import nn

from zero_fn.errors import LayoutError
from zero_fn.transforms.selection import Where, selected
from zero_fn.transforms.substitute import substitute
from zero_fn.values.assignment import Assignment
from zero_fn.values.home import Home, ReshardAfter
from zero_fn.values.tiers import Cpu, Nvme, Tier, Tiers
from zero_fn.values.units import NamedParameter, Units, anchors_of, distinct_parameters

__all__ = ["offload", "offloaded"]

M = TypeVar("M", bound=nn.Module)


def offload(
    module: M,
    *,
    params: Tier | None = None,
    grads: Tier | None = None,
    optim: Tier | None = None,
    fraction: float = 1.0,
    resident: float = 0.0,
    reshard_after: Literal["forward", "backward"] = "forward",
    units: Units = None,
    where: Where = None,
    donate: bool = False,
) -> M:
    """Offloads parameters, gradients and optimizer states of a module to host
    memory or to a disk (tiers).

        disk = zf.nvme("/local_nvme")
        model = zf.offload(zf.shard_params(model, mesh["dp"]), params=disk, grads=disk, optim=disk)
        optimizer = zf.streamed(torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True))

    It composes with the other transforms in any order, and changes no bit of what is computed. It
    also works without a mesh: one process then trains or runs a model that its memory does not
    hold. To `zf.cpu()` of a model that computes on the CPU nothing moves, because that is the
    memory it is in.

    `params`: between uses no parameter is in memory of the device, at any stage. Ahead of the
    forward and of the backward of a unit (wrap group), each rank reads the part of the unit that it
    owns from the tier; the unit is gathered as the stage says, and freed after. Where `precision`
    computes in a smaller dtype, copies in that dtype rest beside the parameters, and gathers read
    the copies. Whatever else reads or writes a parameter (`state_dict()`, `full_tensor()`, edits in
    place) goes to the tier each time.

    `grads`: while backward goes on, the gradients of a unit are written to the tier as soon as they
    are reduced. `.grad` is a tensor whose values are in the tier; `clip_grad_norm_`, and what else
    reads or scales it, takes one tensor at a time, and beside an accelerator computes on the host.

    `optim`: `zf.streamed(optimizer)` keeps states there, and beside an accelerator steps on the
    host. A stock optimizer is refused with any of the three.

    Shapes: those that the other transforms give.

    Communicates: what the other transforms do. Over several ranks also one byte per rank with each
    gather, with each norm and scaling of `clip_grad_norm_`, and with each redistribution of
    offloaded tensors: by it all ranks learn that a disk has failed. Of its tier each rank reads, in
    each forward and in each backward of a unit, the bytes of the unit that it owns, in the dtype of
    the computation. Of replicated parameters that is the whole unit.

    Args:
        module: Any module, transformed or not. On `meta`, nothing is moved until `zf.materialize`
            fills it. Over torch's fake process group, whose ranks are pretended, no path is looked
            at and no room made: to plan a run elsewhere.
        params: Where parameters rest: `zf.nvme(path)` or `zf.cpu()`.
            None: as an earlier transform said, or on the device.
        grads: Where gradients rest between backward and step; likewise.
        optim: Where `zf.streamed(optimizer)` keeps the states of these parameters; likewise.
        fraction: The part of the states, in bytes, that is in the tier of `optim`, more than 0 and
            at most 1. The rest stays on the device. See `streamed`.
        resident: The part of the parameters, in bytes, that stays in memory of the device, at least
            0 and less than 1. Whole parameters, dealt evenly over the module, so that the others
            are read at an even pace: with 0.3 a pass reads 0.7 of the bytes. The rest of what
            `params` says holds for the others.
        reshard_after: When fetched parameters are freed. "backward" is one fetch less,
            and more memory of the device.
        units: What is fetched together: module classes, patterns of module names (`"layers.*"`), or
            `zf.by_size`. None: each of the repeated blocks, each other module of more than 64 MiB,
            and the rest.
        where: Which parameters: patterns of parameter names, or a function of name and parameter.
            The others rest as they do in `module`. None: all.
        donate: Free each parameter as soon as it was moved; `module` can no longer run.

    Returns:
        A new module with the type, the parameter names and the outputs of `module`. `module` is
        unchanged and still runs (unless donated).

    Raises:
        LayoutError: No tier is given, `where` selects nothing, `fraction` or `resident` is not in
            range, `reshard_after` is another word, or an earlier transform chose another tier.
        UnitError: `units` matches nothing, or contradicts an earlier transform.
        TierError: The tier, or host memory for its buffers, is too small:
            on every rank, and before anything moved.
        StorageError: The path takes no files: on every rank, and before anything moved. In a
            forward or backward: the disk failed, on this rank or another.
        StateError: `module` is running, or was donated.

    Source:
        ZeRO-Offload, Ren et al. 2021, 4.1 (the step on the host); ZeRO-Infinity, Rajbhandari et al.
        2021, 5.1.1 (infinity offload engine) and 5.2 (bandwidth-centric partitioning).
    """
    given = {"params": params, "grads": grads, "optim": optim}
    wrong = {
        name: tier
        for name, tier in given.items()
        if tier is not None and not isinstance(tier, Cpu | Nvme)
    }
    if wrong or not any(given.values()):
        raise LayoutError(
            "offload() was given no tier.",
            **{name: repr(tier) for name, tier in (wrong or given).items()},
            fix='zf.offload(model, params=zf.nvme("/local_nvme"))',
        )
    if not 0 < fraction <= 1 or (fraction < 1 and optim is None):
        raise LayoutError(
            "fraction is the part of the optimizer states that goes to optim=: "
            "more than 0, at most 1.",
            got=fraction,
            optim=optim,
            fix='zf.offload(model, optim=zf.nvme("/local_nvme"), '
            "fraction=0.5): half of them, in bytes",
        )
    if not 0 <= resident < 1 or (resident and params is None):
        raise LayoutError(
            "resident is the part of the parameters that stays in memory of the device: "
            "at least 0, less than 1.",
            got=resident,
            params=params,
            fix='zf.offload(model, params=zf.nvme("/local_nvme"), resident=0.3): '
            "a pass reads 0.7 of the bytes",
        )
    tiers = Tiers(params, grads, optim, fraction)
    home = Home(tiers=tiers, reshard_after=ReshardAfter.named(reshard_after))
    return offloaded(module, home, units=units, where=where, resident=resident, donate=donate)


def offloaded(
    module: M,
    home: Home,
    *,
    units: Units = None,
    where: Where = None,
    resident: float = 0.0,
    donate: bool = False,
    reserves: bool = True,
) -> M:
    """`offload`, by what it asks of a home.

    Without `reserves` no path is looked at: a module on `meta` is only planned.
    """
    chosen = selected(distinct_parameters(module), where)
    homes = {parameter.fqn: home for parameter in chosen}
    stay = replace(home, tiers=replace(home.tiers, params=None))
    homes |= dict.fromkeys(_resident(chosen, resident), stay)
    anchors = None if units is None else tuple(anchors_of(module, units))
    request = Assignment(homes=homes, anchors=anchors)
    return substitute(module, request, verb="offload", donate=donate, reserves=reserves)


def _resident(parameters: Sequence[NamedParameter], part: float) -> list[str]:
    """The names of parameters that have this part of the bytes, dealt evenly: up to each parameter
    those before it have that part, to within half of it."""
    names: list[str] = []
    owed = 0.0
    for parameter in parameters if part else ():
        nbytes = parameter.parameter.numel() * parameter.parameter.element_size()
        owed += part * nbytes
        if owed > nbytes / 2:
            names.append(parameter.fqn)
            owed -= nbytes
    return names
