"""Elementwise optimizers, which may step over shards:
which optimizers are elementwise, and how they step.

Most optimizers treat every element alone (SGD, Adam, AdamW, Adagrad, RMSprop, ...). Some look at a
whole matrix or tensor: they orthogonalise it, factor its second moment, or scale by its norm. Given
shards they would compute another update, or one that differs between ranks, without any error. They
are known by name, because torch has no property to ask for.

[Note: local steps] Operations on DTensors cost 14 to 200 us of dispatch per parameter, for nothing:
an elementwise update of a shard needs only the shard. So the lists that a torch optimizer collects
before its arithmetic (`_init_group`) are filled with the local tensors of parameters, gradients and
states. These are the same memory; `param_groups`, `state` and `state_dict()` keep DTensors.

[Note: not in a graph] The compiler runs `_init_group` while it traces a step, and looks up the
tensors of the lists among parameters, gradients and states. A tensor that it does not find it takes
for a state that stays where it is: every step would use the local gradients of the first one. So
the compiler gets the DTensors.

[Note: narrow gradients] Steps of torch take gradients in the dtype of their parameters. Those
that rest in another one (`precision(grads=)`) are widened here, all of a group at once, and
freed after the step.

[Note: momentum of SGD] SGD alone writes its states after the arithmetic, under the parameters of
those lists. The first hook after its step moves them to the resting parameters, as DTensors, before
a hook of the user can look.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch._guards import TracingContext
from torch.distributed.tensor import DTensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from zero_fn.errors import PlacementError
from zero_fn.runtime.slot import slot_of
from zero_fn.values.dtensors import cut_alike, local_of, on_spec

__all__ = [
    "TORCH_ELEMENTWISE",
    "is_of_bitsandbytes",
    "looks_at_whole_tensors",
    "require_elementwise",
    "steps_locally",
]

TORCH_ELEMENTWISE: frozenset[type[Optimizer]] = frozenset((
    Adam, AdamW, SGD, Adagrad, RMSprop, Adadelta, Adamax, NAdam, RAdam, ASGD, Rprop,
))  # fmt: skip
"""The optimizers of torch that treat every element alone.

Classes derived from them are not known to.
"""

_WORDS = (
    "muon", "adafactor", "shampoo", "lamb", "galore", "adammini", "novograd", "prodigy", "dadapt",
    "kfac",
)  # fmt: skip
_NAMES = frozenset((
    "adagc", "adalite", "adamp", "adanorm", "aida", "alice", "apollo", "apolloadamw", "came",
    "conda", "dash", "dion", "kron", "lars", "lorarite", "mars", "psgd", "racs", "ranger21",
    "scion", "sgdp", "sm3", "soap", "spectral", "splus", "stableadamw", "stablespam",
))  # fmt: skip
_OPTIONS = ("caution", "cautious")
"""Options that make an elementwise optimizer scale its update by the mean of a mask over
the tensor (arXiv:2411.16085)."""

_known: dict[type, bool] = {}


def looks_at_whole_tensors(optimizer: Optimizer) -> bool:
    """Whether an optimizer is known to look at whole matrices or tensors:
    by the name of its class or a base, or an option."""
    if any(group.get(option) for group in optimizer.param_groups for option in _OPTIONS):
        return True
    kind = type(optimizer)
    known = _known.get(kind)
    if known is None:
        names = [base.__name__.lower().replace("_", "") for base in kind.__mro__]
        known = is_of_bitsandbytes(kind) or any(
            name in _NAMES or any(w in name for w in _WORDS) for name in names
        )
        _known[kind] = known
    return known


def require_elementwise(optimizer: Optimizer) -> None:
    """Refuses an optimizer that looks at whole tensors if it holds a sharded parameter,
    or one of bitsandbytes at all.

    Raises:
        PlacementError: It does. Nothing was updated.
    """
    if not looks_at_whole_tensors(optimizer) or getattr(optimizer, "steps_wholes", False):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            slot = slot_of(parameter)
            if slot is not None and is_of_bitsandbytes(type(optimizer)):
                raise PlacementError(
                    f"{type(optimizer).__name__} of bitsandbytes cannot "
                    "step transformed parameters.",
                    parameter=slot,
                    why="its kernels take plain tensors alone, "
                    "and scale states by blocks of whole ones; nothing was updated",
                    fix="torch.optim.AdamW(model.parameters(), fused=True), in a Trainer "
                    "optim='adamw_torch_fused': a rank holds its share of the states; "
                    "zf.states8bit(optimizer) keeps them in 8 bits",
                )
            if slot is not None and slot.path.is_spread:
                raise PlacementError(
                    f"{type(optimizer).__name__} looks at whole tensors, "
                    f"and {slot.fqn!r} is sharded.",
                    parameter=slot,
                    why="its update of a shard is not the shard of its update; nothing was updated",
                    fix=f"zf.by_owner({type(optimizer).__name__}(...)): "
                    "each tensor is stepped whole, by one rank",
                )


def is_of_bitsandbytes(kind: type) -> bool:
    """Whether a class of optimizers is one of bitsandbytes, or derived from one."""
    return any(base.__module__.startswith("bitsandbytes.") for base in kind.__mro__)


def steps_locally(optimizer: Optimizer) -> None:
    """Lets one of torch's elementwise optimizers step on local tensors from now on.

    Idempotent. [Note: local steps]
    """
    if type(optimizer) in TORCH_ELEMENTWISE and "_init_group" not in optimizer.__dict__:
        optimizer.__dict__["_init_group"] = _LocalGroups(optimizer)
        if type(optimizer) is SGD:
            hooks: Any = optimizer._optimizer_step_post_hooks
            hooks.move_to_end(optimizer.register_step_post_hook(_restate).id, last=False)


class _LocalGroups:
    """Stands in for `_init_group` of one optimizer."""

    __slots__ = ("_optimizer", "replaced")

    def __init__(self, optimizer: Any) -> None:
        # Weakly: the optimizer holds this, and a cycle would keep both until garbage collection.
        self._optimizer = weakref.ref(optimizer)
        # What local tensors replace in the running step of SGD, by identity.
        self.replaced: dict[int, DTensor] = {}

    def __call__(self, group: dict[str, Any], parameters: list[Any], *lists: list[Any]) -> Any:
        optimizer: Any = self._optimizer()
        found = type(optimizer)._init_group(optimizer, group, parameters, *lists)
        rows = [parameters, *(tensors for tensors in lists if len(tensors) == len(parameters))]
        if TracingContext.try_get() is not None or group["differentiable"]:
            return found  # [Note: not in a graph]
        if Tensor in map(type, lists[0]):  # whole gradients that were assigned
            lists[0][:] = [
                cut_alike(grad, p) if type(grad) is Tensor and isinstance(p, DTensor) else grad
                for p, grad in zip(parameters, lists[0], strict=True)
            ]
        if all(map(_alike, zip(*rows, strict=True))):
            if type(optimizer) is SGD and group["momentum"]:
                self.replaced.update((id(p), p) for p in parameters if isinstance(p, DTensor))
            for tensors in rows:
                tensors[:] = [local_of(t) if isinstance(t, DTensor) else t for t in tensors]
        dtypes = [p.dtype for p in parameters]
        if dtypes != [grad.dtype for grad in lists[0]]:  # [Note: narrow gradients]
            lists[0][:] = [grad.to(dtype) for grad, dtype in zip(lists[0], dtypes, strict=True)]
        return found


def _restate(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    """Moves the states of SGD to the resting parameters. [Note: momentum of SGD]"""
    groups: _LocalGroups | None = optimizer.__dict__.get("_init_group")
    if groups is None:
        # A streamed optimizer, which shares the hooks of the one inside,
        # and steps over local tensors anyway.
        return
    for parameter in groups.replaced.values():
        written = optimizer.state.pop(parameter._local_tensor, {}).get("momentum_buffer")
        if written is None:  # a step before this one raised
            continue
        state = optimizer.state[parameter]
        if (
            not isinstance(known := state.get("momentum_buffer"), DTensor)
            or known._local_tensor is not written
        ):
            state["momentum_buffer"] = on_spec(written, parameter._spec)
    groups.replaced = {}


def _alike(tensors: tuple[Any, ...]) -> bool:
    """Whether the gradient and the states of a parameter are cut as the parameter is."""
    parameter = tensors[0]
    if not isinstance(parameter, DTensor):
        return not any(isinstance(t, DTensor) for t in tensors)
    spec = parameter._spec
    return all(
        t._spec is spec or (t._spec.placements == spec.placements and t._spec.mesh == spec.mesh)
        for t in tensors
        if isinstance(t, DTensor)
    )
