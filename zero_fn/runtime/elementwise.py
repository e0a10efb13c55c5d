"""Which optimizers may step over shards: those that treat every element alone.

Most do (SGD, Adam, AdamW, Adagrad, RMSprop, ...). Some look at a whole matrix or tensor: they orthogonalise it, factor its
second moment, or scale by its norm. Given shards they would compute another update, or one that differs between ranks,
without any error. They are known by name, because torch has no property to ask for.
"""

from __future__ import annotations

from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from zero_fn.errors import PlacementError
from zero_fn.runtime.registry import slot_of

__all__ = ["TORCH_ELEMENTWISE", "looks_at_whole_tensors", "require_elementwise"]

TORCH_ELEMENTWISE: frozenset[type[Optimizer]] = frozenset((
    Adam, AdamW, SGD, Adagrad, RMSprop, Adadelta, Adamax, NAdam, RAdam, ASGD, Rprop,
))  # fmt: skip
"""The optimizers of torch that treat every element alone. A class derived from one of them may not."""

_WORDS = ("muon", "adafactor", "shampoo", "lamb", "galore", "adammini", "novograd", "prodigy", "dadapt", "kfac")
_NAMES = frozenset({
    "adagc", "adalite", "adamp", "adanorm", "aida", "alice", "apollo", "apolloadamw", "came", "conda", "dash", "dion", "kron",
    "lars", "lorarite", "mars", "psgd", "racs", "ranger21", "scion", "sgdp", "sm3", "soap", "spectral", "splus",
    "stableadamw", "stablespam",
})  # fmt: skip
_OPTIONS = ("caution", "cautious")
"""Options of elementwise optimizers that scale an update by the mean of a mask over the whole tensor (arXiv:2411.16085)."""

_known: dict[type, bool] = {}


def looks_at_whole_tensors(optimizer: Optimizer) -> bool:
    """Whether an optimizer is known to look at whole matrices or tensors: by its class, a base of it, or an option."""
    if any(group.get(option) for group in optimizer.param_groups for option in _OPTIONS):
        return True
    kind = type(optimizer)
    known = _known.get(kind)
    if known is None:
        names = [base.__name__.lower().replace("_", "") for base in kind.__mro__]
        known = any(name in _NAMES or any(word in name for word in _WORDS) for name in names)
        _known[kind] = known
    return known


def require_elementwise(optimizer: Optimizer) -> None:
    """Refuses an optimizer that looks at whole tensors if it holds a sharded parameter.

    Raises:
        PlacementError: It does. Nothing was updated.
    """
    if not looks_at_whole_tensors(optimizer):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            slot = slot_of(parameter)
            if slot is not None and slot.path.is_spread:
                raise PlacementError(
                    f"{type(optimizer).__name__} looks at whole tensors, and {slot.fqn!r} is sharded.",
                    parameter=slot,
                    why="its update of a shard is not the shard of its update; nothing was updated",
                    fix="keep these parameters replicated: zf.replicate(model, mesh['dp']), or where= in the sharding "
                    "transforms; shard the others under an elementwise optimizer",
                )
