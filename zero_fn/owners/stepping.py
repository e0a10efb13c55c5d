"""A step: batches of whole tensors arrive at their owners,
are stepped by the optimizer itself, and leave again.

    arriving    gradients and values of the next batch
    stepped     this batch, by the optimizer's own `step`, on plain whole tensors
    leaving     new values of the batch before

[Note: several calls for one step] The optimizer's `step` is called for each batch. Options that it
changes, such as a count of steps in a group, begin each call as they were, and have their new
values after the last one. A rank without a tensor calls it, too, without parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from zero_fn.owners.assignment import Dealt
from zero_fn.owners.exchange import Carried, LinesByAxis, collected, spread
from zero_fn.owners.states_in_tier import Shelf
from zero_fn.runtime.attributes import attributes_of
from zero_fn.runtime.bfloat16_step import Widened, rounding_of
from zero_fn.streamed.inner_optimizer import raw_step, stand_in
from zero_fn.tiers.tier_tensor import TierTensor, in_memory
from zero_fn.transport.line import Work
from zero_fn.transport.trip import Trip
from zero_fn.values.dtensors import local_of
from zero_fn.values.numbering import Numbering

__all__ = ["Arithmetic", "Owned", "States", "step_batches"]

States = MutableMapping[Tensor, dict[str, Any]]


class Owned(NamedTuple):
    """A parameter that this rank steps, whole."""

    parameter: Tensor
    value: Tensor
    grad: Tensor


class Arithmetic:
    """The arithmetic of an optimizer in one step of the user. [Note: several calls for one step]"""

    def __init__(
        self, inner: Optimizer, states: States, shelf_of: Callable[[Tensor], Shelf | None]
    ) -> None:
        self._inner = inner
        self._states = states
        self._shelf_of = shelf_of
        self._group_of = {
            id(p): number
            for number, group in enumerate(inner.param_groups)
            for p in group["params"]
        }
        # What the calls have changed: of the attributes of the optimizer, and of each group.
        self._changed: list[dict[str, Any]] = [{} for _ in range(1 + len(inner.param_groups))]
        self._is_begun = False

    def step(self, owned: Sequence[Owned]) -> None:
        """Steps some parameters: together those whose states are in memory,
        and one after the other those in a tier."""
        rests = [(each, self._shelf_of(each.parameter)) for each in owned]
        here = [each for each, shelf in rests if shelf is None]
        away = [(each, shelf) for each, shelf in rests if shelf is not None]
        if here or not away:
            self._step(here)
        for at, (each, shelf) in enumerate(away):
            earlier = self._states.get(each.parameter, {})
            self._states[each.parameter] = shelf.bring(earlier)
            if at + 1 < len(away):
                following, its = away[at + 1]
                its.fetch(self._states.get(following.parameter, {}))
            self._step([each])
            self._states[each.parameter] = shelf.keep(earlier, self._states[each.parameter])

    def _step(self, owned: Sequence[Owned]) -> None:
        inner, state = self._inner, defaultdict[Any, Any](dict)
        groups = [{**group, "params": []} for group in inner.param_groups]
        pieces: list[tuple[nn.Parameter, Widened | None]] = []
        for parameter, value, grad in owned:
            known, widened = dict(self._states.get(parameter, {})), None
            if rounding_of(parameter) is not None:
                widened = Widened(parameter, value, known, Numbering.of_whole(value))
            piece = nn.Parameter(
                value if widened is None else widened.values, requires_grad=parameter.requires_grad
            )
            vars(piece).update(attributes_of(parameter))
            piece.grad = grad.to(piece.dtype)
            groups[self._group_of[id(parameter)]]["params"].append(piece)
            if known:
                state[piece] = known
            pieces.append((piece, widened))
        options = [dict(group) for group in groups]
        stepping = stand_in(inner, groups, state)
        attributes = dict(vars(stepping))
        for own in (vars(stepping), *groups):  # what a step changes in place is a copy
            own.update(
                {name: value.clone() for name, value in own.items() if isinstance(value, Tensor)}
            )
        raw_step(stepping)
        for (parameter, value, _), (piece, widened) in zip(owned, pieces, strict=True):
            self._states[parameter] = state.get(piece, {})
            if widened is not None:
                self._states[parameter] |= widened.round(piece, value)
            elif piece.data_ptr() != value.data_ptr():  # the step has given it other memory
                value.copy_(piece)
        for found, before, after in zip(
            self._changed,
            [attributes, *options],
            [vars(stepping), *stepping.param_groups],
            strict=True,
        ):
            found |= _changes(before, after)
        self._is_begun = True

    def finish(self) -> None:
        """Takes over the options that the calls have changed."""
        if not self._is_begun:
            self.step(())
        targets = [vars(self._inner), *self._inner.param_groups]
        for target, changes in zip(targets, self._changed, strict=True):
            for name, value in changes.items():
                own = target.get(name)
                if (
                    isinstance(value, Tensor)
                    and isinstance(own, Tensor)
                    and own.shape == value.shape
                ):
                    own.copy_(value)
                else:
                    target[name] = value


def _changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    own = ("params", "param_groups", "state")
    return {
        name: value
        for name, value in after.items()
        if name not in own and before.get(name, own) is not value
    }


def step_batches(
    batches: Sequence[Sequence[Dealt]], arithmetic: Arithmetic, lines: LinesByAxis, check: str
) -> None:
    """Steps all tensors of some batches.

    All ranks call it with the same ones; `check` is a text that must agree.
    """
    begun = (_Batch(batch, lines, check) for batch in batches)  # each as it is asked for
    arriving, leaving = next(begun, None), None
    while arriving is not None:
        batch = arriving
        batch.trip.wait()
        arriving = next(begun, None)
        arithmetic.step(batch.owned)
        if leaving is not None:
            leaving.wait()
        leaving = batch.leave(lines)
    if leaving is not None:
        leaving.wait()


class _Batch:
    """Tensors of one family, on their way to their owners."""

    def __init__(self, dealt: Sequence[Dealt], lines: LinesByAxis, check: str) -> None:
        self.owned: list[Owned] = []
        self._check = check
        self._values: list[Carried] = []
        grads: list[Carried] = []
        for each in dealt:
            parameter = each.parameter
            assert parameter.grad is not None
            value, grad = in_memory(local_of(parameter)), in_memory(local_of(parameter.grad))
            # Memory for what arrives; none where this rank has all of it already.
            whole_value = whole_grad = None
            if each.is_mine and each.route.is_cut:
                whole_value, whole_grad = each.whole(), each.whole(grad.dtype)
            self._values.append(Carried(each, value, whole_value))
            grads.append(Carried(each, grad, whole_grad))
            if each.is_mine:
                # The step may write into it, and it is to stay the same on all ranks.
                if whole_grad is None:
                    whole_grad = each.whole(grad.dtype).copy_(grad)
                self.owned.append(
                    Owned(parameter, value if whole_value is None else whole_value, whole_grad)
                )
        self.trip = Trip(collected([*grads, *self._values], lines, check))

    def leave(self, lines: LinesByAxis) -> Trip:
        """Sends new values to where they rest."""
        return Trip(self._back(lines))

    def _back(self, lines: LinesByAxis) -> Iterator[Work]:
        yield from spread(self._values, lines, check=self._check)
        for dealt, part, _ in self._values:
            local = local_of(dealt.parameter)
            if isinstance(local, TierTensor):
                local.copy_(part)
