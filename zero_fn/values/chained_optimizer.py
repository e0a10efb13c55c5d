"""Several optimizers of one run, such as Muon for matrices and AdamW for the rest,
where one is asked for.

Every function that takes an optimizer takes a sequence of them: `members_of` lists them, and
`as_one` makes of them an optimizer that a scheduler, a trainer or a profile can use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_fn.errors import StateError

__all__ = ["ChainedOptimizer", "Optimizers", "as_one", "members_of"]

Optimizers = Optimizer | Sequence[Optimizer]


class ChainedOptimizer(Optimizer):
    """Steps several optimizers, one after the other.

    Its groups are theirs, so a scheduler sets the rates of all.

    Attributes:
        members: The optimizers.
    """

    def __init__(self, members: Sequence[Optimizer]) -> None:
        self.members = tuple(members)
        self.defaults = dict(self.members[0].defaults)
        owners: dict[int, str] = {}
        for number, member in enumerate(self.members):
            stepped = [parameter for group in member.param_groups for parameter in group["params"]]
            for parameter in stepped:
                own = f"number {number}, {type(member).__name__}"
                other = owners.setdefault(id(parameter), own)
                if other != own:
                    raise StateError(
                        "A parameter is in two optimizers.",
                        parameter=list(parameter.shape),
                        optimizers=f"{other}; {own}",
                        why="each would step it, and a checkpoint has its "
                        "states under its name once",
                        fix="leave it to one of them",
                    )

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of all members."""
        return [group for member in self.members for group in member.param_groups]

    @property
    def state(self) -> Mapping[Tensor, Any]:  # type: ignore[override]
        """The states of all members by parameter, to be read."""
        return {
            parameter: states
            for member in self.members
            for parameter, states in member.state.items()
        }

    def __repr__(self) -> str:
        return "\n".join(map(repr, self.members))

    def wrapped_by(self, wrap: Callable[[Optimizer], Optimizer]) -> ChainedOptimizer:
        """Itself, with each member wrapped (`zf.by_owner`, `zf.streamed`):
        schedulers that know it go on."""
        self.members = tuple(map(wrap, self.members))
        return self

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses: it does not say to which member."""
        raise StateError(
            "A group of parameters was to be added to several optimizers.",
            members=", ".join(type(member).__name__ for member in self.members),
            fix="add it to one of them",
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of all members."""
        for member in self.members:
            member.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all members.

        The closure is evaluated first, once, with gradients enabled; its value is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for member in self.members:
            member.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state dicts of the members, in their order."""
        return {"members": [member.state_dict() for member in self.members]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned."""
        for member, state in zip(self.members, state_dict["members"], strict=True):
            member.load_state_dict(state)

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> Any:
        """Calls a hook before the first member steps of a round, in which each of them steps."""
        return self._in_rounds(hook, "register_step_pre_hook", at=1)

    def register_step_post_hook(self, hook: Callable[..., Any]) -> Any:
        """Calls a hook once all members have stepped."""
        return self._in_rounds(hook, "register_step_post_hook", at=len(self.members))

    def _in_rounds(self, hook: Callable[..., Any], register: str, *, at: int) -> _Handles:
        seen: set[int] = set()

        def each(member: Optimizer, args: Any, options: Any) -> None:
            is_new = id(member) not in seen
            seen.add(id(member))
            if is_new and len(seen) == at:
                hook(self, args, options)
            if len(seen) == len(self.members):
                seen.clear()

        return _Handles([getattr(member, register)(each) for member in self.members])


class _Handles:
    """Handles of hooks, as one."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def as_one(optimizer: Optimizers) -> Optimizer:
    """The optimizer, or several as one.

    Raises:
        StateError: A parameter is in two of them, or there is none.
    """
    if not isinstance(optimizer, Sequence):
        return optimizer
    members = [member for each in optimizer for member in members_of(each)]
    if not members:
        raise StateError(
            "An empty sequence of optimizers was given.", fix="(muon, adamw), or one optimizer"
        )
    return members[0] if len(members) == 1 else ChainedOptimizer(members)


def members_of(optimizer: Optimizers | None) -> tuple[Optimizer, ...]:
    """The optimizers that one, a sequence of them or None stand for.

    Raises:
        StateError: As `as_one`.
    """
    if optimizer is None:
        return ()
    found = as_one(optimizer)
    return found.members if isinstance(found, ChainedOptimizer) else (found,)
