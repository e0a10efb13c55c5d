"""`metrics`: the numbers of a run while it goes on, for sinks;
and what to do when a step goes wrong."""

from __future__ import annotations

import logging
import os
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from math import nan
from statistics import fmean, median
from time import monotonic
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_fn.checkpoint import load
from zero_fn.errors import LayoutError
from zero_fn.inspect.memory import memory
from zero_fn.monitor.gradient_norm import clip_grad_norm
from zero_fn.monitor.memory import memory_numbers
from zero_fn.monitor.sinks.outlet import Numbers
from zero_fn.monitor.sinks.sink import Sink, sink_of
from zero_fn.monitor.spikes import Spike, Spikes
from zero_fn.profiling.clock import Reader, Taken
from zero_fn.profiling.spans import spans_of
from zero_fn.runtime.registry import runs_of, units_of
from zero_fn.transport.agree import Bits
from zero_fn.transport.traffic import PAYLOAD
from zero_fn.values import watching
from zero_fn.values.chained_optimizer import Optimizers, as_one, members_of
from zero_fn.values.tiers import Nvme
from zero_fn.values.watching import Moment

__all__ = ["Metrics", "metrics"]

Answer = Literal["report", "skip", "load"]

_ANSWERS = ("report", "skip", "load")
_LATE = 2  # steps of a device that may be under way before the host waits for the first

_BY_KIND = {"all-gather": "gather", "reduce-scatter": "reduce", "all-to-all": "reduce"}
_NAMES = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer_step",
    "data": "data",
    "copies": "tier_wait",
}
"""Of seconds, by the phase or the part of a step."""

_log = logging.getLogger("zero_fn")


class Metrics:
    """The numbers of a run, and its watch. Made by `metrics`.

    Attributes:
        steps: How many calls of `step` there were, and the steps before that `metrics` was told of.
        skipped: How many of them the optimizer did not make, as of the last report: its step was
            skipped, here or by a `GradScaler`.
        spikes: What went wrong, the last hundred.
        loaded: Of the last checkpoint that a spike has loaded,
            what `zf.load` returned; None if none has.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        sinks: Sequence[Sink | str],
        *,
        every: int,
        every_rank: bool,
        norm: bool,
        on_spike: Answer | Callable[[Spike], Answer] | None,
        checkpoints: str | os.PathLike[str] | None,
        step: int,
    ) -> None:
        self.steps = step
        self.skipped = 0
        self.spikes: deque[Spike] = deque(maxlen=100)
        self.loaded: dict[str, Any] | None = None
        self._model = model
        self._optimizer = as_one(optimizer)
        self._line = runs_of(model, verb="metrics")[0].transport
        self._logs = every_rank or not dist.is_initialized() or dist.get_rank() == 0
        chosen = sinks if self._logs else [sink for sink in sinks if not isinstance(sink, str)]
        self._sinks = [sink_of(sink) if isinstance(sink, str) else sink for sink in chosen]
        self._every = every
        self._measures_norm = norm
        self._on_spike = on_spike
        self._folder = checkpoints
        self._counts = Counter[str]()
        self._watch = Spikes() if on_spike is not None else None
        self._paths = {
            path
            for home in {slot.home.tiers for unit in units_of(model) for slot in unit.slots}
            for tier in (home.params, home.grads, home.optim)
            if isinstance(tier, Nvme)
            for path in tier.paths
        }
        # Of the step that is made now.
        self._is_stepped = self._is_dropped = self._loads = False
        self._norm: float | None = None
        self._overflow: Tensor | None = None  # under a `GradScaler`
        self._overflows: list[Tensor] = []  # of the steps before, since the last report
        self._tally = _Tally(model, self._optimizer)
        self._undo: list[Callable[[], object]] = [
            each.register_step_pre_hook(lambda each, *_: self._before_step(each)).remove
            for each in members_of(self._optimizer)
        ]
        if self._watch is not None:
            watching.look(self._watch)

    def step(
        self,
        loss: Tensor | float | None = None,
        *,
        tokens: float = 0,
        samples: float = 0,
        grad_norm: Tensor | float | None = None,
        scaler: Any = None,
    ) -> Numbers:
        """Ends a step, to be called after `optimizer.step()` on every rank.

        Communicates, every `every` steps, 40 bytes a rank over the data axes of the model.

        Args:
            loss: Of this rank; the mean over ranks is reported.
            tokens, samples: Of this step on this rank; of samples that ranks share, its part.
            grad_norm: The norm of all gradients, of a clipping;
                else it is measured in the steps that are reported.
            scaler: A `torch.amp.GradScaler`, whose scale is reported.

        Returns:
            The numbers, which the sinks have got as well, by their names for Prometheus; empty but
            every `every` steps. On an accelerator the times are of steps that have ended there: up
            to two before.

        Raises:
            CheckpointError, StorageError: A checkpoint could not be loaded after
                a spike (`on_spike="load"`).
        """
        self.steps += 1
        seconds = self._tally.end_step()
        self._tally.tokens += tokens
        self._tally.samples += samples
        if self._overflow is not None:
            self._overflows.append(self._overflow)
            self._overflow = None
        self.skipped += not self._is_stepped or self._is_dropped
        if self._watch is not None:
            self._look_after_step(seconds, loss)
        self._is_stepped = self._is_dropped = False
        if self.steps % self._every:
            return {}
        found = self._found(loss, self._norm if grad_norm is None else _number(grad_norm), scaler)
        for sink in self._sinks if self._logs else ():
            sink.log(self.steps, found)
        return found

    def close(self) -> None:
        """Looks on no more, and closes the sinks that can be closed."""
        undo, self._undo = self._undo, []
        for each in (*undo, self._tally.reader.close):
            each()
        if self._watch is not None:
            watching.look_away(self._watch)
        for sink in self._sinks:
            getattr(sink, "close", lambda: None)()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the watch ---------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer) -> None:
        """Gradients are reduced, and an optimizer is about to use them."""
        # Set by a scaler: a fused step leaves itself out.
        overflow = getattr(optimizer, "found_inf", None)
        if overflow is not None:
            self._overflow = overflow + (0 if self._overflow is None else self._overflow)
        if self._is_stepped:  # by another optimizer
            return
        self._is_stepped, self._norm = True, None
        if self._measures_norm and (self._watch is not None or not (self.steps + 1) % self._every):
            # Set by a scaler: a fused step divides by it.
            scale = getattr(optimizer, "grad_scale", None)
            norm = float(clip_grad_norm(self._parameters(), None))
            self._norm = norm / (1.0 if scale is None else float(scale))
        # An overflow is what a scaler looks for.
        if self._watch is not None and self._norm is not None and not overflow:
            spike = self._watch.look_at(self.steps, "gradient", self._norm, self._line)
            if spike is not None and self._answer(spike) != "report":
                self._is_dropped = True
                for parameter in self._parameters():
                    parameter.grad = None

    def _parameters(self) -> list[Tensor]:
        return [each for group in self._optimizer.param_groups for each in group["params"]]

    def _look_after_step(self, seconds: float, loss: Tensor | float | None) -> None:
        assert self._watch is not None
        step = self.steps - 1
        self._watch.forget()
        if seconds and (spike := self._watch.look_at(step, "step", seconds)):
            self._answer(spike)
        # Its gradients may have told of a loss already.
        if (
            loss is not None
            and (spike := self._watch.look_at(step, "loss", _number(loss)))
            and not (self.spikes and self.spikes[-1].step == step)
        ):
            self._answer(spike)
        if self._folder is None:
            return
        loads, self._loads = self._loads, False
        # All ranks decide together, because losses differ between ranks.
        if Bits(self._line, [loads], "whether to load a checkpoint").read()[0]:
            self.loaded = load(self._folder, self._model, self._optimizer)
            _log.warning("loaded the last checkpoint of %s", self._folder)

    def _answer(self, spike: Spike) -> Answer:
        answer: Any = self._on_spike(spike) if callable(self._on_spike) else self._on_spike
        if spike.what == "step":
            answer = "report"
        _require_answer(answer, self._folder)
        self.spikes.append(spike)
        self._counts["spikes_total" if spike.is_finite else "not_finite_total"] += 1
        self._loads |= answer == "load"
        _log.warning("%s: %s", spike, answer)
        return answer  # type: ignore[no-any-return]

    # -- numbers -----------------------------------------------------------------------------------

    def _found(
        self, loss: Tensor | float | None, norm: float | None, scaler: Any
    ) -> dict[str, Any]:
        self.skipped += sum(map(bool, self._overflows))  # the host waits for the device here
        self._overflows.clear()
        found: dict[str, Any] = {"steps_total": self.steps, "skipped_steps_total": self.skipped}
        for number, group in enumerate(self._optimizer.param_groups):
            if "lr" in group:
                found[f'learning_rate{{group="{number}"}}'] = float(group["lr"])
        if norm is not None:
            found["grad_norm"] = norm
        if scaler is not None:
            found["loss_scale"] = scale = float(scaler.get_scale())
            found["loss_scale_at_minimum"] = float(scale <= 1.0)
        if self._watch is not None:
            found |= {name: self._counts[name] for name in ("spikes_total", "not_finite_total")}
        found |= self._compared(None if loss is None else _number(loss)) | self._tally.report()
        found |= memory_numbers(
            self._tally.reader.device_type, memory(self._model, self._optimizer), self._paths
        )
        return {f"zero_fn_{name}": value for name, value in found.items()}

    def _compared(self, loss: float | None) -> dict[str, float]:
        """What ranks say together: the mean loss, rates, and the slowest. A collective."""
        tally, line = self._tally, self._line
        own = [
            dist.get_rank() if dist.is_initialized() else 0,
            fmean(tally.beside or [0.0]),
            nan if loss is None else loss,
            tally.tokens,
            tally.samples,
        ]
        sent = torch.tensor(own, dtype=torch.float64, device="cpu").view(torch.uint8)
        rows = line.exchange(sent, "metrics").view(torch.float64).tolist()
        ranks, seconds, losses, tokens, samples = zip(*rows, strict=True)
        found = {"ranks": float(len(rows))}
        if loss is not None:
            found["loss"] = fmean(losses)
        for name, counts in (("tokens", tokens), ("samples", samples)):
            if any(counts):
                found[f"{name}_per_second"] = sum(counts) / tally.age_s
        if len(rows) > 1:
            slowest = seconds.index(max(seconds))
            others = seconds[:slowest] + seconds[slowest + 1 :]
            found["slowest_rank"] = ranks[slowest]
            found["slowest_rank_excess_seconds"] = seconds[slowest] - median(others)
        return found


class _Tally:
    """Seconds of each step since the last `report`, and sums since the run began."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.beside: list[float] = []  # of each step, seconds beside collectives
        self.tokens = self.samples = 0.0
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)
        self._peaks = Counter[str]()  # bytes
        self._totals = Counter[str]()
        self._before = Counter[str]()  # the totals at the last `report`
        self._since = monotonic()  # the time of the last `report`
        self._taken = deque[Taken]()
        self.reader = Reader(model, optimizer)

    @property
    def age_s(self) -> float:
        """Seconds since the last `report`."""
        return monotonic() - self._since

    def end_step(self) -> float:
        """Takes what was noted. Of a device that is behind, the steps that it has ended;
        returns the seconds of the last of them, 0 if there is none."""
        seconds, reader = 0.0, self.reader
        reader.note(Moment.STEPPED)
        self._taken.append(reader.take())
        while self._taken and (reader.is_done(self._taken[0]) or len(self._taken) > _LATE):
            taken = reader.resolve(self._taken.popleft())
            seconds = self._add_seconds(taken)
            self._add_bytes(taken)
        return seconds

    def _add_seconds(self, taken: Taken) -> float:
        spans = list(spans_of(taken.marks, on_device=self.reader.on_device))
        ns = Counter[str]()
        for span in spans:
            ns[span.phase] += span.ns
            if span.part != span.phase:  # the optimizer is both
                ns[span.part] += span.ns
        seconds = (spans[-1].end_ns - spans[0].begin_ns) / 1e9
        waiting = ns["communication"] / 1e9
        self._seconds["step"].append(seconds)
        self._seconds["waiting"].append(waiting)
        self.beside.append(seconds - waiting)
        for what, name in _NAMES.items():
            if ns[what]:
                self._seconds[name].append(ns[what] / 1e9)
        return seconds

    def _add_bytes(self, taken: Taken) -> None:
        for mark in taken.marks:
            if mark.resident_nbytes:
                self._peaks["host"] = max(self._peaks["host"], mark.resident_nbytes)
            if mark.allocated is not None:
                self._peaks["device"] = max(self._peaks["device"], mark.allocated[1])
            each = mark.collective
            if each is not None and each.kind in PAYLOAD:
                if mark.moment is Moment.ISSUED:
                    self._totals[f'sent_bytes_total{{axis="{each.axis}"}}'] += each.nbytes
                elif mark.moment is Moment.WAITED:
                    self._seconds[_BY_KIND[each.kind]].append((each.end_ns - each.begin_ns) / 1e9)
        for _, tier, nbytes, is_read in taken.moved:
            way = "read" if is_read else "written"
            self._totals[f'tier_{way}_bytes_total{{tier="{tier}"}}'] += nbytes

    def report(self) -> dict[str, Any]:
        """All of it by the names of numbers, without `zero_fn_`;
        then it begins anew, but for the sums."""
        found: dict[str, Any] = {
            "checkpoint_age_seconds": monotonic() - self.reader.saved_at,
            **self._totals,
        }
        for name, each in self._seconds.items():
            found[f"{name}_seconds"] = each
        for tier, nbytes in (+self._peaks).items():
            found[f'step_peak_memory_bytes{{tier="{tier}"}}'] = nbytes
        for name, total in self._totals.items():
            if name.startswith("tier_"):
                rate = (total - self._before[name]) / self.age_s
                found[name.replace("_bytes_total", "_bytes_per_second")] = rate
        self._since, self._before = monotonic(), Counter(self._totals)
        self._seconds = defaultdict(list)
        self._peaks.clear()
        self.beside.clear()
        self.tokens = self.samples = 0.0
        return found


def metrics(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    sinks: Sequence[Sink | str] = (),
    every: int = 10,
    every_rank: bool = False,
    norm: bool = True,
    on_spike: Answer | Callable[[Spike], Answer] | None = None,
    checkpoints: str | os.PathLike[str] | None = None,
    step: int = 0,
) -> Metrics:
    """Measures a run while it goes on: loss, norm, seconds of each phase and collective,
    bytes, memory, the slowest rank.

        with zf.metrics(model, optimizer, sinks=["prometheus:9400", "tensorboard:runs"]) as metrics:
            for batch in loader:
                loss = ...
                loss.backward(); optimizer.step(); optimizer.zero_grad()
                metrics.step(loss, tokens=batch.numel())

    The names, and what they mean: `docs/guides/monitoring.md`.
    It costs some microseconds for each unit and collective.

    Args:
        model: A transformed module.
        optimizer: The optimizer whose steps are counted; or a sequence of them, of whose steps
            between two calls of `Metrics.step` the first has the norm measured. With a `GradScaler`
            call its `unscale_` for each before that.
        sinks: Where numbers go: words of `zero_fn.monitor.sink_of`, which only ranks that log
            open; sinks of `zero_fn.monitor`, or any object with `log(step, numbers)`. They are
            closed at the end.
        every: A report is made once in so many steps.
        every_rank: Calls the sinks on every rank, not on rank 0 alone:
            for Prometheus with a target for each rank.
        norm: Measures the norm of all gradients before the optimizer steps, in steps that are
            reported: a pass over them, and an all-reduce of a number. False: only what
            `step(grad_norm=)` is given.
        on_spike: A watch: the norm is measured in each step, and a loss or gradient that is not
            finite is told with the unit and the rank where it began, as are a loss, a norm and a
            step of ten times the median of the last hundred. What is done then: "report" (a warning
            of the logger "zero_fn", and counted), "skip" (the optimizer makes no step), or "load"
            (no step, and the last complete checkpoint is loaded), or a function of the `Spike` that
            says which, alike on every rank. A step that is slow is always only reported. Costs a
            pass over all gradients as they arrive.
        checkpoints: The folder of checkpoints for "load".
        step: Steps that were taken before, of a run that goes on: its numbers go on from there.

    Returns:
        A `Metrics`, a context manager.

    Raises:
        StateError: The model was not transformed.
        LayoutError: `every` is not positive, or `on_spike` is none of the above,
            or "load" lacks `checkpoints`.
    """
    if every < 1:
        raise LayoutError("every is a number of steps.", got=every, fix="every=10")
    if on_spike is not None and not callable(on_spike):
        _require_answer(on_spike, checkpoints)
    return Metrics(
        model,
        optimizer,
        sinks,
        every=every,
        every_rank=every_rank,
        norm=norm,
        on_spike=on_spike,
        checkpoints=checkpoints,
        step=step,
    )


def _number(value: Tensor | float) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


def _require_answer(answer: object, folder: object) -> None:
    if answer not in _ANSWERS:
        raise LayoutError(
            "on_spike is none of its answers.",
            got=repr(answer),
            fix=" or ".join(map(repr, _ANSWERS)),
        )
    if answer == "load" and folder is None:
        raise LayoutError(
            'on_spike="load" lacks a folder.', fix='on_spike="load", checkpoints="runs/a"'
        )
