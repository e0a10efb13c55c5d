"""Loading states into an optimizer whose parameters are on an accelerator, which may not hold them all."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_fn.resting import local_of

__all__ = ["load_on_host"]


def load_on_host(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """`optimizer.load_state_dict(state_dict)`, but the states stay in memory of the host.

    torch moves each state to the device of its parameter. Parameters of the same shape and dtype, on the host and without
    memory, take the place of those on a device.
    """
    own = [group["params"] for group in optimizer.param_groups]
    if all(local_of(parameter).device.type == "cpu" for params in own for parameter in params):
        optimizer.load_state_dict(state_dict)
        return
    stand_ins = {id(parameter): _stand_in(parameter) for params in own for parameter in params}
    parameter_of = {id(stand_ins[id(parameter)]): parameter for params in own for parameter in params}
    try:
        for group, params in zip(optimizer.param_groups, own, strict=True):
            group["params"] = [stand_ins[id(parameter)] for parameter in params]
        optimizer.load_state_dict(state_dict)
        states = {parameter_of.get(id(key), key): value for key, value in optimizer.state.items()}
        optimizer.state = defaultdict(dict, states)
    finally:
        for group, params in zip(optimizer.param_groups, own, strict=True):
            group["params"] = params


def _stand_in(parameter: Tensor) -> Tensor:
    local = local_of(parameter)
    if local.device.type == "cpu":
        return parameter
    nothing = torch.empty((), dtype=parameter.dtype).expand(local.shape)
    return nn.Parameter(nothing, requires_grad=parameter.requires_grad)
