"""What a config prints and logs (`steps_per_print`, breakdowns, monitors, profilers), by `zf.metrics` and `zf.profile`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_fn.deepspeed.entries import Entries
from zero_fn.monitor.comet import Comet
from zero_fn.monitor.csv import Csv
from zero_fn.monitor.metrics import metrics
from zero_fn.monitor.sink import Outlet, flat
from zero_fn.monitor.tensorboard import TensorBoard
from zero_fn.monitor.wandb import WandB
from zero_fn.profiling import Profile, profile
from zero_fn.runtime.registry import runs_of
from zero_fn.transport.agree import done_over
from zero_fn.transport.traffic import Sent, traffic

__all__ = ["Reporter", "Reporting", "reporting_of"]

_PHASES = ("forward", "backward", "optimizer_step")


@dataclass(frozen=True, slots=True)
class Reporting:
    """What a config asks to be told."""

    every: int  # steps between lines; 0: none
    seconds: bool  # lines have the seconds of phases; and bytes of memory
    memory: bool
    counts: bool  # bytes sent are counted
    profiled: int | None  # steps before those that are profiled: two, for operations are counted in the first alone
    profile_file: str | None
    sinks: tuple[tuple[Callable[[], Outlet], int], ...]  # each with the samples between its reports


class Reporter:
    """Tells of steps what a config asks for. On rank 0 it prints and logs; `sent` counts bytes on each rank."""

    def __init__(self, asked: Reporting, model: nn.Module, optimizer: Optimizer, steps: int = 0) -> None:
        self.sent: Sent | None = None
        self._asked = asked
        self._model = model
        self._optimizer = optimizer
        self._steps = steps
        self._is_first = not dist.is_initialized() or dist.get_rank() == 0
        self._open = ExitStack()
        self._profile: Profile | None = None
        self._said = time.perf_counter(), 0  # when a line was printed, and the samples since
        self._loss: Tensor | None = None
        if asked.counts:
            self.sent = self._open.enter_context(traffic())
        axes = runs_of(model, verb="from_deepspeed")[0].transport.axes
        self._sinks = done_over(axes, self._opened, "Opening the monitors of a DeepSpeed config", Exception)
        self._metrics = None
        if asked.sinks or ((asked.seconds or asked.memory) and asked.every):
            every = 1 if asked.sinks else asked.every
            self._metrics = self._open.enter_context(metrics(model, optimizer, every=every, norm=False, step=steps))

    def _opened(self) -> list[list[Any]]:
        """The sinks of rank 0, each with the samples between its reports, and those since its last; and its other file."""
        if self._is_first and self._asked.profile_file is not None:
            Path(self._asked.profile_file).parent.mkdir(parents=True, exist_ok=True)
            Path(self._asked.profile_file).touch()
        sinks = self._asked.sinks if self._is_first else ()
        found: list[list[Any]] = [[make(), samples, 0] for make, samples in sinks]
        for sink, *_ in found:
            self._open.callback(sink.close)
        return found

    def resume(self, steps: int) -> None:
        """Goes on after so many steps."""
        self._steps = steps
        if self._metrics is not None:
            self._metrics.steps = steps

    def note(self, loss: Tensor) -> None:
        """Adds the loss of a microbatch to that of its step."""
        if self._metrics is not None:
            self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()

    def step(self, *, samples: int, norm: float | None, scaler: Any, skipped: int) -> None:
        """Ends a step of so many samples of all ranks. A collective of all ranks."""
        self._steps += 1
        numbers: Mapping[str, Any] = {}
        if self._metrics is not None:
            loss, self._loss = self._loss, None
            numbers = self._metrics.step(loss, grad_norm=norm, scaler=scaler)
        if self._steps == self._asked.profiled:
            self._profile = profile(self._model, self._optimizer, flops=True).__enter__()
        elif self._profile is not None and self._steps >= 2 + (self._asked.profiled or 0):
            ended, self._profile = self._profile, None
            ended.__exit__(None, None, None)
            self._show(str(ended))
        began, seen = self._said
        self._said = began, seen + samples
        for row in self._sinks:
            row[2] += samples
            if row[2] >= row[1]:
                row[2] = 0
                row[0].log(self._steps, numbers)
        if self._asked.every and self._steps % self._asked.every == 0:
            rate = self._said[1] / max(1e-9, time.perf_counter() - began)
            self._said = time.perf_counter(), 0
            if self._is_first:
                print(self._line(flat(numbers), rate, norm, scaler, skipped), flush=True)

    def close(self) -> None:
        """Closes what is open, with the files of monitors; may be called again. A profile whose steps have not all come
        is given up, with a warning: ranks that end early would not meet."""
        if self._profile is not None:
            given_up, self._profile = self._profile, None
            given_up.__exit__(InterruptedError)
            warnings.warn(
                f"flops_profiler has shown nothing: the run ended after step {self._steps}, and it looks at steps "
                f"{self._asked.profiled} + 1 and + 2 (profile_step)",
                stacklevel=2,
            )
        self._open.close()

    def _line(self, numbers: Mapping[str, float], rate: float, norm: float | None, scaler: Any, skipped: int) -> str:
        rates = ", ".join(f"{group['lr']:.4g}" for group in self._optimizer.param_groups)
        parts = [f"step {self._steps}: {skipped} skipped", f"learning rate {rates}"]
        parts += [f"loss {numbers['zero_fn/loss']:.6g}"] if "zero_fn/loss" in numbers else []
        parts += [] if norm is None else [f"gradient norm {norm:.6g}"]
        parts += [] if scaler is None else [f"loss scale {scaler.get_scale():g}"]
        parts.append(f"{rate:.1f} samples/s")
        if self._asked.seconds:
            means = {name: numbers.get(f"zero_fn/{name}_seconds/mean") for name in _PHASES}
            parts += [
                f"{name.replace('_', ' ')} {1e3 * mean:.2f} ms" for name, mean in means.items() if mean is not None
            ]
        if self._asked.memory:
            parts += [
                f"{name.removeprefix('zero_fn/')} {int(numbers[name])}" for name in numbers if "memory_bytes" in name
            ]
        return ", ".join([*parts, *([repr(self.sent)] if self.sent is not None else [])])

    def _show(self, text: str) -> None:
        if not self._is_first:
            return
        if self._asked.profile_file is None:
            print(text, flush=True)
        else:
            Path(self._asked.profile_file).write_text(f"{text}\n", encoding="utf-8")


def reporting_of(entries: Entries) -> Reporting | None:
    """Reads the entries; None if the config asks for nothing of it."""
    sinks: list[tuple[Callable[[], Outlet], int]] = []
    if entries["tensorboard.enabled"]:
        folder = Path(entries["tensorboard.output_path"], entries["tensorboard.job_name"])
        sinks.append((lambda: TensorBoard(folder), 1))
    if entries["csv_monitor.enabled"]:
        file = Path(entries["csv_monitor.output_path"], f"{entries['csv_monitor.job_name']}.csv")
        sinks.append((lambda: Csv(file), 1))
    if entries["wandb.enabled"]:
        own = {"entity": entries["wandb.team"], "group": entries["wandb.group"]}
        sinks.append((lambda: WandB(entries["wandb.project"], **own), 1))
    if entries["comet.enabled"]:
        names = ("workspace", "api_key", "experiment_key", "online", "mode")
        given = {name: entries[f"comet.{name}"] for name in names if entries.is_given(f"comet.{name}")}
        sinks.append((lambda: Comet(entries["comet.project"], **given), entries["comet.samples_log_interval"]))
    seconds, memory = entries["wall_clock_breakdown"], entries["memory_breakdown"]
    every = int(entries["steps_per_print"] or 0) or int(seconds or memory)
    found = Reporting(
        every,
        seconds,
        memory,
        counts=entries["comms_logger.enabled"],
        profiled=max(1, entries["flops_profiler.profile_step"]) if entries["flops_profiler.enabled"] else None,
        profile_file=entries["flops_profiler.output_file"],
        sinks=tuple(sinks),
    )
    asks = found.every or found.counts or found.sinks or found.profiled is not None
    return found if asks else None
