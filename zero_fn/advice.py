"""Advice on optimizers, given once: what is right, and hardly what the user wants."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Adam, Adamax, AdamW, NAdam, Optimizer, RAdam

from zero_fn.errors import warn_once
from zero_fn.runtime.optimizers import stepped_optimizers
from zero_fn.runtime.replaced_parameters import replacement_of
from zero_fn.runtime.slot import slot_of

__all__ = [
    "advise_at_first_step",
    "say_if_alone",
    "say_if_left_out",
    "say_if_rounded",
    "say_if_slow",
]


def advise_at_first_step(optimizer: Optimizer) -> None:
    """What is said of a stock optimizer before its first step."""
    say_if_rounded(optimizer)
    say_if_alone(optimizer, lambda parameter: parameter.grad is not None)


def say_if_alone(
    optimizer: Optimizer, is_trained: Callable[[Tensor], bool] = lambda parameter: True
) -> None:
    """Warns of plain parameters beside those of a transformed model, on several ranks: nobody
    reduces their gradients, unless they are in a DistributedDataParallel.

    `is_trained`: whether a parameter that requires gradients counts.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    slots = [slot_of(parameter) for parameter in parameters]
    plain = [
        parameter
        for parameter, slot in zip(parameters, slots, strict=True)
        if slot is None
        and type(parameter) is nn.Parameter
        and parameter.requires_grad
        and is_trained(parameter)
    ]
    plain = [parameter for parameter in plain if replacement_of(parameter) is None]
    hops = (hop for slot in slots if slot is not None for hop in slot.path.hops)
    if not plain or not any(hop.axis.size > 1 for hop in hops):
        return
    wrapped = [
        each
        for each in gc.get_objects()
        if issubclass(type(each), nn.parallel.DistributedDataParallel)
    ]
    reduced = {id(parameter) for module in wrapped for parameter in module.parameters()}
    plain = [parameter for parameter in plain if id(parameter) not in reduced]
    if plain:
        warn_once(
            "An optimizer trains plain parameters beside those of a transformed model: "
            "their gradients are not reduced.",
            first=f"{str(plain[0].dtype).removeprefix('torch.')}{list(plain[0].shape)}, "
            f"of {len(plain)}",
            why="each rank would train its own copy of them, "
            "such as the weights of a loss, and ranks drift apart",
            fix="before the optimizer loss = zf.replicate(loss, mesh['dp']); if it is meant: "
            "warnings.filterwarnings('ignore', '.*trains plain parameters beside')",
        )


def say_if_left_out(saved: Iterable[object], names: Mapping[int, str]) -> None:
    """Warns of an optimizer that has stepped parameters of a model that is saved,
    and that is not saved itself.

    `names`: of the parameters, by identity.
    """
    optimizers = [each for each in saved if isinstance(each, Optimizer)]
    held = {
        id(parameter)
        for each in optimizers
        for group in each.param_groups
        for parameter in group["params"]
    }
    for other in stepped_optimizers():
        groups = [group["params"] for group in other.param_groups]
        lost = [
            names[id(p)] for group in groups for p in group if id(p) in names and id(p) not in held
        ]
        if lost:
            warn_once(
                "A checkpoint is saved with one of the optimizers of its model, "
                "and without another.",
                left_out=type(other).__name__,
                parameters=f"{len(lost)}, such as {', '.join(lost[:3])}",
                why="their states would be gone after a load, "
                "and training would go on with other numbers",
                fix="all of them: zf.save(folder, model, (muon, adamw)); if it is meant: "
                "warnings.filterwarnings('ignore', '.*one of the optimizers of its model')",
            )


def say_if_rounded(optimizer: Optimizer) -> None:
    """Warns of Adam on parameters in 16 bits: its updates are a few thousandths of a parameter at
    most, and with 8 or 11 bits of precision most of them are lost."""
    if type(optimizer) not in (Adam, AdamW, Adamax, NAdam, RAdam):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            slot = slot_of(parameter)
            if slot is None or slot.kind.rounding is not None or not parameter.requires_grad:
                continue
            if parameter.dtype in (torch.bfloat16, torch.float16):
                name = str(parameter.dtype).removeprefix("torch.")
                warn_once(
                    f"{type(optimizer).__name__} trains parameters that rest in {name}, "
                    "without float32 masters.",
                    first=slot,
                    why="updates smaller than half a unit in the last place of a "
                    "parameter are rounded away",
                    fix="before the optimizer model = zf.precision(model, rest=torch.float32, "
                    f"compute=torch.{name}); or, at 2 bytes a parameter, rest=torch.bfloat16, "
                    "round='stochastic'; "
                    "if it is meant: warnings.filterwarnings('ignore', "
                    "'.*without float32 masters')",
                )
                return


def say_if_slow(optimizer: Optimizer) -> None:
    """Warns of a streamed Adam without `fused=True`: it is stepped on the host,
    where only the fused step has a kernel."""
    if type(optimizer) in (Adam, AdamW) and any(
        group["fused"] is None for group in optimizer.param_groups
    ):
        name = type(optimizer).__name__
        warn_once(
            f"{name} is stepped on the host without fused=True: several times slower.",
            why="a kernel in C does the fused step in one pass over memory; "
            "it took 6.8 times as long without, on two cores",
            fix=f"{name}(model.parameters(), ..., fused=True); if it is meant: fused=False",
        )
