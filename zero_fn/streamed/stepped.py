"""One step of an optimizer over chunks: its own arithmetic on pieces of parameters, with states from a buffer.

[Note: where a step is computed] Where the states are: on the host if they rest in another tier than the memory of an
accelerator, as in ZeRO-Offload (Ren et al. 2021, section 4.1). They are the larger part, so the gradients come to them, and
parameters that rest on the device come, too, and go back; what rests in a tier is on the host already.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_fn.resting import local_of
from zero_fn.runtime.tier_tensor import TierTensor
from zero_fn.streamed.chunk import Chunk, Cut
from zero_fn.streamed.one_pass import steps_in_one_pass
from zero_fn.streamed.parcels import Copies
from zero_fn.streamed.scratch import Scratch, begun, taken_over
from zero_fn.streamed.trial import raw_step, replaced
from zero_fn.streamed.visits import Visits

__all__ = ["Stepped"]


class Stepped:
    """One step under way.

    Attributes:
        count: Chunks whose parameters were, at least in part, updated.
    """

    def __init__(
        self,
        inner: Optimizer,
        known: Sequence[Tensor],
        grads: Mapping[int, Tensor],
        copies: Copies,
        visits: Visits,
        *,
        notes: bool = True,
    ) -> None:
        """Begins a step.

        Args:
            inner: The optimizer whose arithmetic it is.
            known: Its parameters, by number.
            grads: Their gradients, by the same numbers, of those that have one.
            copies: The lane of compute copies.
            visits: The lane of what comes from an accelerator.
            notes: Whether the optimizer may keep something in its groups and attributes, which is taken over by `finish`.
        """
        self.count = 0
        self._copies, self._visits = copies, visits
        self._inner, self._known, self._grads = inner, known, grads
        self._groups: list[dict[str, Any]] = inner.param_groups
        # What every chunk begins with, whatever is in the groups by then.
        self._begins: list[dict[str, Any]] = [{**group, **begun(group)} for group in self._groups]
        self._scratch = Scratch(inner) if notes else None
        self._after: dict[int, dict[str, Any]] = {}

    def step(
        self, chunk: Chunk, states: Tensor, parcel: Tensor, copy: Tensor, gradients: Tensor, visiting: Tensor
    ) -> None:
        """Steps the parameters of one chunk.

        Args:
            chunk: Which.
            states: Their states, where they are stepped.
            parcel: Themselves, if they rest in another tier.
            copy: Room for compute copies of these, if there are any.
            gradients: Their gradients, if these do.
            visiting: Those of both that are on an accelerator, while their states are not.
        """
        self.count += 1
        device = states.device  # [Note: where a step is computed]
        values, grads = parcel.to(device), gradients.to(device)
        state: defaultdict[Any, Any] = defaultdict(dict)
        groups: list[dict[str, Any]] = []
        pairs: list[tuple[Cut, nn.Parameter]] = []
        moved: list[tuple[Tensor, Tensor]] = []
        rooms, visits = self._copies.begin(chunk, copy), self._visits.of(chunk, visiting)
        for number, cuts in groupby(chunk.cuts, key=lambda cut: cut.group):
            stand_ins = []
            for cut in cuts:
                parameter = self._known[cut.piece.parameter]
                if cut.piece.parameter not in self._grads:
                    continue
                value, gradient = visits.get(cut, (None, None))
                is_fetched = grads.numel() > 0 and isinstance(local_of(self._grads[cut.piece.parameter]), TierTensor)
                if values.numel():
                    resting = cut.of_parcel(values, parameter.dtype)
                else:
                    resting = value.room if value is not None else cut.of(local_of(parameter))
                if is_fetched:
                    grad = cut.of_parcel(grads, parameter.dtype)
                else:
                    grad = gradient.room if gradient is not None else cut.of(self._visits.gradient(cut))
                stand_in = cut.stand_in(parameter, resting.to(device), grad.to(device))
                if resting.device != device:
                    moved.append((resting, stand_in))
                own = cut.states(states)
                if own:
                    state[stand_in] = own
                stand_ins.append(stand_in)
                pairs.append((cut, stand_in))
            if stand_ins:
                own_group = self._begins[number]
                groups.append({**own_group, **begun(own_group), "params": stand_ins})
                self._after[number] = groups[-1]
        sends = _sends(pairs, rooms) if values is parcel else {}
        if self._scratch is not None:
            self._scratch.begin()
        with replaced(self._inner, groups, state):
            if not steps_in_one_pass(self._inner, sends):
                sends = {}
                raw_step(self._inner)
        for cut, stand_in in pairs:
            cut.keep(states, state.get(stand_in, {}))
        for resting, stepped in moved:
            resting.copy_(stepped)
        if values is not parcel:
            parcel.copy_(values)
        sent = {cut.in_parcel for cut, stand_in in pairs if stand_in in sends}
        self._copies.fill(chunk, parcel, {begin: room for begin, room in rooms.items() if begin not in sent})

    def finish(self) -> None:
        """Takes over what the optimizer wrote into its groups and attributes."""
        assert self._scratch is not None, "a step without notes"
        self._scratch.finish()
        for number, after in self._after.items():
            taken_over(self._groups[number], after)


def _sends(pairs: Sequence[tuple[Cut, nn.Parameter]], rooms: Mapping[int, Tensor]) -> dict[Tensor, Tensor]:
    """What the kernel can write beside the parameters that it steps: their copies in bfloat16."""
    found: dict[Tensor, Tensor] = {}
    for cut, stand_in in pairs:
        room = rooms.get(cut.in_parcel) if cut.in_parcel is not None and cut.piece.numel else None
        if room is not None and room.dtype == torch.bfloat16:
            found[stand_in] = cut.laid(room)
    return found
