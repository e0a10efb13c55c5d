"""An average of the weights, as shards beside the shards of the parameters (`ema`).

[Note: three roundings] A new average is (average - value) * decay + value, in three operations in
place, each of which rounds once. So every kernel gives the same bits: on a device or the host, in
the middle of a tensor or at its end, whole or cut. One `lerp` would round as its kernel likes. In
16 bits an update by a thousandth would be rounded away, so an average has 32.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zero_fn.errors import LayoutError, StaleError, StateError
from zero_fn.runtime.registry import require_idle, units_of
from zero_fn.runtime.replaced_parameters import replacement_of
from zero_fn.runtime.uncompiled import uncompiled
from zero_fn.storage import storage_on
from zero_fn.tiers.parcels import Form, record_nbytes
from zero_fn.tiers.record import Record
from zero_fn.tiers.tier_tensor import TierTensor, in_memory
from zero_fn.transforms.unsharded import refresh
from zero_fn.values.dtensors import local_of, on_spec, spec_on
from zero_fn.values.tiers import Tier, is_away

__all__ = ["Average", "ema"]

Decay = float | Callable[[int], float]


def ema(model: nn.Module, decay: Decay = 0.999, *, tier: Tier | None = None) -> Average:
    """Keeps an exponential moving average of the parameters of a model, cut as they are.

        average = zf.ema(model, decay=0.999)
        optimizer.step()
        average.update()
        with average.shown():
            evaluate(model)

    What requires gradients now is averaged from its present values on, also if it is frozen later.
    What is frozen now takes no room, and is shown as it is; so are buffers. Averages are in float32
    where parameters rest in 16 bits, and else in their dtype. They are those of replicas to the
    bit, at every stage, mesh and tier. Communicates nothing.

    Args:
        model: Any module, transformed or not, after the last transform.
        decay: How much of the average an update keeps, from 0 to 1, or a function that says so for
            update 1, 2, ...: `lambda n: min(0.999, n / (n + 9))` follows the first steps closely.
        tier: Where it rests: `zf.cpu()`, `zf.nvme(path)`; None: on the device.

    Raises:
        LayoutError: `decay` is not in its range, or nothing requires gradients.
        StateError: The model is running, accumulating, inside `unsharded`, evicted, or on meta.
        TierError: The tier has no room.
    """
    return Average(model, decay, tier)


class Average:
    """An average of the parameters of a model, which `ema` makes.

    `zf.save` and `zf.load` take it beside the model, as `extra={"average": average}`, on any number
    of ranks, mesh, stage and tier.
    """

    updates = 0
    """How many updates it has had."""

    @uncompiled
    @torch.no_grad()
    def __init__(self, model: nn.Module, decay: Decay, tier: Tier | None) -> None:
        self._model = model
        self._decay = decay
        self._tier = tier
        self._is_shown = False
        self._decay_of(1)
        require_idle(units_of(model), "ema")
        for unit in units_of(model):
            unit.follow_moved()
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        values = [local_of(parameter) for parameter in self._parameters.values()]
        if not values:
            raise LayoutError(
                "No parameter requires gradients.", fix="zf.ema before parameters are frozen"
            )
        if any(value.is_meta for value in values):
            raise StateError(
                "The model is on meta: it has no values.",
                fix="zf.materialize(model, device) before zf.ema",
            )
        self._forms = list(map(_form, values))
        wide = [
            torch.promote_types(v.dtype, torch.float32) if v.is_floating_point() else v.dtype
            for v in values
        ]
        self._averages = _rooms(values, wide, tier)
        for average, value in zip(self._averages, values, strict=True):
            average.copy_(value)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The averages by the names of their parameters: DTensors of the same placements,
        where those are DTensors."""
        found: dict[str, Tensor] = {}
        for name, (p, average) in zip(self._parameters, self.shards(), strict=True):
            spec = (
                spec_on(p._spec, p.shape, p.stride(), average.dtype)
                if isinstance(p, DTensor)
                else None
            )
            found[name] = average if spec is None else on_spec(average, spec)
        return found

    def shards(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter that is averaged, and the average of what this rank holds of it."""
        return zip(self._parameters.values(), self._averages, strict=True)

    @uncompiled
    @torch.no_grad()
    def update(self) -> None:
        """Takes in the parameters as they are now: all at once, in a tier one after the other.

        Communicates nothing.

        Raises:
            StaleError: Parameters were replaced, moved, cast,
                unfrozen or transformed since `ema`, or are whole.
            StateError: The average is shown.
            StorageError: A disk refused, on this rank; the average is partly updated.
        """
        self.require_hidden("update()")
        self._require_current()
        decay = self._decay_of(self.updates + 1)
        self.updates += 1
        averages, values = list[Tensor](), list[Tensor]()
        for parameter, average in self.shards():
            value = local_of(parameter)
            if isinstance(average, TierTensor):
                with average.record.opened(0, is_written=True, on_host=True) as flat:
                    own = flat.as_strided(average.shape, average.stride(), flat.storage_offset())
                    _update([own], [in_memory(value).to(own.device)], decay)
            elif isinstance(value, TierTensor):
                _update([average], [in_memory(value)], decay)
            else:
                averages.append(average)
                values.append(value)
        if values:
            _update(averages, values, decay)

    @contextmanager
    def shown(self) -> Generator[None, None, None]:
        """Inside the block the parameters of the model have the values of the average; after it
        their own, to the bit, also after an exception.

        Shards are copied, nothing is gathered, nothing is communicated.

            with average.shown():
                zf.save_pretrained(model, "average")

        Values of parameters wait in the tier of the average. Edits inside are dropped.
        The next forward gathers anew.

        Raises:
            StaleError: As `update` does.
            StateError: The module is running or accumulating. Inside: `optimizer.step()`,
                `update()`, or to save or load the average itself.
            StorageError, TierError: A disk refused, or the tier has no room, on this rank.
        """
        self.require_hidden("shown()")
        require_idle(units_of(self._model), "shown()")
        self._require_current()
        values = [local_of(parameter) for parameter, _ in self.shards()]
        own = _rooms(values, [value.dtype for value in values], self._tier)
        with torch.no_grad():
            for room, value in zip(own, values, strict=True):
                room.copy_(value)
        self._is_shown, hook = True, register_optimizer_step_pre_hook(self._refuse_step)
        try:
            self._put(self._averages)
            yield
        finally:
            self._put(own)
            hook.remove()
            self._is_shown = False
            self._require_current()

    @torch.no_grad()
    def _put(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self._parameters.values(), values, strict=True):
            local_of(parameter).copy_(value)
        if units_of(self._model):
            refresh(self._model)

    def _refuse_step(self, optimizer: Optimizer, *_: object) -> None:
        averaged = set(map(id, self._parameters.values()))
        if any(
            id(parameter) in averaged
            for group in optimizer.param_groups
            for parameter in group["params"]
        ):
            self.require_hidden("optimizer.step()")

    def require_hidden(self, verb: str) -> None:
        """Refuses what cannot be done while the parameters show the average."""
        if self._is_shown:
            raise StateError(
                f"{verb} was called inside average.shown().",
                why="the parameters show the average, and get their own values "
                "back when the block ends",
                fix=f"call {verb} after the `with average.shown():` block",
            )

    def _require_current(self) -> None:
        now = dict(self._model.named_parameters())
        for (name, parameter), form in zip(self._parameters.items(), self._forms, strict=True):
            replacement = replacement_of(parameter)
            is_replaced = replacement is not None and replacement.parameter() is not None
            if (
                is_replaced
                or now.pop(name, None) is not parameter
                or _form(local_of(parameter)) != form
            ):
                raise StaleError(
                    "The average is of other parameters than those that the model has now.",
                    first=name,
                    why="it was transformed, replaced, moved, cast or evicted since zf.ema, "
                    "or is whole inside unsharded()",
                    fix="average = zf.ema(model) after the last transform or move; "
                    "its methods outside of such blocks",
                )
        for name, parameter in now.items():
            if parameter.requires_grad:
                raise StaleError(
                    "A parameter is trained that has no average.",
                    first=name,
                    why="it was frozen, or not there, when zf.ema was called, "
                    "and what it was before its first step is lost",
                    fix="zf.ema before parameters are frozen: they are averaged all the same",
                )

    def _decay_of(self, number: int) -> float:
        decay = self._decay(number) if callable(self._decay) else self._decay
        if not 0 <= decay <= 1:
            raise LayoutError(
                "The decay of an average is from 0 to 1.",
                decay=decay,
                fix="zf.ema(model, decay=0.999)",
            )
        return decay


def _update(averages: list[Tensor], values: list[Tensor], decay: float) -> None:
    """[Note: three roundings]"""
    torch._foreach_sub_(averages, values)
    torch._foreach_mul_(averages, decay)
    torch._foreach_add_(averages, values)


def _form(local: Tensor) -> tuple[object, ...]:
    return local.dtype, local.shape, local.device


def _rooms(
    values: Sequence[Tensor], dtypes: Sequence[torch.dtype], tier: Tier | None
) -> list[Tensor]:
    """Memory for tensors of the shapes of these: in a tier,
    where that is other memory than their own, a record for each."""
    away = [
        at for at, value in enumerate(values) if is_away(tier, value.device.type) and value.numel()
    ]
    rooms = [
        torch.empty_like(value, dtype=dtype, device="meta" if at in away else None)
        for at, (value, dtype) in enumerate(zip(values, dtypes, strict=True))
    ]
    if tier is not None and away:
        storage = storage_on(tier, "an average of parameters")
        forms = [[Form(r.numel(), r.dtype)] for r in rooms]
        sizes = [record_nbytes(forms[at]) for at in away]
        storage.stage(max(sizes), 1)
        for at, place in zip(away, storage.reserve(sizes), strict=True):
            record = Record(storage, forms[at], values[at].device, place)
            rooms[at] = TierTensor(record, 0, rooms[at].shape, rooms[at].stride())
    return rooms
