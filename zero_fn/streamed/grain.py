"""What an optimizer looks at: elements, tensors, or several at once. Found out by stepping fourteen elements.

Streaming steps the pieces of tensors that fit a buffer, one after the other. What optimizers of torch and of well-known
libraries look at is known (`elementwise.py`); one of the user may centralise gradients, scale by norms, or clip in its step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_fn.resting import local_of
from zero_fn.runtime.attributes import attributes_of
from zero_fn.runtime.elementwise import looks_at_whole_tensors
from zero_fn.streamed.schema import refusal, states_like
from zero_fn.streamed.trial import Given, step_alone, step_in_turns

__all__ = ["looks_at_whole"]

_ROWS, _COLUMNS, _CUT = 2, 7, 5


def looks_at_whole(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor, device: torch.device) -> bool:
    """Whether it steps a tensor as `parameter` to other values if that is cut in pieces. Tried on a device.

    Raises:
        PlacementError: It steps two tensors to other values than one and then the other, or a tensor to other values once
            it and its states lie elsewhere.
    """
    if looks_at_whole_tensors(optimizer):
        return True
    born = optimizer.state.get(parameter, {})
    if any(
        isinstance(value, Tensor) and value.numel() > 1 and value.shape != parameter.shape for value in born.values()
    ):
        return False  # such states are refused when they are moved
    group = {**group, "lr": 0.1} if isinstance(group.get("lr"), float) else group  # so that updates show
    local = local_of(parameter)
    dtype, ndim = local.dtype, local.ndim
    device = torch.device("cpu") if device.type == "meta" else device
    generator = torch.Generator().manual_seed(0)
    shape = (_ROWS, *[1] * (ndim - 2), _COLUMNS) if ndim > 1 else (_ROWS * _COLUMNS,)
    # The second gradient is large, for an optimizer that clips.
    whole = [scale * torch.randn(shape, generator=generator).to(device, dtype) for scale in (1, 1, 100)]
    flat = [tensor.reshape(*[1] * (ndim - 1), -1) for tensor in whole]
    pieces = [[tensor.narrow(-1, *of) for tensor in flat] for of in ((0, _CUT), (_CUT, _ROWS * _COLUMNS - _CUT))]

    for values in (whole[0], *(piece[0] for piece in pieces)):
        vars(values).update(attributes_of(parameter))

    def with_states(made: bool, tensors: Sequence[Sequence[Tensor]]) -> list[Given]:
        return [(value, grads, states_like(born, parameter, value) if made else {}) for value, *grads in tensors]

    def stepped(made: bool, *tensors: Sequence[Tensor]) -> list[Tensor]:
        parameters, _ = step_alone(optimizer, group, with_states(made, tensors))
        return [found.detach().reshape(-1) for found in parameters]

    def outcomes(made: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        apart = torch.cat([found for piece in pieces for found in stepped(made, piece)])
        in_turns = step_in_turns(optimizer, group, with_states(made, pieces))
        together = torch.cat(stepped(made, *pieces))
        return apart, torch.cat([found.reshape(-1) for found in in_turns]), together, stepped(made, whole)[0]

    try:
        try:
            apart, in_turns, together, in_one = outcomes(made=False)
        except KeyError:  # it looks for states that it made when it was made
            apart, in_turns, together, in_one = outcomes(made=True)
    except Exception as error:  # whatever an optimizer raises that counts on its own parameters
        raise refusal(optimizer, f"it cannot step other parameters: {type(error).__name__}: {error}") from error
    if not _are_alike(together, apart):
        raise refusal(
            optimizer, "it steps two tensors to other values than one and then the other, as a buffer holds them"
        )
    if not _are_alike(in_turns, apart):
        raise refusal(
            optimizer,
            "it steps to other values once values and states have moved: it keeps some beside `state`, or in shared memory",
        )
    return not _are_alike(in_one, apart)


def _are_alike(one: Tensor, other: Tensor) -> bool:
    """But for a few roundings: vectors and what is left of them may take different instructions."""
    largest = other.nan_to_num().abs().max().item()
    return torch.allclose(one, other, rtol=0.0, atol=16 * torch.finfo(one.dtype).eps * largest, equal_nan=True)
