"""What is right, and surely not what the user wants: said once, with what to write instead. Never an error."""

from __future__ import annotations

import torch
from torch.optim import Adam, Adamax, AdamW, NAdam, Optimizer, RAdam

from zero_fn.errors import warn_once
from zero_fn.runtime.registry import slot_of

__all__ = ["say_if_rounded", "say_if_slow"]


def say_if_rounded(optimizer: Optimizer) -> None:
    """Adam's updates are a few thousandths of a parameter at most: added to one in 8 or 11 bits, most of them are lost."""
    if type(optimizer) not in (Adam, AdamW, Adamax, NAdam, RAdam):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            slot = slot_of(parameter)
            if slot is not None and parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
                name = str(parameter.dtype).removeprefix("torch.")
                warn_once(
                    f"{type(optimizer).__name__} trains parameters that rest in {name}, without float32 masters.",
                    first=slot,
                    why="updates smaller than half a unit in the last place of a parameter are rounded away",
                    fix=f"before the optimizer model = zf.precision(model, rest=torch.float32, compute=torch.{name}); "
                    "if it is meant: warnings.filterwarnings('ignore', '.*without float32 masters')",
                )
                return


def say_if_slow(optimizer: Optimizer) -> None:
    """Adam of a streamed optimizer is stepped on the host, where only its fused step has a kernel."""
    if type(optimizer) in (Adam, AdamW) and any(group["fused"] is None for group in optimizer.param_groups):
        name = type(optimizer).__name__
        warn_once(
            f"{name} is stepped on the host without fused=True: several times slower.",
            why="a kernel in C does the fused step in one pass over memory; it took 6.8 times as long without, on two cores",
            fix=f"{name}(model.parameters(), ..., fused=True); if it is meant: fused=False",
        )
