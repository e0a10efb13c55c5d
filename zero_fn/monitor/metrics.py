"""`metrics`: the numbers of a run while it goes on, for sinks;
and what to do when a step goes wrong."""

from __future__ import annotations

import logging
import os
import struct
from collections import Counter, deque
from collections.abc import Callable, Sequence
from math import isfinite, nan
from statistics import median
from time import monotonic
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_fn.checkpoint import load
from zero_fn.errors import LayoutError
from zero_fn.monitor.gradient_norm import clip_grad_norm
from zero_fn.monitor.memory import memory_numbers
from zero_fn.monitor.sink import Numbers, Sink
from zero_fn.monitor.sink_of import sink_of
from zero_fn.monitor.spikes import Spike, Spikes
from zero_fn.monitor.tally import Tally
from zero_fn.profiling.clock import Reader, Taken
from zero_fn.runtime.registry import runs_of, units_of
from zero_fn.transport.agree import Bits
from zero_fn.transport.line import Line
from zero_fn.values import watching
from zero_fn.values.chained_optimizer import Optimizers, as_one, members_of
from zero_fn.values.tiers import Nvme
from zero_fn.values.watching import Moment

__all__ = ["Metrics", "metrics"]

Answer = Literal["report", "skip", "load"]

_ANSWERS = ("report", "skip", "load")
_LATE = 2  # steps of a device that may be under way before the host waits for the first

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
        self._line = runs_of(model, verb="metrics")[0].transport
        self._logs = every_rank or not dist.is_initialized() or dist.get_rank() == 0
        chosen = sinks if self._logs else [sink for sink in sinks if not isinstance(sink, str)]
        self._sinks = [sink_of(sink) if isinstance(sink, str) else sink for sink in chosen]
        self._every = every
        self._norm = norm
        self._on_spike = on_spike
        self._folder = checkpoints
        self._state = _State(model, as_one(optimizer))
        self._counts = Counter[str]()
        self._watch = Spikes() if on_spike is not None else None
        before = [
            each.register_step_pre_hook(lambda each, *_: self._before_step(each))
            for each in members_of(self._state.optimizer)
        ]
        self._undo: list[Callable[[], object]] = [each.remove for each in before]
        if self._watch is not None:
            watching.look(self._watch)
            self._undo.append(lambda watch=self._watch: watching.look_away(watch))  # type: ignore[misc]

    def step(
        self,
        loss: Tensor | float | None = None,
        *,
        tokens: int = 0,
        samples: int = 0,
        grad_norm: Tensor | float | None = None,
        scaler: Any = None,
    ) -> Numbers:
        """Ends a step, to be called after `optimizer.step()` on every rank.

        Communicates, every `every` steps, 40 bytes a rank over the data axes of the model.

        Args:
            loss: Of this rank; the mean over ranks is reported.
            tokens, samples: Of this step on this rank.
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
        state = self._state
        state.end_step()
        self.skipped += not state.is_stepped or state.is_dropped
        if self._watch is not None:
            self._look_after_step(loss)
        state.tally.done.update(tokens=tokens, samples=samples)
        state.is_stepped = state.is_dropped = state.is_overflow_known = False
        if self.steps % self._every:
            return {}
        found = self._found(loss, state.norm if grad_norm is None else _number(grad_norm), scaler)
        for sink in self._sinks if self._logs else ():
            sink.log(self.steps, found)
        return found

    def close(self) -> None:
        """Looks on no more, and closes the sinks that can be closed."""
        undo, self._undo = self._undo, []
        for each in (*undo, self._state.reader.close):
            each()
        for sink in self._sinks:
            getattr(sink, "close", lambda: None)()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the watch ---------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer) -> None:
        """Gradients are reduced, and an optimizer is about to use them."""
        state = self._state
        # Set by a scaler: a fused step leaves itself out.
        overflow = getattr(optimizer, "found_inf", None)
        if overflow is not None:
            others = state.overflows.pop() if state.is_overflow_known else 0
            state.overflows.append(overflow + others)
            state.is_overflow_known = True
        if state.is_stepped:  # by another optimizer
            return
        state.is_stepped, state.norm = True, None
        if self._norm and (self._watch is not None or not (self.steps + 1) % self._every):
            # Set by a scaler: a fused step divides by it.
            scale = getattr(optimizer, "grad_scale", None)
            norm = float(clip_grad_norm(state.parameters(), None))
            state.norm = norm / (1.0 if scale is None else float(scale))
        # An overflow is what a scaler looks for.
        if self._watch is not None and state.norm is not None and not overflow:
            spike = self._watch.look_at(self.steps, "gradient", state.norm, self._line)
            if spike is not None and self._answer(spike) != "report":
                state.is_dropped = True
                for parameter in state.parameters():
                    parameter.grad = None

    def _look_after_step(self, loss: Tensor | float | None) -> None:
        assert self._watch is not None
        state, step = self._state, self.steps - 1
        self._watch.forget()
        found = [self._watch.look_at(step, "step", state.seconds)] if state.seconds else []
        if loss is not None:
            found.append(self._watch.look_at(step, "loss", _number(loss)))
        for spike in found:
            if spike is not None and not (
                spike.what == "loss" and self.spikes and self.spikes[-1].step == step
            ):
                self._answer(spike)  # its gradients have told of a loss already
        if self._folder is None:
            return
        loads, state.loads = state.loads, False
        # All ranks decide together, because losses differ between ranks.
        if Bits(self._line, [loads], "whether to load a checkpoint").read()[0]:
            self.loaded = load(self._folder, state.model, state.optimizer)
            _log.warning("loaded the last checkpoint of %s", self._folder)

    def _answer(self, spike: Spike) -> Answer:
        answer: Any = self._on_spike(spike) if callable(self._on_spike) else self._on_spike
        if spike.what == "step":
            answer = "report"
        _require_answer(answer, self._folder)
        self.spikes.append(spike)
        self._counts["spikes_total" if isfinite(spike.value) else "not_finite_total"] += 1
        self._state.loads |= answer == "load"
        _log.warning("%s: %s", spike, answer)
        return answer  # type: ignore[no-any-return]

    # -- numbers -----------------------------------------------------------------------------------

    def _found(
        self, loss: Tensor | float | None, norm: float | None, scaler: Any
    ) -> dict[str, Any]:
        state = self._state
        self.skipped += sum(map(bool, state.overflows))  # the host waits for the device here
        state.overflows.clear()
        found: dict[str, Any] = {"steps_total": self.steps, "skipped_steps_total": self.skipped}
        for number, group in enumerate(state.optimizer.param_groups):
            if "lr" in group:
                found[f'learning_rate{{group="{number}"}}'] = float(group["lr"])
        if norm is not None:
            found["grad_norm"] = norm
        if scaler is not None:
            found["loss_scale"] = scale = float(scaler.get_scale())
            found["loss_scale_at_minimum"] = float(scale <= 1.0)
        if self._watch is not None:
            found |= {name: self._counts[name] for name in ("spikes_total", "not_finite_total")}
        found |= state.compared(self._line, None if loss is None else _number(loss))
        found |= state.report()
        return {f"zero_fn_{name}": value for name, value in found.items()} | state.memory()


class _State:
    """What is known of the steps since the last report."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        slots = [slot for unit in units_of(model) for slot in unit.slots]
        self.device_type = next(
            (s.kind.device_type for s in slots if s.kind.device_type != "meta"), "cpu"
        )
        tiers = [
            (home.params, home.grads, home.optim) for home in {slot.home.tiers for slot in slots}
        ]
        self._paths = {
            path for each in tiers for tier in each if isinstance(tier, Nvme) for path in tier.paths
        }
        self.tally = Tally()
        self._taken = deque[Taken]()
        self.norm: float | None = None
        self.overflows: list[Tensor] = []  # of steps under a `GradScaler`
        self.seconds = 0.0  # of the last step whose times are known
        self.is_stepped = self.is_dropped = self.loads = False
        self.is_overflow_known = False  # whether the last of the overflows is of this step
        self.reader = Reader(self.device_type, optimizer)

    def parameters(self) -> list[Tensor]:
        """Those of the optimizer."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def end_step(self) -> None:
        """Takes what was noted. Of a device that is behind, the steps that it has ended."""
        reader = self.reader
        reader.note(Moment.STEPPED)
        self._taken.append(reader.take())
        self.seconds = 0.0
        while self._taken and (reader.is_done(self._taken[0]) or len(self._taken) > _LATE):
            taken = reader.resolve(self._taken.popleft())
            self.seconds = self.tally.add(taken, on_device=reader.on_device)

    def compared(self, line: Line, loss: float | None) -> dict[str, float]:
        """What ranks say together: the mean loss, rates, and the slowest. A collective."""
        own = sum(self.tally.beside) / max(1, len(self.tally.beside))
        rank = dist.get_rank() if dist.is_initialized() else 0
        message = struct.pack(
            "5d",
            rank,
            own,
            nan if loss is None else loss,
            self.tally.done["tokens"],
            self.tally.done["samples"],
        )
        rows = [message]
        if line.size > 1:
            sent = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(line.device)
            rows = [row.numpy().tobytes() for row in line.exchange(sent, "metrics")]
        numbers = (struct.unpack("5d", row) for row in rows)
        ranks, seconds, losses, tokens, samples = zip(*numbers, strict=True)
        found = {"ranks": float(len(rows))}
        if loss is not None:
            found["loss"] = sum(losses) / len(losses)
        for name, counts in (("tokens", tokens), ("samples", samples)):
            if any(counts):
                found[f"{name}_per_second"] = sum(counts) / self.tally.age_s
        if len(rows) > 1:
            slowest = max(range(len(rows)), key=seconds.__getitem__)
            others = [each for at, each in enumerate(seconds) if at != slowest]
            found |= {
                "slowest_rank": ranks[slowest],
                "slowest_rank_excess_seconds": seconds[slowest] - median(others),
            }
        return found

    def report(self) -> dict[str, Any]:
        """Seconds and bytes since the last report."""
        return self.tally.report() | {"checkpoint_age_seconds": monotonic() - self.reader.saved_at}

    def memory(self) -> dict[str, float]:
        """Bytes of memory by tier."""
        return memory_numbers(self.device_type, held(self.model, self.optimizer), self._paths)


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
