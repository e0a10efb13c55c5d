"""Mixed precision as a transform: the dtype coordinate of a home."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from zero_fn.errors import LayoutError
from zero_fn.transforms.flatten_subclasses import is_part
from zero_fn.transforms.selection import Where, selected
from zero_fn.transforms.substitute import substitute
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
    grads: torch.dtype | None = None,
    output: torch.dtype | None = None,
    rest: torch.dtype | None = None,
    where: Where = None,
    donate: bool = False,
) -> M:
    """Computes a module in one dtype while its parameters rest, and are optimized, in another (mixed precision).

        model = zf.precision(zf.shard_params(model, mesh["dp"]), compute=torch.bfloat16)

    Between uses parameters keep their dtype, or get that of `rest`: they are the master weights that the optimizer updates.
    They are gathered in `compute`. Gradients are summed over ranks and microbatches in `reduce`, and rest in `grads`, or in
    the dtype of their parameter. Floating point inputs of each unit (wrap group) are cast to `compute`, also in
    dataclasses. Buffers are left alone.

    Communicates: the collectives of the stage, in elements of `compute`. A gradient of a single backward is sent in
    `compute` and summed in `reduce`, which gives the same numbers as sending it in `reduce`; a sum over microbatches is
    sent in `reduce`.

    Args:
        module: Any module, transformed or not, before or after other transforms.
        compute: Dtype of parameters and inputs in forward and backward.
        reduce: Dtype of gradient sums.
        grads: Dtype in which reduced gradients rest, from backward to the step: torch.bfloat16 makes 2 bytes of 4 for each
            element. Each sum is rounded once, when it is complete; the sums inside `accumulate` stay in `reduce`. Optimizers
            of torch.optim widen the gradients of a group for their step (4 bytes an element while it lasts), streamed ones
            (`zf.streamed(optimizer)`, without a tier, too) those of a buffer; the kernel of a streamed Adam reads them as
            they are. Other optimizers, and a stock Rprop, are refused. None: the dtype of the parameter. `clip_grad_norm_`
            of torch computes norms in this dtype, with three digits of bfloat16.
        output: Dtype to which floating point outputs of the whole module are cast, whatever `where` selects; None leaves
            them. A part gets its own first: `model.head = zf.precision(model.head, output=torch.float32)`.
        rest: Dtype of the parameters between uses: torch.float32 makes master weights of a model that was loaded in 16
            bits. Of a module that is sharded already only the shards are cast. None leaves them. Build the optimizer after.
        where: Which parameters: patterns of parameter names, or a function of name and parameter; None: all. Only floating
            point ones are cast, and none that `flatten_subclasses` made.
        donate: Free what a module that is transformed holds as soon as it is copied; `module` can no longer run.

    Returns:
        A new module with the type and the parameter names of `module`, which is unchanged (unless donated).

    Raises:
        LayoutError: A dtype is not floating point, or contradicts an earlier `precision`; or `where` selects nothing; or
            `grads` has 8 bits, or more than the dtype of a parameter at rest.
        StateError: `module` is running, or was donated.

    Source:
        Mixed Precision Training, Micikevicius et al. 2018, 3.1 (master weights); ZeRO, Rajbhandari et al. 2020, 3.1 (16 Ψ).
    """
    for name, dtype in (("compute", compute), ("reduce", reduce), ("grads", grads), ("output", output), ("rest", rest)):
        is_float = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        if dtype is not None and not (is_float and (name != "grads" or dtype.itemsize > 1)):
            what = "precision takes floating point dtypes, of 16 bits or more for gradients, which are added."
            raise LayoutError(what, **{name: dtype}, fix=f"{name}=torch.bfloat16")
    castable = _castable(module, where)
    if grads is not None:
        _require_no_wider(castable, grads, rest)
    homes = dict.fromkeys((each.fqn for each in castable), Home(compute=compute, reduce=reduce, grads=grads))
    request = Assignment(homes=homes, outputs={} if output is None else {"": output})
    result = substitute(module, request, verb="precision", donate=donate)
    if rest is None:
        return result
    chosen = {id(parameter.parameter) for parameter in _castable(result, where)}
    result._apply(  # type: ignore[no-untyped-call]
        lambda tensor: tensor.to(rest) if id(tensor) in chosen and tensor.is_floating_point() else tensor
    )
    # Once more: as if they had been of this dtype from the beginning.
    return substitute(result, Assignment(), verb="precision", donate=True)


def _require_no_wider(castable: list[NamedParameter], grads: torch.dtype, rest: torch.dtype | None) -> None:
    for each in castable:
        own = rest or each.parameter.dtype
        if own.is_floating_point and grads.itemsize > own.itemsize:
            raise LayoutError(
                "Gradients would rest in a larger dtype than their parameter.",
                parameter=each.fqn,
                rests=own,
                grads=grads,
                why="an optimizer takes them in the dtype of the parameter, and would round them again",
                fix="precision(rest=torch.float32, grads=...); or inside accumulate(): there they are summed in `reduce`",
            )


def _castable(module: nn.Module, where: Where) -> list[NamedParameter]:
    """The selected parameters, without parts of tensor subclasses: scales in fewer bits would scale by other numbers."""
    return [each for each in selected(distinct_parameters(module), where) if not is_part(each.parameter)]
