"""Mixed precision as a transform: the dtype coordinate of a home."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from zero_fn.errors import LayoutError
from zero_fn.transforms.flatten_subclasses import is_part
from zero_fn.transforms.selection import Where, selected
from zero_fn.transforms.substitute import assignment_of, substitute
from zero_fn.values.assignment import Assignment
from zero_fn.values.home import Home
from zero_fn.values.units import NamedParameter, distinct_parameters

__all__ = ["precision"]

M = TypeVar("M", bound=nn.Module)


def precision(
    module: M,
    *,
    compute: torch.dtype = torch.bfloat16,
    reduce: torch.dtype = torch.float32,
    output: torch.dtype | None = None,
    rest: torch.dtype | None = None,
    where: Where = None,
) -> M:
    """Computes a module in one dtype while its parameters rest in another.

    The resting parameters keep their dtype, or get that of `rest`, and are the masters that the optimizer updates. Gathers
    move the compute dtype. Gradients are summed over ranks and microbatches in `reduce` and rest in the dtype of their
    parameter. Floating point inputs of each unit are cast to its compute dtype, also in dataclasses; buffers are left alone.

    Communicates: the collectives of the stage, in elements of `compute`. A gradient of a single backward travels in
    `compute` and is summed in `reduce`, which gives the same numbers as sending `reduce`; sums over microbatches travel in
    `reduce`.

    Args:
        module: Any module, transformed or not, in any order.
        compute: Dtype of parameters and inputs in flight.
        reduce: Dtype of gradient sums.
        output: Floating point outputs of the whole module, whatever `where` selects, are cast to this; None leaves them.
            A part gets one of its own first: `model.head = zf.precision(model.head, output=torch.float32)`.
        rest: Dtype of the resting parameters: torch.float32 makes masters of weights that were loaded in 16 bits. Of a module
            that is sharded already only the shards are widened; None leaves them. The optimizer is built after.
        where: Which parameters; only floating point ones are ever cast, and none that `flatten_subclasses` made.

    Returns:
        A new module with the type and the parameter names of `module`, which is unchanged.

    Raises:
        LayoutError: A dtype is not floating point, or contradicts an earlier `precision`.
    """
    for name, dtype in (("compute", compute), ("reduce", reduce), ("output", output), ("rest", rest)):
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise LayoutError("precision takes floating point dtypes.", **{name: dtype}, fix=f"{name}=torch.bfloat16")
    home = Home(compute=compute, reduce=reduce)
    homes = {parameter.fqn: home for parameter in _castable(module, where)}
    request = Assignment(homes=homes, outputs={} if output is None else {"": output})
    result = substitute(module, assignment_of(module).join(request), verb="precision", donate=False)
    if rest is None:
        return result
    chosen = {id(parameter.parameter) for parameter in _castable(result, where)}
    result._apply(  # type: ignore[no-untyped-call]
        lambda tensor: tensor.to(rest) if id(tensor) in chosen and tensor.is_floating_point() else tensor
    )
    # Once more: as if they had been of this dtype from the beginning.
    return substitute(result, assignment_of(result), verb="precision", donate=True)


def _castable(module: nn.Module, where: Where) -> list[NamedParameter]:
    """The selected parameters, without parts of tensor subclasses: scales in fewer bits would scale by other numbers."""
    return [each for each in selected(distinct_parameters(module), where) if not is_part(each.parameter)]
