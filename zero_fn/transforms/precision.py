"""Mixed precision as a transform: the dtype coordinate of a home."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from zero_fn.errors import LayoutError
from zero_fn.runtime.slot import slot_of
from zero_fn.transforms.flatten_subclasses import is_part
from zero_fn.transforms.selection import Where, selected
from zero_fn.transforms.substitute import substitute
from zero_fn.values.assignment import Assignment
from zero_fn.values.home import Home
from zero_fn.values.rounding_mode import Mode, ParameterRounding
from zero_fn.values.units import NamedParameter, distinct_parameters
from zero_fn.values.wire import Wire

__all__ = ["precision"]

M = TypeVar("M", bound=nn.Module)


def precision(
    module: M,
    *,
    compute: torch.dtype = torch.bfloat16,
    reduce: torch.dtype | Wire = torch.float32,
    gather: Wire | None = None,
    grads: torch.dtype | None = None,
    output: torch.dtype | None = None,
    rest: torch.dtype | None = None,
    round: Mode | None = None,
    seed: int = 0,
    where: Where = None,
    donate: bool = False,
) -> M:
    """Computes a module in one dtype while its parameters rest, and are optimized,
    in another (mixed precision).

        model = zf.precision(zf.shard_params(model, mesh["dp"]), compute=torch.bfloat16)

    Between uses parameters keep their dtype, or get that of `rest`: they are the master weights
    that the optimizer updates. They are gathered in `compute`. Gradients are summed over ranks
    and microbatches in `reduce`, and rest in `grads`, or in the dtype of their parameter.
    Floating point inputs of each unit (wrap group) are cast to `compute`, also in dataclasses.
    Buffers are left alone.

    Communicates: the collectives of the stage, in elements of `compute`, or in the formats of
    `gather` and `reduce`. A gradient of a single backward is sent in `compute` and summed in
    `reduce`, which gives the same numbers as sending it in `reduce`; a sum over microbatches is
    sent in `reduce`.

    Args:
        module: Any module, transformed or not, before or after other transforms.
        compute: Dtype of parameters and inputs in forward and backward.
        reduce: Dtype of gradient sums. Or the format in which gradients travel, for slow links:
            `zf.wire.int4()`, `zf.wire.int8()`, `zf.wire.float8()`. Ranks send one another coded addends, and sum
            them in float32 in the order of the ranks; over a second axis the sums are coded once
            more. A block with NaN or infinity arrives as NaN.
        gather: The format in which parameters travel: `zf.wire.int8()`, `zf.wire.int4()`, `zf.wire.float8()`, or
            `zf.wire.delta4()` for the change since they travelled last. All ranks compute with what
            travelled, the owner too, so the numbers are the same at every stage and for every
            number of ranks. Whole parameters are then beside those at rest, at stages 0 to 2, too:
            an element of `compute` more. Over two axes, of which the first shards parameters and
            the second less, the part that stays inside a node is kept as it travelled. None: they
            travel in `compute`. Parameters of one dim, those whose inner dims have fewer than 32
            elements, and what is no float of at most 32 bits in `compute` travel as they are; so do
            their gradients. `zf.unsharded`, `state_dict` and checkpoints give exact values.
        grads: Dtype in which reduced gradients rest, from backward to the step: torch.bfloat16
            makes 2 bytes of 4 for each element. Each sum is rounded once, when it is complete; the
            sums inside `accumulate` stay in `reduce`. Optimizers of torch.optim widen the gradients
            of a group for their step (4 bytes an element while it lasts), streamed ones
            (`zf.streamed(optimizer)`, without a tier, too) those of a buffer; the kernel of a
            streamed Adam reads them as they are. Other optimizers, and a stock Rprop, are refused.
            None: the dtype of the parameter. `clip_grad_norm_` of torch computes norms in this
            dtype, with three digits of bfloat16.
        output: Dtype to which floating point outputs of the whole module are cast, whatever `where`
            selects; None leaves them. A part gets its own first: `model.head =
            zf.precision(model.head, output=torch.float32)`.
        rest: Dtype of the parameters between uses: torch.float32 makes master weights of a model
            that was loaded in 16 bits. Of a module that is sharded already only the shards are
            cast. None leaves them. Build the optimizer after.
        round: How a step is rounded into parameters that rest in torch.bfloat16, which then need no
            master: 2 bytes an element and the states, which are float32. It is computed in float32,
            by `zf.streamed(optimizer)` (without a tier, too) or `zf.by_owner(optimizer)`; others
            are refused. "stochastic": up or down by chance, in the mean the number itself. The
            random number of an element is a hash of its number in the whole tensor, of the number
            of the step, of the name of the parameter, and of `seed`: the same at every stage,
            number of ranks and tier. "kahan": what is cut off is kept in bfloat16, 2 more bytes,
            and added before the next step. None: by the optimizer, in whose steps small updates are
            rounded away.
        seed: Of the random numbers of round="stochastic".
        where: Which parameters: patterns of parameter names, or a function of name and parameter;
            None: all. Only floating point ones are cast, and none that `flatten_subclasses` made.
        donate: Free what a module that is transformed holds as soon as it is copied;
            `module` can no longer run.

    Returns:
        A new module with the type and the parameter names of `module`,
        which is unchanged (unless donated).

    Raises:
        LayoutError: A dtype is not floating point, or contradicts an earlier `precision`; or
            `where` selects nothing; or `grads` has 8 bits, or more than the dtype of a parameter at
            rest; or `round` is of a parameter that does not rest in bfloat16; or gradients would
            travel as differences. In the first forward: parameters would, and no rank keeps them.
        StateError: `module` is running, or was donated.

    Source:
        Mixed Precision Training, Micikevicius et al. 2018, 3.1 (master weights); ZeRO, Rajbhandari
        et al. 2020, 3.1 (16 Ψ); rounding without masters: Revisiting BFloat16 Training, Zamirai et
        al. 2020; formats: ZeRO++, Wang et al. 2023.
    """
    _require_formats(gather, reduce)
    reduce, scatter = (torch.float32, reduce) if isinstance(reduce, Wire) else (reduce, None)
    for name, dtype in (
        ("compute", compute),
        ("reduce", reduce),
        ("grads", grads),
        ("output", output),
        ("rest", rest),
    ):
        is_float = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        if dtype is not None and not (is_float and (name != "grads" or dtype.itemsize > 1)):
            what = (
                "precision takes floating point dtypes, "
                "of 16 bits or more for gradients, which are added."
            )
            raise LayoutError(what, **{name: dtype}, fix=f"{name}=torch.bfloat16")
    castable = _castable(module, where)
    rounding = None if round is None else ParameterRounding(round, seed)
    if rounding is None and seed:
        raise LayoutError(
            "seed is of random numbers, and none are drawn.",
            seed=seed,
            fix='round="stochastic", seed=...',
        )
    _require_rounds(castable, rounding, rest)
    if grads is not None:
        _require_no_wider(castable, grads, rest)
    home = Home(
        compute=compute, reduce=reduce, grads=grads, round=rounding, gather=gather, scatter=scatter
    )
    homes = dict.fromkeys((each.fqn for each in castable), home)
    request = Assignment(homes=homes, outputs={} if output is None else {"": output})
    result = substitute(module, request, verb="precision", donate=donate)
    if rest is None:
        return result
    chosen = {id(parameter.parameter) for parameter in _castable(result, where)}
    result._apply(  # type: ignore[no-untyped-call]
        lambda tensor: (
            tensor.to(rest) if id(tensor) in chosen and tensor.is_floating_point() else tensor
        )
    )
    # Once more: as if they had been of this dtype from the beginning.
    return substitute(result, Assignment(), verb="precision", donate=True)


def _require_formats(gather: object, reduce: object) -> None:
    if not isinstance(gather, Wire | None):
        fix = "gather=zf.wire.int8(); compute=torch.bfloat16"
        raise LayoutError("Parameters travel in a format.", gather=gather, fix=fix)
    if isinstance(reduce, Wire) and reduce.is_difference:
        raise LayoutError(
            "Gradients do not travel as differences.",
            reduce=reduce,
            why="each is another one, and no rank holds the last",
            fix="reduce=zf.wire.int4(), gather=zf.wire.delta4()",
        )


def _require_no_wider(
    castable: list[NamedParameter], grads: torch.dtype, rest: torch.dtype | None
) -> None:
    for each in castable:
        own = rest or each.parameter.dtype
        if own.is_floating_point and grads.itemsize > own.itemsize:
            raise LayoutError(
                "Gradients would rest in a larger dtype than their parameter.",
                parameter=each.fqn,
                rests=own,
                grads=grads,
                why="an optimizer takes them in the dtype of the parameter, "
                "and would round them again",
                fix="precision(rest=torch.float32, grads=...); or inside accumulate(): "
                "there they are summed in `reduce`",
            )


def _require_rounds(
    castable: list[NamedParameter], rounding: ParameterRounding | None, rest: torch.dtype | None
) -> None:
    """Refuses a rounding, of now or earlier, of parameters that do not rest in bfloat16."""
    for each in castable:
        slot, own = slot_of(each.parameter), rest or each.parameter.dtype
        asked = rounding or (slot.home.round if slot is not None else None)
        if asked is not None and each.parameter.is_floating_point() and own != torch.bfloat16:
            raise LayoutError(
                "round= is for parameters that rest in bfloat16.",
                parameter=each.fqn,
                rests=own,
                round=asked,
                why="a step is computed in float32, and of dtypes of 16 bits "
                "bfloat16 alone has its range",
                fix='precision(rest=torch.bfloat16, round="stochastic"); '
                "without round= for a float32 master",
            )


def _castable(module: nn.Module, where: Where) -> list[NamedParameter]:
    """The selected parameters, without parts of tensor subclasses:
    scales in fewer bits would scale by other numbers."""
    return [
        each for each in selected(distinct_parameters(module), where) if not is_part(each.parameter)
    ]
